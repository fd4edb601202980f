"""What a rank needs on its GPU, from the sizes of ``model.layout``, before anything is allocated; and what would fit.

Weights are those that the path reads, each once. The recurrent states have a slot more than sequences (the null slot),
which is counted; that the expert kernel's order pads the scales of w2, 0.6 % of the experts, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k3sim.errors import UserError
from k3sim.kernels.rank.state import PAGE_TOKENS, activation_shapes
from k3sim.kernels.rank.weights import EXPERT_MATRICES, matrices_of, vectors
from k3sim.model.architecture import Architecture
from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, accepted_tp
from k3sim.model.matrices import rank_matrices, rank_shapes
from k3sim.model.paths.own import has_own_experts
from k3sim.model.program import Program, build_program
from k3sim.model.step import Path
from k3sim.model.subset import subset

# CUDA context, code of the kernels, cuBLAS workspaces, graph and exchange slots. An assumption until measured.
RUNTIME_BYTES = 2 * 10**9


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Bytes of one rank."""

    weights: int
    experts: int  # of them, the routed experts
    states: int
    activations: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.states + self.activations + self.runtime


def needed_bytes(
    program: Program,
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    *,
    max_tokens: int,
    also: Sequence[Program] = (),
) -> Needed:
    """Memory of the rank that runs ``program`` with room for ``max_tokens`` cached rows a sequence.

    ``also``: further programs whose weights are kept beside, each matrix once.
    """
    matrices, shapes = rank_matrices(architecture, layout), rank_shapes(architecture, layout)
    dense = experts = 0
    for names in matrices_of(program, *also).values():
        for name in names:
            if name in EXPERT_MATRICES:
                experts += shapes.experts_owned * matrices[name].num_bytes
            else:
                dense += matrices[name].num_bytes
    for layer in (*program.layers, architecture.num_layers):
        for vector in vectors(architecture, layout, layer).values():
            dense += math.prod(vector.shape) * (4 if vector.fp32 else 2)
    rows = -(-workload.concurrency // layout.dp)
    row_bytes = architecture.mla.cache_width * KV_DTYPE_BYTES[workload.kv_dtype]
    cache = rows * math.ceil(max_tokens / PAGE_TOKENS) * PAGE_TOKENS * row_bytes
    state = (rows + 1) * (shapes.kda_state_bytes + shapes.kda_conv_state_bytes)
    layers = [architecture.mixer(layer) for layer in program.layers]
    activations = sum(
        math.prod(shape) * (2 if kind == "act" else 4)
        for shape, kind in activation_shapes(architecture, layout, workload).values()
    )
    return Needed(
        weights=dense + experts,
        experts=experts,
        states=layers.count("mla") * cache + layers.count("kda") * state,
        activations=activations,
    )


def check_memory(
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    path: Path,
    *,
    max_tokens: int,
    free_bytes: int,
    also: Sequence[Path] = (),
) -> Needed:
    """What the rank needs; UserError when the GPU has less free: how much is missing, and what would fit.

    ``also``: further paths whose weights are kept beside those of ``path``.
    """

    def needed(arch: Architecture, candidate: Layout) -> Needed:
        program, *others = (build_program(arch, candidate, workload, one) for one in (path, *also))
        return needed_bytes(program, arch, candidate, workload, max_tokens=max_tokens, also=others)

    wanted = needed(architecture, layout)
    if wanted.total <= free_bytes:
        return wanted

    def fits(arch: Architecture, candidate: Layout) -> bool:
        return needed(arch, candidate).total <= free_bytes

    advice = []
    layers = _most(architecture.num_layers, lambda count: fits(subset(architecture, count), layout))
    if layers:
        advice.append(f"--layers {layers}")
    if layout.pad_experts and fits(architecture, replace(layout, pad_experts=False)):
        advice.append("unpadded expert slices")
    for tp in accepted_tp(architecture):
        other = replace(layout, tp=tp, pad_experts=False)
        if tp > layout.tp and has_own_experts(architecture, tp) and fits(architecture, other):
            advice.append(f"--tp {tp}")
    missing = wanted.total - free_bytes
    raise UserError(
        f"{architecture.num_layers} layers of a {layout.tag} rank need {wanted.total / 1e9:.1f} GB, "
        f"{missing / 1e9:.1f} GB more than the {free_bytes / 1e9:.1f} GB that are free on the GPU; "
        + (f"{' or '.join(advice)} would fit" if advice else "lower --concurrency or --context")
    )


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest count up to ``limit`` that fits, 0 when one does not: more never fits where fewer does not."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
