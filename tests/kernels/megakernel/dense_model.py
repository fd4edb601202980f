"""K3 with KDA mixers and dense FFNs alone: what the megakernel runs on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.model.program import Program, build_program

RANKS = 2
MLA_CONTEXT = 150


def dense_architecture(num_layers: int, **changes: Any) -> Architecture:
    """K3 with dense layers alone, all of them with a KDA mixer."""
    k3 = load_architecture()
    return replace(
        k3,
        name="dense",
        num_layers=num_layers,
        kda_layers=tuple(range(num_layers)),
        mla_layers=(),
        moe=replace(k3.moe, first_moe_layer=num_layers),
        **changes,
    )


def program_of(architecture: Architecture, tp: int, *, context: int = 8192, rows: int = 1) -> Program:
    workload = Workload(concurrency=rows, context=context)
    return build_program(architecture, Layout(tp=tp), workload, find_path("fused", kernel_set="own"))
