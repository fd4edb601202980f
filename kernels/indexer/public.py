"""Costs of the sparse-attention indexer as vLLM and SGLang run it for DeepSeek-V3.2.

Stages of a layer: product of the query latent with the index heads, product of the hidden state with key and head
weights, LayerNorm of the key with its rotation, quantisation and cache write, scores of every cached key (DeepGEMM
``fp8_paged_mqa_logits``), the best 2,048 of them, and attention to those rows alone. The scores read the whole context
on every rank, 132 bytes a token; attention reads at most ``top_k`` rows, scattered.

The search for the best is of one block a row over the context's scores, a digit of the key at a time (SGLang's and
FlashInfer's radix select): each round sweeps the scores in L2 and ends with a sum over the block.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Pass, Read, ReadKind, Unit, Work, block_work
from k3sim.model.program import Weight

FP32_BYTES = 4
SCORE_TOKENS = 256  # of a tile of DeepGEMM's scores
SCORE_BLOCKS = 132
RADIX_ROUNDS = 4  # of eight bits of an fp32 key


def key_and_query(
    weights: Sequence[Weight], *, rows: int, heads: int, head_dim: int, index_row_bytes: int
) -> Work:
    """Rotation and quantisation of the index queries, LayerNorm of the key, and its row into the cache: one launch."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=rows * -(-(heads + 1) * head_dim // 2048),
        loads=2,
        activation_bytes_per_block=2048 * BF16_BYTES,
        written_bytes=rows * index_row_bytes,
        reductions=2,
    )


def scores(
    weights: Sequence[Weight], *, rows: int, heads: int, head_dim: int, cached: int, index_row_bytes: int
) -> Work:
    """``[rows, cached]`` scores: products with all index heads in FP8, a ReLU, and the sum by the heads' weights."""
    tiles = rows * -(-cached // SCORE_TOKENS)
    blocks = min(SCORE_BLOCKS, tiles)
    one = Pass(
        num_address_loads=2,  # the length, then the page
        num_dependent_loads=1,
        activation_bytes_per_block=heads * head_dim,
        reads=(Read(region="", num_bytes=rows * cached * index_row_bytes, kind=ReadKind.KV_STATE),),
        flops=1.0 * rows * max(64, heads) * head_dim * cached,  # FP8: half of two at the rate of bf16
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_tile_epilogues=-(-tiles // blocks) - 1,
        num_block_reductions=2,
    )
    return block_work(blocks, one, block=PUBLIC["mla_split"], in_flight_kib=96)


def top_k(weights: Sequence[Weight], *, rows: int, cached: int) -> Work:
    """The best rows of each request: a block sweeps its scores once for each digit."""
    sweep = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=cached * FP32_BYTES,
        num_block_reductions=2,  # counts of the digit, and the place of each
        num_selection_rounds=1,
    )
    return block_work(rows, *(sweep for _ in range(RADIX_ROUNDS)), block=PUBLIC["routing"], in_flight_kib=16)
