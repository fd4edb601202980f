"""What cuBLAS's second launch of a deep product costs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = ""  # cuBLAS brings its own
SHAPES = ((6288, 7168), (2112, 7168), (896, 7168), (448, 7168), (7168, 1536), (1152, 1536))
CHAIN = 24  # products of a graph


def split_products(gpu: Gpu, recorder: Recorder) -> None:
    """A product of one row by cuBLAS with cold weights, in a chain of itself: period, launches, gaps between them.

    Isolates: ``period`` is the time of three chains less that of one, so a replay's own cost falls out; launches are
    the nodes of the captured graph; durations and gaps are those that the profiler (CUPTI) states of each kernel in a
    replay. Could mislead: the profiler's end of a kernel contains the flush, and its start is not the first
    instruction, so its gaps are not those of ``graph_boundary``; it slows a replay (compare ``profiled_period``);
    which form cuBLAS takes depends on its version. Where the profiler gives no kernels, its readings are left out.
    """
    torch = gpu.torch

    def case(num_outputs: int, depth: int) -> None:
        size = num_outputs * depth
        weights = gpu.data.view(torch.bfloat16)
        copies = min(CHAIN, weights.numel() // size)
        x = torch.randn(1, depth, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(1, num_outputs, device="cuda", dtype=torch.bfloat16)

        def body(chains: int) -> None:
            for i in range(chains * CHAIN):
                at = i % copies * size
                torch.mm(x, weights[at : at + size].view(num_outputs, depth).t(), out=out)

        body(1)  # cuBLAS allocates its workspace before the capture
        gpu.stream.synchronize()
        nodes = gpu.call(gpu.driver.cuGraphGetNodes(gpu.capture(lambda: body(1)), 0)[::2])
        launches = nodes / CHAIN
        one, three = gpu.graph(lambda: body(1)), gpu.graph(lambda: body(3))

        def sampler() -> dict[str, tuple[str, Any]]:
            import numpy

            gpu.event_us(one, 5)
            base = numpy.median(gpu.event_us(one, recorder.replays // 2))
            periods = (numpy.array(gpu.event_us(three, recorder.replays // 2)) - base) / (2 * CHAIN)
            found: dict[str, tuple[str, Any]] = {"period": ("us", periods), "launches": ("1", [launches])}
            return found | _profiled(gpu, one, int(launches))

        parameters = {"num_outputs": num_outputs, "depth": depth, "rows": 1, "copies": copies}
        recorder.record("cublas_product", parameters, sampler)

    for num_outputs, depth in SHAPES:
        case(num_outputs, depth)


def _profiled(gpu: Gpu, graph: Any, launches: int, replays: int = 8) -> dict[str, tuple[str, Any]]:
    """Mean duration of each launch of a product, of the gap in front of it, and of the whole, by replay."""
    import numpy

    torch = gpu.torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            gpu.replay(graph)
            gpu.stream.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    kernels = sorted((one["ts"], one["dur"]) for one in events if one.get("cat") == "kernel" and "dur" in one)
    if launches < 1 or len(kernels) != replays * CHAIN * launches:
        return {}
    rows = numpy.array(kernels).reshape(replays, CHAIN * launches, 2)
    begun, ended = rows[..., 0], rows.sum(-1)
    gaps = begun[:, 1:] - ended[:, :-1]
    found = {"profiled_period": ("us", (begun[:, -launches] - begun[:, 0]) / (CHAIN - 1))}
    for launch in range(launches):
        found[f"launch_{launch}"] = ("us", rows[:, launch::launches, 1].mean(1))
        # The gap with number i lies in front of launch i + 1 of the replay.
        found[f"gap_before_{launch}"] = ("us", gaps[:, (launch - 1) % launches :: launches].mean(1))
    return found
