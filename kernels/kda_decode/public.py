"""Costs of public engines' KDA decode kernels: one block a head, or a head split over a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.kda_decode.cost import STATE_FLOPS_PER_ELEMENT, cluster, state_reads
from k3sim.kernels.work import Pass, Work
from k3sim.model.program import Weight


def per_head(
    weights: Sequence[Weight], *, rows: int, heads: int, state_bytes: int, conv_state_bytes: int, conv_weight_bytes: int
) -> Work:
    """One block a head and row; state ``[heads, 128, 128]`` fp32 streamed in four chunks of 32 rows."""
    return Work(
        num_blocks=rows * heads,
        threads_per_block=256,
        smem_bytes_per_block=36 * 1024,
        bytes_in_flight_per_block=32 * 1024,
        max_blocks_per_sm=4,
        passes=(
            Pass(
                num_dependent_loads=2,  # projections and gate logits, then the output gate
                reads=state_reads(rows, state_bytes, conv_state_bytes, conv_weight_bytes),
                written_bytes=rows * (state_bytes + conv_state_bytes),
                flops=STATE_FLOPS_PER_ELEMENT * rows * state_bytes / 4,
                # L2 norms of q and k together; one meeting a chunk of the state; the RMSNorm. The sums over a
                # state row stay within a warp.
                num_block_reductions=1 + 4 + 1,
            ),
        ),
    )


def public_cluster(
    weights: Sequence[Weight], *, rows: int, heads: int, state_bytes: int, conv_state_bytes: int, conv_weight_bytes: int
) -> Work:
    """``cluster`` of an engine whose code is not known: its instructions are in a trip and a sum for each meeting."""
    work = cluster(
        weights,
        rows=rows,
        heads=heads,
        state_bytes=state_bytes,
        conv_state_bytes=conv_state_bytes,
        conv_weight_bytes=conv_weight_bytes,
    )
    prepare, update = work.passes
    return replace(
        work, passes=(replace(prepare, num_block_reductions=1), replace(update, num_dependent_loads=1))
    )
