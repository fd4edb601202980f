"""Cost of a GEMM of one to a few rows as cuBLAS runs it, launched on a plain graph edge.

Counts are those of a tensor-core tile of 64 outputs, nothing of which is loaded before the kernel starts. That they
hold half an SM is inferred: 12 stages 64 deep are the most with which two products at once share SMs, as they do in a
profiled stock step of an H200. Where K is deep, cuBLAS splits it as long as the parts have an SM each, and a second
launch adds them up: on an H200 products of depth 7168 with 448 to 3,584 outputs have one launch more, one of 6,288
outputs and those of depths up to 1536 have not (probe ``cublas_product``). That launch takes 1.60 to 1.71 us there,
0.24 us behind the first. The first takes a microsecond more than a launch that does not split: 4.9 us for 448 outputs,
5.9 for 896 (same probe), of which fixed costs are priced as two set-ups. Half of the stages are taken as on their way:
18 blocks that read 197 KB each take 4.9 us (same probe), 77 GB/s an SM, which is what 48 KB sustain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.work import Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
FP32_BYTES = 4
TILE_OUTPUTS = 64
TARGET_BLOCKS = 132
MIN_DEPTH_OF_A_PART = 512
MIN_SPLIT_DEPTH = 2048
STAGES, STAGE_DEPTH = 12, 64
STAGES_ON_THEIR_WAY = 6  # inferred, see above
SETUPS_OF_A_SPLIT = 2  # inferred, see above: a part's way out to memory is a pipeline of its own
TOKEN_TILE = 16


def gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in bf16, one matrix, or several stacked to one."""
    return _work(weights, rows=rows)


def batched_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """One small matrix a head: absorption of W_UK, or lift by W_UV."""
    return _work(weights, rows=rows)


def _work(weights: Sequence[Weight], *, rows: int) -> Work:
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    num_tiles = -(-num_outputs // TILE_OUTPUTS)
    num_parts = 1
    if depth >= MIN_SPLIT_DEPTH:
        num_parts = min(TARGET_BLOCKS // num_tiles, depth // MIN_DEPTH_OF_A_PART)
    splits = num_parts >= 2
    num_parts = num_parts if splits else 1
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * depth * BF16_BYTES // num_parts,
        reads=tuple(Read(region=one.region, num_bytes=one.num_bytes) for one in weights),
        flops=2.0 * max(rows, TOKEN_TILE) * num_outputs * depth,
        unit=Unit.BF16,
        num_tensor_core_setups=SETUPS_OF_A_SPLIT if splits else 1,
        num_block_reductions=1,
        barrier=Barrier.LAUNCH if splits else Barrier.NONE,
        num_barriers=1 if splits else 0,
    )
    # A launch that loads its parameters, the scale factors behind their pointers, then the parts.
    add_up = Pass(
        num_dependent_loads=3,
        num_blocks=num_tiles,
        activation_bytes_per_block=num_parts * rows * TILE_OUTPUTS * FP32_BYTES,
    )
    return Work(
        num_blocks=num_tiles * num_parts,
        threads_per_block=128,
        smem_bytes_per_block=STAGES * STAGE_DEPTH * (TILE_OUTPUTS + 8) * BF16_BYTES,
        bytes_in_flight_per_block=STAGES_ON_THEIR_WAY * STAGE_DEPTH * TILE_OUTPUTS * BF16_BYTES,
        max_blocks_per_sm=2,
        # Not known, but so that two fit an SM and none beside a block of the experts: measured steps show products side
        # by side, and none that begins while the experts' first launch holds the SMs (h200-decode-stock.json), not
        # even on the four that it leaves: no block of a product starts before there is room for all of its wave.
        registers_per_thread=248,
        co_resident=True,
        passes=(multiply, add_up) if splits else (multiply,),
    )


# Not the project's to take apart: 20 KB is assumed. The pace of code that the instruction cache holds is part of other
# counts: only misses are added. Products lost 0.2 to 0.4 us behind a launch that evicts code (H200, 2026-11-30; those
# samples were not kept).
CODE: Mapping[str, MachineCode] = {
    "batched_gemm": MachineCode(num_bytes=20480, icache_miss_instructions=264),
    "gemm": MachineCode(num_bytes=20480, icache_miss_instructions=264),
}
