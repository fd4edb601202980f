"""The tables of the megakernel: one program for the whole step. ``step.Row`` explains the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3sim.model.paths.public import (
    ATTENTION,
    EXPERTS,
    HEAD_ROWS,
    KDA_STATE,
    MIX,
    PARTIAL_SUMS,
    ROWS,
    SELECT_EXPERTS,
    SHARDS,
    SHARED,
    START_ROWS,
    TAIL,
    _row,
)
from k3sim.model.step import HEAD, START, Row

# One program a step. A task has no launch and no completion: it starts when shared memory is free, its weights
# stream in while it waits, and a counter (or a peer's data) tells it to go on. What is cheap enough is repeated
# by every block instead of being handed over: the attention residual before the mixer, the expert selection, and
# the latent's sum and norm.
TASK: dict[str, Any] = {"launch": "task", "trigger": "start"}


def _mixer_input(stage: str, weights: tuple[str, ...]) -> Row:
    return _row(stage, "skinny_gemv.resident_after_combine", {"rows": "rows", "hidden": "hidden"}, weights=weights,
                receives=("residual",), **TASK)


PERSISTENT_KDA_ROWS = (
    _mixer_input("kda.in_proj", ("kda.in_proj",)),
    _row("attn_res.snapshots", "attn_res.snapshot_sums", MIX, stream="aux", after=("kda.in_proj",), **TASK),
    _row("kda.decode", "kda_decode.public_cluster", KDA_STATE, weights=("kda.f_b",), **TASK),
    _row("kda.o_proj", "proj_allreduce.produce", ROWS, weights=("kda.o_proj",), sends="attention", **TASK),
)

PERSISTENT_MLA_ROWS = (
    _mixer_input("mla.qkv_a_gate", ("mla.qkv_a", "mla.gate")),
    _row("attn_res.snapshots", "attn_res.snapshot_sums", MIX, stream="aux", after=("mla.qkv_a_gate",), **TASK),
    _row("mla.prep", "mla_prep.public_fused",
         {"rows": "rows", "heads": "mla_own_heads", "kv_row_bytes": "kv_row_bytes"},
         weights=("mla.q_b", "mla.w_uk"), **TASK),
    _row("mla.query_gather", "unfused.query_gather", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}, needs="dcp", sends="query", receives=("query",), group="dcp", **TASK),
    _row("mla.attention", "mla_decode.partial", {**ATTENTION, "context_ranks": "dcp"}, needs="dcp",
         sends="context", group="dcp", **TASK),
    _row("mla.lse_merge", "mla_decode.lse_merge", {"rows": "rows", "heads": "mla_own_heads", "ranks": "dcp",
         "kv_lora_rank": "kv_lora_rank"}, needs="dcp", receives=("context",), **TASK),
    _row("mla.lift", "unfused.batched_gemm", ROWS, weights=("mla.w_uv",), needs="dcp", **TASK),
    _row("mla.attention", "mla_decode.fused", ATTENTION, weights=("mla.w_uv",), needs="no dcp", **TASK),
    _row("mla.o_proj", "proj_allreduce.produce", ROWS, weights=("mla.o_proj",), sends="attention", **TASK),
)

PERSISTENT_BEFORE_FFN = (
    _row("attn_res.ffn", "attn_res.consume", PARTIAL_SUMS, receives=("attention",), **TASK),
)

PERSISTENT_DENSE_ROWS = (
    *PERSISTENT_BEFORE_FFN,
    _row("dense.gate_up", "skinny_gemv.resident", ROWS, weights=("dense.gate_up",), **TASK),
    _row("dense.down", "proj_allreduce.produce", ROWS, weights=("dense.down",), sends="residual", **TASK),
)

PERSISTENT_MOE_ROWS = (
    *PERSISTENT_BEFORE_FFN,
    _row("moe.front", "skinny_gemv.ring_push", {"rows": "rows", "sent_bytes_per_row": "route_bytes"},
         weights=("moe.router_shard", "moe.latent_down_shard"), sends="route", **TASK),
    # The shared experts come before the selected ones in the queue: they run while the selection is on its way.
    _row("moe.shared_gate_up", "skinny_gemv.ring", ROWS, weights=("moe.shared_gate_up",), **SHARED, **TASK),
    _row("moe.shared_down", "skinny_gemv.ring", ROWS, weights=("moe.shared_down",), **SHARED, **TASK),
    _row("moe.experts_1", "expert_gemv.task1", SELECT_EXPERTS, weights=("moe.expert_w13",), receives=("route",),
         **TASK),
    _row("moe.experts_2", "expert_gemv.task2", {**EXPERTS, "latent": "latent"}, weights=("moe.expert_w2",), **TASK),
    _row("prefetch.next", "l2_prefetch.bulk", {"budget_bytes": 48 << 20}, weights=("next layer",), stream="prefetch",
         after=("moe.experts_1",), **TASK),
    _row("moe.tail_send", "latent_tail.send", {**TAIL, "expert_rows": "top_k"}, after=("moe.shared_down",),
         sends="latent", **TASK),
    _row("moe.latent_up", "latent_tail.up_after_sum", TAIL, weights=("moe.latent_up_shard",), receives=("latent",),
         sends="residual", **TASK),
)

PERSISTENT_START_ROWS = (
    START_ROWS[0],
    _row("embed.push", "unfused.embedding", {"rows": "rows", "hidden": "hidden"}, sends="residual",
         after=("host.inputs",), **TASK),
)

PERSISTENT_HEAD_ROWS = (
    _row("head.attn_res", "attn_res.consume", SHARDS, receives=("residual",), **TASK),
    _row("head.lm_head", "lm_head.top_k", ROWS, weights=("lm_head",), sends="candidates", **TASK),
    _row("head.sample", "unfused.sample", {"rows": "rows", "ranks": "ranks"}, receives=("candidates",), **TASK),
    replace(HEAD_ROWS[-1], on=()),
)

MEGAKERNEL_TABLES: Mapping[str, tuple[Row, ...]] = {
    START: PERSISTENT_START_ROWS,
    "kda": PERSISTENT_KDA_ROWS,
    "mla": PERSISTENT_MLA_ROWS,
    "dense": PERSISTENT_DENSE_ROWS,
    "moe": PERSISTENT_MOE_ROWS,
    HEAD: PERSISTENT_HEAD_ROWS,
}
