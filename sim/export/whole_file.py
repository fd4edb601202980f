"""Writing an output file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from k3sim.errors import UserError


def write_whole_file(path: Path, content: bytes) -> None:
    """Writes ``content`` to ``path``; a reader sees the old file or the complete new one, never a part.

    The bytes go to a temporary file in the same folder, because a rename is atomic within a file system only.

    Raises ``UserError`` when the folder does not exist or cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; give a path in a folder that exists and can be written"
        ) from error
