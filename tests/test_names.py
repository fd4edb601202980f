"""What tests are called, and what none of them does: a name says the claim in at most eight words; none reads a clock.

Speed is judged by ``make bench``, against a loop timed in the same run: a test with a limit in seconds fails on a slow
or busy machine for no bug of the project.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 8
TESTS = Path(__file__).parent
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic", "time_ns"}


def files() -> list[Path]:
    return sorted(TESTS.rglob("*.py"))


def functions_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name


def test_names_have_at_most_eight_words() -> None:
    long = [
        f"{path.relative_to(TESTS)} {name}"
        for path in files()
        for name in functions_of(path)
        if len(name.split("_")) - 1 > MAX_WORDS
    ]
    assert long == []


def test_no_test_reads_a_clock() -> None:
    reading = [
        f"{path.relative_to(TESTS)} line {node.lineno}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS
    ]
    assert reading == []
