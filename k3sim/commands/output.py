"""What several commands print: plain tables that survive being pasted into an issue, files, JSON, and how far work is.

Results go to standard output. How far a command is goes to standard error: a bar on a terminal, elsewhere a line every
ten seconds, so that the log of a job shows that it lives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3sim.sim.export.document import SCHEMA_VERSION, dump_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LINE_EVERY_S = 10.0


def console(width: int = 110) -> Console:
    """Standard output. Without a terminal the width is fixed, so that a table is the same in every log."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=width)


def table(*columns: str, left: int = 1, folded: Sequence[int] = ()) -> Table:
    """An empty table whose first ``left`` columns are texts and whose others are numbers.

    ``folded``: columns whose long texts go on in a further line where the terminal is narrow.
    """
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        found.add_column(column, justify="left" if position < left else "right", no_wrap=position not in folded)
    return found


def print_files(files: Mapping[str, str]) -> None:
    """What was written, a line each."""
    out = console()
    out.print()
    for kind, path in files.items():
        out.print(f"{kind:9} {path}", soft_wrap=True, markup=False)


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """The document on standard output as one line."""
    sys.stdout.write(dump_json(document))


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document behind the version of its schema."""
    return {"schema_version": SCHEMA_VERSION, **document}


def warn(warnings: Sequence[str]) -> None:
    """What a reader must know before using the answer, on standard error."""
    for warning in warnings:
        sys.stderr.write(f"k3sim: warning: {warning}\n")


@dataclass(frozen=True)
class Advance:
    """How far long work is, told by calling with (done, of). ``say``: a result, shown at once on a terminal."""

    tell: Callable[[int, int], None]
    say: Callable[[str], None]

    def __call__(self, done: int, of: int) -> None:
        self.tell(done, of)


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """A bar with the results above it on a terminal, elsewhere a line every ten seconds; all on standard error."""
    from rich.console import Console

    errors = Console(stderr=True, highlight=False)
    if not errors.is_terminal:
        yield Advance(_lines(label), lambda _: None)
        return
    from rich.progress import Progress

    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield Advance(
            lambda done, of: bar.update(task, completed=done, total=of),
            lambda line: bar.console.print(line, markup=False, highlight=False),
        )


def _lines(label: str) -> Callable[[int, int | str], None]:
    last_s = time.monotonic()

    def advance(done: int, of: int | str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= LINE_EVERY_S:
            last_s = now_s
            sys.stderr.write(f"{label}: {done} of {of}\n" if isinstance(of, int) else f"{label}: {done}, {of}\n")
            sys.stderr.flush()

    return advance


def progress_lines(label: str) -> Callable[[str], None]:
    """What each piece of work says when it is done: at once on a terminal, elsewhere the latest every ten seconds."""
    count, advance = 0, _lines(label)

    def say(line: str) -> None:
        nonlocal count
        count += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"{line}\n")
        else:
            advance(count, line)

    return say
