"""Cost of one to a few rows times bf16 weights, as the kernel of this folder computes them.

Issue cost on CUDA cores: a conversion a weight, and for each row an FMA and a share of loading and converting the
activation, 3.5 slots in all. The count reproduces the public cold timings of 2880 x 7168 on GB200 at one to four
rows (7.13, 7.95, 8.24, 9.32 us; TokenSpeed routed_gemv.py, 2026-08) to within 10 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3sim.kernels.cublas.cost import gemm as cublas_gemm
from k3sim.kernels.footprints import built_code
from k3sim.kernels.skinny_gemv.configuration import (
    CHUNK,
    MAX_ROWS,
    Epilogue,
    GemvConfiguration,
    choose_tiling,
)
from k3sim.kernels.work import ActivationForm, Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
SLOTS_PER_WEIGHT = 1.0
SLOTS_PER_WEIGHT_AND_ROW = 3.5


def reads(weights: Sequence[Weight], *, early: bool) -> tuple[Read, ...]:
    """The matrices that one launch reads, one behind the other."""
    return tuple(Read(region=one.region, num_bytes=one.num_bytes, early=early) for one in weights)


def fma_flops(weights: Sequence[Weight], rows: int) -> float:
    """Issue cost of ``rows`` products in flops of the FMA pipe, two a slot."""
    slots = SLOTS_PER_WEIGHT + SLOTS_PER_WEIGHT_AND_ROW * rows
    return sum(2.0 * slots * one.num_outputs * one.depth for one in weights)


def _tiled(
    weights: Sequence[Weight], rows: int, *, paired: bool = False, fp32_out: bool = False, sent_bytes_per_peer: int = 0
) -> Work:
    """What runs on an H200: this folder's kernel with the tiling that ``choose_tiling`` gives, or cuBLAS's product.

    Beyond ``MAX_ROWS``, which the kernel does not take, counts grow and the footprint stays.
    """
    taken = min(rows, MAX_ROWS)
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    tiling = choose_tiling(num_outputs=num_outputs, depth=depth, rows=taken, paired=paired)
    if tiling is None:
        num_bytes = sum(one.num_bytes for one in weights)
        return cublas_gemm([replace(weights[0], num_outputs=num_outputs, num_bytes=num_bytes)], rows=rows)
    config = GemvConfiguration(
        num_outputs=num_outputs,
        depth=depth,
        rows=taken,
        fp32_out=fp32_out,
        epilogue=Epilogue.SITU_GLU if paired else Epilogue.NONE,
        tiling=tiling,
    )
    num_blocks = config.tiling.num_tiles * config.tiling.split
    # A slot of the mma form's ring holds x beside the weights.
    weights_share = 1.0
    if config.is_mma:
        row_tiles = config.tiling.rows_per_stage // 8
        weights_share = row_tiles / (row_tiles + config.column_tiles)
    input_bytes, slots = rows * config.slice_depth * BF16_BYTES, config.num_stages if config.is_mma else 1
    multiply = Pass(
        num_dependent_loads=1,
        # In the mma form x comes slot by slot with the weights, each lane asking for its own operands.
        activation_bytes_per_block=input_bytes // slots,
        streamed_activation_bytes_per_block=input_bytes - input_bytes // slots,
        activation_form=ActivationForm.MMA_FRAGMENTS if config.is_mma else ActivationForm.COALESCED,
        reads=reads(weights, early=True),
        flops=(
            sum(2.0 * max(rows, 8 * config.column_tiles) * 2 * one.num_outputs * one.depth for one in weights)
            if config.is_mma
            else fma_flops(weights, rows)
        ),
        unit=Unit.BF16 if config.is_mma else Unit.CUDA_CORE,
        # Of the mma form each stage adds two products to the sums of the one before, for each step along K.
        num_dependent_mmas=2 * config.tiling.steps_per_stage * config.num_stages if config.is_mma else 0,
        num_stages=0 if config.is_mma else config.num_stages,
        stage_instructions=_stage_instructions(config),
        # Sums over a warp are in the stages; those of the warps are added up at once, without a tree.
        num_block_reductions=1 if config.is_mma else 0,
        barrier=Barrier.CLUSTER_RELEASE if config.tiling.split > 1 else Barrier.NONE,
        num_barriers=1 if config.tiling.split > 1 else 0,
    )
    return Work(
        num_blocks=num_blocks,
        threads_per_block=config.threads,
        smem_bytes_per_block=config.smem_bytes,
        bytes_in_flight_per_block=min(
            int(config.ring_bytes * weights_share), -(-num_outputs * depth * BF16_BYTES // num_blocks)
        ),
        early_bytes_in_flight_per_block=0 if config.is_mma else config.early_stages * config.stage_bytes,
        ring_slots=min(config.tiling.stages, config.num_stages),
        max_blocks_per_sm=2048 // config.threads,
        registers_per_thread=_registers(config, pushes=bool(sent_bytes_per_peer)),
        deep_prefetch=True,
        passes=(multiply,),
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def _stage_instructions(config: GemvConfiguration) -> int:
    """Of a warp of the ``fma`` form in one stage, for sm_90a: 37 to 41, 54 to 56 and 96 to 129 with 8, 16 and 32
    weights a thread at one row."""
    weights = CHUNK * config.chunks_per_thread * config.tiling.rows_per_stage
    return round(16 + (1.75 + config.rows) * weights)


def _registers(config: GemvConfiguration, *, pushes: bool) -> int:
    """Of a thread, as allocated for sm_90a, from builds of all the shapes that a rank has at 1 to 16 rows.

    Rows of x are held in registers (``fma``), or sums by tiles of 16 outputs and 8 rows (``mma``); a ring that is
    refilled needs more than one that holds all, and addresses of 16 peers 32 more.
    """
    held_whole, more = config.num_stages <= config.tiling.stages, 32 if pushes else 0
    if config.is_mma:
        tiles = config.tiling.rows_per_stage // 16
        if tiles > 4:
            return more + {5: (72, 120), 6: (96, 136), 7: (112, 152)}.get(tiles, (128, 168))[config.column_tiles - 1]
        if config.column_tiles > 1:
            return more + {1: 40, 2: 64}.get(tiles, 80)
        return more + (40 if held_whole else {1: 40, 2: 48, 3: 80}.get(tiles, 64))
    if config.rows > 1:
        return more + (72 if config.chunks_per_thread > 1 else 40 if held_whole else 56)
    few = config.paired or held_whole or config.chunks_per_thread * config.tiling.rows_per_stage <= 2
    return more + (40 if few else 48)


def tiled(weights: Sequence[Weight], *, rows: int) -> Work:
    """``skinny_gemv`` as the project runs it."""
    return _tiled(weights, rows)


def tiled_situ(weights: Sequence[Weight], *, rows: int) -> Work:
    """``tiled`` with SiTU-GLU on paired rows, for which tilings follow from the rule."""
    return _tiled(weights, rows, paired=True)


def tiled_push(weights: Sequence[Weight], *, rows: int, sent_bytes_per_row: int) -> Work:
    """``tiled`` whose fp32 outputs go to every peer word by word."""
    return _tiled(weights, rows, fp32_out=True, sent_bytes_per_peer=rows * sent_bytes_per_row)


CODE: Mapping[str, MachineCode] = {
    "tiled": built_code("skinny_gemv", "3216x7168_rows1"),
    "tiled_push": built_code("skinny_gemv", "280x7168_rows1_front16"),
    "tiled_situ": built_code("skinny_gemv", "1536x7168_rows1_situ_glu"),
}
