"""Tensors of a checkpoint, from the shapes of its model.

They are not needed for a step. They are here because their sum reproduces the released checkpoint to the byte, which is
the test that the shapes used everywhere else are right.

Source: safetensors headers of https://huggingface.co/moonshotai/Kimi-K3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from k3sim.model.architecture import Architecture, VisionShape

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """``count`` tensors of one shape in the checkpoint; sizes are of one of them.

    ``name`` holds ``*`` for layer, expert and block numbers. ``num_parameters`` counts weights: two per
    byte of 4-bit codes, none for scales. ``group`` is the part of the model it belongs to: ``"kda"``,
    ``"mla"``, ``"dense"``, ``"moe"`` (everything of a MoE layer that is not a routed expert),
    ``"experts"``, ``"residual"`` (layer norms and attention residuals), ``"embedding"``, ``"lm_head"`` or
    ``"vision"``.
    """

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    num_parameters: int
    count: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


def tensors(arch: Architecture) -> list[Tensor]:
    """Every tensor of the checkpoint, equal ones counted together."""
    return [
        *_kda_tensors(arch),
        *_mla_tensors(arch),
        *_dense_tensors(arch),
        *_moe_tensors(arch),
        *_residual_and_vocabulary_tensors(arch),
        *(_vision_tensors(arch, arch.vision) if arch.vision else ()),
    ]


def total_bytes(arch: Architecture) -> int:
    """Bytes of all tensors: the checkpoint's ``total_size``."""
    return sum(tensor.num_bytes * tensor.count for tensor in tensors(arch))


def total_parameters(arch: Architecture) -> int:
    """Weights of all tensors, the vision tower included."""
    return sum(tensor.num_parameters * tensor.count for tensor in tensors(arch))


def active_parameters(arch: Architecture) -> int:
    """Weights that one token of text reads: LM head counted, embedding table and vision not."""
    total = 0
    for tensor in tensors(arch):
        if tensor.group == "experts":
            total += tensor.num_parameters * tensor.count // arch.moe.num_experts * arch.moe.top_k
        elif tensor.group not in ("embedding", "vision"):
            total += tensor.num_parameters * tensor.count
    return total


def _kda_tensors(arch: Architecture) -> Iterator[Tensor]:
    kda, hidden, count = arch.kda, arch.hidden_size, len(arch.kda_layers)
    prefix = "language_model.model.layers.*.self_attn."
    for part, width in (("q", kda.key_width), ("k", kda.key_width), ("v", kda.value_width)):
        yield _tensor("kda", f"{prefix}{part}_proj.weight", (width, hidden), count)
        yield _tensor(
            "kda", f"{prefix}{part}_conv1d.weight", (width, 1, kda.conv_width), count, "float32"
        )
    yield _tensor("kda", f"{prefix}f_a_proj.weight", (kda.decay_rank, hidden), count)
    yield _tensor("kda", f"{prefix}f_b_proj.weight", (kda.key_width, kda.decay_rank), count)
    yield _tensor("kda", f"{prefix}dt_bias", (kda.key_width,), count, "float32")
    # One value a head is used; the release stores the vector padded to 128.
    yield _tensor("kda", f"{prefix}A_log", (math.ceil(kda.num_heads / 128) * 128,), count, "float32")
    yield _tensor("kda", f"{prefix}b_proj.weight", (kda.num_heads, hidden), count)
    yield _tensor("kda", f"{prefix}g_proj.weight", (kda.value_width, hidden), count)
    yield _tensor("kda", f"{prefix}o_norm.weight", (kda.head_dim_v,), count, "float32")
    yield _tensor("kda", f"{prefix}o_proj.weight", (hidden, kda.value_width), count)


def _mla_tensors(arch: Architecture) -> Iterator[Tensor]:
    mla, hidden, count = arch.mla, arch.hidden_size, len(arch.mla_layers)
    prefix = "language_model.model.layers.*.self_attn."
    kv_b_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield _tensor("mla", f"{prefix}q_a_proj.weight", (mla.q_lora_rank, hidden), count)
    yield _tensor("mla", f"{prefix}q_a_layernorm.weight", (mla.q_lora_rank,), count)
    yield _tensor(
        "mla", f"{prefix}q_b_proj.weight", (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank), count
    )
    yield _tensor("mla", f"{prefix}kv_a_proj_with_mqa.weight", (mla.cache_width, hidden), count)
    yield _tensor("mla", f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,), count)
    yield _tensor("mla", f"{prefix}kv_b_proj.weight", (kv_b_width, mla.kv_lora_rank), count)
    yield _tensor("mla", f"{prefix}g_proj.weight", (mla.value_width, hidden), count)
    yield _tensor("mla", f"{prefix}o_proj.weight", (hidden, mla.value_width), count)


def _dense_tensors(arch: Architecture) -> Iterator[Tensor]:
    hidden, width, count = arch.hidden_size, arch.dense_intermediate, arch.num_dense_layers
    prefix = "language_model.model.layers.*.mlp."
    yield _tensor("dense", f"{prefix}gate_proj.weight", (width, hidden), count)
    yield _tensor("dense", f"{prefix}up_proj.weight", (width, hidden), count)
    yield _tensor("dense", f"{prefix}down_proj.weight", (hidden, width), count)


