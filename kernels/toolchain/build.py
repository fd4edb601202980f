"""Build every kernel for every architecture, with no GPU present: cubins and a manifest of what they hold.

CUTLASS fixes its target at import, so each architecture is one worker process. A worker reports each kernel as one
JSON line; the parent prints nothing and returns the manifest, which is written whole when all workers are done.

    python -m k3sim.kernels.toolchain.build --worker sm_90a --out build/kernels
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.kernels.toolchain.child import end_with_parent
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES, get_cutlass, require_cutlass
from k3sim.kernels.toolchain.launch_facts import LaunchFacts, launch_facts

MANIFEST_VERSION = 1
# Together, since nvdisasm starts slowly; few enough that their lines come every few seconds.
KERNELS_DISASSEMBLED = 8


def build(
    folder: Path,
    *,
    architectures: Sequence[str] = ARCHITECTURES,
    operators: Sequence[str] = (),
    on_kernel: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compile and write ``folder/<architecture>/<operator>/<kernel>.cubin`` and ``folder/manifest.json``.

    ``operators`` empty means all. ``on_kernel`` is called with each kernel's entry as it is done. Raises UserError for
    an unknown operator or architecture, or when CUTLASS or nvdisasm is missing; a kernel that does not compile raises
    RuntimeError with the compiler's words.
    """
    from k3sim.kernels.toolchain.catalogue import BUILDS

    for operator in operators:
        if operator not in BUILDS:
            raise UserError(f"unknown operator {operator!r}; accepted: {', '.join(BUILDS)}")
    for one in architectures:
        if one not in ARCHITECTURES:
            raise UserError(f"unknown architecture {one!r}; accepted: {', '.join(ARCHITECTURES)}")
    entries: list[dict[str, Any]] = []
    for one in architectures:
        for entry in _run_worker(one, folder, operators):
            entries.append(entry)
            on_kernel(entry)
    manifest = {"manifest_version": MANIFEST_VERSION, "kernels": entries}
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".manifest.partial"
    partial.write_text(json.dumps(manifest, indent=1) + "\n")
    partial.replace(folder / "manifest.json")
    return manifest


def _run_worker(architecture: str, folder: Path, operators: Sequence[str]) -> Iterator[dict[str, Any]]:
    worker = (sys.executable, "-m", "k3sim.kernels.toolchain.build", "--worker", architecture)
    command = [*worker, "--out", str(folder), *operators]
    environment = {**os.environ, "CUTE_DSL_ARCH": architecture, "CUTE_DSL_KEEP": "cubin"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        words = running.stderr.read()
        if running.wait() != 0:
            lines = [line for line in words.splitlines() if line.strip()]
            if lines and lines[-1].startswith("k3sim.errors.UserError: "):
                raise UserError(lines[-1].removeprefix("k3sim.errors.UserError: "))
            raise RuntimeError(f"build for {architecture} failed: " + "\n".join(lines[-20:]))


def worker(architecture: str, folder: Path, operators: Sequence[str]) -> None:
    """Compile the catalogue for one architecture; one JSON line a kernel on standard output."""
    from k3sim.kernels.toolchain.catalogue import BUILDS
    from k3sim.kernels.toolchain.machine_code import disassembler, kernel_codes

    require_cutlass()
    disassembler()
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder / "dump")
    (folder / "dump").mkdir(parents=True, exist_ok=True)
    get_cutlass()
    for operator in operators or BUILDS:
        kernels = list(BUILDS[operator]().items())
        for first in range(0, len(kernels), KERNELS_DISASSEMBLED):
            built = [_built(*one) for one in kernels[first : first + KERNELS_DISASSEMBLED]]
            codes = kernel_codes([cubin for _, cubin, *_ in built], architecture)
            for (name, cubin, launch, compile_s), functions in zip(built, codes, strict=True):
                path = folder / architecture / operator / f"{name}.cubin"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(cubin)
                entry = {
                    "architecture": architecture,
                    "operator": operator,
                    "kernel": name,
                    "cubin": str(path.relative_to(folder)),
                    "compile_s": compile_s,
                    "functions": [asdict(code) for code in functions],
                    "launch": asdict(launch),
                }
                sys.stdout.write(json.dumps(entry) + "\n")
                sys.stdout.flush()
    for dumped in (folder / "dump").iterdir():
        dumped.unlink()
    (folder / "dump").rmdir()


def _built(name: str, compile_kernel: Callable[[], Any]) -> tuple[str, bytes, LaunchFacts, float]:
    """Name, cubin, launch, and the seconds of its compilation."""
    start = time.monotonic()
    function = compile_kernel()
    cubin: bytes = function.__cubin__
    return name, cubin, launch_facts(str(function.ir_module)), round(time.monotonic() - start, 2)


if __name__ == "__main__":
    assert sys.argv[1] == "--worker" and sys.argv[3] == "--out"
    worker(sys.argv[2], Path(sys.argv[4]), sys.argv[5:])
