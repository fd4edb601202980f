"""Costs of public engines' kernels of grouped-query attention over a paged cache, for one query a row.

FlashInfer's ``BatchDecode`` with tensor cores and FlashAttention's split form are alike: a group's query heads are the
rows of one tile, a block walks tiles of cached tokens of one key head, the context is split so that the grid fills the
SMs, and the parts are merged by a launch behind it (FlashInfer) or the last block. Norms of query and key, rope and the
cache write are the launches in front (vLLM ``qwen3.py``, ``llama.py``: two norms, rope, ``reshape_and_cache``).
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.mla_decode.public import PUBLIC_MERGE_REDUCTIONS
from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Unit, Work, block_work
from k3sim.model.program import Weight

TILE, BLOCKS, GROUP_TILE = 128, 144, 16
# As the latent form's public kernel: a tile is scores, maximum, exponents, values and rescaling; of two products in
# series each fills the tensor cores' pipeline once.
TILE_EPILOGUES, SETUPS, REDUCTIONS = 5, 2, 5


def head_norm(weights: Sequence[Weight], *, rows: int, heads: int, head_dim: int) -> Work:
    """RMSNorm of each head of ``[rows, heads, head_dim]``: of the query, or of the key."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=rows * -(-heads // 4),  # a warp a head, four a block
        activation_bytes_per_block=min(4, heads) * head_dim * BF16_BYTES,
        reductions=1,
    )


def rope(weights: Sequence[Weight], *, rows: int, heads: int, key_heads: int, head_dim: int) -> Work:
    """Query and key turned in place: one launch, a block a row; the position, then its row of the table."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=rows,
        addresses=1,
        activation_bytes_per_block=(heads + key_heads) * head_dim * BF16_BYTES,
    )


def cache_write(weights: Sequence[Weight], *, rows: int, row_bytes: int) -> Work:
    """Key and value of the new token into the paged cache (vLLM ``reshape_and_cache_flash``)."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=rows,
        addresses=1,
        activation_bytes_per_block=row_bytes,
        written_bytes=rows * row_bytes,
    )


def split_kv(
    weights: Sequence[Weight], *, rows: int, heads: int, key_heads: int, head_dim: int, context: int, row_bytes: int
) -> Work:
    """Attention over ``context`` cached tokens of ``row_bytes`` for all key heads, and the merge of the parts."""
    tiles = -(-context // TILE)
    tiles_of_a_block = -(-tiles // max(1, min(tiles, BLOCKS // (rows * key_heads))))
    splits = -(-tiles // tiles_of_a_block)
    group = -(-heads // key_heads)
    padded = -(-group // GROUP_TILE) * GROUP_TILE
    attend = Pass(
        num_address_loads=2,  # the length, then the page
        num_dependent_loads=1,
        reads=(Read(region="", num_bytes=rows * context * row_bytes, kind=ReadKind.KV_STATE),),
        flops=4.0 * rows * key_heads * padded * context * head_dim,
        unit=Unit.BF16,
        num_tensor_core_setups=SETUPS,
        num_tile_epilogues=TILE_EPILOGUES * (tiles_of_a_block - 1),
        num_block_reductions=REDUCTIONS,
        barrier=Barrier.LAUNCH if splits > 1 else Barrier.NONE,
        num_barriers=1 if splits > 1 else 0,
    )
    merge = Pass(
        num_blocks=rows * min(heads, key_heads * splits),
        num_dependent_loads=2,
        activation_bytes_per_block=splits * 4 * head_dim,
        num_block_reductions=PUBLIC_MERGE_REDUCTIONS,
    )
    return block_work(
        rows * key_heads * splits,
        *((attend, merge) if splits > 1 else (attend,)),
        block=PUBLIC["gqa_split"],
        in_flight_kib=64,
    )
