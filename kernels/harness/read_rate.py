"""Read bandwidth of the GPU at hand: what ``bench`` calls 100 %.

A kernel that reads 4 GB once and keeps nothing: 2,048 threads an SM, each with four loads of 16 bytes under way
(128 KiB an SM), every address once, so that all of it comes from HBM. On an H200 loads of this depth read 4.66 TB/s,
within one per cent of the best of all probes (2026-11-29; ``hbm_loads_in_flight`` and ``hbm_bulk_in_flight`` in
calibrate/data/h200-primitives.json).
"""

from __future__ import annotations

from typing import Any

from k3sim.kernels.harness.bench import Timing, time_calls
from k3sim.kernels.toolchain.compile_cache import compiled, get_cutlass

NUM_BYTES = 4_000_000_000  # at least; rounded up to whole turns of the grid
NUM_REPLAYS = 40
GRAPH_US = 8000.0
METHOD = (
    "read-only kernel over 4 GB, 2048 threads an SM, 4 loads of 16 bytes a thread in flight; median of 40 replays of a "
    "graph of several"
)


def read_rate() -> tuple[float, Timing]:
    """Bytes a second that reading sustains on the current GPU (median), and the samples."""
    import torch

    get_cutlass()
    from cuda.bindings.driver import CUstream

    from k3sim.kernels.harness.read_rate_kernel import BLOCKS_PER_SM, TURN_BYTES, compile_read

    num_blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    turns = -(-NUM_BYTES // (num_blocks * TURN_BYTES))
    # Values like those of weights: what toggles on the bus decides power, and power the clock.
    data = torch.empty(turns * num_blocks * TURN_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    run: Any = compiled(("read", num_blocks), lambda: compile_read(num_blocks))

    def call() -> None:
        run(data.data_ptr(), sink.data_ptr(), turns, CUstream(torch.cuda.current_stream().cuda_stream))

    timing = time_calls("read", [call], num_replays=NUM_REPLAYS, graph_us=GRAPH_US)
    return data.numel() * data.element_size() / timing.median_us * 1e6, timing
