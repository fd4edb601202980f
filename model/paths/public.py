"""The tables of the paths. ``paths.Row`` explains the columns.

Read a table from the top: it is the order of the main stream. Rows come in pairs where a switch replaces a
kernel: ``off`` names the switch that removes the row, ``on`` the switches that bring it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.model.paths.draft import DRAFT_TABLES
from k3sim.model.paths.exchanges import DISPATCHED, KEPT, STAGE_END_ROWS, combine, dispatch, gather, gather_group
from k3sim.model.paths.formats import products_in_formats
from k3sim.model.paths.indexer import INDEXER_ROWS
from k3sim.model.paths.verification import verify_kda, verify_mla
from k3sim.model.step import HEAD, STAGE_END, START, Row
from k3sim.model.switches import SWITCHES

BATCH, REDUCE, ROUTE, FETCH = SWITCHES
LATENT, LOGITS = "sharded-router.latent", "sharded-router.logits"  # parts that a row may name, as it may a switch

ROWS: dict[str, int | str] = {"rows": "rows"}
MIX: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "sources": "sources"}
ALL_REDUCE: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "ranks": "ranks"}
LIBRARY_ALL_REDUCE: dict[str, int | str] = {**ALL_REDUCE, "form": "all_reduce_form"}
PARTIAL_SUMS: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "slots": "ranks"}
SHARDS: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "slots": 1}
KDA_STATE: dict[str, int | str] = {
    "rows": "rows",
    "heads": "kda_heads",
    "state_bytes": "kda_state_bytes",
    "conv_state_bytes": "kda_conv_state_bytes",
    "conv_weight_bytes": "kda_conv_weight_bytes",
    "value_bytes": "kda_value_bytes",
}
KDA_UPDATE: dict[str, int | str] = {
    "rows": "rows", "heads": "kda_heads", "state_bytes": "kda_state_bytes", "value_bytes": "kda_value_bytes",
}  # fmt: skip
ATTENTION: dict[str, int | str] = {
    "rows": "rows",
    "heads": "mla_heads",
    "context": "context",
    "kv_row_bytes": "kv_row_bytes",
    "kv_lora_rank": "kv_lora_rank",
}
FRONT: dict[str, int | str] = {"rows": "front_rows"}
EXPERTS: dict[str, int | str] = {"rows": "expert_rows", "top_k": "top_k", "distinct_milli": "distinct_milli"}
SELECT_EXPERTS: dict[str, int | str] = {
    **EXPERTS, "width": "expert_width", "experts": "experts", "latent": "latent",
}  # fmt: skip
SELECT: dict[str, int | str] = {"rows": "rows", "experts": "experts", "latent": "latent"}
TAIL: dict[str, int | str] = {"rows": "rows", "hidden": "hidden", "latent": "latent", "ranks": "ranks"}


def _row(stage: str, operator: str, shape: Mapping[str, int | str], **columns: Any) -> Row:
    return Row(stage=stage, operator=operator, shape=shape, **columns)


# A chain kernel launched early: its successor may start as soon as it runs.
EARLY: dict[str, Any] = {"launch": "pdl", "trigger": "start"}
# The public kernels with early PDL trigger: after the main loop.
PUBLIC: dict[str, Any] = {"launch": "pdl", "trigger": "stream"}
# Beside the main stream, from the input of the feed-forward part on.
ASIDE: dict[str, Any] = {"stream": "aux", "after": ("attn_res.ffn",)}

START_ROWS = (
    # Input preparation runs op by op before the graph. 19 launches were read inside a step: k3opt's "about 90 us" on
    # GB200 at the cost of one launch from a Grace host. vLLM's V2 runner makes 10 to 13 (``prepare_inputs``,
    # ``prepare_attn`` and the metadata of two groups), each of which costs torch or Triton more than a bare launch.
    _row("host.inputs", "host", {"num_launches": 19, "num_graph_launches": 1}, launch="host", stream="host"),
    _row("embed.lookup", "unfused.embedding", {"rows": "rows", "hidden": "hidden"}, off=(REDUCE,),
         after=("host.inputs",)),
    _row("embed.all_reduce", "unfused.library_all_reduce", LIBRARY_ALL_REDUCE, launch="pdl", off=(REDUCE,),
         needs="several ranks", sends="embed", receives=("embed",), transport="library"),
    _row("embed.push", "unfused.embedding", {"rows": "rows", "hidden": "hidden"}, on=(REDUCE,), sends="residual",
         trigger="start", after=("host.inputs",)),
)

# Up to how many rows the public low-batch products are GEMVs. Beyond, the build leaves them to cuBLAS, split over K
# with a launch that adds up (k3opt README: "cuBLAS split-K + reduce" at 3 to 16 rows, the ladder's PLANS).
GEMV_ROWS = 2


def _low_batch(
    stage: str, *weights: str, early: Mapping[str, Any], late: Mapping[str, Any] | None = None
) -> tuple[Row, ...]:
    """A product of the low-batch kernels: a ring that is filled before the wait, or cuBLAS's from three rows on."""
    return (
        _row(stage, "skinny_gemv.ring", ROWS, weights=weights, on=(BATCH,), max_rows=GEMV_ROWS, **early),
        _row(stage, "cublas.public_gemm", ROWS, weights=weights, on=(BATCH,), min_rows=GEMV_ROWS + 1, **(late or {})),
    )


