"""A CSV table of kernel times as rows of cells; what a row says is for ``kernel_tables.py``."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from pathlib import Path

from k3sim.model.documents.document import Accepted, read_bytes, refuse, refuse_kind
from k3sim.model.documents.kinds import Kind, foreign_kind, kind_of_text

ACCEPTED = Accepted(
    what="a CSV table of kernel times, plain or gzipped (docs/calibration.md)",
    kinds=(Kind.KERNEL_TABLE,),
    most_bytes=32 << 20,
)
COLUMNS = ("hardware", "op", "shape", "dtype", "condition", "time_us", "notes", "source_url")


def cells_of(path: Path) -> list[tuple[int, dict[str, str | None]]]:
    """Every row of a table with its line; a cell that a short row has not is None.

    Raises UserError for a file that cannot be read, is something else, or lacks a column.
    """
    text = _text(path)
    try:
        table = csv.DictReader(io.StringIO(text, newline=""))
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            refuse(path, f"line 1: lacks {', '.join(missing)}", ACCEPTED)
        return [(table.line_num, cells) for cells in table]
    except csv.Error as error:
        refuse(path, f"no CSV ({error})", ACCEPTED)


def _text(path: Path) -> str:
    data = read_bytes(path, ACCEPTED)
    if data.startswith(b"\x1f\x8b"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(ACCEPTED.most_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            refuse(path, f"a gzip archive that cannot be unpacked ({error})", ACCEPTED)
        if len(data) > ACCEPTED.most_bytes:
            refuse(path, f"more than {ACCEPTED.most_bytes} bytes once unpacked", ACCEPTED)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    kind = foreign_kind(data) or kind_of_text(text)
    if kind is not None and kind not in ACCEPTED.kinds:
        refuse_kind(path, kind, ACCEPTED)
    return text
