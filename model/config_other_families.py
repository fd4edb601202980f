"""What a ``config.json`` of another family has that is not modelled: every operator, so that one answer names all.

A field tells an operator. The list covers what released files of other families say of their layers; a field that is
neither here nor read elsewhere is named as not known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

#: An operator -> fields of which one that is not off tells it.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "norms of query and key": ("use_qk_norm", "qk_norm_type", "qk_norm"),
    "attention within a window": (
        "sliding_window_size", "swa_num_attention_heads", "hybrid_layer_pattern", "use_sliding_window",
    ),
    "attention within chunks": ("attention_chunk_size",),
    "a bias in attention": ("attention_bias", "qkv_bias", "add_swa_attention_sink_bias"),
    "attention sinks": ("add_full_attention_sink_bias", "attention_sink"),
    "a gate of attention": ("attn_output_gate", "attention_output_gate", "output_gate_type"),
    "compressed or sparse attention of another kind": ("compress_ratios", "sparse_attention_config", "attn_type_list"),
    "an output projection of low rank": ("o_lora_rank",),
    "hyper-connections": ("hc_mult",),
    "Mamba layers": ("ssm_state_size", "mamba_num_heads", "hybrid_override_pattern", "layers_block_type"),
    "delta-net layers": ("linear_num_value_heads", "linear_conv_kernel_dim", "full_attention_interval"),
    "layers that share a cache": ("num_kv_shared_layers", "attention_k_eq_v"),
    "heads of another size in some layers": ("global_head_dim", "num_global_key_value_heads"),
    "embeddings a layer": ("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    "layers that differ one by one": ("block_configs",),
    "experts in some layers only": ("decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step"),
    "shared experts of another size": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim",
    ),
    "routing by hash": ("num_hash_layers",),
    "a bias in the feed-forward part": ("mlp_bias", "use_bias"),
    "one table for embedding and head": ("tie_word_embeddings",),
    "limits on logits": ("final_logit_softcapping", "attn_logit_softcapping"),
    "draft layers": ("mtp_num_hidden_layers", "num_mtp_modules", "use_mtp", "mtp_transformer_layers"),
}  # fmt: skip
#: Of a field that is 1 where every layer is alike.
ONE_IS_OFF = frozenset({"decoder_sparse_step", "interleave_moe_layer_step", "full_attention_interval"})
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")


def operators_of(text: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What a config's layers have that is not modelled, each with the fields that tell it."""
    found: dict[str, tuple[str, ...]] = {}
    if "kv_lora_rank" not in text and "num_attention_heads" in text:
        heads, cached = text["num_attention_heads"], text.get("num_key_value_heads")
        kind = "attention with a key and value a head" if cached in (None, heads) else "grouped-query attention"
        found[kind] = ("num_key_value_heads",) if cached is not None else ("num_attention_heads",)
    for what, names in OPERATORS.items():
        told = tuple(name for name in names if _is_on(name, text.get(name)))
        if told:
            found[what] = told
    if _is_on("sliding_window", text.get("sliding_window")) and text.get("use_sliding_window", True):
        found["attention within a window"] = (*found.get("attention within a window", ()), "sliding_window")
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len({str(one) for one in kinds}) > 1:
        found["layers of several kinds"] = ("layer_types",)
    for name in ACTIVATIONS:
        if name in text and text[name] not in ("silu", "situ"):
            found["another activation"] = (name,)
    return found


def _is_on(name: str, value: object) -> bool:
    if isinstance(value, (list, dict)) and not value:
        return False
    if name in ONE_IS_OFF and value == 1:
        return False
    return value not in (None, False, 0, "")


def used_fields() -> Collection[str]:
    """Fields that ``operators_of`` reads."""
    return {name for names in OPERATORS.values() for name in names} | {*ACTIVATIONS, "sliding_window", "layer_types"}
