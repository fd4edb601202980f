"""Costs of public engines' AttnRes kernels.

``single_block`` is the unfused kernel: one block a row reads all sources and reduces their logits together.
``consume`` is the fused form: a cluster of eight blocks polls peers' slots, sums them, folds the prefix into a
snapshot part that ``snapshot_sums`` prepared earlier, and normalises.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.attn_res.cost import BF16_BYTES, SNAPSHOTS, parameters
from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Work, block_work
from k3sim.model.program import Weight

CLUSTER_BLOCKS = 8


def _sources(rows: int, hidden: int, sources: int, *, early: bool) -> tuple[Read, Read]:
    """Parameters, which need no predecessor, and the snapshots."""
    snapshots = rows * (sources - 1) * hidden * BF16_BYTES
    return parameters(hidden, early=early), Read(region=SNAPSHOTS, num_bytes=snapshots, kind=ReadKind.KV_STATE)


def single_block(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """Mix ``sources`` vectors (snapshots and prefix) of ``[rows, hidden]`` after adding the newest delta."""
    row_bytes = hidden * BF16_BYTES
    return block_work(
        rows,
        Pass(
            num_dependent_loads=2,  # prefix and delta, then the snapshots
            activation_bytes_per_block=2 * row_bytes,
            reads=_sources(rows, hidden, sources, early=False),
            # The logits of all sources together (sums of squares and dots), the softmax, the RMSNorm.
            num_block_reductions=3,
        ),
        block=PUBLIC["attn_res"],
        in_flight_kib=32,
    )


def snapshot_sums(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """Running maximum, denominator and weighted sum over the snapshots alone, for two coming call sites."""
    return block_work(
        2 * rows,
        Pass(
            num_dependent_loads=1,
            reads=_sources(rows, hidden, sources, early=True),
            num_block_reductions=2,
        ),
        block=PUBLIC["snapshot_sums"],
        in_flight_kib=32,
    )


def consume(weights: Sequence[Weight], *, rows: int, hidden: int, slots: int) -> Work:
    """Sum ``slots`` arrived ``[rows, hidden]`` vectors with the residual, combine with the prefix, normalise.

    ``slots`` is the number of ranks for partial sums, and 1 where peers send disjoint shards of one vector.
    """
    row_bytes = hidden * BF16_BYTES
    return block_work(
        CLUSTER_BLOCKS * rows,
        Pass(
            num_dependent_loads=1,
            # The slots' shares of this block, the prefix and the prepared snapshot part.
            activation_bytes_per_block=(slots + 2) * row_bytes // CLUSTER_BLOCKS,
            reads=(parameters(hidden, early=True),),
            num_block_reductions=1,  # sum of squares and dot with the pseudo-query together
            barrier=Barrier.CLUSTER,
            num_barriers=1,
        ),
        Pass(num_block_reductions=1, barrier=Barrier.CLUSTER, num_barriers=1),  # RMSNorm of the mix
        block=PUBLIC["consume"],
        in_flight_kib=16,
    )
