"""What the fields of a ``config.json`` say together, where each of them is good: contradictions, all in one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from k3sim.model.config_text import KIMI_K3, family_of, spelling
from k3sim.model.documents.document import Document, shown
from k3sim.model.documents.lines import Keys

MOST_LAYERS = 4096


def check_together(document: Document, text: Mapping[str, Any], at: Keys) -> None:
    """What fields say together, where each of them is good."""
    same(document, (*at, "num_key_value_heads"), text.get("num_key_value_heads"), text.get("num_attention_heads"),
          "num_attention_heads")  # fmt: skip
    for name in ("num_experts", "num_experts_per_token"):
        spelled = spelling(text, name)
        if spelled not in text:
            document.fault(at, f"lacks {name}")
        elif not _is_whole(text[spelled]) or not 1 <= text[spelled] <= 2**16:
            document.fault((*at, spelled), f"is {shown(text[spelled])}, accepted: a whole number from 1 to 65536")
    context = spelling(text, "max_position_embeddings")
    if context not in text:
        if "linear_attn_config" not in text or family_of(text, document.value.get("model_type")) != KIMI_K3:
            document.fault(at, "lacks max_position_embeddings")
    elif not _is_whole(text[context]) or not 1 <= text[context] < 2**31:
        document.fault((*at, context), f"is {shown(text[context])}, accepted: a whole number from 1 to 2147483647")
    scoring = spelling(text, "moe_router_activation_func")
    if text.get(scoring, "sigmoid") not in ("sigmoid", "softmax"):
        document.fault((*at, scoring), f'is {shown(text[scoring])}, accepted: "sigmoid" or "softmax"')
    _check_layer_lists(document, text, at)
    for name, most in (("num_experts_per_token", "num_experts"), ("topk_group", "num_expert_group"),
                       ("first_k_dense_replace", "num_hidden_layers")):  # fmt: skip
        name, most = spelling(text, name), spelling(text, most)
        value: Any = text.get(name)
        limit: Any = text.get(most)
        if _is_whole(value) and _is_whole(limit) and value > limit > 0:
            document.fault((*at, name), f"is {shown(value)}, accepted: at most {shown(limit)} ({most})")
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


def check_grouped(document: Document, text: Mapping[str, Any], at: Keys) -> None:
    """Heads in whole groups of a whole size, and experts that say all of themselves or nothing."""
    heads, keys, hidden = (
        text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    if _is_whole(heads) and _is_whole(keys) and keys > 0 and heads % keys:
        document.fault((*at, "num_key_value_heads"), f"is {keys}, accepted: a divisor of {heads} (num_attention_heads)")
    if text.get("head_dim") is None and _is_whole(heads) and _is_whole(hidden) and heads > 0 and hidden % heads:
        document.fault((*at, "num_attention_heads"), f"is {heads}, accepted: a divisor of {hidden} (hidden_size)")
    experts, chosen = (spelling(text, name) for name in ("num_experts", "num_experts_per_token"))
    if text.get(experts) in (None, 0):
        if text.get(chosen):
            document.fault((*at, chosen), f"is {shown(text[chosen])}, and there is no {experts}")
        return
    for name, most in ((experts, 2**16), (chosen, text[experts])):
        value = text.get(name)
        limit = most if _is_whole(most) else 2**16
        if not _is_whole(value) or not 1 <= value <= limit:
            document.fault((*at, name), f"is {shown(value)}, accepted: a whole number from 1 to {limit}")
    if not text.get("moe_intermediate_size"):
        document.fault(at, "lacks moe_intermediate_size")


def _check_layer_lists(document: Document, text: Mapping[str, Any], at: Keys) -> None:
    """What re-saved files say again of every layer, and the query's width: as the other fields have it."""
    layers, first = text.get("num_hidden_layers"), text.get("first_k_dense_replace")
    if _is_whole(layers) and _is_whole(first) and 0 <= first <= layers <= MOST_LAYERS:
        for name, meant in (
            ("mlp_layer_types", ["dense"] * first + ["sparse"] * (layers - first)),
            ("indexer_types", ["full"] * layers),
            ("layer_types", ["deepseek_sparse_attention"] * layers),
        ):
            if text.get(name) is not None and text[name] != meant:
                document.fault((*at, name), f"is not {shown(meant[-1])} in each layer as the other fields say")
    parts = (text.get("qk_nope_head_dim"), text.get("qk_rope_head_dim"))
    if "qk_head_dim" in text and all(map(_is_whole, parts)):
        same(document, (*at, "qk_head_dim"), text["qk_head_dim"], sum(parts), "qk_nope_head_dim + qk_rope_head_dim")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def same(document: Document, keys: Keys, value: Any, other: Any, name: str) -> None:
    if _is_whole(value) and _is_whole(other) and value > 0 and value != other:
        document.fault(keys, f"is {shown(value)}, accepted: {shown(other)} ({name})")
