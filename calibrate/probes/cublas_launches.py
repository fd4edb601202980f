"""What cuBLAS launches for K3's products, from the kernel events of torch's profiler: grid, threads, registers, memory.

    python -m k3sim.calibrate.probes.cublas_launches kernels/cublas/h200.json

Needs a GPU and torch. Shapes are those of a rank at TP8 and TP16, as ``kernels.cublas`` prices them: products by
``F.linear``, and those of a matrix a head by ``torch.bmm``. Times are not kept: a profiler adds to them. What is
launched for a shape depends on the versions of cuBLAS and torch; the file names torch's, which brings cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from math import prod
from pathlib import Path
from typing import Any

from k3sim.kernels.cublas.configuration import COLUMNS

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128)
# Outputs and depth of one product.
SHAPES = (
    (20480, 7168), (10240, 7168), (8448, 7168), (6288, 7168), (4224, 7168), (3648, 7168), (3584, 7168), (3216, 7168),
    (2880, 7168), (2112, 7168), (1536, 7168), (896, 7168), (768, 7168), (448, 7168), (7168, 4224), (7168, 3584),
    (7168, 2112), (7168, 1536), (7168, 768), (7168, 384), (896, 3584), (448, 3584), (2304, 1536), (1152, 1536),
    (1536, 128), (768, 128),
)  # fmt: skip
# Heads, and outputs and depth of each.
BY_HEAD = ((12, 512, 128), (6, 512, 128), (12, 128, 512), (6, 128, 512))


def products() -> Iterator[tuple[int, int, int, int]]:
    """Heads (0: one product), outputs, depth and rows of all."""
    for outputs, depth in SHAPES:
        yield from ((0, outputs, depth, rows) for rows in ROWS)
    for heads, outputs, depth in BY_HEAD:
        yield from ((heads, outputs, depth, rows) for rows in ROWS)


def kernel_events(call: Callable[[], object]) -> list[Mapping[str, Any]]:
    """Kernels of one call, in order, as the profiler writes them. Run it once before: the first call chooses."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((one for one in events if one.get("cat") == "kernel"), key=lambda one: float(one["ts"]))


def launch_row(events: list[Mapping[str, Any]]) -> list[Any]:
    """The columns behind the shape: the product's launch, and that which adds up where K is split."""
    if not 1 <= len(events) <= 2:
        raise RuntimeError(f"a product of {len(events)} kernels: {[one['name'] for one in events]}")
    found = []
    for one in events:
        given = one["args"]
        found.append((prod(given["grid"]), prod(given["block"]), given["registers per thread"]))
    add_up = found[1] if len(found) > 1 else (0, 0, 0)
    return [events[0]["name"], *found[0], events[0]["args"]["shared memory"], *add_up]


def record(path: Path) -> None:
    """Measure every product and write the file. Raises RuntimeError for a product that is no launch of its own."""
    import torch

    rows_found = []
    for heads, outputs, depth, rows in products():
        shape = ((heads, rows, depth), (heads, depth, outputs)) if heads else ((rows, depth), (outputs, depth))
        x, w = (torch.randn(one, device="cuda", dtype=torch.bfloat16) for one in shape)
        call = (lambda x=x, w=w: torch.bmm(x, w)) if heads else lambda x=x, w=w: torch.nn.functional.linear(x, w)
        rows_found.append([heads, outputs, depth, rows, *launch_row(kernel_events(call))])
    path.write_text(
        text_of(
            {
                "gpu": torch.cuda.get_device_name(),
                "date": date.today().isoformat(),
                "torch": torch.__version__,
                "method": "kernel events of torch.profiler; torch.nn.functional.linear and torch.bmm, bf16",
                "command": f"python -m k3sim.calibrate.probes.cublas_launches {path}",
                "columns": list(COLUMNS),
                "launches": rows_found,
            }
        )
    )


def text_of(document: Mapping[str, Any]) -> str:
    """A launch a line."""
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(document[key])}" for key in document if key != "launches")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["launches"])
    return f"{{\n{head},\n \"launches\": [\n{rows}\n ]\n}}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    record(parser.parse_args().out)
