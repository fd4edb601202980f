"""The busiest rank's share of the routed experts: how many it reads, and how many tokens they have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3sim.model.architecture import Architecture
from k3sim.model.layout import Layout
from k3sim.model.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What the experts of a rank have to do: different ones that are read, and rows (see ``dimensions``)."""

    experts: float
    rows: int


def rank_load(architecture: Architecture, layout: Layout, rows: int, routing: Routing) -> RankLoad:
    """The busiest rank's load of ``rows`` tokens of a replica."""
    moe, ep = architecture.moe, layout.ep
    if not moe.num_experts:
        return RankLoad(experts=0.0, rows=rows)
    distinct = routing.distinct_experts(moe.num_experts, moe.top_k, rows)
    if ep == 1:
        return RankLoad(experts=distinct, rows=rows)
    imbalance = layout.expert_imbalance
    if imbalance is None:
        busiest = routing.busiest_rank_experts(moe.num_experts, moe.top_k, rows, ep)
        tokens = routing.busiest_rank_tokens(moe.num_experts, moe.top_k, rows, ep)
    else:
        busiest = min(moe.num_experts / ep, max(1.0, distinct / ep * imbalance))
        tokens = min(float(rows * min(moe.top_k, moe.num_experts // ep)), rows * moe.top_k / ep * imbalance)
    return RankLoad(experts=busiest, rows=max(1, math.ceil(tokens / moe.top_k)))
