"""One SM: the shared memory, threads and registers that blocks which are resident on it hold.

A block becomes resident where all of these hold (CUDA C++ Programming Guide, compute capability 9.0 and 10.0):

| Constraint | At most |
| --- | --- |
| shared memory of the blocks | the carve-out, one of ``CARVE_OUTS`` |
| threads of the blocks | ``threads_per_sm`` of the machine |
| registers of the warps in each of four partitions | 64 K / 4 |
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

from collections.abc import Sequence
from dataclasses import dataclass

from k3sim.kernels.work import Work

# Shared memory that an SM can be set to. The first block on an idle SM sets it, and it stays until the SM is idle.
CARVE_OUTS = tuple(1024 * one for one in (8, 16, 32, 64, 100, 132, 164, 196, 228))
L1_AND_SHARED_BYTES = 256 * 1024  # of an SM, of the same capabilities
REGISTERS_PER_SM = 64 * 1024  # compute capability 9.0, 10.0 and 10.3
WARP = 32
NUM_PARTITIONS = 4


def warps_of(work: Work) -> int:
    """Warps of one block."""
    return -(-work.threads_per_block // WARP)


@dataclass(frozen=True)
class BlockResources:
    """What a block holds of an SM."""

    smem_bytes: int
    threads: int
    warps: int
    registers_per_warp: int


def resources_of(work: Work) -> BlockResources:
    return BlockResources(
        work.smem_bytes_per_block, work.threads_per_block, warps_of(work), WARP * work.registers_per_thread
    )


class Sm:
    """What is free on an SM: shared memory as carved out, threads, registers of each partition; its resident blocks."""

    __slots__ = ("blocks", "carve_out", "partitions", "registers", "smem_bytes", "threads")

    def __init__(self, smem_bytes: int, threads: int) -> None:
        self.smem_bytes = self.carve_out = smem_bytes
        self.threads = threads
        self.registers = REGISTERS_PER_SM
        self.partitions = [REGISTERS_PER_SM // NUM_PARTITIONS] * NUM_PARTITIONS
        self.blocks = 0

    def registers_for(self, block: BlockResources) -> list[int] | None:
        """Registers of each partition that a block would hold, or None where it does not fit."""
        if block.smem_bytes > self.smem_bytes or block.threads > self.threads:
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
        return wanted

    def allocate(self, block: BlockResources, registers: Sequence[int]) -> None:
        """Make a block resident, with ``registers`` of each partition."""
        self._change(block, registers, 1)

    def release(self, block: BlockResources, registers: Sequence[int]) -> None:
        """Free what a block held."""
        self._change(block, registers, -1)

    def _change(self, block: BlockResources, registers: Sequence[int], sign: int) -> None:
        self.smem_bytes -= sign * block.smem_bytes
        self.threads -= sign * block.threads
        self.registers -= sign * block.warps * block.registers_per_warp
        self.partitions = [free - sign * one for free, one in zip(self.partitions, registers, strict=True)]
        self.blocks += sign

    def carve(
        self, block: BlockResources, carve_out: int, *, own_blocks: int, requested: bool, was_pending: bool
    ) -> bool:
        """Divide the SM anew for a kernel's block where that is done; whether a block may start here.

        ``own_blocks`` of the kernel are resident here. An SM that has only those becomes idle as they end, and takes
        the others then. ``requested``: the kernel says itself how the SM is to be divided.
        """
        if self.blocks > own_blocks:
            return not (requested and self.carve_out > carve_out)
        if own_blocks and self.carve_out >= carve_out:
            return True
        if was_pending and self.carve_out < carve_out and self.registers_for(block) is not None:
            return True
        self.smem_bytes += carve_out - self.carve_out
        self.carve_out = carve_out
        return True


def most_blocks_by_registers(work: Work) -> int:
    """Blocks whose registers an empty SM holds, at most the kernel's own limit."""
    if not work.registers_per_thread:
        return work.max_blocks_per_sm
    sm, block, count = Sm(0, 0), BlockResources(0, 0, warps_of(work), WARP * work.registers_per_thread), 0
    while count < work.max_blocks_per_sm and (registers := sm.registers_for(block)) is not None:
        sm.allocate(block, registers)
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
        most = min(
            work.max_blocks_per_sm,
            smem_per_sm // max(1, smem_bytes),
            threads_per_sm // work.threads_per_block,
            most_blocks_by_registers(work),
        )
        wanted = max(1, most) * smem_bytes
    return next((one for one in CARVE_OUTS if wanted <= one <= smem_per_sm), smem_per_sm)
