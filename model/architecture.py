"""What the model is: shapes of Kimi K3 and its family, read from a released ``config.json``.

The shipped ``data/kimi-k3.json`` keeps the release's own field names, so any ``config.json`` of the family
can take its place. The tensor list that follows from it reproduces the released checkpoint to the byte;
that is the test that the shapes used everywhere else are right.

Sources: config.json and safetensors headers of https://huggingface.co/moonshotai/Kimi-K3; residual scheme
and the meaning of the mixers from ``vllm/models/kimi_k3/nvidia`` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NoReturn

from k3sim.errors import UserError

SHIPPED_CONFIG = Path(__file__).parent / "data" / "kimi-k3.json"

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "uint8": 1}

_MAX_CONFIG_BYTES = 4 << 20
_MAX_DIMENSION = 2**31 - 1
_MAX_EXPERTS = 2**16
_MISSING = object()

Mixer = Literal["kda", "mla"]
Ffn = Literal["dense", "moe"]


@dataclass(frozen=True, kw_only=True)
class KdaShape:
    """Kimi Delta Attention: linear attention with a recurrent state ``[num_heads, head_dim_k, head_dim_v]``.

    ``conv_width`` is the width of the short causal convolution on q, k and v; ``decay_rank`` the inner
    width of the low-rank decay gate (hidden -> decay_rank -> keys). The output gate is full rank.
    """

    num_heads: int
    head_dim_k: int
    head_dim_v: int
    conv_width: int
    decay_rank: int

    @property
    def key_width(self) -> int:
        """Channels of q, and of k, over all heads."""
        return self.num_heads * self.head_dim_k

    @property
    def value_width(self) -> int:
        """Channels of v, and of the output gate, over all heads."""
        return self.num_heads * self.head_dim_v

    @property
    def conv_channels(self) -> int:
        """Channels that pass the short convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Multi-head latent attention with an output gate; the "rope" dimensions exist but are never rotated."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cache_width(self) -> int:
        """Values of one KV-cache row: the latent and the shared extra key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Channels of the attention output, and of its gate, over all heads."""
        return self.num_heads * self.v_head_dim


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Latent mixture of experts: hidden -> latent once, experts in the latent, latent -> hidden once.

    Shared experts read the full hidden state and are one MLP of width ``shared_intermediate``. Routed
    experts are MXFP4: ``weight_bits``-bit codes with one ``scale_bits``-bit scale per ``scale_group``
    weights along the depth.
    """

    num_experts: int
    top_k: int
    latent_size: int
    expert_intermediate: int
    num_shared_experts: int
    shared_intermediate: int
    first_moe_layer: int
    weight_bits: int = 4
    scale_bits: int = 8
    scale_group: int = 32

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of one routed-expert weight, its share of the scale included: 4.25 for MXFP4."""
        return self.weight_bits + self.scale_bits / self.scale_group

    def matrix_bytes(self, num_outputs: int, depth: int) -> int:
        """Bytes of codes and scales of a routed-expert matrix; the depth is whole scale groups."""
        assert depth % self.scale_group == 0, f"depth {depth} is not in groups of {self.scale_group}"
        num_weights = num_outputs * depth
        return num_weights * self.weight_bits // 8 + num_weights // self.scale_group * self.scale_bits // 8


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Vision tower and projector: never run in decode, but part of the checkpoint's total."""

    hidden_size: int
    qkv_size: int
    intermediate_size: int
    num_layers: int
    patch_size: int
    position_rows: int
    position_columns: int
    merged_size: int  # width after the spatial merge, the projector's input


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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of one model of the Kimi K3 family. Layers count from zero."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    kda: KdaShape
    mla: MlaShape
    attn_res_block_size: int
    moe: MoeShape
    dense_intermediate: int
    vision: VisionShape | None = None

    @property
    def num_dense_layers(self) -> int:
        return self.moe.first_moe_layer

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.moe.first_moe_layer

    def mixer(self, layer: int) -> Mixer:
        """Token mixer of a layer."""
        self._check_layer(layer)
        return "mla" if layer in self.mla_layers else "kda"

    def ffn(self, layer: int) -> Ffn:
        """Feed-forward part of a layer."""
        self._check_layer(layer)
        return "moe" if layer >= self.moe.first_moe_layer else "dense"

    def is_snapshot(self, layer: int) -> bool:
        """Whether the layer stores the running residual and restarts it from its mixer's output."""
        self._check_layer(layer)
        return layer % self.attn_res_block_size == 0

    def attn_res_sources(self, layer: int, before: Literal["mixer", "ffn"]) -> int:
        """Vectors that the attention residual before a sublayer mixes: snapshots so far plus the running
        residual.

        Before the mixer the layer's own snapshot is not yet taken (only the embedding exists at layer 0);
        before the FFN it is. ``layer == num_layers`` with ``"mixer"`` is the final call, in front of the LM
        head.
        """
        if before == "mixer" and layer == self.num_layers:
            return math.ceil(layer / self.attn_res_block_size) + 1
        self._check_layer(layer)
        if before == "mixer":
            return math.ceil(layer / self.attn_res_block_size) + 1
        return layer // self.attn_res_block_size + 2

    def attn_res_total_sources(self) -> int:
        """Vectors read by all attention residuals of one decode step and one row: 1003 for K3."""
        before_mixer = sum(self.attn_res_sources(layer, "mixer") for layer in range(self.num_layers + 1))
        before_ffn = sum(self.attn_res_sources(layer, "ffn") for layer in range(self.num_layers))
        return before_mixer + before_ffn

    def tensors(self) -> list[Tensor]:
        """Every tensor of the checkpoint, equal ones counted together."""
        return [
            *self._kda_tensors(),
            *self._mla_tensors(),
            *self._dense_tensors(),
            *self._moe_tensors(),
            *self._residual_and_vocabulary_tensors(),
            *(self._vision_tensors(self.vision) if self.vision else ()),
        ]

    def total_bytes(self) -> int:
        """Bytes of all tensors: the checkpoint's ``total_size``."""
        return sum(tensor.num_bytes * tensor.count for tensor in self.tensors())

    def total_parameters(self) -> int:
        """Weights of all tensors, the vision tower included."""
        return sum(tensor.num_parameters * tensor.count for tensor in self.tensors())

    def active_parameters(self) -> int:
        """Weights that one token of text reads: LM head counted, embedding table and vision not."""
        total = 0
        for tensor in self.tensors():
            if tensor.group == "experts":
                total += tensor.num_parameters * tensor.count // self.moe.num_experts * self.moe.top_k
            elif tensor.group not in ("embedding", "vision"):
                total += tensor.num_parameters * tensor.count
        return total

    def _check_layer(self, layer: int) -> None:
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"

    def _kda_tensors(self) -> Iterator[Tensor]:
        kda, hidden, count = self.kda, self.hidden_size, len(self.kda_layers)
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

    def _mla_tensors(self) -> Iterator[Tensor]:
        mla, hidden, count = self.mla, self.hidden_size, len(self.mla_layers)
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

    def _dense_tensors(self) -> Iterator[Tensor]:
        hidden, width, count = self.hidden_size, self.dense_intermediate, self.num_dense_layers
        prefix = "language_model.model.layers.*.mlp."
        yield _tensor("dense", f"{prefix}gate_proj.weight", (width, hidden), count)
        yield _tensor("dense", f"{prefix}up_proj.weight", (width, hidden), count)
        yield _tensor("dense", f"{prefix}down_proj.weight", (hidden, width), count)

    def _moe_tensors(self) -> Iterator[Tensor]:
        moe, hidden, count = self.moe, self.hidden_size, self.num_moe_layers
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

    def _residual_and_vocabulary_tensors(self) -> Iterator[Tensor]:
        hidden, count = self.hidden_size, self.num_layers
        layer = "language_model.model.layers.*."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _tensor("residual", f"{layer}{norm}.weight", (hidden,), count)
        for call_site in ("self_attention_res", "mlp_res"):
            yield _tensor("residual", f"{layer}{call_site}_norm.weight", (hidden,), count)
            yield _tensor("residual", f"{layer}{call_site}_proj.weight", (1, hidden), count)
        yield _tensor("residual", "language_model.model.output_attn_res_norm.weight", (hidden,), 1)
        yield _tensor("residual", "language_model.model.output_attn_res_proj.weight", (1, hidden), 1)
        yield _tensor("residual", "language_model.model.norm.weight", (hidden,), 1)
        yield _tensor("embedding", "language_model.model.embed_tokens.weight", (self.vocab_size, hidden), 1)
        yield _tensor("lm_head", "language_model.lm_head.weight", (self.vocab_size, hidden), 1)

    def _vision_tensors(self, vision: VisionShape) -> Iterator[Tensor]:
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
        yield _tensor("vision", "mm_projector.proj.2.weight", (self.hidden_size, vision.merged_size), 1)
        yield _tensor("vision", "mm_projector.post_norm.weight", (self.hidden_size,), 1)


