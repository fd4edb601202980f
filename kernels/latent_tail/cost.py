"""Cost of the LatentMoE tail: sum over experts and ranks, latent RMSNorm, sharded up-projection, gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.skinny_gemv.configuration import MAX_ROWS
from k3sim.kernels.work import Barrier, MachineCode, Pass, Read, Unit, Work, block_work
from k3sim.model.program import Weight

BF16_BYTES = 2
CLUSTER_BLOCKS = 8
SEND_BLOCKS = 6  # of a row: two for the latent, four for the shared experts


def _built_ranks(ranks: int) -> int:
    """The ranks of the build that is nearest."""
    return 8 if ranks <= 8 else 16


def send(weights: Sequence[Weight], *, rows: int, hidden: int, latent: int, ranks: int, expert_rows: int) -> Work:
    """Weighted sum of the experts' partial rows and the shared expert's partial row, then the push.

    The latent partial goes to all peers, each peer's slice of the shared partial to its owner.
    """
    return block_work(
        SEND_BLOCKS * rows,
        Pass(
            num_dependent_loads=1,
            activation_bytes_per_block=(expert_rows * latent + hidden) * BF16_BYTES // SEND_BLOCKS,
        ),
        block=footprint("latent_tail", f"send_ranks{_built_ranks(ranks)}_rows1").block(),
        in_flight_kib=16,
        sent_bytes_per_peer=rows * (latent + hidden // ranks) * BF16_BYTES,
    )


def send_shared(weights: Sequence[Weight], *, rows: int, hidden: int, ranks: int) -> Work:
    """The half of ``send`` that moves the shared expert's columns, each peer's to its owner: four blocks a row."""
    return block_work(
        4 * rows,
        Pass(num_dependent_loads=1, activation_bytes_per_block=hidden * BF16_BYTES // 4),
        block=footprint("latent_tail", f"send_shared_ranks{_built_ranks(ranks)}").block(),
        in_flight_kib=4,
        sent_bytes_per_peer=rows * hidden // ranks * BF16_BYTES,
    )


UP_OUTPUTS = 8  # of a block of ``up_cluster``
UP_WARPS = 4
SUM_INSTRUCTIONS_PER_SLOT = 33  # of a warp: 530 with 16 slots, for sm_90a


def up_cluster(weights: Sequence[Weight], *, rows: int, hidden: int, latent: int, ranks: int) -> Work:
    """Sum, latent norm, column shard, shared slice, push: weights in shared memory before the wait, sum over a cluster.

    A block sums an eighth of the latent, two rows at a time, and sends it to its cluster; products, the sum over
    warps, the shared experts' slots. A warp's products are a chain for each eight rows, over its share of the latent in
    steps of 32.
    """
    (one,) = weights
    taken = min(rows, MAX_ROWS)  # that the kernel has room for
    row_bytes = 2 * latent + 64  # in shared memory, with padding
    return Work(
        num_blocks=one.num_outputs // UP_OUTPUTS,
        threads_per_block=32 * UP_WARPS,
        smem_bytes_per_block=UP_OUTPUTS * row_bytes + taken * (row_bytes + 16 * ranks + 80) + -(-taken // 8) * 1024 + 8,
        bytes_in_flight_per_block=UP_OUTPUTS * latent * BF16_BYTES,
        max_blocks_per_sm=1,
        registers_per_thread=footprint("latent_tail", f"up_ranks{_built_ranks(ranks)}_rows1").allocated_registers,
        deep_prefetch=True,
        passes=(
            Pass(
                num_dependent_loads=-(-rows // 2),
                activation_bytes_per_block=rows * ranks * latent * BF16_BYTES // CLUSTER_BLOCKS,
                # The slots of the first rows are in the exchange's visibility.
                num_stages=-(-rows // 2) - 1,
                stage_instructions=SUM_INSTRUCTIONS_PER_SLOT * ranks,
                num_block_reductions=1,
                barrier=Barrier.CLUSTER_RELEASE,
                num_barriers=1,
            ),
            Pass(
                reads=(Read(region=one.region, num_bytes=one.num_bytes, early=True),),
                flops=2.0 * -(-rows // 8) * 16 * one.num_outputs * one.depth,
                unit=Unit.BF16,
                num_dependent_mmas=-(-rows // 8) * (latent // 32 // UP_WARPS),
                num_block_reductions=2,
            ),
        ),
        sent_bytes_per_peer=rows * one.num_outputs * BF16_BYTES,
    )


def collect(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """Polls the gathered rows, adds the prefix and empties the slots."""
    return block_work(
        6 * rows,
        Pass(num_dependent_loads=1, activation_bytes_per_block=2 * width * BF16_BYTES // 6),
        block=footprint("latent_tail", "collect_ranks16_rows1").block(),
        in_flight_kib=8,
    )


CODE: Mapping[str, MachineCode] = {
    "collect": built_code("latent_tail", "collect_ranks16_rows1"),
    "send": built_code("latent_tail", "send_ranks16_rows1"),
    "send_shared": built_code("latent_tail", "send_shared_ranks16"),
    "up_cluster": built_code("latent_tail", "up_ranks16_rows1", half_the_ranks="up_ranks8_rows1"),
}
