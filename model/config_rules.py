"""What a ``config.json`` must say to be of the family that is modelled; all that it says otherwise is one answer.

Refused is also what would change the work of a decode step without showing in the shapes: another activation, quantised
attention, sparse attention. Fields that change no work are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

from pydantic import Field

from k3sim.model.documents.document import Document
from k3sim.model.documents.fields import OpenRecord, checked, number, one_of, whole
from k3sim.model.documents.lines import Keys

MOST_LAYERS = 4096
_SIZE = whole(1, 2**31 - 1)
_YES, _NO = one_of(True), one_of(False)

#: Fields that change what a step does, and what they stand for. Present and not off, they are refused by name.
NOT_MODELLED: Mapping[str, str] = {
    "dsa_config": "sparse attention",
    "index_topk": "sparse attention",
    "index_n_heads": "sparse attention",
    "sliding_window": "attention within a window",
    "attention_chunk_size": "attention within chunks",
}
#: Parts that stay in bf16, with names of matrices in them: none may be quantised.
UNQUANTISED: Mapping[str, tuple[str, ...]] = {
    "self_attn": tuple(
        f"language_model.model.layers.{layer}.self_attn.{matrix}"
        for layer in (0, 3)
        for matrix in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_b_proj")
    ),
    "shared_experts": tuple(
        f"language_model.model.layers.1.block_sparse_moe.shared_experts.{matrix}"
        for matrix in ("gate_proj", "up_proj", "down_proj")
    ),
    "mlp": tuple(f"language_model.model.layers.0.mlp.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")),
    "lm_head": ("language_model.lm_head",),
}


class LinearAttention(OpenRecord):
    """KDA, and which layers have it; layers count from one."""

    kda_layers: list[Annotated[int, _SIZE]]
    full_attn_layers: list[Annotated[int, _SIZE]]
    use_full_rank_gate: Annotated[bool, _YES]
    head_dim: Annotated[int, _SIZE]
    num_heads: Annotated[int, _SIZE]
    # A convolution of width 1 has no state: the kernels that update it would have nothing to do.
    short_conv_kernel_size: Annotated[int, whole(2, 1024)]


class TextConfig(OpenRecord):
    """The language model."""

    model_type: Annotated[str, one_of("kimi_linear")]
    hidden_act: Annotated[str, one_of("situ")]
    mla_use_nope: Annotated[bool, _YES]
    mla_use_output_gate: Annotated[bool, _YES]
    latent_moe_use_norm: Annotated[bool, _YES]
    tie_word_embeddings: Annotated[bool, _NO]
    moe_layer_freq: Annotated[int, one_of(1)]
    num_expert_group: Annotated[int, one_of(1)]
    hidden_size: Annotated[int, _SIZE]
    num_hidden_layers: Annotated[int, whole(1, MOST_LAYERS)]
    linear_attn_config: LinearAttention
    num_attention_heads: Annotated[int, _SIZE]
    num_key_value_heads: Annotated[int, _SIZE]
    q_lora_rank: Annotated[int, _SIZE]
    kv_lora_rank: Annotated[int, _SIZE]
    qk_nope_head_dim: Annotated[int, _SIZE]
    qk_rope_head_dim: Annotated[int, _SIZE]
    v_head_dim: Annotated[int, _SIZE]
    vocab_size: Annotated[int, _SIZE]
    rms_norm_eps: Annotated[float, number(1e-30, 0.999, accepted="a number above 0 and below 1")]
    max_position_embeddings: Annotated[int, _SIZE]
    attn_res_block_size: Annotated[int, _SIZE]
    intermediate_size: Annotated[int, _SIZE]
    num_experts: Annotated[int, whole(1, 2**16)]
    # Without shared experts their stages would have no work, and the paths always run them.
    num_shared_experts: Annotated[int, whole(1, 1024)]
    num_experts_per_token: Annotated[int, whole(1, 2**16)]
    moe_intermediate_size: Annotated[int, _SIZE]
    routed_expert_hidden_size: Annotated[int, _SIZE]
    first_k_dense_replace: Annotated[int, whole(0, MOST_LAYERS)]


class VisionConfig(OpenRecord):
    """The vision tower, which counts in the totals of the checkpoint."""

    attn_bias: Annotated[bool, _NO]
    linear_bias: Annotated[bool, _NO]
    patch_embed_proj_bias: Annotated[bool, _NO]
    text_hidden_size: Annotated[int, _SIZE]
    merge_kernel_size: Annotated[list[Annotated[int, _SIZE]], Field(min_length=1, max_length=4)]
    vt_hidden_size: Annotated[int, _SIZE]
    qkv_hidden_size: Annotated[int, _SIZE]
    vt_intermediate_size: Annotated[int, _SIZE]
    vt_num_hidden_layers: Annotated[int, _SIZE]
    patch_size: Annotated[int, _SIZE]
    init_pos_emb_height: Annotated[int, _SIZE]
    init_pos_emb_width: Annotated[int, _SIZE]
    mm_hidden_size: Annotated[int, _SIZE]


class QuantisedWeights(OpenRecord):
    """Weights of the routed experts: MXFP4."""

    num_bits: Annotated[int, one_of(4)]
    group_size: Annotated[int, one_of(32)]
    type: Annotated[str, one_of("float")] = "float"


class QuantisedGroup(OpenRecord):
    weights: QuantisedWeights


class QuantisedGroups(OpenRecord):
    group_0: QuantisedGroup


class Quantisation(OpenRecord):
    """What compressed-tensors writes."""

    quant_method: Annotated[str, one_of("compressed-tensors")] = "compressed-tensors"
    format: Annotated[str, one_of("mxfp4-pack-quantized")]
    config_groups: QuantisedGroups


def check_config(document: Document) -> None:
    """Note every fault of a config. Another family is told so, and nothing else."""
    top: dict[str, Any] = document.value
    nested = "text_config" in top or top.get("model_type") == "kimi_k3"
    families = ("kimi_k3",) if "text_config" in top else ("kimi_k3", "kimi_linear")
    family = top.get("model_type")
    if "model_type" in top and family not in families:
        document.fault(("model_type",), f"is {_shown(family)}, accepted: {' or '.join(map(_shown, families))}")
        if not (isinstance(family, str) and family.startswith("kimi")):
            return
    elif "model_type" not in top and nested:
        document.fault((), f"lacks model_type ({_shown(families[0])})")
    at: Keys = ("text_config",) if nested else ()
    text = top.get("text_config") if nested else top
    if not isinstance(text, dict):
        says = "lacks text_config (an object)" if text is None else f"is {_shown(text)}, accepted: an object"
        document.fault(() if text is None else at, says)
        return
    checked(document, TextConfig, at)
    _check_text(document, text, at)
    _check_quantisation(document, top, text, at)
    if "vision_config" in top and checked(document, VisionConfig, ("vision_config",)) is not None:
        _same(document, ("vision_config", "text_hidden_size"), top["vision_config"]["text_hidden_size"],
              text.get("hidden_size"), "hidden_size")  # fmt: skip
    for keys, fields in ((at, text), ((), top)) if nested else (((), top),):
        for name, what in NOT_MODELLED.items():
            if fields.get(name) not in (None, False, 0, [], {}):
                document.fault((*keys, name), f"is set: {what} is not modelled; accepted: a config without it")
        name = "torch_dtype" if "torch_dtype" in fields else "dtype"
        if name not in fields and fields is text:
            document.fault(keys, 'lacks dtype ("bfloat16")')
        elif name in fields and fields[name] != "bfloat16":
            document.fault((*keys, name), f'is {_shown(fields[name])}, accepted: "bfloat16"')


def _shown(value: Any) -> str:
    from k3sim.model.documents.document import shown

    return shown(value)


def _check_text(document: Document, text: Mapping[str, Any], at: Keys) -> None:
    """What fields say together, where each of them is good."""
    _same(document, (*at, "num_key_value_heads"), text.get("num_key_value_heads"), text.get("num_attention_heads"),
          "num_attention_heads")  # fmt: skip
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if _is_whole(text.get(name)) and text[name] > 0 and text[name] % 32:
            document.fault((*at, name), f"is {text[name]}, accepted: a multiple of 32, the MXFP4 scale group")
    for name, most in (("num_experts_per_token", "num_experts"), ("first_k_dense_replace", "num_hidden_layers")):
        value: Any = text.get(name)
        limit: Any = text.get(most)
        if _is_whole(value) and _is_whole(limit) and value > limit > 0:
            document.fault((*at, name), f"is {_shown(value)}, accepted: at most {_shown(limit)} ({most})")
    linear: Any = text.get("linear_attn_config")
    num_layers: Any = text.get("num_hidden_layers")
    if isinstance(linear, dict) and _is_whole(num_layers) and 0 < num_layers <= MOST_LAYERS:
        lists = [linear.get(name) for name in ("kda_layers", "full_attn_layers")]
        if all(isinstance(one, list) and all(map(_is_whole, one)) for one in lists):
            named = sorted(lists[0] + lists[1])  # type: ignore[operator]
            # Sorted, so the first entry that is not its own position is repeated, too large, or follows a gap.
            wrong = next((place for place, layer in enumerate(named, 1) if layer != place), len(named) + 1)
            if named != list(range(1, num_layers + 1)):
                document.fault(
                    (*at, "linear_attn_config"),
                    f"names {len(named)} layers in kda_layers and full_attn_layers, wrong from layer {wrong} on, "
                    f"accepted: each of 1 to {num_layers} (num_hidden_layers) in exactly one",
                )


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _same(document: Document, keys: Keys, value: Any, other: Any, name: str) -> None:
    if _is_whole(value) and _is_whole(other) and value > 0 and value != other:
        document.fault(keys, f"is {_shown(value)}, accepted: {_shown(other)} ({name})")


def _check_quantisation(document: Document, top: Mapping[str, Any], text: Mapping[str, Any], at: Keys) -> None:
    """Routed experts in MXFP4 and all else in bf16, or a fault that says what is quantised otherwise."""
    # transformers moves the quantisation to the top level when it saves a config again.
    owner, keys = (text, at) if "quantization_config" in text else (top, ())
    given = owner.get("quantization_config")
    keys = (*keys, "quantization_config")
    if not isinstance(given, dict):
        says = "lacks quantization_config (MXFP4 experts)"
        document.fault(
            keys[:-1] if given is None else keys, says if given is None else f"is {_shown(given)}, accepted: an object"
        )
        return
    if given.get("quant_method", "compressed-tensors") != "compressed-tensors":
        document.fault(
            (*keys, "quant_method"),
            f'is {_shown(given["quant_method"])}, accepted: "compressed-tensors" with format "mxfp4-pack-quantized"',
        )
        return
    if checked(document, Quantisation, keys) is None:
        return
    for name in given["config_groups"]:
        if name != "group_0":
            document.fault(
                (*keys, "config_groups", name),
                "quantises more than the routed experts, which is not modelled; accepted: group_0 alone",
            )
    targets = _patterns(given["config_groups"]["group_0"].get("targets", ["Linear"]))
    ignored = _patterns(given.get("ignore", []))
    quantised = [
        part
        for part, matrices in UNQUANTISED.items()
        if any(_matches(targets, one) and not _matches(ignored, one) for one in matrices)
    ]
    if quantised:
        document.fault(
            (*keys, "ignore"),
            f"leaves {', '.join(quantised)} to be quantised, which is not modelled; accepted: patterns that name "
            f"{', '.join(UNQUANTISED)}",
        )


def _patterns(given: Any) -> list[str]:
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


def _matches(patterns: list[str], name: str) -> bool:
    """Whether one of compressed-tensors' patterns names a matrix: ``re:`` an expression, else a class or a name."""
    for one in patterns:
        if not one.startswith("re:"):
            if one == "Linear" or name == one or name.endswith(f".{one}"):
                return True
        # Of expressions only those are tried that cannot take long.
        elif re.fullmatch(r"[\w.\\*|()?:^$\[\]-]{1,200}", one[3:]) and one.count("*") <= 4 and ")*" not in one:
            try:
                if re.match(one[3:], name):
                    return True
            except re.error:
                continue
    return False
