"""Rewrite the parts of README.md that follow from the code: what the default command prints, what is not modelled.

    python tools/readme_output.py

Whoever changes a cost or a machine runs it (``make readme``); a test compares README.md with a fresh run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from marked_blocks import with_blocks

README = Path(__file__).parents[1] / "README.md"
ARGUMENTS = ("timeline", "--concurrency", "1")


def output() -> str:
    """A fenced block: the default command and what it prints in an empty folder."""
    command = Path(sys.executable).with_name("k3sim")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([command, *ARGUMENTS], cwd=folder, check=True, capture_output=True, text=True)
    lines = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"```text\n$ k3sim {' '.join(ARGUMENTS)}\n{lines}\n```\n"


def not_modelled() -> str:
    """A list, as every report carries it."""
    from k3sim.report import NOT_MODELLED

    return "".join(f"* {item}\n" for item in NOT_MODELLED)


def rewritten(readme: str) -> str:
    """``readme`` with what lies between each pair of markers replaced."""
    return with_blocks(readme, "readme_output.py", {"output": output(), "not modelled": not_modelled()})


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