KDA_ROWS = (
    _row("attn_res.mixer", "attn_res.single_block", MIX, off=(REDUCE,)),
    _row("attn_res.mixer", "attn_res.consume", SHARDS, on=(REDUCE,), receives=("residual",), **EARLY),
    _row("kda.in_proj", "skinny_gemv.column_pair", ROWS, weights=("kda.in_proj",), off=(BATCH,), **PUBLIC),
    *_low_batch("kda.in_proj", "kda.in_proj", early=EARLY),
    _row("attn_res.snapshots", "attn_res.snapshot_sums", MIX, on=(REDUCE,), stream="aux", after=("attn_res.mixer",)),
    _row("kda.f_b", "skinny_gemv.column_pair", ROWS, weights=("kda.f_b",), off=(BATCH,), launch="pdl"),
    _row("kda.decode", "kda_decode.per_head", KDA_STATE, off=(BATCH,), needs="many kda heads, no drafts", **PUBLIC),
    _row("kda.conv", "unfused.conv_update",
         {"rows": "rows", "conv_state_bytes": "kda_conv_state_bytes", "conv_weight_bytes": "kda_conv_weight_bytes"},
         off=(BATCH,), needs="few kda heads, convolution, no drafts"),
    _row("kda.recurrent", "unfused.recurrent_update",
         KDA_UPDATE, off=(BATCH,), needs="few kda heads, no drafts"),
    _row("kda.gated_norm", "unfused.gated_norm", {"rows": "rows", "heads": "kda_heads", "head_dim": "head_dim"},
         off=(BATCH,), needs="few kda heads, no drafts"),
    _row("kda.decode", "kda_decode.public_cluster", KDA_STATE, weights=("kda.f_b",), on=(BATCH,), needs="no drafts",
         **EARLY),
    *verify_kda(BATCH),
    _row("prefetch.o_proj", "l2_prefetch.bulk", {"budget_bytes": 16 << 20}, weights=("kda.o_proj",), on=(FETCH,),
         stream="prefetch", after=("kda.in_proj",)),
    _row("kda.o_proj", "skinny_gemv.column_pair", ROWS, weights=("kda.o_proj",), off=(REDUCE,), **PUBLIC),
    _row("kda.all_reduce", "unfused.library_all_reduce", LIBRARY_ALL_REDUCE, off=(REDUCE,), launch="pdl",
         needs="several ranks", sends="attention", receives=("attention",), transport="library"),
    _row("kda.o_proj", "proj_allreduce.produce", ROWS, weights=("kda.o_proj",), on=(REDUCE,),
         sends="attention", **EARLY),
)

GATED: dict[str, Any] = {"needs": "mla gate"}
UNGATED: dict[str, Any] = {"needs": "no mla gate"}

