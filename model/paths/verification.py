"""Kernels of the target that change where it verifies drafts, on the stock and the fused path alike.

vLLM compiles its fused KDA decode out and runs three launches: convolution, recurrence over a user's rows with a state
for each, gated norm (``kimi_k3/nvidia/kda.py``). Attention takes a user's rows as further query rows, so that its cache
is read once.
"""

from __future__ import annotations

from k3sim.model.step import Row

VERIFIED: dict[str, int | str] = {"users": "users", "positions": "positions"}


def verify_kda(batch: str) -> tuple[Row, ...]:
    """Behind the inner products; ``batch``: the switch that has the decay's product inside its decode kernel."""
    return (
        Row(stage="kda.f_b", operator="skinny_gemv.column_pair", shape={"rows": "rows"}, weights=("kda.f_b",),
            on=(batch,), launch="pdl", needs="drafts"),
        Row(stage="kda.conv", operator="unfused.conv_update_verified", needs="drafts", shape={
            **VERIFIED, "conv_state_bytes": "kda_conv_state_bytes", "conv_weight_bytes": "kda_conv_weight_bytes"}),
        Row(stage="kda.recurrent", operator="unfused.recurrent_update_verified", needs="drafts", shape={
            **VERIFIED, "heads": "kda_heads", "state_bytes": "kda_state_bytes", "value_bytes": "kda_value_bytes"}),
        Row(stage="kda.gated_norm", operator="unfused.gated_norm", needs="drafts",
            shape={"rows": "rows", "heads": "kda_heads", "head_dim": "head_dim"}),
    )  # fmt: skip


def verify_mla(batch: str) -> tuple[Row, ...]:
    """Attention; ``batch``: the switch whose attention kernel also lifts to values and applies the gate."""
    return (
        Row(stage="mla.attention", operator="mla_decode.split_kv", needs="no dcp, drafts", launch="pdl", shape={
            "rows": "users", "heads": "mla_query_heads", "context": "context", "kv_row_bytes": "kv_row_bytes",
            "kv_lora_rank": "kv_lora_rank"}),
        Row(stage="mla.lift", operator="unfused.batched_gemm", shape={"rows": "rows"}, weights=("mla.w_uv",),
            on=(batch,), needs="no dcp, drafts"),
        Row(stage="mla.gate_multiply", operator="unfused.elementwise", on=(batch,), needs="no dcp, mla gate, drafts",
            shape={"rows": "rows", "width": "mla_value_width"}, after=("mla.gate",)),
    )  # fmt: skip