def _moe_tensors(arch: Architecture) -> Iterator[Tensor]:
    moe, hidden, count = arch.moe, arch.hidden_size, arch.num_moe_layers
    prefix = "language_model.model.layers.*.block_sparse_moe."
    yield _tensor("moe", f"{prefix}gate.weight", (moe.num_experts, hidden), count)
    yield _tensor("moe", f"{prefix}gate.e_score_correction_bias", (moe.num_experts,), count, "float32")
    yield _tensor("moe", f"{prefix}routed_expert_down_proj.weight", (moe.latent_size, hidden), count)
    yield _tensor("moe", f"{prefix}routed_expert_norm.weight", (moe.latent_size,), count)
    yield _tensor("moe", f"{prefix}routed_expert_up_proj.weight", (hidden, moe.latent_size), count)
    if moe.num_shared_experts:
        shared = f"{prefix}shared_experts."
        yield _tensor("moe", f"{shared}gate_proj.weight", (moe.shared_intermediate, hidden), count)
        yield _tensor("moe", f"{shared}up_proj.weight", (moe.shared_intermediate, hidden), count)
        yield _tensor("moe", f"{shared}down_proj.weight", (hidden, moe.shared_intermediate), count)
    for part, num_outputs, depth in (
        ("w1", moe.expert_intermediate, moe.latent_size),
        ("w3", moe.expert_intermediate, moe.latent_size),
        ("w2", moe.latent_size, moe.expert_intermediate),
    ):
        name = f"{prefix}experts.*.{part}.weight"
        yield Tensor(
            name=f"{name}_packed",
            group="experts",
            shape=(num_outputs, depth * moe.weight_bits // 8),
            dtype="uint8",
            num_parameters=num_outputs * depth,
            count=count * moe.num_experts,
        )
        yield Tensor(
            name=f"{name}_scale",
            group="experts",
            shape=(num_outputs, depth // moe.scale_group),
            dtype="uint8",
            num_parameters=0,
            count=count * moe.num_experts,
        )


def _residual_and_vocabulary_tensors(arch: Architecture) -> Iterator[Tensor]:
    hidden, count = arch.hidden_size, arch.num_layers
    layer = "language_model.model.layers.*."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _tensor("residual", f"{layer}{norm}.weight", (hidden,), count)
    for call_site in ("self_attention_res", "mlp_res"):
        yield _tensor("residual", f"{layer}{call_site}_norm.weight", (hidden,), count)
        yield _tensor("residual", f"{layer}{call_site}_proj.weight", (1, hidden), count)
    yield _tensor("residual", "language_model.model.output_attn_res_norm.weight", (hidden,), 1)
    yield _tensor("residual", "language_model.model.output_attn_res_proj.weight", (1, hidden), 1)
    yield _tensor("residual", "language_model.model.norm.weight", (hidden,), 1)
    yield _tensor("embedding", "language_model.model.embed_tokens.weight", (arch.vocab_size, hidden), 1)
    yield _tensor("lm_head", "language_model.lm_head.weight", (arch.vocab_size, hidden), 1)


def _vision_tensors(arch: Architecture, vision: VisionShape) -> Iterator[Tensor]:
    width, count = vision.hidden_size, vision.num_layers
    patch = vision.patch_size
    block = "vision_tower.encoder.blocks.*."
    position_shape = (vision.position_rows, vision.position_columns, width)
    yield _tensor("vision", "vision_tower.patch_embed.proj.weight", (width, 3, patch, patch), 1)
    yield _tensor("vision", "vision_tower.patch_embed.pos_emb.weight", position_shape, 1)
    yield _tensor("vision", f"{block}norm0.weight", (width,), count)
    yield _tensor("vision", f"{block}wqkv.weight", (3 * vision.qkv_size, width), count)
    yield _tensor("vision", f"{block}wo.weight", (width, vision.qkv_size), count)
    yield _tensor("vision", f"{block}norm1.weight", (width,), count)
    yield _tensor("vision", f"{block}mlp.fc0.weight", (vision.intermediate_size, width), count)
    yield _tensor("vision", f"{block}mlp.fc1.weight", (width, vision.intermediate_size), count)
    yield _tensor("vision", "vision_tower.encoder.final_layernorm.weight", (width,), 1)
    yield _tensor("vision", "mm_projector.proj.0.weight", (vision.merged_size, vision.merged_size), 1)
    yield _tensor("vision", "mm_projector.proj.2.weight", (arch.hidden_size, vision.merged_size), 1)
    yield _tensor("vision", "mm_projector.post_norm.weight", (arch.hidden_size,), 1)


def _tensor(group: str, name: str, shape: tuple[int, ...], count: int, dtype: str = "bfloat16") -> Tensor:
    """An unquantised tensor: as many weights as elements."""
    return Tensor(
        name=name, group=group, shape=shape, dtype=dtype, num_parameters=math.prod(shape), count=count
    )