MLA_ROWS = (
    _row("attn_res.mixer", "attn_res.single_block", MIX, off=(REDUCE,)),
    _row("attn_res.mixer", "attn_res.consume", SHARDS, on=(REDUCE,), receives=("residual",), **EARLY),
    _row("mla.gate", "skinny_gemv.column_pair", ROWS, weights=("mla.gate",), off=(BATCH,), stream="aux",
         after=("attn_res.mixer",), needs="mla gate"),
    _row("mla.qkv_a", "skinny_gemv.column_pair", ROWS, weights=("mla.qkv_a",), off=(BATCH,), **PUBLIC),
    *_low_batch("mla.qkv_a_gate", "mla.qkv_a", "mla.gate", early={**EARLY, **GATED}, late=GATED),
    *_low_batch("mla.qkv_a", "mla.qkv_a", early={**EARLY, **UNGATED}, late=UNGATED),
    _row("attn_res.snapshots", "attn_res.snapshot_sums", MIX, on=(REDUCE,), stream="aux", after=("attn_res.mixer",)),
    _row("mla.norms", "unfused.norm", {"rows": "rows", "width": 2048}, off=(BATCH,)),
    _row("mla.q_b", "skinny_gemv.column_pair", ROWS, weights=("mla.q_b",), off=(BATCH,), **PUBLIC),
    *INDEXER_ROWS,
    _row("mla.absorb", "unfused.batched_gemm", ROWS, weights=("mla.w_uk",), off=(BATCH,)),
    _row("mla.query_cache", "unfused.query_and_cache", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}, off=(BATCH,)),
    _row("mla.prep", "mla_prep.public_fused",
         {"rows": "rows", "heads": "mla_own_heads", "kv_row_bytes": "kv_row_bytes"},
         weights=("mla.q_b", "mla.w_uk"), on=(BATCH,), **EARLY),
    _row("prefetch.o_proj", "l2_prefetch.bulk", {"budget_bytes": 16 << 20}, weights=("mla.o_proj",), on=(FETCH,),
         stream="prefetch", after=("mla.prep", "mla.query_cache")),
    _row("mla.query_gather", "unfused.query_gather", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}, needs="dcp", launch="pdl", sends="query", receives=("query",), group="dcp"),
    _row("mla.attention", "mla_decode.split_kv", ATTENTION, off=(BATCH,), needs="no dcp, no drafts", launch="pdl"),
    _row("mla.attention", "mla_decode.partial", {**ATTENTION, "context_ranks": "dcp"}, needs="dcp", launch="pdl",
         sends="context", group="dcp"),
    _row("mla.lse_merge", "mla_decode.lse_merge", {"rows": "rows", "heads": "mla_own_heads", "ranks": "dcp",
         "kv_lora_rank": "kv_lora_rank"}, needs="dcp", launch="pdl", receives=("context",)),
    _row("mla.attention", "mla_decode.fused", ATTENTION, weights=("mla.w_uv",), on=(BATCH,), needs="no dcp, no drafts",
         **EARLY),
    *verify_mla(BATCH),
    _row("mla.lift", "unfused.batched_gemm", ROWS, weights=("mla.w_uv",), off=(BATCH,), needs="no dcp"),
    _row("mla.lift", "unfused.batched_gemm", ROWS, weights=("mla.w_uv",), needs="dcp"),
    _row("mla.gate_multiply", "unfused.elementwise", {"rows": "rows", "width": "mla_value_width"}, off=(BATCH,),
         needs="no dcp, mla gate", after=("mla.gate",)),
    _row("mla.gate_multiply", "unfused.elementwise", {"rows": "rows", "width": "mla_value_width"},
         needs="dcp, mla gate", after=("mla.gate",)),
    _row("mla.o_proj", "skinny_gemv.column_pair", ROWS, weights=("mla.o_proj",), off=(REDUCE,), **PUBLIC),
    _row("mla.all_reduce", "unfused.library_all_reduce", LIBRARY_ALL_REDUCE, off=(REDUCE,), launch="pdl",
         needs="several ranks", sends="attention", receives=("attention",), transport="library"),
    _row("mla.o_proj", "proj_allreduce.produce", ROWS, weights=("mla.o_proj",), on=(REDUCE,),
         sends="attention", **EARLY),
)

BEFORE_FFN = (
    _row("attn_res.ffn", "attn_res.single_block", MIX, off=(REDUCE,)),
    _row("attn_res.ffn", "attn_res.consume", PARTIAL_SUMS, on=(REDUCE,), receives=("attention",), **EARLY),
)

