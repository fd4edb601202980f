"""What several commands print beside their tables: files, JSON, warnings.

Results go to standard output; warnings, like how far a command is, to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from k3sim.commands import terminal
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json


def print_files(files: Mapping[str, str]) -> None:
    """What was written, a line each."""
    out = terminal.console()
    out.print()
    for kind, path in files.items():
        out.print(f"{kind:9} {path}", soft_wrap=True)


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
