"""What a kernel belongs to: step, layer, sublayer. Spans that tile the step, for tracks above the kernels.

Kernels of neighbouring sublayers overlap, since launches come early and prefetches look ahead. So a sublayer is said to
run from when the one before it was done to when its own last kernel of the main stream is: what the step waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3sim.sim.timeline.timeline import KernelRun

# How the stages of the second half of a layer begin; all others of a layer belong to the mixer in front of it.
FFN_STAGES = ("attn_res.ffn", "moe.", "dense.")


@dataclass(frozen=True)
class Sublayer:
    """``[start_ps, end_ps)`` of the step. ``layer`` is -1 before the first layer, ``num_layers`` after the last."""

    layer: int
    name: str  # "kda", "mla", "moe", "dense"; "start" and "head" outside the layers
    start_ps: int
    end_ps: int


def sublayers(kernels: Iterable[KernelRun], num_layers: int, step_ps: int) -> list[Sublayer]:
    """The sublayers of one rank in order. They tile the step from 0 to ``step_ps``; empty ones are left out."""
    ends: dict[tuple[int, int, str], int] = {}
    for kernel in kernels:
        if kernel.stream != "main" and 0 <= kernel.layer < num_layers:
            continue
        key = _place(kernel, num_layers)
        ends[key] = max(ends.get(key, 0), kernel.end_ps)
    found: list[Sublayer] = []
    now = 0
    for number, (key, end_ps) in enumerate(sorted(ends.items())):
        end_ps = step_ps if number + 1 == len(ends) else min(end_ps, step_ps)
        if end_ps > now:
            found.append(Sublayer(key[0], key[2], now, end_ps))
            now = end_ps
    return found


def _place(kernel: KernelRun, num_layers: int) -> tuple[int, int, str]:
    """Layer, half of the layer, and name of the half."""
    if kernel.layer < 0:
        return kernel.layer, 0, "start"
    if kernel.layer >= num_layers:
        return kernel.layer, 0, "head"
    mixer, _, ffn = kernel.kind.partition("+")
    if kernel.stage.startswith(FFN_STAGES):
        return kernel.layer, 1, ffn or "ffn"
    return kernel.layer, 0, mixer or "mixer"
