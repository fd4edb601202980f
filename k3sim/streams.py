"""Standard output and error of a run: closed ones, full ones, and readers that go away.

What a command prints is its result, so a loss of it ends the run with a line and a status of its own. What it says on
standard error besides is not: a terminal that was closed must not stop an hour of work. Python's own streams raise
OSError from wherever something is printed, once more when the interpreter ends, and are None where the shell closed
them.
"""

from __future__ import annotations

import errno
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class OutputLost(Exception):
    """Standard output took no more. ``reader_left`` where it is a pipe whose reader has ended, as ``head`` does."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output ({error.strerror})")
        self.reader_left = error.errno == errno.EPIPE


class _Out(io.FileIO):
    """A descriptor whose loss is told once and by a name of its own: libraries take an OSError for theirs."""

    lost = False

    def write(self, data: Any, /) -> int:
        if not self.lost:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = True
                raise OutputLost(error) from None
        return memoryview(data).nbytes


class _Errors(io.FileIO):
    """A descriptor whose loss nobody is told of."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def settle_streams() -> None:
    """Open what the shell closed, and make losses known as this module says; a stream that a caller put in stays."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free. Standard output is open for reading: whatever is printed is lost, and says so.
            os.open(os.devnull, mode)
    # What no encoding has is spelled out: half a surrogate pair in a name, or a sign that the locale lacks.
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Out(1, "w", closefd=False), sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Errors(2, "w", closefd=False), sys.stderr, by_line=True)


def _text(raw: io.FileIO, before: Any, *, by_line: bool = False) -> io.TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    by_line = by_line or raw.isatty() or getattr(before, "line_buffering", False)
    through = getattr(before, "write_through", False)
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffered, encoding=encoding, errors="backslashreplace", line_buffering=by_line, write_through=through
    )
