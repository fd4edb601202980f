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

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8": 1, "int32": 4}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """``count`` tensors of one shape in the checkpoint; sizes are of one of them.

    ``name`` holds ``*`` for layer, expert and block numbers. ``num_parameters`` counts weights: two per
    byte of 4-bit codes, none for scales. ``group`` is the part of the model it belongs to: ``"kda"``,
    ``"mla"``, ``"gqa"``, ``"dense"``, ``"moe"`` (everything of a MoE layer that is not a routed expert),
    ``"experts"``, ``"residual"`` (layer norms and attention residuals), ``"embedding"``, ``"lm_head"``, ``"mtp"`` (a
    layer that predicts a further token) or ``"vision"``.
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
        *_gqa_tensors(arch),
        *_dense_tensors(arch),
        *_moe_tensors(arch),
        *_residual_and_vocabulary_tensors(arch),
        *_mtp_tensors(arch),
        *(_vision_tensors(arch, arch.vision) if arch.vision else ()),
    ]


def total_bytes(arch: Architecture) -> int:
    """Bytes of all tensors: the checkpoint's ``total_size``."""
    return arch.unused_bytes + sum(tensor.num_bytes * tensor.count for tensor in tensors(arch))


def total_parameters(arch: Architecture) -> int:
    """Weights of all tensors, the vision tower included."""
    return sum(tensor.num_parameters * tensor.count for tensor in tensors(arch))


def active_parameters(arch: Architecture) -> int:
    """Weights that one token of text reads: LM head counted, embedding table and vision not."""
    total = 0
    for tensor in tensors(arch):
        if tensor.group == "experts":
            total += tensor.num_parameters * tensor.count // arch.moe.num_experts * arch.moe.top_k
        elif tensor.group not in ("embedding", "vision", "mtp"):
            total += tensor.num_parameters * tensor.count
    return total


def _kda_tensors(arch: Architecture) -> Iterator[Tensor]:
    kda, hidden, count = arch.kda, arch.hidden_size, len(arch.kda_layers)
    if not count:
        return
    prefix = f"{_prefix(arch)}model.layers.*.self_attn."
    # Kimi-Linear, whose gate is of low rank, stores convolutions and the norm as its other weights.
    small = "bfloat16" if kda.gate_rank else "float32"
    for part, width in (("q", kda.key_width), ("k", kda.key_width), ("v", kda.value_width)):
        yield from _linear(arch, "kda", f"{prefix}{part}_proj", width, hidden, count, "kda.in_proj")
        yield _tensor("kda", f"{prefix}{part}_conv1d.weight", (width, 1, kda.conv_width), count, small)
    yield _tensor("kda", f"{prefix}f_a_proj.weight", (kda.decay_rank, hidden), count)
    yield from _linear(arch, "kda", f"{prefix}f_b_proj", kda.key_width, kda.decay_rank, count, "kda.f_b")
    yield _tensor("kda", f"{prefix}dt_bias", (kda.key_width,), count, "float32")
    # One value a head is used; the release of K3 stores the vector padded to 128.
    heads = kda.num_heads if kda.gate_rank else math.ceil(kda.num_heads / 128) * 128
    yield _tensor("kda", f"{prefix}A_log", (heads,), count, "float32")
    yield _tensor("kda", f"{prefix}b_proj.weight", (kda.num_heads, hidden), count)
    if kda.gate_rank:
        yield _tensor("kda", f"{prefix}g_a_proj.weight", (kda.gate_rank, hidden), count)
        yield from _linear(arch, "kda", f"{prefix}g_b_proj", kda.value_width, kda.gate_rank, count, "kda.g_b")
    else:
        yield from _linear(arch, "kda", f"{prefix}g_proj", kda.value_width, hidden, count, "kda.in_proj")
    yield _tensor("kda", f"{prefix}o_norm.weight", (kda.head_dim_v,), count, small)
    yield from _linear(arch, "kda", f"{prefix}o_proj", hidden, kda.value_width, count, "kda.o_proj")


def _gqa_tensors(arch: Architecture) -> Iterator[Tensor]:
    gqa, hidden, count = arch.gqa, arch.hidden_size, len(arch.gqa_layers)
    if not count:
        return
    prefix = f"{_prefix(arch)}model.layers.*.self_attn."
    for part, width in (("q", gqa.query_width), ("k", gqa.key_width), ("v", gqa.key_width)):
        yield from _linear(arch, "gqa", f"{prefix}{part}_proj", width, hidden, count, "gqa.qkv")
    yield from _linear(arch, "gqa", f"{prefix}o_proj", hidden, gqa.query_width, count, "gqa.o_proj")
    if gqa.has_norms:
        for part in "qk":
            yield _tensor("gqa", f"{prefix}{part}_norm.weight", (gqa.head_dim,), count)


