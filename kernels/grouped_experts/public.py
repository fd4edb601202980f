"""Costs of public engines' grouped products of the routed experts, in the formats that checkpoints have.

| Kernels | Formats | Launches |
| --- | --- | --- |
| trtllm-gen (FlashInfer, Blackwell) | FP8 block, NVFP4, int4, bf16 | routing, gate and up, down, finalize |
| Triton (vLLM and SGLang ``fused_moe``) | FP8 block, bf16 | align, gate and up, SwiGLU, quantise, down, sum |
| Marlin (vLLM, SGLang) | int4 | align, gate and up, SwiGLU, down, sum |

``weights`` is one expert's slice with the bytes of all that the step hits: bits a weight follow from both. Tiles are
128 outputs by the whole depth (trtllm-gen and Triton's tuned tables for few rows), so that at one row few blocks run,
each of which reads its rows in series through its ring: that, not the bytes, bounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.expert_gemv.public import PUBLIC_BYTES_IN_FLIGHT, SHORTEST_FILL_BYTES
from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Barrier, Block, Pass, Read, Unit, Work, block_work
from k3sim.model.program import Weight

TILE_OUTPUTS = 128
TOKEN_TILE = 16
# FP8 with a scale per 128 x 128: the sums of each 128 of depth leave tensor memory, are scaled and added in registers.
# Four MMAs, the wait for the last, the way out and the additions take as long as 20 MMAs: one expert a rank takes 19 us
# longer so than in NVFP4, over 9,216 of depth (AIConfigurator 2026-08, B200 and B300: 38 and 19 us).
SCALE_DEPTH, FP8_BLOCK_MMAS = 128, 20
# Triton (vLLM's tuned tables for 256 experts on H200): tiles 128 deep, three stages, of which one is multiplied and one
# waited for, so that one is on its way: 51 to 59 us for eight experts of 384 with all launches around them, 64 to 74
# for 16 (AIConfigurator 2026-08, H200, SGLang 0.5.14 and vLLM 0.24).
TRITON_DEPTH, TRITON_SLOTS = 128, 1
# Of a warp in a stage of 128 x 128, of which it has a quarter: 32 MMAs of 16 x 8 x 16, as tiles of 16 rows are too
# small for a warpgroup's; 32 loads of operands, 32 copies, and 60 for addresses and the pipeline. FP8 is turned into
# FP16 (64 conversions), and the sums are scaled and added (80).
TRITON_INSTRUCTIONS, TRITON_FP8_INSTRUCTIONS = 32 + 32 + 32 + 60, 32 + 32 + 32 + 60 + 64 + 80
MARLIN_DEPTH, MARLIN_STAGES, MARLIN_OUTPUTS = 64, 4, 256
MARLIN_BLOCKS = 132  # Marlin is persistent: a block an SM, each with an equal stretch of all tiles
# Of a warp in a stage of 64 x 256, of which it has an eighth: 16 MMAs, each with eight weights a lane decoded (12
# instructions) and scaled (8), and 64 for loads, addresses and the pipeline (IST-DASLab/marlin, vLLM's ``marlin_moe``).
MARLIN_STAGE_INSTRUCTIONS = 16 * (1 + 12 + 8) + 64
# Multiply and add of a weight at the rate of bf16: tensor cores run FP8 at twice it (datasheets).
FLOPS_OF = {"fp8": 1.0, "bf16": 2.0, "fp4": 2.0}


def _num_experts(distinct_milli: int) -> int:
    return -(-distinct_milli // 1000)


def _num_weights(weight: Weight, distinct_milli: int) -> float:
    return weight.num_outputs * weight.depth * distinct_milli / 1000


def _token_tiles(rows_per_expert: float) -> int:
    return max(1, -(-round(rows_per_expert) // TOKEN_TILE))


def _trtllm(
    weight: Weight, *, rows: int, top_k: int, distinct_milli: int, flops: float, unit: Unit, scale_depth: int = 0
) -> Work:
    """A grouped product of trtllm-gen: a block a tile of an expert, its ring filled for a tile at a time."""
    experts = _num_experts(distinct_milli)
    rows_per_expert = rows * top_k / experts
    num_weights = _num_weights(weight, distinct_milli)
    tiles = experts * -(-weight.num_outputs // TILE_OUTPUTS) * _token_tiles(rows_per_expert)
    tile_bytes = int(TILE_OUTPUTS * weight.depth * weight.num_bytes / num_weights)
    one = Pass(
        num_blocks=tiles,
        num_address_loads=2,  # expert table, then this tile's rows
        reads=(Read(region=weight.region, num_bytes=weight.num_bytes),),
        fill_bytes=max(SHORTEST_FILL_BYTES, tile_bytes),
        flops=flops * max(float(TOKEN_TILE), rows_per_expert) * num_weights,
        unit=unit,
        decoded_weights=int(num_weights) if unit is Unit.FP4 else 0,
        num_tensor_core_setups=1,
        num_dependent_mmas=-(-weight.depth // scale_depth) * FP8_BLOCK_MMAS if scale_depth else 0,
        num_block_reductions=2,
    )
    return block_work(tiles, one, block=PUBLIC["expert_gemm"], in_flight_kib=PUBLIC_BYTES_IN_FLIGHT // 1024)


def trtllm_fp4(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """NVFP4 or MXFP4 weights with FP4 or FP8 rows: block-scaled products."""
    (one,) = weights
    return _trtllm(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=2.0, unit=Unit.FP4)


def trtllm_fp8(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """FP8 weights with a scale per 128 x 128, which the epilogue warps apply."""
    (one,) = weights
    return _trtllm(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=FLOPS_OF["fp8"], unit=Unit.BF16,
                   scale_depth=SCALE_DEPTH)  # fmt: skip


def trtllm_bf16(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """Weights in bf16."""
    (one,) = weights
    return _trtllm(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=FLOPS_OF["bf16"], unit=Unit.BF16)


def trtllm_int4(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """int4 weights that are decoded to bf16 on the way to the tensor core."""
    (one,) = weights
    return _trtllm(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=2.0, unit=Unit.FP4)


def _triton(weight: Weight, *, rows: int, top_k: int, distinct_milli: int, flops: float, instructions: int) -> Work:
    """A program of Triton a tile, whose warps load, decode and multiply stage by stage."""
    experts = _num_experts(distinct_milli)
    rows_per_expert = rows * top_k / experts
    num_weights = _num_weights(weight, distinct_milli)
    tiles = experts * -(-weight.num_outputs // TILE_OUTPUTS) * _token_tiles(rows_per_expert)
    slot_bytes = int(TILE_OUTPUTS * TRITON_DEPTH * weight.num_bytes / num_weights)
    one = Pass(
        num_blocks=tiles,
        num_address_loads=2,  # the tile's expert, then its rows
        num_dependent_loads=1,
        activation_bytes_per_block=TOKEN_TILE * TRITON_DEPTH,
        reads=(Read(region=weight.region, num_bytes=weight.num_bytes),),
        flops=flops * max(float(TOKEN_TILE), rows_per_expert) * num_weights,
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_stages=-(-weight.depth // TRITON_DEPTH),
        stage_instructions=instructions,
        num_block_reductions=1,
    )
    return block_work(tiles, one, block=PUBLIC["triton_experts"],
                      in_flight_kib=max(1, TRITON_SLOTS * slot_bytes // 1024))  # fmt: skip


def triton_fp8(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """FP8 weights with a scale per 128 x 128: sums of a stage are scaled and added before the next."""
    (one,) = weights
    return _triton(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=FLOPS_OF["fp8"],
                   instructions=TRITON_FP8_INSTRUCTIONS)  # fmt: skip


def triton_bf16(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """Weights in bf16."""
    (one,) = weights
    return _triton(one, rows=rows, top_k=top_k, distinct_milli=distinct_milli, flops=FLOPS_OF["bf16"],
                   instructions=TRITON_INSTRUCTIONS)  # fmt: skip


def marlin(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """4-bit weights decoded to bf16 in registers: persistent blocks share all tiles evenly, over K too.

    Parts of a tile that several blocks have are added up one after the other, through a lock.
    """
    (one,) = weights
    experts = _num_experts(distinct_milli)
    rows_per_expert = rows * top_k / experts
    num_weights = _num_weights(one, distinct_milli)
    tiles = experts * -(-one.num_outputs // MARLIN_OUTPUTS) * _token_tiles(rows_per_expert)
    slots = tiles * -(-one.depth // MARLIN_DEPTH)
    blocks = min(MARLIN_BLOCKS, slots)
    slot_bytes = int(MARLIN_OUTPUTS * MARLIN_DEPTH * one.num_bytes / num_weights)
    parts = -(-blocks // tiles)  # of one tile
    multiply = Pass(
        num_blocks=blocks,
        num_address_loads=2,
        num_dependent_loads=1,
        activation_bytes_per_block=TOKEN_TILE * MARLIN_DEPTH * BF16_BYTES,
        reads=(Read(region=one.region, num_bytes=one.num_bytes),),
        flops=2.0 * max(float(TOKEN_TILE), rows_per_expert) * num_weights,
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_stages=-(-slots // blocks),
        stage_instructions=MARLIN_STAGE_INSTRUCTIONS,
        num_block_reductions=2,
    )
    # Who has a later part waits for the lock, loads the sums so far and adds its own.
    add_up = Pass(num_dependent_loads=2 * (parts - 1), num_blocks=blocks)
    return block_work(blocks, *((multiply, add_up) if parts > 1 else (multiply,)), block=PUBLIC["marlin_experts"],
                      in_flight_kib=max(1, MARLIN_STAGES * slot_bytes // 1024))  # fmt: skip


def _of_rows(*, num_rows: int, width: int, inputs: int, block: Block, reductions: int = 0, loads: int = 1) -> Work:
    return small(
        block=block,
        num_blocks=max(1, -(-num_rows * width // 2048)),
        loads=loads,
        activation_bytes_per_block=inputs * 2048 * BF16_BYTES,
        reductions=reductions,
    )


def activate(weights: Sequence[Weight], *, rows: int, top_k: int, width: int) -> Work:
    """SiLU of the gate times up over the rows of all chosen experts."""
    return _of_rows(num_rows=rows * top_k, width=width, inputs=2, block=PUBLIC["elementwise"])


def activate_and_quantise(weights: Sequence[Weight], *, rows: int, top_k: int, width: int) -> Work:
    """``activate`` and ``quantise`` in one launch."""
    return _of_rows(num_rows=rows * top_k, width=width, inputs=2, block=PUBLIC["elementwise"], reductions=1)


def quantise(weights: Sequence[Weight], *, rows: int, top_k: int, width: int) -> Work:
    """The rows of all chosen experts to FP8, with a scale per 128."""
    return _of_rows(num_rows=rows * top_k, width=width, inputs=1, block=PUBLIC["elementwise"], reductions=1)


def finalize(weights: Sequence[Weight], *, rows: int, top_k: int, hidden: int) -> Work:
    """The weighted sum of a token's ``top_k`` rows: their places, then the rows."""
    return _of_rows(num_rows=rows, width=hidden, inputs=top_k, block=PUBLIC["elementwise"], loads=2)