DENSE_ROWS = (
    *BEFORE_FFN,
    _row("dense.gate_up", "skinny_gemv.column_pair", ROWS, weights=("dense.gate_up",), off=(BATCH,), **PUBLIC),
    *_low_batch("dense.gate_up", "dense.gate_up", early=EARLY),
    _row("dense.situ", "unfused.elementwise", {"rows": "rows", "width": "dense_width"}, off=(BATCH,)),
    _row("dense.down", "skinny_gemv.column_pair", ROWS, weights=("dense.down",), off=(REDUCE,), **PUBLIC),
    _row("dense.all_reduce", "unfused.library_all_reduce", LIBRARY_ALL_REDUCE, off=(REDUCE,), launch="pdl",
         needs="several ranks", sends="ffn", receives=("ffn",), transport="library"),
    _row("dense.down", "proj_allreduce.produce", ROWS, weights=("dense.down",), on=(REDUCE,),
         sends="residual", **EARLY),
)

# The public one-launch expert kernels are built for up to eight rows (k3opt: MOEBLOCK and moe8). One row is selected
# inside the launch; from two on, a launch in front of it selects and the tensor-core kernel follows (k3opt README: "the
# block kernel then runs in routing-only mode").
BLOCK_ROWS, SELECT_INSIDE_ROWS = 8, 1
# Up to how many rows the front is divided; beyond that every rank computes all of it (k3opt README: DOWNSHARD). Public
# builds divide the latent projection alone and read the router whole on every rank (k3opt: 12.8 MB of 111 a layer).
FRONT_ROWS = 8
SELECT_BEFORE: dict[str, Any] = {"min_rows": SELECT_INSIDE_ROWS + 1, "max_rows": BLOCK_ROWS}


NVFP4: dict[str, Any] = {"formats": ("nvfp4",), "needs": "block-scaled"}


def _select_from_whole_logits(**columns: Any) -> tuple[Row, ...]:
    """Selection and quantisation where every rank has all logits and the whole latent."""
    return (
        _row("moe.routing", "unfused.routing", {"rows": "moe_rows", "experts": "experts"}, launch="pdl", **columns),
        _row("moe.quantise", "unfused.quantise", {"rows": "moe_rows", "width": "latent"}, after=("moe.latent_down",),
             **columns),
    )


def _whole_front(*, part: str, on: tuple[str, ...] = (), off: tuple[str, ...] = (), **columns: Any) -> tuple[Row, ...]:
    """Router or latent projection without a switch that divides it: whole on every rank, or a column shard.

    The latent projection runs beside the router, on the other stream.
    """
    how: dict[str, Any] = PUBLIC if part == "router" else ASIDE
    return tuple(
        _row(f"moe.{part}", "skinny_gemv.column_pair", FRONT, weights=(f"moe.{part}{shard}",), on=on, off=off,
             needs=needs, **how, **columns)
        for shard, needs in (("", "front whole"), ("_shard", "front divided"))
    )


def _front_gather(**columns: Any) -> Row:
    """Scores and latents of all ranks' columns, where the front is divided without a switch that pushes them."""
    return _row("moe.front_gather", "expert_exchange.all_gather",
                {"rows": "front_rows", "row_bytes": "route_bytes", "ranks": "ranks"}, launch="pdl",
                after=("moe.latent_down",), sends="front", receives=("front",), transport="each",
                needs="front divided", **columns)


def _divided_front(sent: str, weights: tuple[str, ...], **columns: Any) -> Row:
    """A GEMV that pushes this rank's columns to all."""
    return _row("moe.front", "skinny_gemv.ring_push", {"rows": "rows", "sent_bytes_per_row": sent}, weights=weights,
                sends="route", max_rows=FRONT_ROWS, **columns)


