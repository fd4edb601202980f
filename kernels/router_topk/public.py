"""Cost of a public engine's selection behind a divided router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.router_topk.cost import select, selection
from k3sim.kernels.work import Work
from k3sim.model.program import Weight


def gather_select(weights: Sequence[Weight], *, rows: int, experts: int, latent: int) -> Work:
    """Polls the shards of logits and latent of every rank, selects, and quantises the latent: one block a row."""
    work = select(weights, rows=rows, experts=experts, latent=0)
    return replace(work, passes=(selection(experts=experts, latent=latent, num_quantise_reductions=1),))
