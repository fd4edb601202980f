"""Cost of an output projection whose epilogue pushes partial rows into every peer's buffer.

``produce_whole`` asks for the whole matrix at once, straight into registers; of its consumers one exchange over the
cluster serves logit and norm. ``consume_gathered`` polls one row instead of a slot a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.skinny_gemv.configuration import MAX_ROWS
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.kernels.work import REGISTER_LOAD_CARVE_OUT, ActivationForm, Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

CHUNK = 8  # values of a copy
TILE = 16  # outputs of a block of ``produce_whole``
CLUSTER_BLOCKS = 8
MAX_BLOCKS_K = 12  # 32-wide blocks along K whose weights a thread holds


def produce_whole(weights: Sequence[Weight], *, rows: int) -> Work:
    """16 outputs a block, its weights in registers before the wait; then x, the products, and a chunk a thread sent.

    x goes through shared memory, and so do the sums of the warps: two barriers of a block. The addresses of the peers
    were read before the wait.
    """
    (one,) = weights
    blocks_k = one.depth // 32
    warps = next(n for n in (4, 6, 8, 12) if blocks_k % n == 0 and blocks_k // n <= MAX_BLOCKS_K)
    num_blocks = one.num_outputs // TILE
    taken = min(rows, MAX_ROWS)  # that the kernel has room for
    copies = -(-taken * one.depth // CHUNK // (32 * warps))  # of a thread, of its part of x
    return Work(
        num_blocks=num_blocks,
        threads_per_block=32 * warps,
        smem_bytes_per_block=taken * (2 * one.depth + 64) + warps * -(-taken // 8) * 8 * TILE * 4 + 1024,
        bytes_in_flight_per_block=one.num_bytes // num_blocks,
        max_blocks_per_sm=2048 // (32 * warps),
        registers_per_thread=footprint("proj_allreduce", _produce_form(one.depth)).allocated_registers,
        deep_prefetch=True,
        register_loads=True,
        triggers_after_loads=True,
        # Copies of x, products, and the rest; for sm_90a 171, 225 and 347 at 1, 8 and 16 rows of K 768, 229, 352 and
        # 652 of K 1536.
        serial_instructions=113 + 12 * copies + 8 * -(-taken // 8) * (blocks_k // warps),
        carve_out_percent=REGISTER_LOAD_CARVE_OUT,
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=rows * one.depth * BF16_BYTES,
                activation_form=ActivationForm.CP_ASYNC,
                reads=(Read(region=one.region, num_bytes=one.num_bytes, early=True),),
                flops=2.0 * -(-rows // 8) * 8 * one.num_outputs * one.depth,
                unit=Unit.BF16,
                num_dependent_mmas=blocks_k // warps,
                num_block_reductions=2,
            ),
        ),
        sent_bytes_per_peer=rows * one.num_outputs * BF16_BYTES,
    )


def _produce_form(depth: int) -> str:
    """The build whose depth is nearest."""
    ranks_of = {768: 16, 1536: 8, 2112: 16, 4224: 8}
    nearest = min(ranks_of, key=lambda built: abs(built - depth))
    return f"produce_depth{nearest}_ranks{ranks_of[nearest]}"


def consume(weights: Sequence[Weight], *, rows: int, hidden: int, slots: int) -> Work:
    """Sum of ``slots`` rows, residual, mix with the prepared snapshot part, norm: eight blocks a row.

    The number of the buffer in use is read before its slots can be, and at the end a counter is taken, in whose order
    the last block turns to the next buffer: two trips to L2 more. Slots are added up, and sums cross the block before
    and after the cluster.
    """
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=CLUSTER_BLOCKS * rows,
        threads_per_block=-(-hidden // 64 // 32) * 32,
        smem_bytes_per_block=footprint("proj_allreduce", "consume_ranks16_snapshots").smem_bytes,
        bytes_in_flight_per_block=16 * 1024,
        max_blocks_per_sm=4,
        registers_per_thread=footprint(
            "proj_allreduce",
            f"consume_ranks{16 if slots > 8 else 8}_snapshots" if slots > 1 else "gathered_ranks16",
        ).allocated_registers,
        passes=(
            Pass(
                num_dependent_loads=2,
                # Residual and snapshot part were loaded before the polling.
                activation_bytes_per_block=slots * row_bytes // CLUSTER_BLOCKS,
                reads=(Read(region="", num_bytes=3 * row_bytes, early=True),),
                num_block_reductions=3,
                barrier=Barrier.CLUSTER,
                num_barriers=1,
            ),
            Pass(num_dependent_loads=2),
        ),
    )


def consume_gathered(weights: Sequence[Weight], *, rows: int, hidden: int) -> Work:
    """One gathered row, of which there is one buffer; as many blocks again empty the tail's slots."""
    work = consume(weights, rows=rows, hidden=hidden, slots=1)
    polled = replace(work.passes[0], num_dependent_loads=1, num_block_reductions=2)
    return replace(work, num_blocks=2 * work.num_blocks, passes=(polled,), polled_slots=1)


CODE: Mapping[str, MachineCode] = {
    "consume": built_code("proj_allreduce", "consume_ranks16_snapshots", half_the_ranks="consume_ranks8_snapshots"),
    "consume_gathered": built_code("proj_allreduce", "gathered_ranks16"),
    "produce_whole": built_code("proj_allreduce", "produce_depth768_ranks16"),
}
