"""Shapes of the neighbours of Kimi K3, written out from their released configs, for tests of paths and costs."""

from __future__ import annotations

from dataclasses import replace

from k3sim.model.architecture import Architecture, GqaShape, KdaShape, MlaShape, MoeShape
from k3sim.model.config_grouped import NO_MLA
from k3sim.model.weight_formats import BF16, FORMATS, FP8_BLOCK, NVFP4, WeightFormat

NO_KDA = KdaShape(num_heads=0, head_dim_k=0, head_dim_v=0, conv_width=0, decay_rank=0)
ATTENTION = ("mla.qkv_a", "mla.q_b", "mla.o_proj")
FFN = ("dense.gate_up", "dense.down", "moe.shared_gate_up", "moe.shared_down")
EXPERTS = ("moe.expert_w13", "moe.expert_w2")


def formats(**parts: WeightFormat) -> tuple[tuple[str, WeightFormat], ...]:
    """Formats of matrices by groups: ``attention``, ``ffn``, ``experts``, ``o_proj``; what is not named is bf16."""
    named = {"attention": ATTENTION, "ffn": FFN, "experts": EXPERTS, "o_proj": ("mla.o_proj",)}
    given = {"experts": BF16, **parts}
    return tuple((name, stored) for group, stored in given.items() for name in named[group])


DEEPSEEK_V3 = Architecture(
    name="DeepSeek-V3",
    num_layers=61,
    hidden_size=7168,
    vocab_size=129280,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
    kda_layers=(),
    mla_layers=tuple(range(61)),
    kda=NO_KDA,
    mla=MlaShape(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        has_gate=False, has_rope=True,
    ),
    attn_res_block_size=0,
    moe=MoeShape(
        num_experts=256, top_k=8, latent_size=0, expert_intermediate=2048, num_shared_experts=1,
        shared_intermediate=2048, first_moe_layer=3, num_groups=8, top_k_groups=4,
    ),
    dense_intermediate=18432,
    formats=formats(attention=FP8_BLOCK, ffn=FP8_BLOCK, experts=FP8_BLOCK),
)  # fmt: skip
R1_NVFP4 = replace(DEEPSEEK_V3, name="DeepSeek-R1-0528-NVFP4", formats=formats(ffn=NVFP4, experts=NVFP4))
V31_NVFP4 = replace(
    DEEPSEEK_V3, name="DeepSeek-V3.1-NVFP4", formats=formats(ffn=NVFP4, experts=NVFP4, o_proj=NVFP4)
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3, name="DeepSeek-V3.2", mla=replace(DEEPSEEK_V3.mla, index_heads=64, index_dim=128, index_top_k=2048)
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    name="Kimi-K2",
    vocab_size=163840,
    mla=replace(DEEPSEEK_V3.mla, num_heads=64),
    moe=replace(DEEPSEEK_V3.moe, num_experts=384, first_moe_layer=1, num_groups=1, top_k_groups=1),
)
KIMI_K25 = replace(KIMI_K2, name="Kimi-K2.5", formats=formats(experts=FORMATS["int4_g32"]))
_FULL = (3, 7, 11, 15, 19, 23, 26)
KIMI_LINEAR = Architecture(
    name="Kimi-Linear-48B-A3B",
    num_layers=27,
    hidden_size=2304,
    vocab_size=163840,
    rms_norm_eps=1e-5,
    max_position_embeddings=1048576,
    kda_layers=tuple(layer for layer in range(27) if layer not in _FULL),
    mla_layers=_FULL,
    kda=KdaShape(num_heads=32, head_dim_k=128, head_dim_v=128, conv_width=4, decay_rank=128, gate_rank=128),
    mla=MlaShape(
        num_heads=32, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        has_gate=False,
    ),
    attn_res_block_size=0,
    moe=MoeShape(
        num_experts=256, top_k=8, latent_size=0, expert_intermediate=1024, num_shared_experts=1,
        shared_intermediate=1024, first_moe_layer=1,
    ),
    dense_intermediate=9216,
    formats=formats(),
)  # fmt: skip
QWEN3_MOE = replace(
    KIMI_LINEAR, name="Qwen3-30B-A3B", num_layers=48, hidden_size=2048, vocab_size=151936, kda_layers=(), mla_layers=(),
    kda=NO_KDA, mla=NO_MLA, gqa_layers=tuple(range(48)), dense_intermediate=6144,
    gqa=GqaShape(num_heads=32, num_key_heads=4, head_dim=128, has_norms=True),
    moe=MoeShape(
        num_experts=128, top_k=8, latent_size=0, expert_intermediate=768, num_shared_experts=0, shared_intermediate=0,
        first_moe_layer=0, has_correction=False,
    ),
)  # fmt: skip
LLAMA_70B = replace(
    QWEN3_MOE, name="Llama-3.1-70B", num_layers=80, hidden_size=8192, vocab_size=128256,
    gqa_layers=tuple(range(80)), gqa=GqaShape(num_heads=64, num_key_heads=8, head_dim=128), dense_intermediate=28672,
    moe=replace(
        QWEN3_MOE.moe, num_experts=0, top_k=0, expert_intermediate=0, first_moe_layer=80,
    ),
)  # fmt: skip

FAMILIES = (DEEPSEEK_V3, R1_NVFP4, V31_NVFP4, DEEPSEEK_V32, KIMI_K2, KIMI_K25, KIMI_LINEAR, QWEN3_MOE, LLAMA_70B)
