"""One SM: the shared memory, threads and registers that blocks which are resident on it hold.

A block becomes resident where all of these hold (CUDA C++ Programming Guide, compute capability 9.0 and 10.0):

| Constraint | At most |
| --- | --- |
| shared memory of the blocks | the carve-out, one of ``CARVE_OUTS`` |
| threads of the blocks | ``threads_per_sm`` of the machine |
| registers of the warps in each of four partitions | 64 K / 4 |
| blocks | 32 |
| carve-out of a further kernel that requests its own | what the first block set, until the SM is idle |

Registers lie in four partitions of an SM, and the warps of a block are spread evenly over them (H200): of 13 warps with
128 each, one partition has four and is full, and no block of eight becomes resident beside; of 12 it does
(calibrate/probes, ``residency``). 14 warps of 40 become resident beside 17 of 72: three of them in the partition that
has five (block timestamps).

A block's shared memory need not be one piece: what a block has released counts together with what was free, though a
third block lies between (probe ``three_blocks``).

How an SM is divided when one block takes over from another (H200): a launch that comes to an idle SM divides it anew. A
block that was pending takes it as it is where it fits and requests no more L1 (probe ``carve_out_inheritance``): behind
blocks that requested 60 per cent the experts find 164 KB, and a product of 84 KB no room beside their 127, though all
of them request all of it. A kernel that requests more L1 than an SM has does not start beside others there; it waits
until the SM is idle and divides it (probe ``carve_out_persistence``; block timestamps: the projection's begin 0.4 us
and more after those before it have left, on every SM).
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from k3sim.kernels.work import BLOCK_SLOTS, Work

# Shared memory that an SM can be set to. The first block on an idle SM sets it, and it stays until the SM is idle.
CARVE_OUTS = tuple(1024 * one for one in (8, 16, 32, 64, 100, 132, 164, 196, 228))
L1_AND_SHARED_BYTES = 256 * 1024  # of an SM, of the same capabilities
REGISTERS_PER_SM = 64 * 1024  # compute capability 9.0, 10.0 and 10.3
WARP = 32
NUM_PARTITIONS = 4

Registers = tuple[int, ...]  # of each partition


def warps_of(work: Work) -> int:
    """Warps of one block."""
    return -(-work.threads_per_block // WARP)


class BlockResources(NamedTuple):
    """What a block holds of an SM."""

    smem_bytes: int
    threads: int
    warps: int
    registers_per_warp: int


def resources_of(work: Work) -> BlockResources:
    return BlockResources(
        work.smem_bytes_per_block, work.threads_per_block, warps_of(work), WARP * work.registers_per_thread
    )


class Sm(NamedTuple):
    """What is free on an SM: shared memory as carved out, threads, registers of each partition; its resident blocks.

    A state, not a thing: the methods return the state that follows. SMs in equal states are told apart by nothing, so
    what becomes of one becomes of all of them (``occupancy.py``).
    """

    smem_bytes: int
    carve_out: int
    threads: int
    registers: int
    partitions: Registers
    blocks: int

    @staticmethod
    def idle(smem_bytes: int, threads: int) -> Sm:
        """An SM without blocks, all of whose memory for blocks is shared."""
        partition = REGISTERS_PER_SM // NUM_PARTITIONS
        return Sm(smem_bytes, smem_bytes, threads, REGISTERS_PER_SM, (partition,) * NUM_PARTITIONS, 0)

    def registers_for(self, block: BlockResources) -> Registers | None:
        """Registers of each partition that a block would hold, or None where it does not fit."""
        if block.smem_bytes > self.smem_bytes or block.threads > self.threads or self.blocks >= BLOCK_SLOTS:
            return None
        each, more = divmod(block.warps, NUM_PARTITIONS)
        wanted = [each * block.registers_per_warp] * NUM_PARTITIONS
        if more:
            # The emptiest first, of equal ones the first: reversed sorting keeps their order.
            emptiest = sorted(range(NUM_PARTITIONS), key=self.partitions.__getitem__, reverse=True)
            for partition in emptiest[:more]:
                wanted[partition] += block.registers_per_warp
        for need, free in zip(wanted, self.partitions, strict=True):
            if need > free:
                return None
        return tuple(wanted)

    def with_block(self, block: BlockResources, registers: Registers) -> Sm:
        """With a block that holds ``registers`` of each partition."""
        return self._changed(block, registers, 1)

    def without_block(self, block: BlockResources, registers: Registers) -> Sm:
        """Without a block that held ``registers`` of each partition."""
        return self._changed(block, registers, -1)

    def _changed(self, block: BlockResources, registers: Registers, sign: int) -> Sm:
        return Sm(
            self.smem_bytes - sign * block.smem_bytes,
            self.carve_out,
            self.threads - sign * block.threads,
            self.registers - sign * block.warps * block.registers_per_warp,
            tuple(free - sign * one for free, one in zip(self.partitions, registers, strict=True)),
            self.blocks + sign,
        )

    def carved(self, request: BlockRequest, own_blocks: int) -> Sm | None:
        """Divided anew for a kernel's block where that is done; None where no block of it may start here.

        ``own_blocks`` of the kernel are resident here. An SM that has only those becomes idle as they end, and takes
        the others then.
        """
        carve_out = request.carve_out
        if self.blocks > own_blocks:
            return None if request.requests_carve_out and self.carve_out > carve_out else self
        if own_blocks and self.carve_out >= carve_out:
            return self
        if request.was_pending and self.carve_out < carve_out and self.registers_for(request.block) is not None:
            return self
        return self._replace(smem_bytes=self.smem_bytes + carve_out - self.carve_out, carve_out=carve_out)


class BlockRequest(NamedTuple):
    """A block that is to become resident.

    ``carve_out``: shared memory that it sets on an SM it comes to first. ``requests_carve_out``: the kernel says itself
    how an SM is to be divided. ``was_pending``: it did not fit when its kernel was launched.
    """

    block: BlockResources
    carve_out: int
    requests_carve_out: bool
    was_pending: bool


class Readiness(IntEnum):
    """How soon an SM can start a block; blocks start where that is soonest."""

    READY = 0  # divided as the kernel requests, or it requests nothing
    IDLE = 1  # to be divided anew, for which an SM is idle
    OTHERWISE = 2  # divided otherwise, beside blocks of others


def readiness_of(sm: Sm, after: Sm, request: BlockRequest) -> Readiness:
    """Of an SM that becomes ``after`` when a block is offered to it."""
    if after.carve_out != sm.carve_out:
        return Readiness.IDLE
    if request.requests_carve_out and sm.blocks and sm.carve_out != request.carve_out:
        return Readiness.OTHERWISE
    return Readiness.READY


@lru_cache(maxsize=1 << 14)
def started(sm: Sm, request: BlockRequest, own_blocks: int) -> tuple[Sm, Registers | None]:
    """An SM after a block has been offered to it, and the registers of the block, None where it does not start.

    Kept: an SM has few states, and every layer brings the same kernels.
    """
    carved = sm.carved(request, own_blocks)
    if carved is None:
        return sm, None
    registers = carved.registers_for(request.block)
    return (carved, None) if registers is None else (carved.with_block(request.block, registers), registers)


def most_blocks(work: Work, smem_bytes: int, threads: int) -> int:
    """Blocks of a kernel on an SM of its own with so much shared memory and so many threads."""
    return min(
        work.max_blocks_per_sm,
        threads // work.threads_per_block,
        smem_bytes // max(1, work.smem_bytes_per_block),
        _blocks_by_registers(warps_of(work), WARP * work.registers_per_thread),
    )


@lru_cache(maxsize=1024)
def _blocks_by_registers(warps: int, registers_per_warp: int) -> int:
    sm, block, count = Sm.idle(0, 0), BlockResources(0, 0, warps, registers_per_warp), 0
    while (registers := sm.registers_for(block)) is not None:
        sm = sm.with_block(block, registers)
        count += 1
    return count


def requested_carve_out(work: Work, smem_per_sm: int, threads_per_sm: int) -> int:
    """Shared memory of an idle SM when a block of the kernel comes.

    By the driver it is for as many blocks as an SM takes, without the KB of each that the system reserves: with 8 KB in
    a block of 256 threads 64 KB do not fit beside it, with 48 KB 128 KB do (probe ``residency``).
    """
    smem_bytes = work.smem_bytes_per_block
    if work.carve_out_percent is not None:
        wanted = max(smem_bytes, smem_per_sm * work.carve_out_percent // 100)
    else:
        wanted = max(1, most_blocks(work, smem_per_sm, threads_per_sm)) * smem_bytes
    return next((one for one in CARVE_OUTS if wanted <= one <= smem_per_sm), smem_per_sm)