def _grouped_experts(*, on: tuple[str, ...] = (), off: tuple[str, ...] = (), min_rows: int = 1) -> tuple[Row, ...]:
    """Routing, permutation and the two grouped GEMMs, with the router computed in full or divided."""
    bounds: dict[str, Any] = {"min_rows": min_rows}
    exchanged: dict[str, Any] = {"on": on, "off": (*off, REDUCE), **bounds}
    return (
        gather(after=("moe.latent_down",), **exchanged),
        *_select_from_whole_logits(on=on, off=(*off, ROUTE), **bounds),
        *_select_from_whole_logits(on=(*on, ROUTE), off=off, min_rows=max(min_rows, FRONT_ROWS + 1)),
        *(
            (_row("moe.routing", "router_topk.gather_select", SELECT, receives=("route",), on=(*on, ROUTE), off=off,
                  after=("moe.latent_down",), max_rows=FRONT_ROWS, **PUBLIC, **bounds),
             _row("moe.quantise", "unfused.quantise", {"rows": "rows", "width": "latent"}, launch="pdl",
                  on=(*on, ROUTE), off=off, max_rows=FRONT_ROWS, **bounds))
            if min_rows <= FRONT_ROWS
            else ()
        ),
        # vLLM's router packs ids and weights in a launch of its own for FlashInfer's routing.
        _row("moe.pack", "unfused.pack", {"rows": "moe_rows"}, launch="pdl", on=on, off=off, needs=KEPT, **bounds),
        _row("moe.permutation", "unfused.permutation", {"rows": "moe_rows", "experts": "experts"}, launch="pdl",
             on=on, off=off, needs=KEPT, **bounds),
        dispatch(**exchanged),
        _row("moe.experts_1", "expert_gemv.gemm1", {**EXPERTS, "width": "expert_width"},
             weights=("moe.expert_w13",), launch="pdl", on=on, off=off, **bounds),
        _row("moe.experts_1", "grouped_experts.trtllm_fp4", EXPERTS, weights=("moe.expert_w13",), launch="pdl", on=on,
             off=off, **NVFP4, **bounds),
        _row("moe.experts_2", "expert_gemv.gemm2", {**EXPERTS, "latent": "latent"}, weights=("moe.expert_w2",),
             launch="pdl", on=on, off=off, **bounds),
        _row("moe.experts_2", "grouped_experts.trtllm_fp4", EXPERTS, weights=("moe.expert_w2",), launch="pdl", on=on,
             off=off, **NVFP4, **bounds),
        *combine(summed_rows="expert_pairs", **exchanged),
    )


SHARED: dict[str, Any] = {"needs": "shared experts"}
# vLLM's K3 model, defaults of 2026-10: up to how many rows the tail is one fused exchange, and up to how many the sum
# of the latent is followed by the whole up-projection, with the shared experts' sum beside it. Beyond that each rank
# projects its slice of the latent, and one more all-reduce adds up both.
FUSED_TAIL_ROWS, WHOLE_UP_ROWS = 128, 256
FEW_TAIL: dict[str, Any] = {"off": (REDUCE,), "needs": KEPT, "max_rows": FUSED_TAIL_ROWS}
MANY_TAIL: dict[str, Any] = {"off": (REDUCE,), "needs": KEPT, "min_rows": FUSED_TAIL_ROWS + 1}
LATENT_ALL_REDUCE: dict[str, int | str] = {"rows": "rows", "hidden": "latent", "ranks": "ranks", "form": "latent_form"}


def _library_sum(stage: str, exchange: str, shape: Mapping[str, int | str], **columns: Any) -> Row:
    return _row(stage, "unfused.library_all_reduce", shape, launch="pdl", sends=exchange, receives=(exchange,),
                transport="library", **columns)


def _tail_of_many_rows() -> tuple[Row, ...]:
    whole: dict[str, Any] = {**MANY_TAIL, "max_rows": WHOLE_UP_ROWS}
    sliced: dict[str, Any] = {**MANY_TAIL, "min_rows": WHOLE_UP_ROWS + 1}
    add = ("moe.add", "unfused.elementwise", {"rows": "rows", "width": "hidden"})
    return (
        _row("moe.finalize", "grouped_experts.finalize", {"rows": "rows", "top_k": "tail_rows", "hidden": "latent"},
             **MANY_TAIL),
        _library_sum("moe.latent_all_reduce", "latent", LATENT_ALL_REDUCE, **MANY_TAIL),
        _row("moe.latent_norm", "unfused.norm", {"rows": "rows", "width": "latent"}, **MANY_TAIL),
        _library_sum("moe.shared_all_reduce", "shared sum", LIBRARY_ALL_REDUCE, stream="aux", **whole),
        _row("moe.latent_up", "skinny_gemv.column_pair", ROWS, weights=("moe.latent_up",), **whole),
        _row(*add, after=("moe.shared_all_reduce",), **whole),
        # As many weights as a column shard: all outputs, of a slice of the depth.
        _row("moe.latent_up", "skinny_gemv.column_pair", ROWS, weights=("moe.latent_up_shard",), **sliced),
        _row(*add, after=("moe.shared_down",), **sliced),
        _library_sum("moe.all_reduce", "ffn", LIBRARY_ALL_REDUCE, **sliced),
    )

