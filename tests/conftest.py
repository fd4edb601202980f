"""What is skipped, in a line a reason; what is slow, apart; and the longest files first.

A reader without torch or a GPU should see at the end of ``make test`` what was left out and what would bring it in,
rather than hundreds of single skips.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

# Builds of every kernel for three architectures, and all that the pages say: workers that take whole files would
# otherwise begin one of them when the others have nothing left.
LONGEST_FILES = ("test_build.py", "test_documentation.py")

#: A skip's reason contains -> what is said of all that contain it. The first that fits counts.
SKIPPED_FOR = (
    (r"'torch'|'cutlass'|cuda\.bindings|nvidia-cutlass-dsl|nvrtc|fla-core",
     "need torch and CUTLASS: make kernel-tools"),
    (r"no CUDA GPU|needs two GPUs", "need a CUDA GPU, or two"),
    (r"chromium", "need a browser: chromium on the path"),
    (r"'scipy'", "need scipy: pip install 'k3sim[test]'"),
)  # fmt: skip


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _mark_slow_but_one(items: list[pytest.Item]) -> None:
    seen = set[str]()
    for item in items:
        if item.get_closest_marker("slow_but_one"):
            function = item.nodeid.partition("[")[0]
            if function in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(function)


@pytest.hookimpl(tryfirst=True)  # before -m takes out the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow_but_one(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


def skip_lines(reports: list[tuple[str, str]]) -> list[str]:
    """One line a reason: of (node, reason) how many tests and whole files it keeps from running."""
    tests, files = Counter[str](), Counter[str]()
    for node, reason in reports:
        said = next((words for pattern, words in SKIPPED_FOR if re.search(pattern, reason)), reason)
        (tests if "::" in node else files)[said] += 1
    lines = []
    for said in sorted({*tests, *files}):
        counts = [
            f"{count} {noun}{'s' if count > 1 else ''}"
            for count, noun in ((files[said], "file"), (tests[said], "test"))
            if count
        ]
        lines.append(f"skipped: {' and '.join(counts)}: {said}")
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", ())
    skips = [(one.nodeid, one.longrepr[2].removeprefix("Skipped: ")) for one in reports]
    for line in skip_lines(skips):
        terminalreporter.write_line(line)
