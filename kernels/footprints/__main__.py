"""Write the footprints of every kernel, from a build without a GPU.

    python -m k3sim.kernels.footprints            # all architectures
    python -m k3sim.kernels.footprints sm_90a
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.kernels.footprints import COLUMNS, path_of
from k3sim.kernels.toolchain.build import build
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES
from k3sim.kernels.toolchain.machine_code import sections

TOOL_NOTE = ".note.nv.tkinfo"  # of a cubin: the assembler, its version and its options
RESERVED_SMEM_BYTES = 1024  # of each block, which a cubin counts as static


def row_of(entry: Mapping[str, Any]) -> list[Any]:
    """One kernel of a build's manifest as a row of a file."""
    (code,) = entry["functions"]
    launch = entry["launch"]
    x, y, z = launch["cluster"]
    return [
        entry["kernel"],
        code["registers"],
        max(0, code["static_smem_bytes"] - RESERVED_SMEM_BYTES),
        launch["dynamic_smem_bytes"],
        launch["block"][0] * launch["block"][1] * launch["block"][2],
        list(launch["grid"]),
        x * y * z,
        code["code_bytes"],
        code["serial_instructions"],
    ]


def assembler(cubin: bytes) -> list[str]:
    """What a cubin says of its assembler: name, release, build, options."""
    note = sections(cubin)[TOOL_NOTE][0]
    return [words.decode() for words in re.findall(rb"[\x20-\x7e]{5,}", note)]


def document_of(architecture: str, folder: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that a file holds."""
    kernels: dict[str, list[list[Any]]] = {}
    for entry in entries:
        kernels.setdefault(entry["operator"], []).append(row_of(entry))
    return {
        "architecture": architecture,
        "date": date.today().isoformat(),
        "compilers": {name: version(name) for name in ("nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm")},
        "assembler": assembler((folder / entries[0]["cubin"]).read_bytes()),
        "command": f"python -m k3sim.kernels.footprints {architecture}",
        "columns": list(COLUMNS),
        "kernels": kernels,
    }


def text_of(document: Mapping[str, Any]) -> str:
    """A row of a kernel a line, so that a change of one kernel is a change of one line."""
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(document[key])}" for key in document if key != "kernels")
    operators = ",\n".join(
        f"  {json.dumps(operator)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for operator, rows in document["kernels"].items()
    )
    return f"{{\n{head},\n \"kernels\": {{\n{operators}\n }}\n}}\n"


def main(architectures: Sequence[str]) -> int:
    for architecture in architectures or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            manifest = build(Path(folder), architectures=(architecture,))
            document = document_of(architecture, Path(folder), manifest["kernels"])
        path = path_of(architecture)
        partial = path.with_suffix(".partial")
        partial.write_text(text_of(document))
        partial.replace(path)
        sys.stdout.write(f"{len(manifest['kernels'])} kernels  {path}\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as wrong:
        sys.stderr.write(f"{wrong}\n")
        sys.exit(2)