def _mla_tensors(arch: Architecture) -> Iterator[Tensor]:
    if not arch.mla_layers:
        return
    yield from _mla_layers(arch, "mla", f"{_prefix(arch)}model.layers.*.self_attn.", len(arch.mla_layers))


def _mla_layers(arch: Architecture, group: str, prefix: str, count: int) -> Iterator[Tensor]:
    mla, hidden = arch.mla, arch.hidden_size
    query_width = mla.num_heads * mla.qk_head_dim
    kv_b_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    down = "mla.qkv_a" if mla.q_lora_rank else "mla.kv_a"
    if mla.q_lora_rank:
        yield from _linear(arch, group, f"{prefix}q_a_proj", mla.q_lora_rank, hidden, count, down)
        yield _tensor(group, f"{prefix}q_a_layernorm.weight", (mla.q_lora_rank,), count)
        yield from _linear(arch, group, f"{prefix}q_b_proj", query_width, mla.q_lora_rank, count, "mla.q_b")
    else:
        yield from _linear(arch, group, f"{prefix}q_proj", query_width, hidden, count, "mla.q")
    yield from _linear(arch, group, f"{prefix}kv_a_proj_with_mqa", mla.cache_width, hidden, count, down)
    yield _tensor(group, f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,), count)
    # In a step it is folded into W_UK and W_UV, in bf16; the file has it as the matrix before it.
    yield from _linear(arch, group, f"{prefix}kv_b_proj", kv_b_width, mla.kv_lora_rank, count, down)
    if mla.has_gate:
        yield from _linear(arch, group, f"{prefix}g_proj", mla.value_width, hidden, count, "mla.gate")
    yield from _linear(arch, group, f"{prefix}o_proj", hidden, mla.value_width, count, "mla.o_proj")
    if mla.index_heads:
        index = f"{prefix}indexer."
        index_width, depth = mla.index_heads * mla.index_dim, mla.q_lora_rank or hidden
        yield from _linear(arch, group, f"{index}wq_b", index_width, depth, count, "mla.index_q")
        yield _tensor(group, f"{index}wk.weight", (mla.index_dim, hidden), count)
        yield _tensor(group, f"{index}weights_proj.weight", (mla.index_heads, hidden), count)
        yield _tensor(group, f"{index}k_norm.weight", (2, mla.index_dim), count)


def _dense_tensors(arch: Architecture) -> Iterator[Tensor]:
    hidden, width, count = arch.hidden_size, arch.dense_intermediate, arch.num_dense_layers
    if not count:
        return
    prefix = f"{_prefix(arch)}model.layers.*.mlp."
    yield from _linear(arch, "dense", f"{prefix}gate_proj", width, hidden, count, "dense.gate_up")
    yield from _linear(arch, "dense", f"{prefix}up_proj", width, hidden, count, "dense.gate_up")
    yield from _linear(arch, "dense", f"{prefix}down_proj", hidden, width, count, "dense.down")


def _moe_tensors(arch: Architecture) -> Iterator[Tensor]:
    if arch.num_moe_layers:
        block = "block_sparse_moe" if arch.kda_layers else "mlp"
        yield from _moe_layers(arch, f"{_prefix(arch)}model.layers.*.{block}.", arch.num_moe_layers)


def _moe_layers(arch: Architecture, prefix: str, count: int, group: str = "") -> Iterator[Tensor]:
    """``group``: of all tensors, where they count together."""
    moe, hidden, depth = arch.moe, arch.hidden_size, arch.expert_depth
    outside, inside = group or "moe", group or "experts"
    yield _tensor(outside, f"{prefix}gate.weight", (moe.num_experts, hidden), count)
    if moe.has_correction:
        # Kimi-Linear's is bf16.
        bias = "bfloat16" if arch.kda.gate_rank else "float32"
        yield _tensor(outside, f"{prefix}gate.e_score_correction_bias", (moe.num_experts,), count, bias)
    if moe.latent_size:
        yield _tensor(outside, f"{prefix}routed_expert_down_proj.weight", (moe.latent_size, hidden), count)
        yield _tensor(outside, f"{prefix}routed_expert_norm.weight", (moe.latent_size,), count)
        yield _tensor(outside, f"{prefix}routed_expert_up_proj.weight", (hidden, moe.latent_size), count)
    if moe.num_shared_experts:
        shared, width = f"{prefix}shared_experts.", moe.shared_intermediate
        yield from _linear(arch, outside, f"{shared}gate_proj", width, hidden, count, "moe.shared_gate_up")
        yield from _linear(arch, outside, f"{shared}up_proj", width, hidden, count, "moe.shared_gate_up")
        yield from _linear(arch, outside, f"{shared}down_proj", hidden, width, count, "moe.shared_down")
    for name, num_outputs, columns, part in (
        ("w1", moe.expert_intermediate, depth, "moe.expert_w13"),
        ("w3", moe.expert_intermediate, depth, "moe.expert_w13"),
        ("w2", depth, moe.expert_intermediate, "moe.expert_w2"),
    ):
        every = count * moe.num_experts
        yield from _linear(arch, inside, f"{prefix}experts.*.{name}", num_outputs, columns, every, part)


