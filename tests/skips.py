"""What skipped tests need, in a line a reason, with what to install and how.

Who has no torch or GPU sees at the end of ``make test`` what was left out, rather than hundreds of single skips.
"""

from __future__ import annotations

import re
from collections import Counter

#: A skip's reason contains -> what is needed, and what brings it in. The first that fits counts.
SKIPPED_FOR = (
    (r"'torch'|'cutlass'|nvidia-cutlass-dsl|nvrtc|fla-core",
     "torch and CUTLASS, but no GPU", "make kernel-tools, then make test"),
    (r"needs two GPUs", "two CUDA GPUs", "on such a machine, pip install -e '.[test,gpu]', then pytest -m gpu"),
    (r"no CUDA GPU", "a CUDA GPU", "on such a machine, pip install -e '.[test,gpu]', then pytest -m gpu"),
    (r"chromium", "a browser", "install chromium, so that it is on the path (apt-get install chromium)"),
    (r"'scipy'", "scipy", "pip install -e '.[test]'"),
)  # fmt: skip


def skip_lines(reports: list[tuple[str, str]]) -> list[str]:
    """One line a reason: of (node, reason) how many tests and whole files it keeps from running, and what to do."""
    tests, files = Counter[str](), Counter[str]()
    for node, reason in reports:
        needs = (f"need {what}: {how}" for pattern, what, how in SKIPPED_FOR if re.search(pattern, reason))
        (tests if "::" in node else files)[next(needs, reason)] += 1
    lines = []
    for said in sorted({*tests, *files}):
        counts = [
            f"{count} {noun}{'s' if count > 1 else ''}"
            for count, noun in ((files[said], "file"), (tests[said], "test"))
            if count
        ]
        lines.append(f"skipped: {' and '.join(counts)}: {said}")
    return lines
