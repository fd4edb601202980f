"""What lies where in a ``config.json``: the language model in it, its family, its layers, the formats of its matrices.

Without the models of ``config_rules.py``, whose import costs more than the shipped config takes to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.model.config_fields import SPELLINGS
from k3sim.model.config_quantisation import MODULES, formats_of, reader_of
from k3sim.model.documents.lines import Keys
from k3sim.model.weight_formats import WeightFormat

KIMI_K3, KIMI_LINEAR, DEEPSEEK, GROUPED = "Kimi K3", "Kimi-Linear", "DeepSeek-V3", "grouped-query attention"
#: ``model_type`` of a family's files, the outer one where there are two. It decides nothing by itself, but for
#: grouped-query attention, whose files do not say of its norms.
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    KIMI_K3: ("kimi_k3", "kimi_k31"),
    KIMI_LINEAR: ("kimi_linear",),
    DEEPSEEK: ("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"),
    GROUPED: ("llama", "qwen3", "qwen3_moe"),
}


def family_of(text: Mapping[str, Any], outer: object) -> str | None:
    """The family whose fields a config has."""
    if "linear_attn_config" in text or outer in MODEL_TYPES[KIMI_K3]:
        beyond = ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate", "latent_moe_use_norm")
        is_k3 = outer in MODEL_TYPES[KIMI_K3] or any(name in text for name in beyond)
        return KIMI_K3 if is_k3 else KIMI_LINEAR
    if "kv_lora_rank" in text and "n_routed_experts" in text:
        return DEEPSEEK
    if "text_config" not in text and text.get("model_type") in MODEL_TYPES[GROUPED]:
        return GROUPED
    return None


def text_of(config: Mapping[str, Any]) -> tuple[Any, Keys]:
    """The language model's part of a config, and where it stands."""
    nested = "text_config" in config or config.get("model_type") in MODEL_TYPES[KIMI_K3]
    return (config.get("text_config"), ("text_config",)) if nested else (config, ())


def spelling(text: Mapping[str, Any], name: str) -> str:
    """The name under which a config has a field: the one used here where it has none of the others."""
    return next((one for one in (name, *SPELLINGS.get(name, ())) if one in text), name)


def quantisation_of(top: Mapping[str, Any], text: Mapping[str, Any], at: Keys) -> tuple[Any, Keys]:
    """What a config says of quantisation, and where: transformers moves it to the top when it saves one again."""
    owner, keys = (text, at) if "quantization_config" in text else (top, ())
    return owner.get("quantization_config"), (*keys, "quantization_config")


def layers_of(text: Mapping[str, Any]) -> dict[str, list[int]]:
    """Layers of each kind of sublayer, counted from zero, of a config without faults."""
    every = range(text["num_hidden_layers"])
    if "kv_lora_rank" not in text:
        moe = bool(text.get(spelling(text, "num_experts")))
        return {"kda": [], "mla": [], "gqa": [*every], "dense": [] if moe else [*every], "moe": [*every] if moe else []}
    linear = text.get("linear_attn_config")
    kda = sorted(layer - 1 for layer in linear["kda_layers"]) if linear else []
    first = text["first_k_dense_replace"]
    return {
        "kda": kda,
        "gqa": [],
        "mla": [layer for layer in every if layer not in set(kda)],
        "dense": [layer for layer in every if layer < first],
        "moe": [layer for layer in every if layer >= first],
    }


def read_formats(config: Mapping[str, Any]) -> dict[str, WeightFormat]:
    """Format of each matrix of ``config_quantisation.MODULES``, of a config without faults. Raises ``Refused``."""
    text, at = text_of(config)
    given, _ = quantisation_of(config, text, at)
    family = family_of(text, config.get("model_type"))
    nested_model = bool(at) or family == KIMI_K3
    return formats_of(
        reader_of(given),
        layers=layers_of(text),
        prefix="language_model." if nested_model else "",
        moe="block_sparse_moe" if family in (KIMI_K3, KIMI_LINEAR) else "mlp",
        parts=MODULES,
    )
