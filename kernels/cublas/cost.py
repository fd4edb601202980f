"""Cost of a GEMM of one to a few rows as cuBLAS runs it, launched on a plain graph edge.

Grid, threads, registers, shared memory, stages and whether K is split are those of its launches on an H200, by shape
and rows (``configuration.py``); nothing is loaded before the kernel starts. A second launch adds up the parts of a
split K: it takes 1.60 to 1.71 us there, 0.24 us behind the first (probe ``cublas_product``). The first takes a
microsecond more than a launch that does not split: 4.9 us for 448 outputs, 5.9 for 896 (same probe), of which fixed
costs are priced as two set-ups. Half of the stages are taken as on their way, 64 KB for most shapes: 18 blocks that
read 197 KB each take 4.9 us (same probe), 77 GB/s an SM, which is what 48 KB sustain and less than what all stages
would. Blocks start as there is room: only those of a cluster start together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.cublas.configuration import cublas_launch
from k3sim.kernels.work import Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
FP32_BYTES = 4
STAGES_SHARE_ON_THEIR_WAY = 0.5  # inferred, see above
SETUPS_OF_A_SPLIT = 2  # inferred, see above: a part's way out to memory is a pipeline of its own
TOKEN_TILE = 16


def gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in bf16, one matrix."""
    (one,) = weights
    return _work(one, rows=rows, by_head=False)


def batched_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """One small matrix a head: absorption of W_UK, or lift by W_UV."""
    (one,) = weights
    return _work(one, rows=rows, by_head=True)


def _work(one: Weight, *, rows: int, by_head: bool) -> Work:
    launch = cublas_launch(num_outputs=one.num_outputs, depth=one.depth, rows=rows, by_head=by_head)
    num_tiles = -(-one.num_outputs // launch.tile_outputs) * -(-rows // launch.tile_rows)
    splits = launch.add_up_blocks > 0
    parts = max(1.0, launch.num_blocks / num_tiles)
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=round(min(rows, launch.tile_rows) * one.depth * BF16_BYTES / parts),
        reads=(Read(region=one.region, num_bytes=one.num_bytes),),
        flops=2.0 * max(rows, TOKEN_TILE) * one.num_outputs * one.depth,
        unit=Unit.BF16,
        num_tensor_core_setups=SETUPS_OF_A_SPLIT if splits else 1,
        num_block_reductions=1,
        barrier=Barrier.LAUNCH if splits else Barrier.NONE,
        num_barriers=1 if splits else 0,
    )
    # A launch that loads its parameters, the scale factors behind their pointers, then the parts.
    add_up = Pass(
        num_dependent_loads=3,
        num_blocks=min(launch.num_blocks, launch.add_up_blocks),
        activation_bytes_per_block=round(
            parts * rows * one.num_outputs * FP32_BYTES / min(launch.num_blocks, max(1, launch.add_up_blocks))
        ),
    )
    return Work(
        num_blocks=launch.num_blocks,
        threads_per_block=launch.threads,
        smem_bytes_per_block=launch.smem_bytes,
        bytes_in_flight_per_block=int(launch.ring_weight_bytes * STAGES_SHARE_ON_THEIR_WAY),
        max_blocks_per_sm=1,
        registers_per_thread=launch.registers,
        passes=(multiply, add_up) if splits else (multiply,),
    )


# Not the project's to take apart: 20 KB is assumed. The pace of code that the instruction cache holds is part of other
# counts: only misses are added. Products lost 0.2 to 0.4 us behind a launch that evicts code (H200, 2026-11-30; those
# samples were not kept).
CODE: Mapping[str, MachineCode] = {
    "batched_gemm": MachineCode(num_bytes=20480, icache_miss_instructions=600),
    "gemm": MachineCode(num_bytes=20480, icache_miss_instructions=600),
}
