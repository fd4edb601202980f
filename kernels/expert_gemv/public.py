"""Costs of public engines' kernels for the selected MXFP4 experts, one or a few rows.

Weights are the tensor-core operand with 128 outputs a tile, so at one row the number of blocks is
experts x tiles: 48 at TP16 and 96 at TP8, never the whole chip; that and the serial set-up bound the kernel,
not its bytes. ``gemm1`` and ``gemm2`` are the two public launches, ``block`` is one persistent launch that also
selects the experts, with a grid barrier between the two matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.expert_gemv.cost import BITS_PER_WEIGHT, MAX_BLOCKS
from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.router_topk.cost import selection
from k3sim.kernels.work import Barrier, Pass, Read, Unit, Work, block_work
from k3sim.model.program import Weight

TILE_OUTPUTS = 128
TASK_TILE_OUTPUTS = 32
# Ring of the public launches, from the slope of their public timings over rows (AIConfigurator tables 2026-08, GB300
# and GB200): 6.5 TB/s where an expert is whole. A block fills it for one tile at a time, for two where they are shorter
# than 8 KB, so that the short rows of a sliced second matrix leave it half empty: 4.8 TB/s at 256 of depth.
PUBLIC_BYTES_IN_FLIGHT = 48 * 1024
SHORTEST_FILL_BYTES = 16 * 1024
TASK_BYTES_IN_FLIGHT = 96 * 1024  # a persistent program owns nearly all shared memory
# In series before the first product of a block-scaled MMA: scales of the weights and of the rows, each through shared
# memory into tensor memory, and the pipeline's fill; a bf16 product has the last alone. From the same tables.
BLOCK_SCALED_SETUPS = 3


def _pass(
    weight: Weight,
    rows_per_expert: float,
    num_tiles: int,
    *,
    early: bool = False,
    barrier: Barrier = Barrier.NONE,
    num_address_loads: int = 1,
    num_tensor_core_setups: int = BLOCK_SCALED_SETUPS,
    fills_tile_by_tile: bool = True,
) -> Pass:
    num_weights = weight.num_bytes * 8 / BITS_PER_WEIGHT
    tile_bytes = int(TILE_OUTPUTS * weight.depth * BITS_PER_WEIGHT / 8)
    num_blocks = min(num_tiles, MAX_BLOCKS)
    return Pass(
        num_blocks=num_blocks,
        num_address_loads=num_address_loads,
        reads=(Read(region=weight.region, num_bytes=weight.num_bytes, early=early),),
        fill_bytes=max(SHORTEST_FILL_BYTES, tile_bytes) if fills_tile_by_tile else 0,
        # Token tile of 16 on the tensor cores, whatever the rows an expert gets.
        flops=2.0 * max(16.0, rows_per_expert) * num_weights,
        unit=Unit.FP4,
        decoded_weights=int(num_weights),
        num_tensor_core_setups=num_tensor_core_setups,
        # A tile ends with the wait for its last MMA (168 to 264 cycles on B200, SemiAnalysis microbenchmarks: as
        # long as a block reduction) and an epilogue from tensor memory over the block. All but the last run while
        # the next tile's weights arrive.
        num_tile_epilogues=-(-num_tiles // num_blocks) - 1,
        num_block_reductions=2,
        barrier=barrier,
        num_barriers=1 if barrier is not Barrier.NONE else 0,
    )


def _num_experts(distinct_milli: int) -> int:
    return -(-distinct_milli // 1000)


def _one_launch(passes: tuple[Pass, ...]) -> Work:
    """Persistent blocks, which wait for one another."""
    return replace(
        block_work(MAX_BLOCKS, *passes, block=PUBLIC["expert_block"], in_flight_kib=PUBLIC_BYTES_IN_FLIGHT // 1024),
        co_resident=True,
    )


def _grouped(one: Pass) -> Work:
    return block_work(
        one.num_blocks, one, block=PUBLIC["expert_gemm"], in_flight_kib=PUBLIC_BYTES_IN_FLIGHT // 1024
    )


def gemm1(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, width: int) -> Work:
    """Gate and up of the selected experts, SiTU and requantisation in the epilogue."""
    (w13,) = weights
    experts = _num_experts(distinct_milli)
    # Expert table, then this tile's rows: two loads in series before the first weight address is known.
    one = _pass(w13, rows * top_k / experts, experts * -(-2 * width // TILE_OUTPUTS), num_address_loads=2)
    return _grouped(one)


def gemm2(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, latent: int) -> Work:
    """Down projection of the selected experts into ``top_k`` partial rows of the latent."""
    (w2,) = weights
    experts = _num_experts(distinct_milli)
    one = _pass(w2, rows * top_k / experts, experts * -(-latent // TILE_OUTPUTS), num_address_loads=2)
    return _grouped(one)


def block(
    weights: Sequence[Weight],
    *,
    rows: int,
    top_k: int,
    distinct_milli: int,
    width: int,
    experts: int,
    latent: int,
    selects: int = 1,
) -> Work:
    """Selection (unless ``selects`` is 0), both matrices and the weighted sum in the latent, one launch.

    As the public kernel divides its time at one row on GB200 (k3opt design plan, 2026-09): first matrix 7.63 us,
    barrier 2.05, then 0.72 until the hidden vectors are there and 2.86 for the second matrix, whose scales are loaded
    before.
    """
    w13, w2 = weights
    chosen = _num_experts(distinct_milli)
    rows_per_expert = rows * top_k / chosen
    passes: tuple[Pass, ...] = (
        _pass(w13, rows_per_expert, chosen * -(-2 * width // TILE_OUTPUTS), barrier=Barrier.GRID),
        _pass(w2, rows_per_expert, chosen * -(-latent // TILE_OUTPUTS), num_tensor_core_setups=1),
    )
    if selects:
        passes = (selection(experts=experts, latent=latent, num_quantise_reductions=1), *passes)
    return _one_launch(passes)


def route(weights: Sequence[Weight], *, rows: int, experts: int, latent: int) -> Work:
    """``block`` that only selects, in front of one that does not: its blocks hold every SM, and then come again."""
    return _one_launch((selection(experts=experts, latent=0, num_quantise_reductions=0),))


def task1(
    weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, width: int, experts: int, latent: int
) -> Work:
    """Selection and ``gemm1`` as tasks of a persistent program.

    Every block selects for itself (the result is the same everywhere), tiles of 32 outputs keep every SM busy,
    and the tensor cores were set up when the program started.
    """
    (w13,) = weights
    chosen = _num_experts(distinct_milli)
    tiles = chosen * -(-2 * width // TASK_TILE_OUTPUTS)
    select = selection(experts=experts, latent=latent, num_quantise_reductions=1)
    return _task(select, _task_pass(w13, rows * top_k / chosen, tiles))


def task2(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, latent: int) -> Work:
    """``gemm2`` as tasks: the experts are known since the selection, so weights are read before the rows are."""
    (w2,) = weights
    experts = _num_experts(distinct_milli)
    tiles = experts * -(-latent // TILE_OUTPUTS)
    return _task(_task_pass(w2, rows * top_k / experts, tiles, early=True))


def _task_pass(weight: Weight, rows_per_expert: float, num_tiles: int, *, early: bool = False) -> Pass:
    return _pass(
        weight, rows_per_expert, num_tiles, early=early, num_tensor_core_setups=0, fills_tile_by_tile=False
    )


def _task(*passes: Pass) -> Work:
    return replace(_one_launch(passes), bytes_in_flight_per_block=TASK_BYTES_IN_FLIGHT)
