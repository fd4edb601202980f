"""Costs of public engines' NoPE latent attention over a paged cache, split over the context.

``split_kv`` ends with the attention output in the latent; the last block of a row to arrive merges the parts.
``fused`` also lifts the latent to values and applies the output gate.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.mla_decode.cost import HEAD_TILE
from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Unit, Work, block_work
from k3sim.model.program import Weight

TOKENS_PER_BLOCK = 64  # one tile of keys: at 8k context 128 blocks run
MAX_SPLITS = 128  # beyond it a block walks several tiles
LIFT_BLOCKS = 48


def _attention(
    *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int, early: bool, unit: Unit
) -> Pass:
    padded_heads = -(-heads // HEAD_TILE) * HEAD_TILE
    return Pass(
        num_blocks=rows * min(MAX_SPLITS, -(-context // TOKENS_PER_BLOCK)),
        num_address_loads=0 if early else 1,  # the public form reads its page table after the wait
        num_dependent_loads=1,
        reads=(Read(region="", num_bytes=rows * context * kv_row_bytes, kind=ReadKind.KV_STATE, early=early),),
        flops=2.0 * rows * padded_heads * context * (2 * kv_lora_rank + 64),
        unit=unit,
        num_tensor_core_setups=2,  # scores, then values
        # Scores, row maximum and sum, and values of one tile before the next in a block.
        num_tile_epilogues=-(-context // TOKENS_PER_BLOCK // MAX_SPLITS) - 1,
        num_block_reductions=3,
        barrier=Barrier.CLUSTER,  # the blocks of a cluster add up before the merge over clusters
        num_barriers=1,
    )


def _merge(*, rows: int, heads: int, context: int, kv_lora_rank: int) -> Pass:
    """The last block reads every part's output (fp32) and log-sum-exp: counter, then data."""
    num_splits = min(MAX_SPLITS, -(-context // TOKENS_PER_BLOCK))
    return Pass(
        num_dependent_loads=2,
        activation_bytes_per_block=num_splits * 4 * kv_lora_rank * heads // max(1, min(num_splits, heads)),
        num_block_reductions=1,
    )


def _footprint(*, rows: int, context: int, passes: tuple[Pass, ...]) -> Work:
    # The lift to values needs blocks too where the context is short.
    num_blocks = max(rows * min(MAX_SPLITS, -(-context // TOKENS_PER_BLOCK)), LIFT_BLOCKS)
    return block_work(num_blocks, *passes, block=PUBLIC["mla_fused"], in_flight_kib=72)


def split_kv(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """Attention of ``heads`` heads over ``context`` cached tokens a row, and the merge of the parts.

    The public kernel: a block an SM, tiles of 128 tokens in series, and a launch of its own to merge where a row has
    more than one block. Its counts are not published; those here follow from its tables over batch and context
    (AIConfigurator 2026-08, B300 and GB300): what one tile costs, what each further one does, and the merge.
    """
    return _public(rows=rows, heads=heads, context=context, kv_row_bytes=kv_row_bytes, kv_lora_rank=kv_lora_rank)


PUBLIC_TILE, PUBLIC_BLOCKS = 128, 144
# Each tile: scores, maximum, exponents, values and rescaling, ten reductions' time in series, of which all but the
# last tile's lie beside the stream. Two products, each with two fills; then 512 outputs a head through tensor memory.
PUBLIC_TILE_EPILOGUES = 5
PUBLIC_SETUPS, PUBLIC_REDUCTIONS, PUBLIC_MERGE_REDUCTIONS = 4, 17, 3


def _public(
    *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int, sent_bytes_per_peer: int = 0
) -> Work:
    tiles = -(-context // PUBLIC_TILE)
    tiles_of_a_block = -(-tiles // max(1, min(tiles, PUBLIC_BLOCKS // rows)))
    splits = -(-tiles // tiles_of_a_block)
    padded_heads = max(64, -(-heads // HEAD_TILE) * HEAD_TILE)
    attend = Pass(
        num_address_loads=2,  # the length, then the page
        num_dependent_loads=1,
        reads=(Read(region="", num_bytes=rows * context * kv_row_bytes, kind=ReadKind.KV_STATE),),
        flops=2.0 * rows * padded_heads * context * (2 * kv_lora_rank + 64),
        unit=Unit.BF16,
        num_tensor_core_setups=PUBLIC_SETUPS,
        num_tile_epilogues=PUBLIC_TILE_EPILOGUES * (tiles_of_a_block - 1),
        num_block_reductions=PUBLIC_REDUCTIONS,
        barrier=Barrier.LAUNCH if splits > 1 else Barrier.NONE,
        num_barriers=1 if splits > 1 else 0,
    )
    merge = Pass(
        num_blocks=min(rows * heads, rows * splits),
        num_dependent_loads=2,
        activation_bytes_per_block=splits * 4 * kv_lora_rank,
        num_block_reductions=PUBLIC_MERGE_REDUCTIONS,
    )
    return block_work(
        rows * splits,
        *((attend, merge) if splits > 1 else (attend,)),
        block=PUBLIC["mla_split"],
        in_flight_kib=96,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def partial(
    weights: Sequence[Weight],
    *,
    rows: int,
    heads: int,
    context: int,
    kv_row_bytes: int,
    kv_lora_rank: int,
    context_ranks: int,
) -> Work:
    """Context parallel: ``split_kv`` over this rank's share, then outputs (bf16) and log-sum-exp to peers."""
    own_heads = heads // context_ranks
    return _public(
        rows=rows,
        heads=heads,
        context=context,
        kv_row_bytes=kv_row_bytes,
        kv_lora_rank=kv_lora_rank,
        sent_bytes_per_peer=rows * own_heads * (2 * kv_lora_rank + 4),
    )


def fused(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """``split_kv``, then W_UV and the sigmoid gate in the same launch; ``weights`` is W_UV, read early."""
    shape = {"rows": rows, "heads": heads, "context": context, "kv_lora_rank": kv_lora_rank}
    attention = _attention(**shape, kv_row_bytes=kv_row_bytes, early=True, unit=Unit.BF16)
    lift = Pass(
        num_dependent_loads=1,
        reads=tuple(Read(region=one.region, num_bytes=one.num_bytes, early=True) for one in weights),
        flops=sum((rows + 1) * float(one.num_bytes) for one in weights),
        num_block_reductions=1,
    )
    return _footprint(
        rows=rows,
        context=context,
        passes=(attention, _merge(**shape), lift),
    )
