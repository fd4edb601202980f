"""Costs of public engines' KDA decode kernels: one block a head, or a head split over a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.kda_decode.cost import STATE_FLOPS_PER_ELEMENT, cluster, state_reads
from k3sim.kernels.work import Pass, Work, block_work
from k3sim.model.program import Weight


def per_head(
    weights: Sequence[Weight],
    *,
    rows: int,
    heads: int,
    state_bytes: int,
    conv_state_bytes: int,
    conv_weight_bytes: int,
    value_bytes: int = 4,
) -> Work:
    """One block a head and row; state ``[heads, 128, 128]`` fp32 streamed in four chunks of 32 rows."""
    return block_work(
        rows * heads,
        Pass(
            num_dependent_loads=2,  # projections and gate logits, then the output gate
            reads=state_reads(rows, state_bytes, conv_state_bytes, conv_weight_bytes),
            written_bytes=rows * (state_bytes + conv_state_bytes),
            flops=STATE_FLOPS_PER_ELEMENT * rows * state_bytes / value_bytes,
            # L2 norms of q and k together; one barrier a chunk of the state; the RMSNorm. The sums over a
            # state row stay within a warp.
            num_block_reductions=1 + 4 + 1,
        ),
        block=PUBLIC["kda_per_head"],
        in_flight_kib=32,
    )


def public_cluster(
    weights: Sequence[Weight],
    *,
    rows: int,
    heads: int,
    state_bytes: int,
    conv_state_bytes: int,
    conv_weight_bytes: int,
    value_bytes: int = 4,
) -> Work:
    """``cluster`` of an engine whose code is not known: its instructions are in a trip and a sum for each barrier."""
    work = cluster(
        weights,
        rows=rows,
        heads=heads,
        state_bytes=state_bytes,
        conv_state_bytes=conv_state_bytes,
        conv_weight_bytes=conv_weight_bytes,
        value_bytes=value_bytes,
    )
    prepare, update = work.passes
    return replace(work, passes=(replace(prepare, num_block_reductions=1), replace(update, num_dependent_loads=1)))