def _tensor(group: str, name: str, shape: tuple[int, ...], count: int, dtype: str = "bfloat16") -> Tensor:
    """An unquantised tensor: as many weights as elements."""
    return Tensor(
        name=name, group=group, shape=shape, dtype=dtype, num_parameters=math.prod(shape), count=count
    )


def load_architecture(path: str | Path | None = None) -> Architecture:
    """Read a ``config.json`` of the Kimi K3 family, or a folder that holds one; None is the shipped K3.

    The file may nest the language model under ``text_config``, as the release does, or be that part alone;
    without ``vision_config`` the vision tower is left out of the totals.

    Raises:
        UserError: the file cannot be read, is not JSON, lacks a field, or holds a value that is not
            supported; the message names the field, what it was and what is accepted.
    """
    if path is None:
        return _load_shipped()
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        return _read_architecture(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}); give a config.json") from error
    except ValueError as error:
        # A path with a null byte raises a bare ValueError.
        if isinstance(error, UserError):
            raise
        raise UserError(f"{str(file)!r}: not a path ({error}); give a config.json") from error


@lru_cache(maxsize=1)
def _load_shipped() -> Architecture:
    return _read_architecture(SHIPPED_CONFIG)


def _read_architecture(file: Path) -> Architecture:
    document = _read_json(file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    top = _Fields(source=str(file), path="", values=document)
    if "text_config" in document:
        top.one_of("model_type", ("kimi_k3",))
    else:
        top.one_of("model_type", ("kimi_k3", "kimi_linear"))
    text = top.section("text_config") if document["model_type"] == "kimi_k3" else top
    text.one_of("model_type", ("kimi_linear",))
    return _build(name, top, text)


def _read_json(file: Path) -> dict[str, object]:
    if not file.exists():
        raise UserError(f"{file}: no such file; give a config.json or a folder that holds one")
    if not file.is_file():
        raise UserError(f"{file}: not a regular file; give a config.json or a folder that holds one")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise UserError(
            f"{file}: {file.stat().st_size} bytes; a config.json of up to {_MAX_CONFIG_BYTES} is accepted"
        )
    try:
        document = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start}); a JSON config is accepted") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}: not valid JSON ({error.msg}, line {error.lineno}, column {error.colno}); truncated?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a usable JSON config; a config.json is accepted") from error
    if not isinstance(document, dict):
        raise UserError(
            f"{file}: holds a JSON {_json_type(document)}; an object with the model's fields is accepted"
        )
    return document


