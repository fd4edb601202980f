"""Cost of NoPE latent attention over a paged cache, split over the context.

``split_kv`` ends with the attention output in the latent; the last block of a row to arrive merges the parts.
``fused`` also lifts the latent to values and applies the output gate.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Unit, Work
from k3sim.model.program import Weight

TOKENS_PER_BLOCK = 64  # one tile of keys: at 8k context 128 blocks run
MAX_SPLITS = 128  # beyond it a block walks several tiles
LIFT_BLOCKS = 48
HEAD_TILE = 16  # tensor-core rows that heads are padded to


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
        num_tensor_core_setups=1,
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
        input_bytes_per_block=num_splits * 4 * kv_lora_rank * heads // max(1, min(num_splits, heads)),
        num_block_reductions=1,
    )


def _footprint(*, rows: int, context: int, passes: tuple[Pass, ...], sent_bytes_per_peer: int = 0) -> Work:
    return Work(
        # The lift to values needs blocks too where the context is short.
        num_blocks=max(rows * min(MAX_SPLITS, -(-context // TOKENS_PER_BLOCK)), LIFT_BLOCKS),
        threads_per_block=256,
        smem_bytes_per_block=100 * 1024,
        bytes_in_flight_per_block=72 * 1024,
        max_blocks_per_sm=2,
        passes=passes,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def split_kv(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """Attention of ``heads`` heads over ``context`` cached tokens a row, merged in the same launch."""
    shape = {"rows": rows, "heads": heads, "context": context, "kv_lora_rank": kv_lora_rank}
    attention = _attention(**shape, kv_row_bytes=kv_row_bytes, early=False, unit=Unit.BF16)
    return _footprint(rows=rows, context=context, passes=(attention, _merge(**shape)))


def split_kv_early(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """``split_kv`` whose settled cache rows are read before the dependency wait."""
    shape = {"rows": rows, "heads": heads, "context": context, "kv_lora_rank": kv_lora_rank}
    attention = _attention(**shape, kv_row_bytes=kv_row_bytes, early=True, unit=Unit.BF16)
    return _footprint(rows=rows, context=context, passes=(attention, _merge(**shape)))


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
    """Context parallel: as ``split_kv`` over this rank's share, then outputs (bf16) and log-sum-exp to peers."""
    shape = {"rows": rows, "heads": heads, "context": context, "kv_lora_rank": kv_lora_rank}
    attention = _attention(**shape, kv_row_bytes=kv_row_bytes, early=True, unit=Unit.BF16)
    own_heads = heads // context_ranks
    return _footprint(
        rows=rows,
        context=context,
        passes=(attention, _merge(**shape)),
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


def lift_gate(weights: Sequence[Weight], *, rows: int, kv_lora_rank: int) -> Work:
    """W_UV and the sigmoid gate behind ``split_kv``, a launch of its own: eight values of a head a block."""
    (one,) = weights
    num_values = one.num_outputs
    return Work(
        num_blocks=num_values // 8,
        threads_per_block=128,
        smem_bytes_per_block=1024,
        bytes_in_flight_per_block=8 * kv_lora_rank * 2,
        max_blocks_per_sm=8,
        passes=(
            Pass(
                num_dependent_loads=1,
                input_bytes_per_block=rows * (kv_lora_rank + 8) * 2,
                reads=(Read(region=one.region, num_bytes=one.num_bytes, early=True),),
                written_bytes=0,
                flops=(rows + 1) * float(one.num_bytes),
                unit=Unit.BF16,
                num_tensor_core_setups=1,
                num_block_reductions=1,
            ),
        ),
    )


def lse_merge(weights: Sequence[Weight], *, rows: int, heads: int, ranks: int, kv_lora_rank: int) -> Work:
    """Merge of ``ranks`` partial outputs of this rank's heads by log-sum-exp."""
    return Work(
        num_blocks=rows * heads,
        threads_per_block=128,
        smem_bytes_per_block=4096,
        bytes_in_flight_per_block=8192,
        max_blocks_per_sm=8,
        passes=(
            Pass(
                num_dependent_loads=1,
                input_bytes_per_block=ranks * kv_lora_rank * 2,
                num_block_reductions=1,
                barrier=Barrier.NONE,
            ),
        ),
    )
