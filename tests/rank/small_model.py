"""A model of the family with real head sizes and everything else small: what the engine's tests run on the CPU."""

from __future__ import annotations

from dataclasses import replace

from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture

# KDA and MLA, the dense layer, snapshots at layers 0 and 3, two MLA layers at the end.
NUM_LAYERS = 6


def small_architecture() -> Architecture:
    k3 = load_architecture()
    return replace(
        k3,
        name="small",
        num_layers=NUM_LAYERS,
        hidden_size=192,
        vocab_size=256,
        kda_layers=(0, 1, 3),
        mla_layers=(2, 4, 5),
        kda=replace(k3.kda, num_heads=4),
        mla=replace(k3.mla, num_heads=4),
        attn_res_block_size=3,
        moe=replace(
            k3.moe, num_experts=32, latent_size=128, expert_intermediate=128, shared_intermediate=128,
        ),
        dense_intermediate=256,
    )  # fmt: skip