MOE_ROWS = (
    *BEFORE_FFN,
    # Front: router scores and latent projection, each in full on every rank or divided over the ranks.
    *_whole_front(part="router", off=(LOGITS,)),
    *_whole_front(part="router", on=(LOGITS,), min_rows=FRONT_ROWS + 1),
    *_whole_front(part="latent_down", off=(LATENT,)),
    *_whole_front(part="latent_down", on=(LATENT,), min_rows=FRONT_ROWS + 1),
    _front_gather(off=(LATENT, LOGITS)),
    _front_gather(on=(LATENT, LOGITS), min_rows=FRONT_ROWS + 1),
    _divided_front("route_bytes", ("moe.router_shard", "moe.latent_down_shard"), on=(LATENT, LOGITS), **EARLY),
    _divided_front("latent_bytes", ("moe.latent_down_shard",), on=(LATENT,), off=(LOGITS,), stream="aux",
                   after=("attn_res.ffn",), trigger="start"),
    _divided_front("logit_bytes", ("moe.router_shard",), on=(LOGITS,), off=(LATENT,), **EARLY),
    # Shared experts beside the selected ones.
    _row("moe.shared_gate_up", "skinny_gemv.column_pair", FRONT, weights=("moe.shared_gate_up",), off=(BATCH,),
         stream="aux", after=("attn_res.ffn",), **SHARED),
    _row("moe.shared_situ", "unfused.elementwise", {"rows": "front_rows", "width": "shared_width"}, off=(BATCH,),
         stream="aux", **SHARED),
    *_low_batch("moe.shared_gate_up", "moe.shared_gate_up", early={**ASIDE, "trigger": "start", **SHARED},
                late={**ASIDE, **SHARED}),
    _row("moe.shared_down", "skinny_gemv.column_pair", FRONT, weights=("moe.shared_down",), off=(BATCH,),
         stream="aux", launch="pdl", **SHARED),
    *_low_batch("moe.shared_down", "moe.shared_down", early={"stream": "aux", "launch": "pdl", **SHARED},
                late={"stream": "aux", **SHARED}),
    # Selection and quantisation as separate kernels, and the grouped launches of the experts.
    *_grouped_experts(off=(BATCH,)),
    *_grouped_experts(on=(BATCH,), min_rows=BLOCK_ROWS + 1),
    # Selection, both expert matrices and the weighted sum in one persistent launch, or the selection in one before it.
    _row("moe.experts", "expert_gemv.block", SELECT_EXPERTS, weights=("moe.expert_w13", "moe.expert_w2"),
         on=(BATCH,), off=(ROUTE,), max_rows=SELECT_INSIDE_ROWS, launch="pdl", after=("moe.latent_down",)),
    _row("moe.experts", "expert_gemv.block", SELECT_EXPERTS, weights=("moe.expert_w13", "moe.expert_w2"),
         on=(BATCH, ROUTE), max_rows=SELECT_INSIDE_ROWS, receives=("route",), launch="pdl", trigger="stream",
         after=("moe.latent_down",)),
    _row("moe.routing", "expert_gemv.route", SELECT, on=(BATCH,), off=(ROUTE,), after=("moe.latent_down",),
         **PUBLIC, **SELECT_BEFORE),
    _row("moe.routing", "expert_gemv.route", SELECT, receives=("route",), on=(BATCH, ROUTE),
         after=("moe.latent_down",), **PUBLIC, **SELECT_BEFORE),
    _row("moe.experts", "expert_gemv.block", {**SELECT_EXPERTS, "selects": 0},
         weights=("moe.expert_w13", "moe.expert_w2"), on=(BATCH,), launch="pdl", trigger="stream", **SELECT_BEFORE),
    _row("prefetch.next", "l2_prefetch.bulk", {"budget_bytes": 48 << 20}, weights=("moe.latent_up_shard", "next layer"),
         on=(FETCH,), stream="prefetch", after=("moe.experts", "moe.experts_2")),
    # Tail: sum over experts and ranks, latent norm, sharded up-projection, gather.
    _row("moe.tail_reduce", "latent_tail.reduce_pull", {**TAIL, "expert_rows": "tail_rows"}, launch="pdl",
         after=("moe.shared_down",), sends="latent", receives=("latent",), transport="pull", **FEW_TAIL),
    _row("moe.latent_up", "latent_tail.up", ROWS, weights=("moe.latent_up_shard",), launch="pdl", sends="residual",
         **FEW_TAIL),
    _row("moe.tail_copy", "unfused.poll", {"rows": "rows", "width": "hidden"}, launch="pdl", receives=("residual",),
         **FEW_TAIL),
    *_tail_of_many_rows(),
    # Of dispatched tokens a rank has the whole sum, and projects the rows that are its own.
    _row("moe.latent_norm", "unfused.norm", {"rows": "front_rows", "width": "latent"}, off=(REDUCE,), needs=DISPATCHED),
    _row("moe.latent_up", "skinny_gemv.column_pair", FRONT, weights=("moe.latent_up",), off=(REDUCE,),
         needs=DISPATCHED, **PUBLIC),
    _row("moe.add", "unfused.elementwise", {"rows": "front_rows", "width": "hidden"}, off=(REDUCE,), needs=DISPATCHED,
         after=("moe.shared_down",)),
    gather_group(off=(REDUCE,)),
    _row("moe.tail_reduce", "latent_tail.reduce_push", {**TAIL, "expert_rows": "top_k"}, on=(REDUCE,), launch="pdl",
         after=("moe.shared_down",), sends="latent", receives=("latent",), trigger="start"),
    _row("moe.latent_up", "latent_tail.up_ring", ROWS, weights=("moe.latent_up_shard",), on=(REDUCE,), sends="residual",
         **EARLY),
)

