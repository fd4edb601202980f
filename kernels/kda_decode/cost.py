"""Cost of one KDA decode step: convolution, SiLU, L2 norms, decay gate, delta rule, gated RMSNorm.

``per_head`` is the public fused kernel: one block a head, the low-rank gate projected by a kernel before it.
``cluster`` splits the 128 value columns of a head over a cluster of eight blocks (they are independent in the
delta rule) and projects the low-rank gate itself; the blocks meet for the gate and for the RMSNorm.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.work import Barrier, Pass, Read, ReadKind, Work
from k3sim.model.program import Weight

CLUSTER_BLOCKS = 8
STATE_FLOPS_PER_ELEMENT = 8.0  # decay, k S, rank-one update, q S: four FMAs an element


def _state_reads(rows: int, state_bytes: int, conv_state_bytes: int, conv_weight_bytes: int) -> tuple[Read, ...]:
    # Slot indices are known when the step starts, so the state may be fetched before the projection is done.
    return (
        Read(region="", num_bytes=rows * (state_bytes + conv_state_bytes), kind=ReadKind.KV_STATE, early=True),
        Read(region="", num_bytes=conv_weight_bytes, early=True),
    )


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
                reads=_state_reads(rows, state_bytes, conv_state_bytes, conv_weight_bytes),
                written_bytes=rows * (state_bytes + conv_state_bytes),
                flops=STATE_FLOPS_PER_ELEMENT * rows * state_bytes / 4,
                # L2 norms of q and k together; one meeting a chunk of the state; the RMSNorm. The sums over a
                # state row stay within a warp.
                num_block_reductions=1 + 4 + 1,
            ),
        ),
    )


def cluster(
    weights: Sequence[Weight], *, rows: int, heads: int, state_bytes: int, conv_state_bytes: int, conv_weight_bytes: int
) -> Work:
    """A cluster of eight blocks a head and row; each holds 16 value columns of the state in registers.

    ``weights`` is the low-rank gate projection f_b, read before the wait.
    """
    return Work(
        num_blocks=CLUSTER_BLOCKS * rows * heads,
        threads_per_block=128,
        smem_bytes_per_block=16 * 1024,
        bytes_in_flight_per_block=12 * 1024,
        max_blocks_per_sm=8,
        passes=(
            Pass(
                num_dependent_loads=1,
                reads=(
                    *_state_reads(rows, state_bytes, conv_state_bytes, conv_weight_bytes),
                    *(Read(region=one.region, num_bytes=one.num_bytes, early=True) for one in weights),
                ),
                # Written after the update, but the two streams overlap block by block when there are many rows.
                written_bytes=rows * (state_bytes + conv_state_bytes),
                flops=sum(2.0 * rows * one.num_outputs * one.depth for one in weights),
                num_block_reductions=2,  # the gate's dot products, L2 norms of q and k
                barrier=Barrier.CLUSTER,  # each block projects a share of the gate and of q, k
                num_barriers=1,
            ),
            Pass(
                num_dependent_loads=1,  # output gate
                flops=STATE_FLOPS_PER_ELEMENT * rows * state_bytes / 4,
                num_block_reductions=2,  # k S and q S together, sum of squares
                barrier=Barrier.CLUSTER,
                num_barriers=1,
            ),
        ),
    )