def align(weights: Sequence[Weight], *, rows: int, top_k: int, experts: int) -> Work:
    """Counts of each expert and their prefix sums, padded to tiles: one block (vLLM ``moe_align_block_size``)."""
    return small(
        block=PUBLIC["permutation"], num_blocks=1, activation_bytes_per_block=rows * top_k * 4, reductions=4
    )


def place(weights: Sequence[Weight], *, rows: int, top_k: int) -> Work:
    """The index of each token's row behind its expert's: the second launch of ``align`` for more than 64 experts."""
    return small(block=PUBLIC["elementwise"], num_blocks=1, loads=2, activation_bytes_per_block=rows * top_k * 4)


def select(weights: Sequence[Weight], *, rows: int, experts: int, top_k: int, groups: int) -> Work:
    """Sigmoid or softmax, bias and top-k of ``experts``; of the best ``groups`` of them first where there are any.

    A warp a row holds all scores in registers (vLLM ``grouped_topk_kernels.cu``): the two best of each group and the
    best groups are sums over lanes, and each chosen expert is one more search over the warp.
    """
    searches = top_k + (1 if groups > 1 else 0)
    work = small(
        block=PUBLIC["routing"], num_blocks=rows, loads=1, activation_bytes_per_block=experts * 4, reductions=1
    )
    (one,) = work.passes
    return replace(work, passes=(replace(one, num_stages=searches, stage_instructions=16),))


def route(weights: Sequence[Weight], *, rows: int, experts: int, top_k: int, groups: int) -> Work:
    """trtllm-gen's routing in one launch: scores, groups, top-k, counts and places.

    One cluster of eight blocks (FlashInfer ``trtllm_fused_moe_routing_deepseek.cu``): selection as ``select``, then
    counts, prefix sums and indices with a cluster barrier behind each.
    """
    (chosen,) = select((), rows=rows, experts=experts, top_k=top_k, groups=groups).passes
    sweep = Pass(num_block_reductions=1, barrier=Barrier.CLUSTER, num_barriers=1)
    work = small(block=PUBLIC["permutation"], num_blocks=max(8, rows), loads=1, activation_bytes_per_block=experts * 4)
    return replace(work, passes=(replace(chosen, num_blocks=rows), sweep, sweep))
