"""What a ``config.json`` must say to be of a family that is modelled; all that it says otherwise is one answer.

A family is told by its fields, not by ``model_type``: Kimi-Linear and the inner config of Kimi K3 have the same, and
re-exports change it. Every field is used, or has no bearing (``config_fields.py``), or is a fault; a user may go on
without one (``ignored``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from k3sim.model.config_contradictions import MOST_LAYERS, check_grouped, check_together, same
from k3sim.model.config_fields import NO_BEARING, canonical
from k3sim.model.config_other_families import operators_of, used_fields
from k3sim.model.config_quantisation import Refused, check_group, reader_of
from k3sim.model.config_text import (
    DEEPSEEK,
    GROUPED,
    KIMI_K3,
    KIMI_LINEAR,
    MODEL_TYPES,
    family_of,
    quantisation_of,
    read_formats,
    spelling,
    text_of,
)
from k3sim.model.documents.document import Document
from k3sim.model.documents.fields import OpenRecord, checked, number, one_of, whole
from k3sim.model.documents.lines import Keys
from k3sim.model.weight_formats import WeightFormat

_SIZE = whole(1, 2**31 - 1)
_YES, _NO = one_of(True), one_of(False)

#: Fields that change what a step does, and what they stand for. Present and not off, they are refused by name.
NOT_MODELLED: Mapping[str, str] = {
    "sliding_window": "attention within a window",
    "attention_chunk_size": "attention within chunks",
    "index_topk_freq": "layers that share their chosen rows",
    "index_topk_pattern": "layers that share their chosen rows",
    "attention_bias": "a bias in attention",
    "mlp_bias": "a bias in the feed-forward part",
}
class LinearAttention(OpenRecord):
    """KDA, and which layers have it; layers count from one."""

    kda_layers: list[Annotated[int, _SIZE]]
    full_attn_layers: list[Annotated[int, _SIZE]]
    use_full_rank_gate: bool = False  # the gate goes through the width of a head
    head_dim: Annotated[int, _SIZE]
    num_heads: Annotated[int, _SIZE]
    short_conv_kernel_size: Annotated[int, whole(1, 1024)]


class FullRankLinearAttention(LinearAttention):
    """As Kimi K3 has it."""

    use_full_rank_gate: Annotated[bool, _YES]


class Indexer(OpenRecord):
    """Which cached rows attention reads. Names inside Kimi K3.1's ``dsa_config`` are assumed to be DeepSeek-V3.2's."""

    index_n_heads: Annotated[int, whole(1, 1024)]
    index_head_dim: Annotated[int, whole(1, 4096)]
    index_topk: Annotated[int, _SIZE]


class LinearConfig(OpenRecord):
    """Kimi-Linear: KDA with a gate of low rank, MLA without a gate, a plain residual, experts of the hidden state."""

    model_type: Annotated[str, one_of("kimi_linear")]
    hidden_act: Annotated[str, one_of("silu")]
    mla_use_nope: Annotated[bool, _YES]
    tie_word_embeddings: Annotated[bool, _NO] = False
    moe_layer_freq: Annotated[int, one_of(1)]
    num_expert_group: Annotated[int, _SIZE]
    hidden_size: Annotated[int, _SIZE]
    num_hidden_layers: Annotated[int, whole(1, MOST_LAYERS)]
    linear_attn_config: LinearAttention
    num_attention_heads: Annotated[int, _SIZE]
    num_key_value_heads: Annotated[int, _SIZE]
    q_lora_rank: Annotated[int, _SIZE] | None
    kv_lora_rank: Annotated[int, _SIZE]
    qk_nope_head_dim: Annotated[int, _SIZE]
    qk_rope_head_dim: Annotated[int, _SIZE]
    v_head_dim: Annotated[int, _SIZE]
    vocab_size: Annotated[int, _SIZE]
    rms_norm_eps: Annotated[float, number(1e-30, 0.999, accepted="a number above 0 and below 1")]
    intermediate_size: Annotated[int, _SIZE]
    num_shared_experts: Annotated[int, whole(0, 1024)] | None
    moe_intermediate_size: Annotated[int, _SIZE]
    first_k_dense_replace: Annotated[int, whole(0, MOST_LAYERS)]
    num_nextn_predict_layers: Annotated[int, one_of(0)] = 0


class DeepseekConfig(OpenRecord):
    """DeepSeek-V3 and R1, V3.2 with its indexer, Kimi-K2: MLA with rope in all layers, a plain residual."""

    hidden_act: Annotated[str, one_of("silu")]
    tie_word_embeddings: Annotated[bool, _NO] = False
    moe_layer_freq: Annotated[int, one_of(1)] = 1
    n_group: Annotated[int, _SIZE]
    topk_group: Annotated[int, _SIZE]
    topk_method: Annotated[str, one_of("noaux_tc")] = "noaux_tc"
    hidden_size: Annotated[int, _SIZE]
    num_hidden_layers: Annotated[int, whole(1, MOST_LAYERS)]
    num_attention_heads: Annotated[int, _SIZE]
    q_lora_rank: Annotated[int, _SIZE] | None
    kv_lora_rank: Annotated[int, _SIZE]
    qk_nope_head_dim: Annotated[int, _SIZE]
    qk_rope_head_dim: Annotated[int, _SIZE]
    v_head_dim: Annotated[int, _SIZE]
    vocab_size: Annotated[int, _SIZE]
    rms_norm_eps: Annotated[float, number(1e-30, 0.999, accepted="a number above 0 and below 1")] = 1e-6
    intermediate_size: Annotated[int, _SIZE]
    n_shared_experts: Annotated[int, whole(0, 1024)] | None
    stored_rotary_frequencies: bool = False  # no field of a release (data/README.md)
    moe_intermediate_size: Annotated[int, _SIZE]
    first_k_dense_replace: Annotated[int, whole(0, MOST_LAYERS)]
    num_nextn_predict_layers: Annotated[int, whole(0, 64)] = 0


class GroupedConfig(OpenRecord):
    """Llama, Qwen3 and Qwen3-MoE: grouped-query attention in all layers, all of them dense or all with experts."""

    model_type: Annotated[str, one_of(*MODEL_TYPES[GROUPED])]
    hidden_act: Annotated[str, one_of("silu")]
    tie_word_embeddings: Annotated[bool, _NO] = False
    use_sliding_window: Annotated[bool, _NO] = False
    decoder_sparse_step: Annotated[int, one_of(1)] = 1
    mlp_only_layers: Annotated[list[Any] | None, Field(max_length=0)] = None
    qkv_bias: Annotated[bool, _NO] = False
    use_qk_norm: bool | None = None  # where nothing is said, as the family has it
    shared_expert_intermediate_size: Annotated[int, one_of(0)] = 0
    hidden_size: Annotated[int, _SIZE]
    num_hidden_layers: Annotated[int, whole(1, MOST_LAYERS)]
    num_attention_heads: Annotated[int, _SIZE]
    num_key_value_heads: Annotated[int, _SIZE]
    head_dim: Annotated[int, whole(1, 4096)] | None = None
    vocab_size: Annotated[int, _SIZE]
    max_position_embeddings: Annotated[int, _SIZE]
    rms_norm_eps: Annotated[float, number(1e-30, 0.999, accepted="a number above 0 and below 1")] = 1e-6
    intermediate_size: Annotated[int, _SIZE]
    moe_intermediate_size: Annotated[int, _SIZE] | None = None


class TextConfig(OpenRecord):
    """The language model of Kimi K3."""

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
    linear_attn_config: FullRankLinearAttention
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
    num_shared_experts: Annotated[int, whole(0, 1024)]
    num_experts_per_token: Annotated[int, whole(1, 2**16)]
    moe_intermediate_size: Annotated[int, _SIZE]
    routed_expert_hidden_size: Annotated[int, _SIZE]
    first_k_dense_replace: Annotated[int, whole(0, MOST_LAYERS)]
    num_nextn_predict_layers: Annotated[int, one_of(0)] = 0


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


MODELS: Mapping[str, type[OpenRecord]] = {
    KIMI_K3: TextConfig, KIMI_LINEAR: LinearConfig, DEEPSEEK: DeepseekConfig, GROUPED: GroupedConfig,
}  # fmt: skip


def check_config(document: Document, ignored: Collection[str] = ()) -> None:
    """Note every fault of a config. Another family is told so, and nothing else.

    ``ignored``: names of fields that a user goes on without.
    """
    top: dict[str, Any] = document.value
    text, at = text_of(top)
    outer = top.get("model_type")
    if not isinstance(text, dict):
        says = "lacks text_config (an object)" if text is None else f"is {_shown(text)}, accepted: an object"
        document.fault(() if text is None else at, says)
        return
    family = family_of(text, outer)
    model, names = MODELS[family or KIMI_K3], MODEL_TYPES[family or KIMI_K3]
    if family is None or ("model_type" in top and at and outer not in names):
        if family is None and "linear_attn_config" not in text:
            every = [name for names_of_one in MODEL_TYPES.values() for name in names_of_one]
            says = f"is {_shown(outer)}, accepted: {' or '.join(map(_shown, every))}, and the fields of one of them"
            document.fault(("model_type",) if "model_type" in top else (), says if "model_type" in top else
                           f"lacks model_type, accepted: {' or '.join(map(_shown, every))}")  # fmt: skip
            _check_other_family(document, top, text, at, ignored)
            return
        document.fault(("model_type",), f"is {_shown(outer)}, accepted: {' or '.join(map(_shown, names))}")
        if not (isinstance(outer, str) and outer.startswith("kimi")):
            return
    elif "model_type" not in top and at:
        document.fault((), f"lacks model_type ({_shown(names[0])})")
    checked(document, model, at)
    if family == GROUPED:
        check_grouped(document, text, at)
    else:
        check_together(document, text, at)
        _check_indexer(document, text, at)
    formats = _check_quantisation(document, top, text, at, family or KIMI_K3)
    _check_depths(document, text, at, formats)
    if "vision_config" in top and family == KIMI_K3 and (
        checked(document, VisionConfig, ("vision_config",)) is not None
    ):
        same(document, ("vision_config", "text_hidden_size"), top["vision_config"]["text_hidden_size"],
              text.get("hidden_size"), "hidden_size")  # fmt: skip
    for keys, fields in ((at, text), ((), top)) if at else (((), top),):
        for name, what in NOT_MODELLED.items():
            if fields.get(name) not in (None, False, 0, [], {}) and name not in ignored:
                document.fault((*keys, name), f"is set: {what} is not modelled; accepted: a config without it")
        if fields is top and fields.get("tie_word_embeddings") not in (None, False):
            given = _shown(fields["tie_word_embeddings"])
            document.fault((*keys, "tie_word_embeddings"), f"is {given}, accepted: false")
        name = "torch_dtype" if "torch_dtype" in fields else "dtype"
        if name not in fields and fields is text and not (at and ({"dtype", "torch_dtype"} & top.keys())):
            document.fault(keys, 'lacks dtype ("bfloat16")')
        elif name in fields and fields[name] != "bfloat16":
            document.fault((*keys, name), f'is {_shown(fields[name])}, accepted: "bfloat16"')
    _check_unknown(document, top, text, at, model, ignored)


#: Fields that are read beside those of the families' models.
_READ = frozenset(
    {
        "model_type", "text_config", "vision_config", "quantization_config", "dsa_config", "dtype", "torch_dtype",
        "num_experts", "num_experts_per_token", "num_expert_group", "topk_group", "use_grouped_topk", "topk_method",
        "max_position_embeddings", "moe_router_activation_func", "num_nextn_predict_layers", "mla_use_output_gate",
        "tie_word_embeddings", "compression_config", "linear_attn_config", "mlp_layer_types", "indexer_types",
        "layer_types", "qk_head_dim", *Indexer.model_fields,
    }
)  # fmt: skip


def _check_unknown(
    document: Document,
    top: Mapping[str, Any],
    text: Mapping[str, Any],
    at: Keys,
    model: type[OpenRecord],
    ignored: Collection[str],
) -> None:
    """Fields that nothing reads and that are on no list, all in one fault; and ignored ones that are not there."""
    used = model.model_fields.keys() | _READ | NOT_MODELLED.keys() | NO_BEARING.keys()
    linear: Any = text.get("linear_attn_config")
    inside = linear if isinstance(linear, dict) else {}
    of_kda = LinearAttention.model_fields.keys() | NO_BEARING.keys()
    unknown = [
        name
        for fields, names in ((text, used), (top if at else {}, used), (inside, of_kda))
        for name in fields
        if canonical(name) not in names and name not in names and name not in ignored
    ]
    if unknown:
        listed = ", ".join(dict.fromkeys(_shown(name)[1:-1] for name in unknown[:40]))
        more = f" and {len(unknown) - 40} more" if len(unknown) > 40 else ""
        document.fault(
            at,
            f"has fields that may change work and are not known: {listed}{more}; "
            "accepted: --ignore-field NAME for each",
        )
    for name in ignored:
        if name not in {*text, *top, *inside}:
            document.fault((), f"has no field {_shown(name)[1:-1]}, which --ignore-field names")


def _check_other_family(
    document: Document, top: Mapping[str, Any], text: Mapping[str, Any], at: Keys, ignored: Collection[str]
) -> None:
    """Why a config of another family cannot be priced: its operators, precision, and fields that are not known."""
    found = operators_of(text)
    if not any(spelling(text, name) in text for name in ("num_experts", "num_experts_per_token")):
        found["no experts"] = ()
    if found:
        named = "; ".join(f"{what} ({', '.join(names)})" if names else what for what, names in found.items())
        document.fault(at, f"has what is not modelled: {named}")
    given, keys = quantisation_of(top, text, at)
    try:
        reader_of(given if isinstance(given, dict) else None)
    except Refused as refused:
        document.fault((*keys, *refused.at), str(refused))
    known = {name for model in MODELS.values() for name in model.model_fields}
    used = known | _READ | NOT_MODELLED.keys() | NO_BEARING.keys() | set(used_fields())
    unknown = [name for name in text if canonical(name) not in used and name not in used and name not in ignored]
    if unknown:
        listed = ", ".join(_shown(name)[1:-1] for name in unknown[:40])
        more = f" and {len(unknown) - 40} more" if len(unknown) > 40 else ""
        document.fault(at, f"has fields that are not known: {listed}{more}")


def _check_indexer(document: Document, text: Mapping[str, Any], at: Keys) -> None:
    """An indexer says all of itself, in ``dsa_config`` or beside the other fields."""
    if isinstance(text.get("dsa_config"), dict):
        if checked(document, Indexer, (*at, "dsa_config")) is not None:
            unknown = sorted(text["dsa_config"].keys() - Indexer.model_fields.keys() - {"layers", "full_attn_layers"})
            if unknown:
                document.fault((*at, "dsa_config"), f"has fields that are not known: {', '.join(unknown[:8])}")
        linear = text.get("linear_attn_config")
        full = linear.get("full_attn_layers") if isinstance(linear, dict) else None
        for name in ("layers", "full_attn_layers"):
            if name in text["dsa_config"] and text["dsa_config"][name] != full:
                document.fault((*at, "dsa_config", name), "is not the list of full attention layers")
    elif text.get("dsa_config") is not None:
        document.fault((*at, "dsa_config"), f"is {_shown(text['dsa_config'])}, accepted: an object")
    elif any(text.get(name) is not None for name in Indexer.model_fields):
        checked(document, Indexer, at)


def _shown(value: Any) -> str:
    from k3sim.model.documents.document import shown

    return shown(value)


def _check_quantisation(
    document: Document, top: Mapping[str, Any], text: Mapping[str, Any], at: Keys, family: str
) -> dict[str, WeightFormat]:
    """Formats of the matrices, or a fault; nothing where the layers are at fault already."""
    given, keys = quantisation_of(top, text, at)
    if given is None and family == KIMI_K3:
        document.fault(keys[:-1], "lacks quantization_config (MXFP4 experts)")
        return {}
    if given is not None and not isinstance(given, dict):
        document.fault(keys, f"is {_shown(given)}, accepted: an object")
        return {}
    try:
        if document.faults:
            reader_of(given)
            return {}
        return read_formats(top)
    except Refused as refused:
        document.fault((*keys, *refused.at), str(refused))
        return {}


def _check_depths(document: Document, text: Mapping[str, Any], at: Keys, formats: Mapping[str, WeightFormat]) -> None:
    """Weights that share a scale are whole groups of a matrix's depth."""
    if not formats:
        return
    width, latent = text.get("moe_intermediate_size"), text.get("routed_expert_hidden_size")
    for part, name, depth in (
        ("moe.expert_w2", "moe_intermediate_size", width),
        ("moe.expert_w13", "routed_expert_hidden_size" if latent else "hidden_size", latent or text["hidden_size"]),
    ):
        why = check_group(part, formats[part], depth) if part in formats and depth else None
        if why is not None:
            document.fault((*at, name), f"is {depth}, accepted: a multiple of {formats[part].group} ({why})")
