"""Cost of the AttnRes combine: a softmax mix of snapshots and the running prefix, then the sublayer's RMSNorm.

``single_block`` is the unfused kernel: one block a row reads all sources and reduces their logits together.
``consume`` is the fused form: a cluster of eight blocks polls peers' slots, sums them, folds the prefix into a
snapshot part that ``snapshot_sums`` prepared earlier, and normalises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
CLUSTER_BLOCKS = 8
SNAPSHOTS = "attn_res/snapshots"


def _parameters(hidden: int, *, early: bool) -> Read:
    # AttnRes norm, pseudo-query and the sublayer's norm, one [hidden] vector each.
    return Read(region="", num_bytes=3 * hidden * BF16_BYTES, early=early)


def single_block(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """Mix ``sources`` vectors (snapshots and prefix) of ``[rows, hidden]`` after adding the newest delta."""
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=rows,
        threads_per_block=512,
        smem_bytes_per_block=32 * 1024,
        bytes_in_flight_per_block=32 * 1024,
        max_blocks_per_sm=2,
        passes=(
            Pass(
                num_dependent_loads=2,  # prefix and delta, then the snapshots
                activation_bytes_per_block=2 * row_bytes,
                reads=(
                    _parameters(hidden, early=False),
                    Read(region=SNAPSHOTS, num_bytes=rows * (sources - 1) * row_bytes, kind=ReadKind.KV_STATE),
                ),
                # The logits of all sources together (sums of squares and dots), the softmax, the RMSNorm.
                num_block_reductions=3,
            ),
        ),
    )


def snapshot_sums(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """Running maximum, denominator and weighted sum over the snapshots alone, for two coming call sites."""
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=2 * rows,
        threads_per_block=512,
        smem_bytes_per_block=32 * 1024,
        bytes_in_flight_per_block=32 * 1024,
        max_blocks_per_sm=2,
        passes=(
            Pass(
                num_dependent_loads=1,
                reads=(
                    _parameters(hidden, early=True),
                    Read(region=SNAPSHOTS, num_bytes=rows * (sources - 1) * row_bytes, kind=ReadKind.KV_STATE),
                ),
                num_block_reductions=2,
            ),
        ),
    )


def consume(weights: Sequence[Weight], *, rows: int, hidden: int, slots: int) -> Work:
    """Sum ``slots`` arrived ``[rows, hidden]`` vectors with the residual, combine with the prefix, normalise.

    ``slots`` is the number of ranks for partial sums, and 1 where peers send disjoint shards of one vector.
    """
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=CLUSTER_BLOCKS * rows,
        threads_per_block=256,
        smem_bytes_per_block=16 * 1024,
        bytes_in_flight_per_block=16 * 1024,
        max_blocks_per_sm=4,
        passes=(
            Pass(
                num_dependent_loads=1,
                # The slots' shares of this block, the prefix and the prepared snapshot part.
                activation_bytes_per_block=(slots + 2) * row_bytes // CLUSTER_BLOCKS,
                reads=(_parameters(hidden, early=True),),
                num_block_reductions=1,  # sum of squares and dot with the pseudo-query together
                barrier=Barrier.CLUSTER,
                num_barriers=1,
            ),
            Pass(num_block_reductions=1, barrier=Barrier.CLUSTER, num_barriers=1),  # RMSNorm of the mix
        ),
    )


ROW_BLOCKS = 4  # of the project's own kernels, which split a row over a cluster


def _row_cluster(
    *, rows: int, hidden: int, num_snapshots: int, loaded_rows: int, num_barriers: int, registers: int
) -> Work:
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=ROW_BLOCKS * rows,
        threads_per_block=224,
        smem_bytes_per_block=8 * 1024,
        # Parameters and snapshots, all asked for at once.
        bytes_in_flight_per_block=(num_snapshots + 3) * row_bytes // ROW_BLOCKS,
        max_blocks_per_sm=4,
        registers_per_thread=registers,
        carve_out_percent=None,
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=loaded_rows * row_bytes // ROW_BLOCKS,
                reads=(
                    _parameters(hidden, early=True),
                    Read(
                        region=SNAPSHOTS,
                        num_bytes=rows * num_snapshots * row_bytes,
                        kind=ReadKind.KV_STATE,
                        early=True,
                    ),
                ),
                num_block_reductions=1,
                barrier=Barrier.CLUSTER,
                num_barriers=num_barriers,
            ),
        ),
    )


def combine(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """``single_block`` as the project runs it: four blocks a row, logits and then the norm over their cluster."""
    return _row_cluster(
        rows=rows, hidden=hidden, num_snapshots=sources - 1, loaded_rows=2, num_barriers=2, registers=128
    )


def snapshot_part(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """The snapshots' share of one call site: four blocks a row.

    The pseudo-query is widened, and so waited for, before the snapshots are asked for: two trips in series. The last is
    that of the fence behind its stores, which whoever joins it relies on.
    """
    work = _row_cluster(
        rows=rows, hidden=hidden, num_snapshots=sources - 1, loaded_rows=0, num_barriers=1, registers=80
    )
    (mix,) = work.passes
    return replace(work, passes=(replace(mix, num_dependent_loads=2), Pass(num_dependent_loads=1)))
