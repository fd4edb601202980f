"""Cost of a GEMM of one to a few rows as cuBLAS runs it, launched on a plain graph edge.

Grid, tile, threads, registers, shared memory and stages are those of cuBLAS's launches on an H200
(``configuration.py``). Nothing is loaded before the kernel starts. Where K is split, a second launch adds the parts up;
it takes 1.60 to 1.71 us there, 0.24 us behind the first. The first takes a microsecond more than a launch that does not
split: 4.9 us for 448 outputs, 5.9 for 896 (probe ``cublas_product``), of which fixed costs are priced as two set-ups.
Half of the stages are taken as on their way: 18 blocks that read 197 KB each take 4.9 us (same probe), 77 GB/s an SM.
Three quarters, or all of them, leave products in chains as far off in the median and farther in the worst
(docs/journal/2026-12-01-occupancy.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.cublas.configuration import cublas_launch
from k3sim.kernels.work import BLOCK_SLOTS, Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
FP32_BYTES = 4
SETUPS_OF_A_SPLIT = 2  # inferred, see above: a part's way out to memory is a pipeline of its own


def gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in bf16, one matrix, or several stacked to one."""
    return _work(weights, rows=rows)


def batched_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """One small matrix a head: absorption of W_UK, or lift by W_UV."""
    return _work(weights, rows=rows, by_head=True)


def _work(weights: Sequence[Weight], *, rows: int, by_head: bool = False) -> Work:
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    launch = cublas_launch(num_outputs=num_outputs, depth=depth, rows=rows, by_head=by_head)
    splits = launch.add_up_blocks > 0
    num_tiles = -(-num_outputs // launch.tile_outputs)
    num_parts = max(1, round(launch.num_blocks / num_tiles)) if splits else 1
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * depth * BF16_BYTES // num_parts,
        reads=tuple(Read(region=one.region, num_bytes=one.num_bytes) for one in weights),
        flops=2.0 * max(rows, launch.tile_rows) * num_outputs * depth,
        unit=Unit.BF16,
        num_tensor_core_setups=SETUPS_OF_A_SPLIT if splits else 1,
        num_block_reductions=1,
        barrier=Barrier.LAUNCH if splits else Barrier.NONE,
        num_barriers=1 if splits else 0,
    )
    # A launch that loads its parameters, the scale factors behind their pointers, then the parts.
    add_up = Pass(
        num_dependent_loads=3,
        num_blocks=launch.add_up_blocks,
        activation_bytes_per_block=num_parts * rows * num_outputs * FP32_BYTES // max(1, launch.add_up_blocks),
    )
    return Work(
        num_blocks=launch.num_blocks,
        threads_per_block=launch.threads,
        smem_bytes_per_block=launch.smem_bytes,
        bytes_in_flight_per_block=launch.ring_weight_bytes // 2,  # inferred, see above
        max_blocks_per_sm=BLOCK_SLOTS,
        registers_per_thread=launch.registers,
        passes=(multiply, add_up) if splits else (multiply,),
    )


# Not the project's to take apart: 20 KB is assumed. The pace of code that the instruction cache holds is part of other
# counts: only misses are added. Products lost 0.2 to 0.4 us behind a launch that evicts code (H200, 2026-11-30; those
# samples were not kept).
CODE: Mapping[str, MachineCode] = {
    "batched_gemm": MachineCode(num_bytes=20480, icache_miss_instructions=264),
    "gemm": MachineCode(num_bytes=20480, icache_miss_instructions=264),
}
