"""How far a command is, on standard error, so that standard output holds results alone.

On a terminal a bar with what is being done; elsewhere a line every ten seconds, so that the log of a job shows that it
lives. The lines come by the clock and not with the pieces of work: one piece may take a minute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Progress:
    """How far long work is, told by calling with (done, of), or (done) where nobody knows of how much.

    doing
        names what is being done now
    say
        shows a result at once on a terminal, above the bar; elsewhere results come together at the end
    """

    tell: Callable[[int, int | None], None]
    doing: Callable[[str], None]
    say: Callable[[str], None]

    def __call__(self, done: int, of: int | None = None) -> None:
        self.tell(done, of)

    def counted(self) -> Callable[[str], None]:
        """What takes a line for each piece of work that is done, where nobody knows of how many."""
        done = 0

        def say(line: str) -> None:
            nonlocal done
            done += 1
            self.tell(done, None)
            self.doing(line)
            self.say(line)

        return say


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show how far the work of the body is. ``label`` is the work in a few words, such as ``predicting``."""
    with _bar(label) if sys.stderr.isatty() else _lines(label) as found:
        yield found


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    errors = Console(stderr=True, highlight=False, markup=False)
    # Standard output may be a file, and must not come to the bar's terminal.
    with Bar(*columns, console=errors, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(label, total=None)
        yield Progress(
            tell=lambda done, of: bar.update(task, completed=done, total=of),
            doing=lambda what: bar.update(task, description=f"{label}: {what}"),
            say=bar.console.print,
        )


@contextmanager
def _lines(label: str) -> Iterator[Progress]:
    started_s, ended = time.monotonic(), threading.Event()
    said = {"count": "", "what": ""}

    def write() -> None:
        while not ended.wait(LINE_EVERY_S):
            count, what = said["count"], said["what"]
            # Who reads the log may have gone; the work goes on.
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{label}: {count}{time.monotonic() - started_s:.0f} s{what}\n")
                sys.stderr.flush()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield Progress(
            tell=lambda done, of: said.update(count=f"{done}, " if of is None else f"{done} of {of}, "),
            doing=lambda what: said.update(what=f", {what}"),
            say=lambda line: None,
        )
    finally:
        ended.set()
        writer.join()
