"""The tables of the paths as this project's own kernels run them (``kernels/rank`` executes them).

They differ from the public kernel lists of ``path_rows`` where the project's kernels are cut differently: plain GEMMs
are cuBLAS calls, experts take token ids and bf16 rows (no permutation, no quantisation), the latent tail is two or
three launches, attention and the lift to values are two. The step is what one CUDA graph holds: the sampled token is
fed back on the GPU, so the host has no row. ``paths.Row`` explains the columns; rows come in pairs as in ``path_rows``.

Order that early launches rely on. A fused consume reads the prefix and the snapshots' part before the kernel ahead of
it on the stream has ended, although other kernels wrote them. They are complete by then, because the side stream forks
behind the kernel that wrote the prefix and joins ahead of that consume: at the output projection for the FFN's part,
at the tail for the next mixer's. A table that moves a fork or a join must keep that. The output projection is released
early, so that its consume is polling when data comes (13 layers on an H200, 2026-11-30: 643 us, released late 655).

What a poller waits for must be resident or done when the launches behind it fill the SMs. A side stream's push is
therefore joined before the poller is launched (``moe.send_shared``), although its data would be waited for anyway: with
the next layer's kernels resident, a shared expert that is late found no SM, and nothing went on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.model.layout import accepted_tp
from k3sim.model.paths.public import (
    ALL_REDUCE,
    ATTENTION,
    BATCH,
    EARLY,
    EXPERTS,
    FETCH,
    KDA_STATE,
    KDA_UPDATE,
    MIX,
    PARTIAL_SUMS,
    REDUCE,
    ROUTE,
    ROWS,
    SELECT,
    TAIL,
    _row,
)
from k3sim.model.step import HEAD, START, Row

if TYPE_CHECKING:
    from k3sim.model.architecture import Architecture
    from k3sim.model.layout import Layout

MAX_OWN_ROWS = 16
OWN_EXPERT_WIDTHS = (192, 384)  # of an expert's slice: TP16 and TP8 of K3
SNAPSHOT_LAYER = "snapshot layer"
NEXT_PART: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "sources": "ffn_sources"}
GATHERED: dict[str, int | str] = {"rows": "rows", "hidden": "hidden"}
SHARED_COLUMNS: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "ranks": "ranks"}
GATHERED_LATENT: dict[str, int | str] = {"rows": "rows", "latent": "latent"}
WAITING_ROWS = 8  # up to how many the experts wait on their SMs for the selection
WHOLE_ROW: dict[str, int | str] = {"rows": "rows", "width": "hidden"}
LAUNCHED: dict[str, object] = {"launch": "pdl", "trigger": "start"}
# Late triggers, in front of the kernels that read and write before their wait (docs/kernels.md).
LATE: dict[str, Any] = {"launch": "pdl", "trigger": "wait"}

OWN_START_ROWS = (
    _row("embed.lookup", "unfused.embedding", {"rows": "rows", "hidden": "hidden"}, off=(REDUCE,)),
    _row("embed.all_reduce", "unfused.all_reduce", ALL_REDUCE, off=(REDUCE,), sends="embed", receives=("embed",)),
    _row("embed.push", "unfused.embedding", {"rows": "rows", "hidden": "hidden"}, on=(REDUCE,), sends="residual"),
)

# Input of the mixer. The prefix of a snapshot layer is kept before the mixer's output replaces it (the fused form
# writes it to the snapshot's place at once), and that form prepares the snapshots' share of the two call sites that
# follow beside the mixer.
BEFORE_MIXER = (
    _row("attn_res.mixer", "attn_res.combine", MIX, off=(REDUCE,), **LAUNCHED),
    _row("attn_res.snapshot", "unfused.copy", WHOLE_ROW, off=(REDUCE,), needs=SNAPSHOT_LAYER),
    _row("attn_res.mixer", "proj_allreduce.consume_gathered", GATHERED, on=(REDUCE,), receives=("residual",), **EARLY),
    _row("attn_res.part_ffn", "attn_res.snapshot_part", NEXT_PART, on=(REDUCE,), stream="aux",
         after=("attn_res.mixer",)),
    _row("attn_res.part_mixer", "attn_res.snapshot_part", NEXT_PART, on=(REDUCE,), stream="aux"),
)


def _output_projection(mixer: str) -> tuple[Row, ...]:
    weight = f"{mixer}.o_proj"
    return (
        _row(weight, "cublas.gemm", ROWS, weights=(weight,), off=(REDUCE,)),
        _row(f"{mixer}.all_reduce", "unfused.all_reduce", ALL_REDUCE, off=(REDUCE,), sends="attention",
             receives=("attention",)),
        # Released early, so that its consumer polls when the data comes. The join shows that the mixer's residual has
        # ended, from which that consumer reads before its wait (docs/kernels.md).
        _row(weight, "proj_allreduce.produce_whole", ROWS, weights=(weight,), on=(REDUCE,), sends="attention",
             after=("attn_res.part_ffn",), **EARLY),
    )  # fmt: skip


OWN_KDA_ROWS = (
    *BEFORE_MIXER,
    _row("kda.in_proj", "cublas.gemm", ROWS, weights=("kda.in_proj",), off=(BATCH,)),
    _row("kda.in_proj", "skinny_gemv.tiled", ROWS, weights=("kda.in_proj",), on=(BATCH,), **EARLY),
    _row("kda.f_b", "cublas.gemm", ROWS, weights=("kda.f_b",), off=(BATCH,)),
    _row("kda.conv", "unfused.conv_update",
         {"rows": "rows", "conv_state_bytes": "kda_conv_state_bytes", "conv_weight_bytes": "kda_conv_weight_bytes"},
         off=(BATCH,)),
    _row("kda.recurrent", "unfused.recurrent_update",
         KDA_UPDATE, off=(BATCH,)),
    _row("kda.gated_norm", "unfused.gated_norm", {"rows": "rows", "heads": "kda_heads", "head_dim": "head_dim"},
         off=(BATCH,)),
    # Its output projection is asked for as soon by its own early launch as by a prefetch, so there is none.
    _row("kda.decode", "kda_decode.cluster", KDA_STATE, weights=("kda.f_b",), on=(BATCH,), **EARLY),
    *_output_projection("kda"),
)

OWN_MLA_ROWS = (
    *BEFORE_MIXER,
    _row("mla.gate", "cublas.gemm", ROWS, weights=("mla.gate",), off=(BATCH,), stream="aux", after=("attn_res.mixer",)),
    _row("mla.qkv_a", "cublas.gemm", ROWS, weights=("mla.qkv_a",), off=(BATCH,)),
    _row("mla.qkv_a_gate", "skinny_gemv.tiled", ROWS, weights=("mla.qkv_a", "mla.gate"), on=(BATCH,), **EARLY),
    _row("mla.norms", "unfused.norm", {"rows": "rows", "width": 2048}, off=(BATCH,)),
    _row("mla.q_b", "cublas.gemm", ROWS, weights=("mla.q_b",), off=(BATCH,)),
    _row("mla.absorb", "cublas.batched_gemm", ROWS, weights=("mla.w_uk",), off=(BATCH,)),
    _row("mla.query_cache", "unfused.query_and_cache", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}, off=(BATCH,)),
    _row("mla.prep", "mla_prep.fused", {"rows": "rows", "heads": "mla_own_heads", "kv_row_bytes": "kv_row_bytes"},
         weights=("mla.q_b", "mla.w_uk"), on=(BATCH,), **EARLY),
    _row("prefetch.o_proj", "l2_prefetch.bulk", {"budget_bytes": 16 << 20}, weights=("mla.o_proj",), on=(FETCH,),
         stream="prefetch", after=("mla.prep", "mla.query_cache")),
    _row("mla.attention", "mla_decode.clusters", ATTENTION, off=(BATCH,), **LAUNCHED),
    _row("mla.attention", "mla_decode.clusters_early", ATTENTION, on=(BATCH,), **EARLY),
    _row("mla.lift", "cublas.batched_gemm", ROWS, weights=("mla.w_uv",), off=(BATCH,)),
    _row("mla.gate_multiply", "unfused.elementwise", {"rows": "rows", "width": "mla_value_width"}, off=(BATCH,),
         after=("mla.gate",)),
    _row("mla.lift_gate", "mla_decode.lift_gate", {"rows": "rows", "kv_lora_rank": "kv_lora_rank"},
         weights=("mla.w_uv",), on=(BATCH,), **LAUNCHED),
    *_output_projection("mla"),
)  # fmt: skip

BEFORE_OWN_FFN = (
    _row("attn_res.ffn", "attn_res.combine", MIX, off=(REDUCE,), **LAUNCHED),
    _row("attn_res.ffn", "proj_allreduce.consume", PARTIAL_SUMS, on=(REDUCE,), receives=("attention",), **EARLY),
)

OWN_DENSE_ROWS = (
    *BEFORE_OWN_FFN,
    _row("dense.gate_up", "cublas.gemm", ROWS, weights=("dense.gate_up",), off=(BATCH,)),
    _row("dense.situ", "unfused.elementwise", {"rows": "rows", "width": "dense_width"}, off=(BATCH,)),
    _row("dense.gate_up", "skinny_gemv.tiled_situ", ROWS, weights=("dense.gate_up",), on=(BATCH,), **EARLY),
    _row("dense.down", "cublas.gemm", ROWS, weights=("dense.down",), off=(REDUCE,)),
    _row("dense.all_reduce", "unfused.all_reduce", ALL_REDUCE, off=(REDUCE,), sends="ffn", receives=("ffn",)),
    _row("dense.down", "proj_allreduce.produce_whole", ROWS, weights=("dense.down",), on=(REDUCE,), sends="residual",
         after=("attn_res.part_mixer",), **LATE),
)  # fmt: skip

OWN_MOE_ROWS = (
    *BEFORE_OWN_FFN,
    _row("moe.router", "cublas.gemm", ROWS, weights=("moe.router",), off=(ROUTE,)),
    _row("moe.latent_down", "cublas.gemm", ROWS, weights=("moe.latent_down",), off=(ROUTE,), stream="aux",
         after=("attn_res.ffn",)),
    _row("moe.front", "skinny_gemv.tiled_push", {"rows": "rows", "sent_bytes_per_row": "front_bytes"},
         weights=("moe.router_shard", "moe.latent_down_shard"), on=(ROUTE,), sends="route", **EARLY),
    _row("moe.shared_gate_up", "cublas.gemm", ROWS, weights=("moe.shared_gate_up",), off=(BATCH,), stream="aux",
         after=("attn_res.ffn",)),
    _row("moe.shared_situ", "unfused.elementwise", {"rows": "rows", "width": "shared_width"}, off=(BATCH,),
         stream="aux"),
    _row("moe.shared_down", "cublas.gemm", ROWS, weights=("moe.shared_down",), off=(BATCH,), stream="aux"),
    _row("moe.shared_gate_up", "skinny_gemv.tiled_situ", ROWS, weights=("moe.shared_gate_up",), on=(BATCH,),
         stream="aux", after=("attn_res.ffn",), trigger="start"),
    _row("moe.shared_down", "skinny_gemv.tiled", ROWS, weights=("moe.shared_down",), on=(BATCH,), stream="aux",
         **EARLY),
    # The fused tail: the shared expert's columns leave from their own stream, the latent from the experts' launch.
    _row("moe.send_shared", "latent_tail.send_shared", SHARED_COLUMNS, on=(BATCH, REDUCE), stream="aux", sends="shared",
         **EARLY),
    _row("moe.routing", "router_topk.select", SELECT, off=(ROUTE,), **LAUNCHED),
    # Released early in front of the experts' one launch: its blocks wait on their SMs for the selection, beside those
    # of the shared experts' down-projection (13 layers on an H200, 2026-11-30: 610 us at one row and 1,236 at eight,
    # released late some 640 and 1,266). At 16 rows the shared experts then find room late (2,063 us, late 2,013), as
    # they do at any number ahead of two launches (989 us at one row, late 934).
    # The next layer's weights are not prefetched: 12 to 48 MB behind the experts cost 6 to 100 us, in competition with
    # the chain's own reads.
    _row("moe.routing", "router_topk.gather_topk", GATHERED_LATENT, on=(BATCH, ROUTE), max_rows=WAITING_ROWS,
         receives=("route",), **EARLY),
    _row("moe.routing", "router_topk.gather_topk", GATHERED_LATENT, on=(BATCH, ROUTE), min_rows=WAITING_ROWS + 1,
         receives=("route",), launch="pdl"),
    _row("moe.routing", "router_topk.gather_topk", GATHERED_LATENT, on=(ROUTE,), off=(BATCH,), receives=("route",),
         launch="pdl"),
    _row("moe.experts_1", "expert_gemv.gate_up", EXPERTS, weights=("moe.expert_w13",),
         off=(BATCH,), after=("moe.latent_down",), **LAUNCHED),
    _row("moe.experts_2", "expert_gemv.down", EXPERTS, weights=("moe.expert_w2",),
         off=(BATCH,), **LAUNCHED),
    _row("moe.experts", "expert_gemv.persistent", {**EXPERTS, "width": "expert_width"},
         weights=("moe.expert_w13", "moe.expert_w2"), on=(BATCH,), off=(REDUCE,), after=("moe.latent_down",),
         **LAUNCHED),
    _row("moe.experts", "expert_gemv.persistent_push", {**EXPERTS, "width": "expert_width", "latent": "latent"},
         weights=("moe.expert_w13", "moe.expert_w2"), on=(BATCH, REDUCE), after=("moe.latent_down",), sends="latent",
         **LAUNCHED),
    _row("moe.tail_send", "latent_tail.send", {**TAIL, "expert_rows": 1}, off=(REDUCE,), after=("moe.shared_down",),
         sends="latent", **EARLY),
    _row("moe.tail_send", "latent_tail.send", {**TAIL, "expert_rows": 1}, on=(REDUCE,), off=(BATCH,),
         after=("moe.shared_down",), sends="latent", **EARLY),
    _row("moe.latent_up", "latent_tail.up_cluster", TAIL, weights=("moe.latent_up_shard",), on=(REDUCE,), off=(BATCH,),
         receives=("latent",), sends="residual", **LATE),
    _row("moe.latent_up", "latent_tail.up_cluster", TAIL, weights=("moe.latent_up_shard",), on=(BATCH, REDUCE),
         receives=("latent", "shared"), sends="residual", after=("moe.send_shared",), **LATE),
    _row("moe.latent_up", "latent_tail.up_cluster", TAIL, weights=("moe.latent_up_shard",), off=(REDUCE,),
         receives=("latent",), sends="residual", **EARLY),
    _row("moe.tail_collect", "latent_tail.collect", WHOLE_ROW, off=(REDUCE,), receives=("residual",), **LAUNCHED),
)

OWN_HEAD_ROWS = (
    _row("head.attn_res", "attn_res.combine", MIX, off=(REDUCE,), **LAUNCHED),
    _row("head.attn_res", "proj_allreduce.consume_gathered", GATHERED, on=(REDUCE,), receives=("residual",), **EARLY),
    _row("head.lm_head", "cublas.gemm", ROWS, weights=("lm_head",), off=(ROUTE,)),
    _row("head.logits", "unfused.gather", {"rows": "rows", "width": "vocab", "ranks": "ranks"}, off=(ROUTE,),
         sends="logits", receives=("logits",)),
    _row("head.sample", "unfused.argmax", {"rows": "rows", "width": "vocab"}, off=(ROUTE,)),
    _row("head.lm_head", "skinny_gemv.tiled", ROWS, weights=("lm_head",), on=(ROUTE,), **EARLY),
    _row("head.top_k", "lm_head.select", {"rows": "rows"}, on=(ROUTE,), **EARLY),
    _row("head.sample", "unfused.sample", {"rows": "rows", "ranks": "ranks"}, on=(ROUTE,), sends="candidates",
         receives=("candidates",)),
    _row("head.advance", "unfused.advance", {"rows": "rows"}),
)

OWN_TABLES: Mapping[str, tuple[Row, ...]] = {
    START: OWN_START_ROWS,
    "kda": OWN_KDA_ROWS,
    "mla": OWN_MLA_ROWS,
    "dense": OWN_DENSE_ROWS,
    "moe": OWN_MOE_ROWS,
    HEAD: OWN_HEAD_ROWS,
}


def has_own_experts(architecture: Architecture, tp: int) -> bool:
    """Whether the project's expert kernel is built for a slice of ``1 / tp``."""
    return architecture.moe.expert_intermediate // tp in OWN_EXPERT_WIDTHS


def check_own(architecture: Architecture, layout: Layout, rows: int) -> None:
    """UserError where the project has no kernels for a rank of this layout with this many rows."""
    if layout.ep > 1 or layout.dcp > 1:
        raise UserError(
            f"the project's own kernels run plain tensor parallelism; ep={layout.ep} and dcp={layout.dcp} need "
            "--kernels public"
        )
    if rows > MAX_OWN_ROWS:
        raise UserError(f"the project's own kernels take 1 to {MAX_OWN_ROWS} rows a rank; got {rows}")
    if not has_own_experts(architecture, layout.tp):
        width = architecture.moe.expert_intermediate // layout.tp
        fitting = " or ".join(str(tp) for tp in accepted_tp(architecture) if has_own_experts(architecture, tp))
        raise UserError(
            f"tp={layout.tp}: an expert's slice is {width} wide, and the project's expert kernel is built for "
            f"{' and '.join(map(str, OWN_EXPERT_WIDTHS))}; accepted: tp {fitting}"
        )
