"""Reading a ``config.json`` of the Kimi K3 family.

The shipped ``data/kimi-k3.json`` keeps the release's own field names, so any ``config.json`` of the family can take its
place. A file of the user's is checked field by field (``config_rules.py``); the shipped one is checked by the tests and
read straight, since every command reads it and the models of the check cost 0.15 s.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture, KdaShape, MlaShape, MoeShape, VisionShape, usual_format
from k3sim.model.config_grouped import NO_KDA, build_grouped
from k3sim.model.config_quantisation import MODULES, TARGETS
from k3sim.model.config_text import (
    DEEPSEEK,
    GROUPED,
    KIMI_K3,
    family_of,
    layers_of,
    read_formats,
    spelling,
    text_of,
)
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind
from k3sim.model.hub_cache import cached_model, snapshot_config
from k3sim.model.weight_formats import FORMATS, WeightFormat

DATA = Path(__file__).parent / "data"
SHIPPED_CONFIG = DATA / "kimi-k3.json"
ACCEPTED = Accepted(
    what="a config.json of the Kimi K3 family, or a folder that holds one", kinds=(Kind.CONFIG,), most_bytes=4 << 20
)
QUANTISATION = Accepted(what="a hf_quant_config.json of ModelOpt", kinds=(Kind.CONFIG,), most_bytes=16 << 20)
LONGEST_REFUSAL = 2000  # characters: a config of another family has many reasons, and each is named
STATE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}


def load_architecture(
    path: str | Path | None = None,
    *,
    ignored: Sequence[str] = (),
    weights: Sequence[str] = (),
    state_dtype: str = "",
) -> Architecture:
    """Read a ``config.json``, or a folder that holds one; None is the shipped K3, a name that of another shipped model.

    The file may nest the language model under ``text_config``, as releases of Kimi do, or be that part alone; without
    ``vision_config`` the vision tower is left out of the totals. A folder may also be a model's in the cache of Hugging
    Face, which ``owner/name`` finds too. A ``hf_quant_config.json`` beside the config is read where that says nothing
    of quantisation.

    ``ignored``: fields that are left out. ``weights``: ``TARGET=FORMAT`` each. ``state_dtype``: of KDA's state.

    Raises:
        UserError: the file cannot be read, is something else, or has faults: all of them in one line, each with field,
            value, what is accepted, and line; or an override that names no matrix or format.
    """
    shipped = None if path is None else shipped_config(str(path))
    if path is None and not ignored:
        found = _load_shipped()
    elif shipped is not None and not ignored:
        found = build(str(path), json.loads(shipped.read_text(encoding="utf-8")))
    else:
        found = _load_file(Path(shipped or cached_model(str(path)) or path or SHIPPED_CONFIG), ignored)
    return overridden(found, weights, state_dtype) if weights or state_dtype else found


def shipped_config(name: str) -> Path | None:
    """The file of a shipped model by its name, where there is no file of the user's of that name."""
    return DATA / f"{name}.json" if name in shipped_models() and not os.path.exists(name) else None


def shipped_models() -> tuple[str, ...]:
    """Names of the shipped models."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


def _load_file(path: Path, ignored: Sequence[str]) -> Architecture:
    from k3sim.model.config_rules import check_config

    file = _config_in(path)
    document = read_json(file, ACCEPTED)
    document.longest = LONGEST_REFUSAL
    beside = file.with_name(file.name.removesuffix("config.json") + "hf_quant_config.json")
    text, _ = text_of(document.value)
    if isinstance(text, dict) and "quantization_config" not in {*document.value, *text} and beside.is_file():
        document.value["quantization_config"] = read_json(beside, QUANTISATION).value
    check_config(document, ignored)
    document.settle()
    return build(model_name(file), document.value, ignored)


def overridden(found: Architecture, weights: Sequence[str], state_dtype: str) -> Architecture:
    """``found`` with matrices in other formats and another type of KDA's state.

    Raises UserError for a word that is not ``TARGET=FORMAT``, and for what the model has not.
    """
    formats, notes = dict(found.formats), list(found.notes)
    targets = {**TARGETS, **{name: (name,) for name in MODULES}}
    for word in weights:
        target, equals, name = word.partition("=")
        if not equals or target not in targets or name not in FORMATS:
            raise UserError(
                f"weights {_printable(word)!r}: accepted: TARGET=FORMAT with a target of {', '.join(TARGETS)} or a "
                f"matrix ({', '.join(MODULES)}), and a format of {', '.join(FORMATS)}"
            )
        formats |= dict.fromkeys(targets[target], FORMATS[name])
        notes.append(f"weights of {target} are taken as {name}")
    if state_dtype:
        if state_dtype not in STATE_BYTES:
            raise UserError(f"unknown type of KDA's state {state_dtype!r}; accepted: {', '.join(STATE_BYTES)}")
        if not found.kda_layers:
            raise UserError(f"{found.name} has no KDA, and so no state of type {state_dtype}")
        notes.append(f"KDA's state is taken as {state_dtype}")
    return replace(
        found,
        formats=tuple((part, stored) for part, stored in formats.items() if stored != usual_format(part)),
        state_bytes_per_value=STATE_BYTES.get(state_dtype, found.state_bytes_per_value),
        notes=tuple(notes),
    )


@lru_cache(maxsize=1)
def _load_shipped() -> Architecture:
    return build(SHIPPED_CONFIG.stem, json.loads(SHIPPED_CONFIG.read_text(encoding="utf-8")))


def _config_in(path: Path) -> Path:
    """The ``config.json`` that a path means: itself, that of a folder, or of the snapshot in a model's cache."""
    try:
        if not path.is_dir():
            return path
        if (path / "config.json").exists():
            return path / "config.json"
    except (OSError, ValueError):
        return path
    return snapshot_config(path) or path / "config.json"


