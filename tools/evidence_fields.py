"""Writes the tables of fields in docs/evidence.md from the models that read such files.

    python tools/evidence_fields.py

A test compares the page with what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from k3sim.calibrate.evidence.rules import UNITS, Call, KernelRecord, Loop, Published, StageRecord, StepRecord
from k3sim.model.documents.fields import Record, type_words

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
BEGIN, END = "<!-- fields: written by tools/evidence_fields.py -->", "<!-- end of fields -->"


def rows(model: type[Record], beyond: type[Record] | None = None) -> Iterator[str]:
    """A table of a model's fields; those that ``beyond`` has alike are left out."""
    yield "| Field | Type | Accepted | Meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        known = beyond.model_fields.get(name) if beyond is not None else None
        kind, accepted = type_words(field)
        if known is not None and (name == "kind" or type_words(known) == (kind, accepted)):
            continue
        optional = "" if field.is_required() else " (optional)"
        yield f"| `{name}`{optional} | {kind} | {accepted} | {field.description} |"


def tables() -> str:
    """All tables with their headings."""
    lines = ["### Every record", "", *rows(Published), ""]
    lines += ["| Unit | Least | Most |", "| --- | --- | --- |"]
    lines += [f"| `{unit}` | {least:g} | {most:g} |" for unit, (least, most) in UNITS.items()]
    for title, model in (("`step`", StepRecord), ("`stage`", StageRecord), ("`kernel`", KernelRecord)):
        lines += ["", f"### Also in a record of kind {title}", "", *rows(model, Published)]
    lines += ["", "### `loop` of a kernel", "", *rows(Loop), "", "### Each of its `calls`", "", *rows(Call)]
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """The page with its tables as they are now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