def _build(name: str, top: _Fields, text: _Fields) -> Architecture:
    _check_variant(top, text)
    hidden_size = text.positive_int("hidden_size")
    num_layers = text.positive_int("num_hidden_layers")
    linear = text.section("linear_attn_config")
    kda_layers, mla_layers = _layer_split(linear, num_layers)
    linear.one_of("use_full_rank_gate", (True,))
    head_dim = linear.positive_int("head_dim")
    kda = KdaShape(
        num_heads=linear.positive_int("num_heads"),
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        conv_width=linear.positive_int("short_conv_kernel_size"),
        decay_rank=head_dim,  # the release's f_a and f_b meet at the head width
    )
    num_heads = text.positive_int("num_attention_heads")
    text.one_of("num_key_value_heads", (num_heads,))
    mla = MlaShape(
        num_heads=num_heads,
        q_lora_rank=text.positive_int("q_lora_rank"),
        kv_lora_rank=text.positive_int("kv_lora_rank"),
        qk_nope_head_dim=text.positive_int("qk_nope_head_dim"),
        qk_rope_head_dim=text.positive_int("qk_rope_head_dim"),
        v_head_dim=text.positive_int("v_head_dim"),
    )
    return Architecture(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=text.positive_int("vocab_size"),
        rms_norm_eps=text.small_float("rms_norm_eps"),
        max_position_embeddings=text.positive_int("max_position_embeddings"),
        kda_layers=kda_layers,
        mla_layers=mla_layers,
        kda=kda,
        mla=mla,
        attn_res_block_size=text.positive_int("attn_res_block_size"),
        moe=_moe_shape(top, text, num_layers),
        dense_intermediate=text.positive_int("intermediate_size"),
        vision=_vision_shape(top, hidden_size) if "vision_config" in top.values else None,
    )


def _check_variant(top: _Fields, text: _Fields) -> None:
    """Refuse what would change the work of a decode step without showing in the shapes."""
    text.one_of("hidden_act", ("situ",))
    text.one_of("mla_use_nope", (True,))
    text.one_of("mla_use_output_gate", (True,))
    text.one_of("latent_moe_use_norm", (True,))
    text.one_of("tie_word_embeddings", (False,))
    text.one_of("moe_layer_freq", (1,))
    text.one_of("num_expert_group", (1,))
    for fields in (text, top):
        name = "torch_dtype" if "torch_dtype" in fields.values else "dtype"
        if fields is text or name in fields.values:
            fields.one_of(name, ("bfloat16",))


