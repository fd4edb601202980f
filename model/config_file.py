"""Reading a ``config.json`` of the Kimi K3 family.

The shipped ``data/kimi-k3.json`` keeps the release's own field names, so any ``config.json`` of the family can take its
place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture, KdaShape, MlaShape, MoeShape, VisionShape

SHIPPED_CONFIG = Path(__file__).parent / "data" / "kimi-k3.json"

_MAX_CONFIG_BYTES = 4 << 20
_MAX_DIMENSION = 2**31 - 1
_MAX_EXPERTS = 2**16
_MISSING = object()


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
