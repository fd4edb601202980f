"""Kernels of the stock path that move rows between ranks: embedding, embedding by push, one-shot all-reduce.

What they compute
    ``embedding``       out [B, D] bf16 = table [N, D] at ids [B] int32 - first_id, 0 where the id is not this rank's.
    ``embedding_push``  the owner of an id stores its row to row b of every peer's landing place [max rows, D]; ids
                        below 0 (padding) are 0 and belong to the rank whose first id is 0, so a reader never waits in
                        vain.
    ``all_reduce``      out [B, D] bf16 = sum over ranks of x [B, D] bf16, in rank order, in fp32, rounded once: all
                        ranks have the same bits.

How data moves
    16 bytes a thread, eight blocks a row. ``embedding_push`` writes for ``latent_tail.collect``, whose sign for "not
    arrived" is a word of all ones; a table that holds one sends the usual NaN in its place. ``all_reduce`` stores its
    chunks into slot ``rank`` of every peer, its own included, then polls the same chunks of all its slots
    (``kernels/device/lamport.py`` has the protocol and why it needs no flag; buffers are those of ``proj_allreduce``,
    and the two may take turns on them). What it reads again it has written itself, so ``out`` may be ``x``.

Why this shape
    One kernel, push and poll together, is the public one-shot form at these sizes. A block pushes all its chunks before
    it polls the first, and blocks do not wait for one another, so all ranks of a test can share one GPU as long as all
    their blocks fit on it: at most 32 blocks of 128 threads a rank, several chunks a thread above four rows.

Limits
    1 to 16 rows, 1 to 16 ranks, D a multiple of 64 up to 8192. All reads but the peer table's follow the dependency
    wait. A peer that never sends stops ``all_reduce`` by a trap after about ten seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx
from k3sim.kernels.device.lamport import BUFFERS, CHUNK, CONTROL_ROWS, EMPTY, await_slots, sum_slots, turn_buffer
from k3sim.kernels.latent_tail.kernel import not_empty

BLOCKS_PER_ROW = 8
MAX_BLOCKS = 32
THREADS = 128


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfiguration:
    """``peers``: ranks that are stored to, 0 where the rows stay here."""

    hidden: int
    peers: int = 0
    pdl: bool = False


@dataclass(frozen=True, kw_only=True)
class AllReduceConfiguration:
    """``release_next``: the launch after this one may start while this one waits for peers."""

    rows: int
    hidden: int
    ranks: int
    max_rows: int
    release_next: bool
    pdl: bool

    @property
    def blocks(self) -> int:
        return min(BLOCKS_PER_ROW * self.rows, MAX_BLOCKS)

    @property
    def steps(self) -> int:
        """Chunks of a thread."""
        return -(-self.rows * self.hidden // (CHUNK * self.blocks * THREADS))


@cute.kernel
def _embedding(
    mIds: Int64, mTable: Int64, mOut: Int64, first_id: Int32, num_ids: Int32, configuration: cutlass.Constexpr
) -> None:
    """``mOut``: where rows go, or the table of the peers' addresses."""
    hidden, peers = configuration.hidden, configuration.peers
    row_chunks = hidden // CHUNK
    tid, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    bases = [ptx.load_long(mOut + 8 * peer) for peer in range(peers)]
    cute.arch.griddepcontrol_wait()
    token = ptx.load_int(mIds + Int64(row) * 4)
    here = (token >= first_id) & (token - first_id < num_ids)
    # A row that this table has, whatever the id: the loads need no branch.
    gRow = mTable + Int64(cutlass.min(cutlass.max(token - first_id, Int32(0)), num_ids - 1)) * (2 * hidden)
    stores = here | ((token < 0) & (first_id == 0))
    share = -(-row_chunks // BLOCKS_PER_ROW)
    for step in range_constexpr(-(-share // THREADS)):
        in_share = step * THREADS + tid
        chunk = part * share + in_share
        if (in_share < share) & (chunk < row_chunks):
            words = [word if here else Uint32(0) for word in ptx.load_stream(gRow + chunk * 16)]
            place = (Int64(row) * row_chunks + chunk) * 16
            if const_expr(peers == 0):
                ptx.store(mOut + place, words)
            else:
                if stores:
                    sent = [not_empty(word) for word in words]
                    for peer in range_constexpr(peers):
                        ptx.store_to_peer(bases[peer] + place, sent)


@cute.kernel
def _all_reduce(
    mX: Int64, mPeers: Int64, mReceived: Int64, mControl: Int64, mOut: Int64, rank: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    rows, hidden, ranks = configuration.rows, configuration.hidden, configuration.ranks
    row_chunks = hidden // CHUNK
    num_chunks = rows * row_chunks
    stride = configuration.blocks * THREADS
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    first = block * THREADS + tid
    if const_expr(configuration.release_next):
        cute.arch.griddepcontrol_launch_dependents()
    peers = [ptx.load_long(mPeers + 8 * peer) for peer in range(ranks)]
    cute.arch.griddepcontrol_wait()
    buffer = ptx.load_int(mControl)
    before = (buffer + BUFFERS - 1) % BUFFERS
    rows_before = ptx.load_int(mControl + CONTROL_ROWS + before * 4)

    slot_bytes = configuration.max_rows * hidden * 2
    buffer_bytes = Int64(ranks * slot_bytes)
    mine = buffer * buffer_bytes + Int64(rank) * slot_bytes
    for step in range_constexpr(configuration.steps):
        chunk = first + step * stride
        if chunk < num_chunks:
            words = [ptx.without_negative_zero(word) for word in ptx.load_l2(mX + Int64(chunk) * 16)]
            for peer in range_constexpr(ranks):
                ptx.store_to_peer(peers[peer] + mine + chunk * 16, words)

    # The call before this one: nobody reads or writes its buffer now.
    for chunk in cutlass.range(first, rows_before * row_chunks, stride, unroll=1):
        for slot in range_constexpr(ranks):
            ptx.store(mReceived + before * buffer_bytes + slot * slot_bytes + Int64(chunk) * 16, [Uint32(EMPTY)] * 4)

    for step in range_constexpr(configuration.steps):
        chunk = first + step * stride
        # Threads beyond the last chunk repeat it, so that whole warps poll; they store nothing.
        gSlots = mReceived + buffer * buffer_bytes + Int64(cutlass.min(chunk, Int32(num_chunks - 1))) * 16
        rArrived = cute.make_rmem_tensor((ranks * 4,), Uint32)
        await_slots(gSlots, rArrived, ranks, slot_bytes)
        if chunk < num_chunks:
            ptx.store(mOut + Int64(chunk) * 16, ptx.narrow_bf16(sum_slots(rArrived, ranks)))

    cute.arch.sync_threads()  # all threads of the block have read the control words and their slots
    if tid == 0:
        turn_buffer(mControl, buffer, before, rows, configuration.blocks)


def compile_embedding(configuration: EmbeddingConfiguration) -> Any:
    """Function of (ids, table, out or peers, first_id, number of ids, rows, stream)."""

    @cute.jit
    def launch(
        mIds: Int64, mTable: Int64, mOut: Int64, first_id: Int32, num_ids: Int32, rows: Int32, stream: CUstream
    ) -> None:
        _embedding(mIds, mTable, mOut, first_id, num_ids, configuration).launch(
            grid=[BLOCKS_PER_ROW, rows, 1], block=[THREADS, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, Int32(0), Int32(1), Int32(1), cute.runtime.make_fake_stream())


def compile_all_reduce(configuration: AllReduceConfiguration) -> Any:
    """Function of (x, peers, received, control, out, rank, stream)."""

    @cute.jit
    def launch(
        mX: Int64, mPeers: Int64, mReceived: Int64, mControl: Int64, mOut: Int64, rank: Int32, stream: CUstream
    ) -> None:
        _all_reduce(mX, mPeers, mReceived, mControl, mOut, rank, configuration).launch(
            grid=[configuration.blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 5, Int32(0), cute.runtime.make_fake_stream())