def _layer_split(linear: _Fields, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """KDA and MLA layers from zero; the config counts from one and must name every layer once."""
    kda = linear.positive_ints("kda_layers")
    mla = linear.positive_ints("full_attn_layers")
    named = sorted(kda + mla)
    if len(named) != num_layers or named != list(range(1, num_layers + 1)):
        # Sorted, so the first entry that is not its own position is repeated, too large, or follows a gap.
        wrong = next((place for place, layer in enumerate(named, 1) if layer != place), num_layers + 1)
        raise UserError(
            f"{linear.source}: {linear.path}.kda_layers and full_attn_layers name {len(named)} layers, wrong "
            f"from layer {wrong} on; each of 1 to {num_layers} (num_hidden_layers) in exactly one is accepted"
        )
    return tuple(layer - 1 for layer in sorted(kda)), tuple(layer - 1 for layer in sorted(mla))


def _moe_shape(top: _Fields, text: _Fields, num_layers: int) -> MoeShape:
    # transformers moves the quantisation to the top level when it saves a config again.
    owner = text if "quantization_config" in text.values else top
    quantization = owner.section("quantization_config")
    quantization.one_of("format", ("mxfp4-pack-quantized",))
    weights = quantization.section("config_groups").section("group_0").section("weights")
    weights.one_of("num_bits", (4,))
    weights.one_of("group_size", (32,))
    num_experts = text.integer("num_experts", 1, _MAX_EXPERTS)
    num_shared_experts = text.integer("num_shared_experts", 0, 1024)
    expert_intermediate = text.positive_int("moe_intermediate_size")
    latent_size = text.positive_int("routed_expert_hidden_size")
    for field, value in (
        ("moe_intermediate_size", expert_intermediate),
        ("routed_expert_hidden_size", latent_size),
    ):
        if value % 32:
            text.refuse(field, value, "a multiple of 32, the MXFP4 scale group,")
    return MoeShape(
        num_experts=num_experts,
        top_k=text.integer("num_experts_per_token", 1, num_experts),
        latent_size=latent_size,
        expert_intermediate=expert_intermediate,
        num_shared_experts=num_shared_experts,
        shared_intermediate=num_shared_experts * expert_intermediate,
        first_moe_layer=text.integer("first_k_dense_replace", 0, num_layers),
    )


def _vision_shape(top: _Fields, hidden_size: int) -> VisionShape:
    vision = top.section("vision_config")
    for bias in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        vision.one_of(bias, (False,))
    vision.one_of("text_hidden_size", (hidden_size,))
    merge = vision.positive_ints("merge_kernel_size")
    return VisionShape(
        hidden_size=vision.positive_int("vt_hidden_size"),
        qkv_size=vision.positive_int("qkv_hidden_size"),
        intermediate_size=vision.positive_int("vt_intermediate_size"),
        num_layers=vision.positive_int("vt_num_hidden_layers"),
        patch_size=vision.positive_int("patch_size"),
        position_rows=vision.positive_int("init_pos_emb_height"),
        position_columns=vision.positive_int("init_pos_emb_width"),
        merged_size=math.prod(merge) * vision.positive_int("mm_hidden_size"),
    )


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """One JSON object of the config, with the path that errors name."""

    source: str
    path: str
    values: Mapping[str, object]

    def section(self, name: str) -> _Fields:
        value = self._get(name)
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return _Fields(source=self.source, path=self._dotted(name), values=value)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, value, f"an integer from {low} to {high}")
        return value

    def positive_int(self, name: str) -> int:
        return self.integer(name, 1, _MAX_DIMENSION)

    def positive_ints(self, name: str) -> list[int]:
        values = self._get(name)
        if not isinstance(values, list):
            self.refuse(name, values, "a list of positive integers")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_DIMENSION:
                self.refuse(f"{name} entry", value, "a positive integer")
        return values

    def small_float(self, name: str) -> float:
        value = self._get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
            self.refuse(name, value, "a number above 0 and below 1")
        return float(value)

    def one_of(self, name: str, accepted: tuple[object, ...]) -> None:
        value = self._get(name)
        if not any(type(value) is type(choice) and value == choice for choice in accepted):
            self.refuse(name, value, " or ".join(json.dumps(choice) for choice in accepted))

    def refuse(self, name: str, value: object, accepted: str) -> NoReturn:
        shown = "missing" if value is _MISSING else json.dumps(value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        raise UserError(f"{self.source}: {self._dotted(name)} is {shown}; {accepted} is accepted")

    def _get(self, name: str) -> object:
        return self.values.get(name, _MISSING)

    def _dotted(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
    return names.get(type(value), "null")
