"""Models of grouped-query attention in all layers, dense or with experts: Llama, Qwen3 and Qwen3-MoE.

Few of their files say of norms of query and key, so that these families alone are told by ``model_type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.model.architecture import Architecture, GqaShape, KdaShape, MlaShape, MoeShape
from k3sim.model.config_text import spelling
from k3sim.model.weight_formats import WeightFormat

NORMED = ("qwen3", "qwen3_moe")  # with a norm of each head of query and key

NO_KDA = KdaShape(num_heads=0, head_dim_k=0, head_dim_v=0, conv_width=1, decay_rank=0)
NO_MLA = MlaShape(
    num_heads=0, q_lora_rank=0, kv_lora_rank=0, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, has_gate=False
)


def build_grouped(
    name: str, text: Mapping[str, Any], formats: tuple[tuple[str, WeightFormat], ...], notes: tuple[str, ...]
) -> Architecture:
    """The architecture of a config that has been checked."""
    layers = text["num_hidden_layers"]
    experts = text.get(spelling(text, "num_experts")) or 0
    width = text.get("moe_intermediate_size") or 0
    has_said = text.get("use_qk_norm") is not None
    return Architecture(
        name=name,
        num_layers=layers,
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=text[spelling(text, "max_position_embeddings")],
        kda_layers=(),
        mla_layers=(),
        gqa_layers=tuple(range(layers)),
        kda=NO_KDA,
        mla=NO_MLA,
        gqa=GqaShape(
            num_heads=text["num_attention_heads"],
            num_key_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
            has_norms=text["use_qk_norm"] if has_said else text.get("model_type") in NORMED,
        ),
        attn_res_block_size=0,
        moe=MoeShape(
            num_experts=experts,
            top_k=text[spelling(text, "num_experts_per_token")] if experts else 0,
            latent_size=0,
            expert_intermediate=width if experts else 0,
            num_shared_experts=0,
            shared_intermediate=0,
            first_moe_layer=0 if experts else layers,
            has_correction=False,
        ),
        dense_intermediate=text["intermediate_size"],
        formats=formats,
        notes=notes,
    )
