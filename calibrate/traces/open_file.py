"""A trace file opened with care: regular files only, gzip by its first bytes, and never more text than it may hold.

Profilers write 2 GB and more, so nothing here reads a file whole. gzip of real traces is 10 to 30 times smaller than
its text; a file that unpacks to far more is taken for a hostile one and stopped.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from k3sim.errors import UserError

CHUNK_BYTES = 1 << 22
MOST_TEXT_BYTES = 16 << 30
MOST_RATIO = 100
RATIO_FROM_BYTES = 32 << 20  # short repetitive traces may well be packed closer
GZIP_MAGIC = b"\x1f\x8b"
SQLITE_MAGIC = b"SQLite format 3\0"


def first_bytes(path: str | Path, num_bytes: int = 64) -> bytes:
    """The beginning of a file. Raises UserError where it is no regular file or cannot be read."""
    try:
        # Without waiting for the other end, which is how a FIFO would hang.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{path}: no regular file; give a trace that a profiler wrote")
            return file.read(num_bytes)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path!r}: no path of a file ({error})") from None


class TextChunks:
    """Chunks of a trace's bytes, unpacked where they are gzip. ``damage`` says why they ended early, if they did."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.damage = ""
        self._packed = first_bytes(path)[:2] == GZIP_MAGIC
        self._packed_bytes = max(1, os.path.getsize(path))

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        with gzip.open(self.path) if self._packed else open(self.path, "rb") as file:
            while True:
                try:
                    chunk = file.read(CHUNK_BYTES)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    self.damage = f"its gzip is damaged or cut off ({error})"
                    return
                except OSError as error:
                    raise UserError(f"{self.path}: {error.strerror or error}") from None
                if not chunk:
                    return
                total += len(chunk)
                ratio = total / self._packed_bytes
                if total > MOST_TEXT_BYTES:
                    raise UserError(f"{self.path}: more than {MOST_TEXT_BYTES >> 30} GB of text; cut the trace")
                if self._packed and total > RATIO_FROM_BYTES and ratio > MOST_RATIO:
                    raise UserError(
                        f"{self.path}: its gzip unpacks to more than {MOST_RATIO} times its size, which no trace does; "
                        "give the unpacked file if it is one"
                    )
                yield chunk
