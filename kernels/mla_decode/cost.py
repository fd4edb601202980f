"""Cost of NoPE latent attention over a paged cache: clusters that take pages in turn, then the lift to values.

``clusters`` ends with the attention output in the latent; ``lift_gate`` lifts it to values and applies the output gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import ActivationForm, Barrier, MachineCode, Pass, Read, ReadKind, Unit, Work, block_work
from k3sim.model.program import Weight

# As it was measured: ptxas had moved the wait in front of the loads of W_UV (machine code of 2026-11-29).
LIFT_WARPS = 4  # that share K of the value projection, in steps of 32
LIFT_BEFORE_WAIT = True
HEAD_TILE = 16  # tensor-core rows that heads are padded to


PAGE_TOKENS, CLUSTER = 64, 8
# Of eight blocks with an SM each: as many as an H200 holds at once. A sixteenth waits for a second round (128k tokens:
# 64 us instead of 36, 2026-11-29).
MAX_CLUSTERS = 15
# A page's chain through the score warps: 36 products in series on each of two accumulators (33 cycles each), the row
# maxima over the warps, exponents, the hand-over to the value warps and its way back: six reductions' time.
CHAIN_EPILOGUES = 3


def chosen_clusters(rows: int, heads: int, pages: int | None = None) -> int:
    """Clusters a row and head tile: what fills the GPU once, at least 1; about two pages a block if a row has at most
    ``pages``, because merging more clusters costs more than the pages save (8k tokens: 9.06 us with 8, 9.2 with 15;
    64 tokens: 5.8 with 1, 7.1 with 15; H200, 2026-11-29)."""
    filling = max(1, MAX_CLUSTERS // (rows * -(-heads // HEAD_TILE)))
    if pages is None:
        return filling
    return max(1, min(filling, (pages + CLUSTER) // (2 * CLUSTER)))


def _clusters(*, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int, early: bool) -> Work:
    """The kernel of this folder: clusters of eight blocks, one block an SM, that take pages in turn (launch.py)."""
    pages = -(-context // PAGE_TOKENS)
    tiles = -(-heads // HEAD_TILE)
    clusters = chosen_clusters(rows, heads, pages)
    num_blocks = rows * tiles * clusters * CLUSTER
    pages_of_a_block = -(-pages // (clusters * CLUSTER))
    waves = -(-num_blocks // (MAX_CLUSTERS * CLUSTER))
    attend = Pass(
        num_address_loads=2,  # the length, then the page
        num_dependent_loads=1,
        activation_bytes_per_block=HEAD_TILE * (kv_lora_rank + 64) * 2,
        reads=(Read(region="", num_bytes=rows * context * kv_row_bytes, kind=ReadKind.KV_STATE, early=early),),
        flops=2.0 * rows * tiles * HEAD_TILE * context * (2 * kv_lora_rank + 64),
        unit=Unit.BF16,
        num_tile_epilogues=CHAIN_EPILOGUES * waves * pages_of_a_block,
        num_block_reductions=1,
        barrier=Barrier.CLUSTER,
        num_barriers=1,
    )
    # Each block of a cluster adds up an eighth of the dimensions of all eight, and leaves it in the workspace; a
    # counter, and the last block of a slice merges the clusters.
    merges = clusters > 1
    add_up = Pass(
        num_block_reductions=1, barrier=Barrier.LAST if merges else Barrier.NONE, num_barriers=1 if merges else 0
    )
    merge = Pass(
        activation_bytes_per_block=clusters * HEAD_TILE * (kv_lora_rank // CLUSTER + 2) * 4,
        num_block_reductions=1,
    )
    built = footprint("mla_decode", "heads6_fp8" if kv_row_bytes <= 576 else "heads6_bf16")
    return Work(
        num_blocks=num_blocks,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=(4 if kv_row_bytes <= 576 else 2) * PAGE_TOKENS * kv_row_bytes,
        max_blocks_per_sm=1,
        registers_per_thread=built.allocated_registers,
        deep_prefetch=True,
        passes=(attend, add_up, merge) if merges else (attend, add_up),
    )


def clusters(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """Attention of ``heads`` heads over ``context`` cached tokens a row, and the merge; nothing before the wait."""
    return _clusters(
        rows=rows, heads=heads, context=context, kv_row_bytes=kv_row_bytes, kv_lora_rank=kv_lora_rank, early=False
    )


def clusters_early(
    weights: Sequence[Weight], *, rows: int, heads: int, context: int, kv_row_bytes: int, kv_lora_rank: int
) -> Work:
    """``clusters`` with a settled cache: rows are asked for before the wait, as far as the ring holds them."""
    return _clusters(
        rows=rows, heads=heads, context=context, kv_row_bytes=kv_row_bytes, kv_lora_rank=kv_lora_rank, early=True
    )


def lift_gate(weights: Sequence[Weight], *, rows: int, kv_lora_rank: int) -> Work:
    """W_UV and the sigmoid gate behind the attention, a launch of its own: eight values of a head a block."""
    (one,) = weights
    num_values = one.num_outputs
    built = footprint("mla_decode", f"lift_heads6_rows{8 if rows <= 8 else 16}")
    return Work(
        num_blocks=num_values // 8,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=8 * kv_lora_rank * 2,
        max_blocks_per_sm=8,
        registers_per_thread=built.allocated_registers,
        register_loads=True,
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=rows * (kv_lora_rank + 8) * 2,
                activation_form=ActivationForm.MMA_FRAGMENTS,
                reads=(Read(region=one.region, num_bytes=one.num_bytes, early=LIFT_BEFORE_WAIT),),
                written_bytes=0,
                flops=(rows + 1) * float(one.num_bytes),
                unit=Unit.BF16,
                num_dependent_mmas=kv_lora_rank // (32 * LIFT_WARPS),
                num_block_reductions=1,
            ),
        ),
    )


def lse_merge(weights: Sequence[Weight], *, rows: int, heads: int, ranks: int, kv_lora_rank: int) -> Work:
    """Merge of ``ranks`` partial outputs of this rank's heads by log-sum-exp."""
    return block_work(
        rows * heads,
        Pass(
            num_dependent_loads=1,
            activation_bytes_per_block=ranks * kv_lora_rank * 2,
            num_block_reductions=1,
            barrier=Barrier.NONE,
        ),
        block=footprint("mla_decode", f"lse_merge_ranks{8 if ranks <= 8 else 16}").block(),
        in_flight_kib=8,
    )


CODE: Mapping[str, MachineCode] = {
    "clusters": built_code("mla_decode", "heads6_fp8"),
    "clusters_early": built_code("mla_decode", "heads6_fp8"),
    "lift_gate": built_code("mla_decode", "lift_heads6_rows8"),
    "lse_merge": built_code("mla_decode", "lse_merge_ranks16"),
}