HEAD_ROWS = (
    _row("head.attn_res", "attn_res.single_block", MIX, off=(REDUCE,)),
    _row("head.norm", "unfused.norm", {"rows": "rows", "width": "hidden"}, off=(REDUCE,)),
    _row("head.attn_res", "attn_res.consume", SHARDS, on=(REDUCE,), receives=("residual",), **EARLY),
    _row("head.lm_head", "lm_head.logits", ROWS, weights=("lm_head",), off=(ROUTE,), launch="pdl", sends="logits"),
    _row("head.logits", "unfused.poll", {"rows": "rows", "width": "vocab"}, off=(ROUTE,), receives=("logits",)),
    _row("head.lm_head", "lm_head.top_k", ROWS, weights=("lm_head",), on=(ROUTE,), launch="pdl", sends="candidates"),
    _row("head.sample", "unfused.sample", {"rows": "rows", "ranks": "ranks"}, on=(ROUTE,), launch="pdl",
         receives=("candidates",)),
    # Sampling op by op on the whole vocabulary: 16 launches, read inside a step (k3opt's "60 to 100 us" on GB200);
    # with distributed sampling the token is drawn in the graph and two launches return it.
    _row("host.sampling", "host", {"num_launches": 16, "num_graph_launches": 0}, launch="host", stream="host",
         off=(ROUTE,), after=("head.logits",)),
    _row("host.sampling", "host", {"num_launches": 2, "num_graph_launches": 0}, launch="host", stream="host",
         on=(ROUTE,), after=("head.sample",)),
)

# Products of checkpoints that are quantised beyond the experts: the kernels that other models' stock paths run.
_IN_BF16 = ("skinny_gemv.column_pair",)

FUSED_TABLES: Mapping[str, tuple[Row, ...]] = {
    START: START_ROWS,
    "kda": products_in_formats(KDA_ROWS, _IN_BF16),
    "mla": products_in_formats(MLA_ROWS, _IN_BF16),
    "dense": products_in_formats(DENSE_ROWS, _IN_BF16),
    "moe": products_in_formats(MOE_ROWS, _IN_BF16),
    STAGE_END: STAGE_END_ROWS,
    HEAD: HEAD_ROWS,
    **DRAFT_TABLES,
}

FUSED_NEXT_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "kda": ("kda.in_proj",),
    "mla": ("mla.qkv_a", "mla.gate", "mla.q_b"),
}
