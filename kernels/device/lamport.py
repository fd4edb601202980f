"""Receiving half of the one-shot all-reduce protocol, shared by the kernels that poll a rank's receive buffers.

A word that reads -0, -0 has not arrived; senders turn -0 into +0 (``ptx.without_negative_zero``). Three buffers rotate:
calls use one after the other, and each clears the buffer of the call before. No peer can still write that one: it may
do so two calls later, after it has received this rank's next push, which follows the clearing. The buffer in use is a
number in this rank's memory that the last block of a call to arrive advances, so graphs replay without the host.

Imports cutlass, so only kernel modules import this one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from k3sim.kernels.device import ptx

BUFFERS = 3
CHUNK = 8  # bf16 values in 16 bytes
EMPTY = 0x80008000  # two bf16 -0
MAX_POLLS = 20_000_000  # about ten seconds
# Byte offsets of a rank's control words (int32): buffer in use, arrivals, rows that each buffer holds.
CONTROL_ARRIVALS = 4
CONTROL_ROWS = 8


def await4(g_address: Int64, empty_word: int) -> ptx.Words:
    """16 bytes, once none of their words is ``empty_word``."""
    checks = " ".join(f"setp.eq.u32 p, {{$w{i}}}, {empty_word:#x}; @p bra again;" for i in range(4))
    arrived: ptx.Words = ptx.inline_ptx(
        "{ .reg .pred p; again: ld.volatile.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; " + checks + " }",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_address],
    )
    return arrived


@cute.jit
def await_slots(
    gSlots: Int64,
    rArrived: cute.Tensor,
    ranks: cutlass.Constexpr,
    slot_bytes: Int64,
    empty_word: cutlass.Constexpr = EMPTY,
) -> None:
    """Poll the same 16 bytes of all ``ranks`` slots until they are there: ``rArrived[4 rank + word]``.

    For whole warps: a warp goes on when all its lanes have all their words. Traps when a peer never sends.
    """
    missing = cutlass.Boolean(True)
    polls = Int32(0)
    while missing:
        empty = cutlass.Boolean(False)
        for slot in range_constexpr(ranks):
            words = ptx.load_from_peer(gSlots + slot * slot_bytes)
            for i in range_constexpr(4):
                rArrived[4 * slot + i] = words[i]
                empty = empty | (words[i] == Uint32(empty_word))
        missing = cute.arch.vote_any_sync(empty)
        polls += 1
        if polls > MAX_POLLS:
            ptx.inline_ptx("trap;")


def sum_slots(rArrived: cute.Tensor, ranks: int) -> list[Float32]:
    """Eight fp32 sums of what ``await_slots`` brought, in rank order: every rank computes the same bits."""
    total = [Float32(0.0)] * CHUNK
    for slot in range(ranks):
        part = ptx.widen_bf16(tuple(rArrived[4 * slot + i] for i in range(4)))
        total = [one + other for one, other in zip(total, part, strict=True)]
    return total


@cute.jit
def turn_buffer(
    mControl: Int64, buffer: Int32, before: Int32, rows: cutlass.Constexpr, num_blocks: cutlass.Constexpr
) -> None:
    """For one thread of each of ``num_blocks`` blocks, when its block is done with ``buffer``: the last one turns."""
    if ptx.count_wrapping(mControl + CONTROL_ARRIVALS, Int32(num_blocks - 1)) == num_blocks - 1:
        ptx.store_int(mControl + CONTROL_ROWS + buffer * 4, Int32(rows))
        ptx.store_int(mControl + CONTROL_ROWS + before * 4, Int32(0))
        ptx.store_int(mControl, (buffer + 1) % BUFFERS)
