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
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture, KdaShape, MlaShape, MoeShape, VisionShape
from k3sim.model.documents.document import Accepted, read_json, shown_path
from k3sim.model.documents.kinds import Kind

SHIPPED_CONFIG = Path(__file__).parent / "data" / "kimi-k3.json"
ACCEPTED = Accepted(
    what="a config.json of the Kimi K3 family, or a folder that holds one", kinds=(Kind.CONFIG,), most_bytes=4 << 20
)


def load_architecture(path: str | Path | None = None) -> Architecture:
    """Read a ``config.json`` of the Kimi K3 family, or a folder that holds one; None is the shipped K3.

    The file may nest the language model under ``text_config``, as the release does, or be that part alone;
    without ``vision_config`` the vision tower is left out of the totals. A folder may also be a model's in the cache of
    Hugging Face, where it has one snapshot.

    Raises:
        UserError: the file cannot be read, is something else, or has faults: all of them in one line, each with field,
            value, what is accepted, and line.
    """
    if path is None:
        return _load_shipped()
    from k3sim.model.config_rules import check_config

    file = _config_in(Path(path))
    document = read_json(file, ACCEPTED)
    check_config(document)
    document.settle()
    return build(model_name(file), document.value)


@lru_cache(maxsize=1)
def _load_shipped() -> Architecture:
    return build(SHIPPED_CONFIG.stem, json.loads(SHIPPED_CONFIG.read_text(encoding="utf-8")))


def _config_in(path: Path) -> Path:
    """The ``config.json`` that a path means: itself, that of a folder, or of the only snapshot in a model's cache."""
    try:
        if not path.is_dir():
            return path
        if (path / "config.json").exists():
            return path / "config.json"
        snapshots = sorted(path.glob("snapshots/*/config.json"))
    except (OSError, ValueError):
        return path
    if len(snapshots) > 1:
        names = ", ".join(one.parent.name[:12] for one in snapshots[:5])
        raise UserError(f"{shown_path(path)}: holds {len(snapshots)} snapshots ({names}); give the folder of one")
    return snapshots[0] if snapshots else path / "config.json"


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


def build(name: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config that has been checked."""
    text = config.get("text_config", config)
    linear = text["linear_attn_config"]
    num_shared, width = text["num_shared_experts"], text["moe_intermediate_size"]
    return Architecture(
        name=name,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=float(text["rms_norm_eps"]),
        max_position_embeddings=text["max_position_embeddings"],
        # The config counts layers from one.
        kda_layers=tuple(layer - 1 for layer in sorted(linear["kda_layers"])),
        mla_layers=tuple(layer - 1 for layer in sorted(linear["full_attn_layers"])),
        kda=KdaShape(
            num_heads=linear["num_heads"],
            head_dim_k=linear["head_dim"],
            head_dim_v=linear["head_dim"],
            conv_width=linear["short_conv_kernel_size"],
            decay_rank=linear["head_dim"],  # the release's f_a and f_b meet at the head width
        ),
        mla=MlaShape(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"],
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
        ),
        attn_res_block_size=text["attn_res_block_size"],
        moe=MoeShape(
            num_experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            latent_size=text["routed_expert_hidden_size"],
            expert_intermediate=width,
            num_shared_experts=num_shared,
            shared_intermediate=num_shared * width,
            first_moe_layer=text["first_k_dense_replace"],
        ),
        dense_intermediate=text["intermediate_size"],
        vision=_vision(config["vision_config"]) if "vision_config" in config else None,
    )


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
