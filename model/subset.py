"""A part of the model that fits where the whole does not: what measured steps of fewer GPUs run."""

from __future__ import annotations

from dataclasses import replace

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture


def subset(architecture: Architecture, num_layers: int) -> Architecture:
    """The model's first ``num_layers`` layers, then its head.

    Raises UserError for fewer than one layer or more than there are.
    """
    if not 1 <= num_layers <= architecture.num_layers:
        raise UserError(f"layers: got {num_layers}, accepted: 1 to {architecture.num_layers}")
    return replace(
        architecture,
        num_layers=num_layers,
        kda_layers=tuple(layer for layer in architecture.kda_layers if layer < num_layers),
        mla_layers=tuple(layer for layer in architecture.mla_layers if layer < num_layers),
        moe=replace(architecture.moe, first_moe_layer=min(architecture.moe.first_moe_layer, num_layers)),
    )
