"""Cost of one KDA decode step: convolution, SiLU, L2 norms, decay gate, delta rule, gated RMSNorm.

``cluster`` is the kernel of this folder: it projects the gate itself and splits the 128 value columns of a head over
four blocks, two, or none, by the heads of all rows; the blocks of a head have one barrier, for the RMSNorm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import Barrier, MachineCode, Pass, Read, ReadKind, Work
from k3sim.model.program import Weight

# Heads of all rows up to which a head is split over four and over two blocks (launch.py).
FOUR_BLOCKS_MAX, TWO_BLOCKS_MAX = 24, 192
STATE_FLOPS_PER_ELEMENT = 8.0  # decay, k S, rank-one update, q S: four FMAs an element


def state_reads(rows: int, state_bytes: int, conv_state_bytes: int, conv_weight_bytes: int) -> tuple[Read, ...]:
    """States and taps. Slot indices are known when the step starts: fetched before the projection is done."""
    return (
        Read(region="", num_bytes=rows * (state_bytes + conv_state_bytes), kind=ReadKind.KV_STATE, early=True),
        Read(region="", num_bytes=conv_weight_bytes, early=True),
    )


def cluster(
    weights: Sequence[Weight],
    *,
    rows: int,
    heads: int,
    state_bytes: int,
    conv_state_bytes: int,
    conv_weight_bytes: int,
    value_bytes: int = 4,
) -> Work:
    """A head's state in registers of its blocks, or (many rows) streamed through one block an SM.

    ``weights`` is the low-rank gate projection f_b, read before the wait like the state. A block's warps meet
    twice without a sum between them; the sum of squares goes through the warp and to the other blocks.
    """
    heads_of_all_rows = rows * heads
    blocks_per_head = 4 if heads_of_all_rows <= FOUR_BLOCKS_MAX else 2 if heads_of_all_rows <= TWO_BLOCKS_MAX else 1
    streams = blocks_per_head == 1
    built = footprint("kda_decode", f"heads6_fp32_{'stream' if streams else f'cluster{blocks_per_head}'}")
    return Work(
        num_blocks=blocks_per_head * heads_of_all_rows,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=192 * 1024 if streams else state_bytes // heads // blocks_per_head + 8 * 1024,
        max_blocks_per_sm=1 if streams else 2,
        registers_per_thread=built.allocated_registers,
        passes=(
            Pass(
                num_dependent_loads=1,
                reads=(
                    *state_reads(rows, state_bytes, conv_state_bytes, conv_weight_bytes),
                    *(Read(region=one.region, num_bytes=one.num_bytes, early=True) for one in weights),
                ),
                # Written after the update, but the two streams overlap block by block when there are many rows.
                written_bytes=rows * (state_bytes + conv_state_bytes),
                flops=sum(2.0 * rows * one.num_outputs * one.depth for one in weights),
            ),
            Pass(  # the output gate was asked for with the projections
                flops=STATE_FLOPS_PER_ELEMENT * rows * state_bytes / value_bytes,
                num_block_reductions=1,
                barrier=Barrier.NONE if streams else Barrier.CLUSTER,
                num_barriers=0 if streams else 1,
            ),
        ),
    )


CODE: Mapping[str, MachineCode] = {
    "cluster": built_code("kda_decode", "heads6_fp32_cluster4"),
}
