"""Costs of public engines' kernels of the LatentMoE tail, and of the tasks of a megakernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.latent_tail.cost import BF16_BYTES, CLUSTER_BLOCKS, send
from k3sim.kernels.skinny_gemv.public import column_pair, ring
from k3sim.kernels.work import Barrier, Pass, Work
from k3sim.model.program import Weight


def _reduce(*, rows: int, hidden: int, latent: int, ranks: int, expert_rows: int, slots: int) -> Work:
    """``send``, then the slots of every rank and the latent RMSNorm over the cluster."""
    work = send((), rows=rows, hidden=hidden, latent=latent, ranks=ranks, expert_rows=expert_rows)
    collect = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=slots * (latent + hidden // ranks) * BF16_BYTES // CLUSTER_BLOCKS,
        num_block_reductions=1,
        barrier=Barrier.CLUSTER,
        num_barriers=1,
    )
    return replace(work, passes=(*work.passes, collect))


def reduce_push(
    weights: Sequence[Weight], *, rows: int, hidden: int, latent: int, ranks: int, expert_rows: int
) -> Work:
    """Every rank pushes its latent partial to all and each peer's slice of the shared partial to its owner."""
    return _reduce(rows=rows, hidden=hidden, latent=latent, ranks=ranks, expert_rows=expert_rows, slots=ranks)


def reduce_pull(
    weights: Sequence[Weight], *, rows: int, hidden: int, latent: int, ranks: int, expert_rows: int
) -> Work:
    """In-switch form: after a barrier over the ranks one load returns the sum, so one slot is read."""
    return _reduce(rows=rows, hidden=hidden, latent=latent, ranks=ranks, expert_rows=expert_rows, slots=1)


def up(weights: Sequence[Weight], *, rows: int) -> Work:
    """Column shard of the up-projection plus the shared expert's slice, sent to every peer."""
    work = column_pair(weights, rows=rows)
    return replace(work, sent_bytes_per_peer=rows * weights[0].num_outputs * BF16_BYTES)


def up_ring(weights: Sequence[Weight], *, rows: int) -> Work:
    """``up`` with the shard loaded before the dependency wait."""
    return ring(weights, rows=rows, sent_bytes_per_peer=rows * weights[0].num_outputs * BF16_BYTES)


def up_after_sum(weights: Sequence[Weight], *, rows: int, hidden: int, latent: int, ranks: int) -> Work:
    """Second half: every block sums the slots and normalises the latent itself, then ``up_ring``."""
    work = up_ring(weights, rows=rows)
    total = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * ranks * latent * BF16_BYTES,
        num_block_reductions=1,
    )
    multiply = replace(work.passes[0], num_dependent_loads=0, activation_bytes_per_block=0)
    return replace(work, passes=(total, multiply))
