"""Cost of cuBLAS's products in public engines, on Blackwell.

Its launches there are not recorded. Tiles and parts follow a rule that public tables of bf16 products on GB200 and
GB300 agree with (AIConfigurator 2026-08, 840 rows of up to 16 rows, 9.6 % off): tiles of 64 outputs, K split as long as
the parts have an SM each, one set-up of the tensor cores, 48 KB on their way a block. With the grids of an H200's
records (``configuration.py``) the same tables are 11.2 % off.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.work import Barrier, Pass, Read, Unit, Work, block_work
from k3sim.model.program import Weight

BF16_BYTES = 2
FP32_BYTES = 4
TILE_OUTPUTS = 64
TARGET_BLOCKS = 132
MIN_DEPTH_OF_A_PART = 512
MIN_SPLIT_DEPTH = 2048
KIB_IN_FLIGHT = 48
TOKEN_TILE = 16


def public_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in bf16, one matrix or several stacked to one."""
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    num_tiles = -(-num_outputs // TILE_OUTPUTS)
    num_parts = 1
    if depth >= MIN_SPLIT_DEPTH:
        num_parts = max(1, min(TARGET_BLOCKS // num_tiles, depth // MIN_DEPTH_OF_A_PART))
    splits = num_parts >= 2
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * depth * BF16_BYTES // num_parts,
        reads=tuple(Read(region=one.region, num_bytes=one.num_bytes) for one in weights),
        flops=2.0 * max(rows, TOKEN_TILE) * num_outputs * depth,
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_block_reductions=1,
        barrier=Barrier.LAUNCH if splits else Barrier.NONE,
        num_barriers=1 if splits else 0,
    )
    add_up = Pass(
        num_dependent_loads=3,
        num_blocks=num_tiles,
        activation_bytes_per_block=num_parts * rows * TILE_OUTPUTS * FP32_BYTES,
    )
    passes = (multiply, add_up) if splits else (multiply,)
    return block_work(num_tiles * num_parts, *passes, block=PUBLIC["cublas"], in_flight_kib=KIB_IN_FLIGHT)