def _residual_and_vocabulary_tensors(arch: Architecture) -> Iterator[Tensor]:
    hidden, count, prefix = arch.hidden_size, arch.num_layers, _prefix(arch)
    layer = f"{prefix}model.layers.*."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _tensor("residual", f"{layer}{norm}.weight", (hidden,), count)
    if arch.attn_res_block_size:
        for call_site in ("self_attention_res", "mlp_res"):
            yield _tensor("residual", f"{layer}{call_site}_norm.weight", (hidden,), count)
            yield _tensor("residual", f"{layer}{call_site}_proj.weight", (1, hidden), count)
        yield _tensor("residual", f"{prefix}model.output_attn_res_norm.weight", (hidden,), 1)
        yield _tensor("residual", f"{prefix}model.output_attn_res_proj.weight", (1, hidden), 1)
    yield _tensor("residual", f"{prefix}model.norm.weight", (hidden,), 1)
    yield _tensor("embedding", f"{prefix}model.embed_tokens.weight", (arch.vocab_size, hidden), 1)
    yield from _linear(arch, "lm_head", f"{prefix}lm_head", arch.vocab_size, hidden, 1, "lm_head")


def _mtp_tensors(arch: Architecture) -> Iterator[Tensor]:
    """Layers that predict further tokens: a MoE layer each, a projection of two rows, and tables of their own."""
    hidden, count = arch.hidden_size, arch.num_mtp_layers
    if not count:
        return
    layer = f"{_prefix(arch)}model.layers.mtp."
    yield from _mla_layers(arch, "mtp", f"{layer}self_attn.", count)
    yield from _moe_layers(arch, f"{layer}mlp.", count, "mtp")
    for norm in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        yield _tensor("mtp", f"{layer}{norm}.weight", (hidden,), count)
    yield _tensor("mtp", f"{layer}eh_proj.weight", (hidden, 2 * hidden), count)
    yield _tensor("mtp", f"{layer}embed_tokens.weight", (arch.vocab_size, hidden), count)
    yield _tensor("mtp", f"{layer}shared_head.head.weight", (arch.vocab_size, hidden), count)


def _prefix(arch: Architecture) -> str:
    return "language_model." if arch.vision is not None or arch.attn_res_block_size else ""


def _linear(
    arch: Architecture, group: str, name: str, num_outputs: int, depth: int, count: int, part: str
) -> Iterator[Tensor]:
    """A matrix in the format of ``part``: codes, and scales where it has some."""
    stored = arch.weight_format(part)
    weights = num_outputs * depth
    if stored.code_bits >= 16:
        plain = "float32" if stored.code_bits == 32 else "bfloat16"
        yield _tensor(group, f"{name}.weight", (num_outputs, depth), count, plain)
        return
    packed, dtype = ("_packed", "uint8") if stored.code_bits < 8 else ("", "float8")
    yield Tensor(
        name=f"{name}.weight{packed}", group=group, shape=(num_outputs, depth * stored.code_bits // 8), dtype=dtype,
        num_parameters=weights, count=count,
    )  # fmt: skip
    if stored.block != (0, 0):
        shape = tuple(-(-size // one) for size, one in zip((num_outputs, depth), stored.block, strict=True))
        scales, scale_dtype = "_scale_inv", "float32"
    elif stored.group:
        shape, scales = (num_outputs, -(-depth // stored.group)), "_scale"
        scale_dtype = {8: "uint8", 16: "bfloat16"}[stored.scale_bits]
    else:
        shape, scales, scale_dtype = (1,), "_scale", "float32"
    yield Tensor(
        name=f"{name}.weight{scales}", group=group, shape=shape, dtype=scale_dtype, num_parameters=0, count=count
    )
    if stored.name == "nvfp4":  # a scale of the whole matrix beside those of its groups
        yield Tensor(
            name=f"{name}.weight_scale_2", group=group, shape=(1,), dtype="float32", num_parameters=0, count=count
        )


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