def model_name(file: Path) -> str:
    """What a model is called: by the cache's ``models--OWNER--NAME``, else by its folder as the path gives it."""
    path = Path(os.path.abspath(file))
    for part in reversed(path.parts[:-1]):
        cached = re.fullmatch(r"models--.+?--(.+)", part)
        if cached is not None:
            return _printable(cached.group(1))
    return _printable((path.parent.name or "model") if path.name == "config.json" else path.stem)


def _printable(name: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in name)


def build(name: str, config: Mapping[str, Any], ignored: Sequence[str] = ()) -> Architecture:
    """The architecture of a config that has been checked."""
    notes = [f"field {_printable(field)} of the config is ignored, as --ignore-field says" for field in ignored]
    text, _ = text_of(config)
    family = family_of(text, config.get("model_type"))
    if family == GROUPED:
        return build_grouped(name, text, _formats(config), tuple(notes))
    linear, num_shared = text.get("linear_attn_config"), text.get(spelling(text, "num_shared_experts")) or 0
    layers, width = layers_of(text), text["moe_intermediate_size"]
    indexer = text.get("dsa_config") or text
    has_indexer = indexer.get("index_n_heads") is not None
    if indexer is not text:
        notes.append("names inside dsa_config are assumed to be those of DeepSeek-V3.2's indexer")
    latent_size = text.get("routed_expert_hidden_size") or 0
    return Architecture(
        name=name,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=text[spelling(text, "max_position_embeddings")],
        kda_layers=tuple(layers["kda"]),
        mla_layers=tuple(layers["mla"]),
        kda=_kda(linear) if linear else NO_KDA,
        mla=MlaShape(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"] or 0,
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            has_gate=bool(text.get("mla_use_output_gate")),
            has_rope=not text.get("mla_use_nope", False),
            index_heads=indexer["index_n_heads"] if has_indexer else 0,
            index_dim=indexer["index_head_dim"] if has_indexer else 0,
            index_top_k=indexer["index_topk"] if has_indexer else 0,
        ),
        attn_res_block_size=text.get("attn_res_block_size", 0),
        moe=MoeShape(
            num_experts=text[spelling(text, "num_experts")],
            top_k=text[spelling(text, "num_experts_per_token")],
            latent_size=latent_size,
            expert_intermediate=width,
            num_shared_experts=num_shared,
            shared_intermediate=num_shared * width,
            first_moe_layer=text["first_k_dense_replace"],
            num_groups=text.get(spelling(text, "num_expert_group"), 1) if text.get("use_grouped_topk", True) else 1,
            top_k_groups=text.get("topk_group", 1),
        ),
        dense_intermediate=text["intermediate_size"],
        vision=_vision(config["vision_config"]) if "vision_config" in config and family == KIMI_K3 else None,
        formats=_formats(config),
        # Of a shipped model whose files were read: a frequency in bf16 for each two of a head's values, in each layer.
        unused_bytes=text["num_hidden_layers"] * (text["hidden_size"] // text["num_attention_heads"] // 2) * 2
        if text.get("stored_rotary_frequencies")
        else 0,
        num_mtp_layers=text.get("num_nextn_predict_layers", 0) if family == DEEPSEEK else 0,
        notes=tuple(notes),
    )


def _kda(linear: Mapping[str, Any]) -> KdaShape:
    dim = linear["head_dim"]
    return KdaShape(
        num_heads=linear["num_heads"],
        head_dim_k=dim,
        head_dim_v=dim,
        conv_width=linear["short_conv_kernel_size"],
        decay_rank=dim,  # the release's f_a and f_b meet at the head width, and so do g_a and g_b where there are
        gate_rank=0 if linear.get("use_full_rank_gate") else dim,
    )


def _formats(config: Mapping[str, Any]) -> tuple[tuple[str, WeightFormat], ...]:
    """Formats of the matrices that are in another than those of Kimi K3's release."""
    return tuple((part, stored) for part, stored in read_formats(config).items() if stored != usual_format(part))


def _vision(vision: Mapping[str, Any]) -> VisionShape:
    return VisionShape(
        hidden_size=vision["vt_hidden_size"],
        qkv_size=vision["qkv_hidden_size"],
        intermediate_size=vision["vt_intermediate_size"],
        num_layers=vision["vt_num_hidden_layers"],
        patch_size=vision["patch_size"],
        position_rows=vision["init_pos_emb_height"],
        position_columns=vision["init_pos_emb_width"],
        merged_size=math.prod(vision["merge_kernel_size"]) * vision["mm_hidden_size"],
    )
