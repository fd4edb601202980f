"""Room on the SMs: shared memory, threads and registers that running kernels hold.

Kernels whose registers are not known hold room of the whole chip: their blocks are spread evenly, a kernel that would
run in several waves holds one full wave, and it is admitted when that fits beside those that run.

Kernels whose registers are known are placed SM by SM: a block with 200 KB of shared memory finds no room beside one
that holds the registers, nor on an SM whose shared memory was carved out for less and that is not idle since. Such a
kernel starts with the blocks that fit; the others follow when room is left, and only then has all of it started. Blocks
start in the order of launch: while a kernel has blocks left to start, no later one's do, on whatever stream (timestamps of
blocks on an H200: the shared experts' begin when the last block of the routed ones, launched before, has begun).

A block's shared memory need not be one piece: what a block has left counts together with what was free, though a third
block lies between (probe ``three_blocks``).

Probes (``residency``) agree with the rest, one cause at a time: 200 KB start beside 48 KB that prefer all of an SM's
memory as shared, and not beside 8 KB that leave the choice to the driver, until the SM is idle; then they start 0.2 us
after the last block there has ended (``block_refill_s``), with no launch in between.

How an SM is divided when one block takes over from another (H200): a launch that comes to an idle SM divides it anew. A
block that stood waiting for room takes it as it is where it fits and wants no more L1 (probe ``carve_out_inheritance``): behind
blocks that wanted 60 per cent the experts find 164 KB, and a product of 84 KB no room beside their 127, though all of
them want all of it. A kernel that wants more L1 than an SM has does not start beside others there; it waits until the
SM is idle and divides it (probe ``carve_out_persistence``; timestamps of blocks: the projection's begin 0.4 us and more after
those before it have left, on every SM).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import simpy

from k3sim.errors import UserError
from k3sim.kernels.work import Work
from k3sim.sim.machine import Machine

# Shared memory that an SM can be set to (CUDA C++ Programming Guide, compute capability 9.0 and 10.0). The first block
# on an idle SM sets it, and it stays until the SM is idle again.
CARVE_OUTS = tuple(1024 * one for one in (8, 16, 32, 64, 100, 132, 164, 196, 228))
L1_AND_SHARED_BYTES = 256 * 1024  # of an SM, of the same capabilities (same guide)
REGISTERS_PER_SM = 64 * 1024  # compute capability 9.0, 10.0 and 10.3 (CUDA C++ Programming Guide)
# Registers lie in four parts of an SM, and the warps of a block are dealt out evenly over them (H200): of 13 warps with
# 128 each, one part has four and is full, and no block of eight finds room beside; of 12 it does (calibrate/probes,
# ``residency``). 14 warps of 40 find room beside 17 of 72: three of them in the part that has five (timestamps of blocks).
WARP = 32
PARTS = 4


def warps_of(work: Work) -> int:
    return -(-work.threads_per_block // WARP)


@dataclass(frozen=True)
class _Needs:
    """What a block takes from an SM."""

    smem_bytes: int
    threads: int
    warps: int
    warp_registers: int


class _Room:
    """What is free on an SM: shared memory as carved out, threads, registers of each part; and how many blocks run."""

    __slots__ = ("blocks", "carve_out", "parts", "registers", "smem_bytes", "threads")

    def __init__(self, smem_bytes: int, threads: int) -> None:
        self.smem_bytes = self.carve_out = smem_bytes
        self.threads = threads
        self.registers = REGISTERS_PER_SM
        self.parts = [REGISTERS_PER_SM // PARTS] * PARTS
        self.blocks = 0

    def deal(self, needs: _Needs) -> list[int] | None:
        """Registers of each part that a block would take, or None where it does not fit."""
        if needs.smem_bytes > self.smem_bytes or needs.threads > self.threads:
            return None
        each, more = divmod(needs.warps, PARTS)
        taken = [each * needs.warp_registers] * PARTS
        if more:
            for part in sorted(range(PARTS), key=lambda one: (-self.parts[one], one))[:more]:
                taken[part] += needs.warp_registers
        if any(need > free for need, free in zip(taken, self.parts, strict=True)):
            return None
        return taken

    def change(self, needs: _Needs, taken: Sequence[int], sign: int) -> None:
        """Take (1) or give back (-1) a block's room."""
        self.smem_bytes -= sign * needs.smem_bytes
        self.threads -= sign * needs.threads
        self.registers -= sign * needs.warps * needs.warp_registers
        self.parts = [free - sign * one for free, one in zip(self.parts, taken, strict=True)]
        self.blocks += sign


Share = tuple[int, list[int]]  # an SM and the registers of each part that a block took there


@dataclass(frozen=True)
class Footprint:
    """One wave of a kernel: its resident blocks and what they hold."""

    blocks: int
    smem_bytes: int
    threads: int
    registers: int = 0


@dataclass(eq=False)
class Placement:
    """Where the blocks of one kernel are: ``missing`` ones have no room yet; ``whole`` fires when all have started.

    ``on``: of each SM, the registers that each block there took.
    """

    needs: _Needs
    missing: int
    carve_out: int  # shared memory of an SM that the first of its blocks sets
    whole: simpy.Event
    begun: simpy.Event  # a block has started
    on: dict[int, list[list[int]]] = field(default_factory=dict)
    first: list[Share] = field(default_factory=list)  # of the blocks that started before there was ``on_start``
    on_start: Callable[[list[Share]], object] | None = None  # gets what further blocks took
    wishes: bool = False  # says itself how an SM's memory is to be divided
    waiting: bool = False  # found no room when it was launched

    def num_on(self) -> dict[int, int]:
        """Blocks on each SM that has some."""
        return {sm: len(taken) for sm, taken in self.on.items()}

    def most_on_an_sm(self, before: Mapping[int, int] | None = None) -> int:
        """Blocks on the SM with most of them, less what it had ``before``."""
        return max((num - (before or {}).get(sm, 0) for sm, num in self.num_on().items()), default=0)


class Occupancy:
    """The SMs of one GPU."""

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self._env = env
        self._num_sms = int(machine.num_sms)
        self._smem_per_sm = int(machine.smem_bytes_per_sm)
        self._smem_per_block = int(machine.max_smem_bytes_per_block)
        self._threads_per_sm = int(machine.threads_per_sm)
        self._machine_name = machine.name
        self._free_smem = self._num_sms * self._smem_per_sm
        self._free_threads = self._num_sms * self._threads_per_sm
        self._free_registers = self._num_sms * REGISTERS_PER_SM
        self._waiting: list[tuple[Footprint, simpy.Event]] = []
        self._rooms = [_Room(self._smem_per_sm, self._threads_per_sm) for _ in range(self._num_sms)]
        self._parts: list[Placement] = []  # of kernels that have not started whole, in the order of launch

    def footprint(self, work: Work) -> Footprint:
        """The wave that a kernel holds when it has the chip to itself.

        Raises UserError when not even one block fits on an SM.
        """
        for what, needed, available in (
            ("bytes of shared memory", work.smem_bytes_per_block, self._smem_per_block),
            ("threads", work.threads_per_block, self._threads_per_sm),
        ):
            if needed > available:
                raise UserError(
                    f"a kernel of this path needs {needed} {what} in a block and {self._machine_name} has "
                    f"{available}; use another machine or path, or correct the profile"
                )
        per_sm = min(
            work.max_blocks_per_sm,
            self._threads_per_sm // work.threads_per_block,
            self._carve_out(work) // max(1, work.smem_bytes_per_block),
            self._most_by_registers(work),
        )
        blocks = min(work.num_blocks, self._num_sms * per_sm)
        registers = blocks * warps_of(work) * WARP * work.registers_per_thread
        return Footprint(blocks, blocks * work.smem_bytes_per_block, blocks * work.threads_per_block, registers)

    def _most_by_registers(self, work: Work) -> int:
        """Blocks whose registers an empty SM holds."""
        if not work.registers_per_thread:
            return work.max_blocks_per_sm
        room, needs, count = _Room(0, 0), _Needs(0, 0, warps_of(work), WARP * work.registers_per_thread), 0
        while count < work.max_blocks_per_sm and (taken := room.deal(needs)) is not None:
            room.change(needs, taken, 1)
            count += 1
        return count

    def _carve_out(self, work: Work) -> int:
        """Shared memory of an idle SM when a block of the kernel comes.

        By the driver it is for as many blocks as an SM takes, without the KB of each that the system reserves: with 8
        KB in a block of 256 threads 64 KB do not fit beside it, with 48 KB 128 KB do.
        """
        smem_bytes = work.smem_bytes_per_block
        if work.carve_out_percent is not None:
            wanted = max(smem_bytes, self._smem_per_sm * work.carve_out_percent // 100)
        else:
            most = min(
                work.max_blocks_per_sm,
                self._smem_per_sm // max(1, smem_bytes),
                self._threads_per_sm // work.threads_per_block,
                self._most_by_registers(work),
            )
            wanted = max(1, most) * smem_bytes
        return next((one for one in CARVE_OUTS if wanted <= one <= self._smem_per_sm), self._smem_per_sm)

    def l1_bytes(self, work: Work, placement: Placement | None) -> int:
        """What is L1 on the SMs of a kernel's blocks: where it is least, as their shared memory is carved out."""
        carve_outs = [self._rooms[sm].carve_out for sm in placement.on] if placement is not None else []
        return L1_AND_SHARED_BYTES - max(carve_outs, default=self._carve_out(work))

    def _fits(self, wanted: Footprint) -> bool:
        return (
            wanted.smem_bytes <= self._free_smem
            and wanted.threads <= self._free_threads
            and wanted.registers <= self._free_registers
        )

    def acquire(self, wanted: Footprint, *, placed: bool = False) -> simpy.Event | None:
        """Take room now and return None, or return the event that fires once the room has been given.

        ``placed``: the kernel's blocks find their own room, SM by SM; here they only count for others.
        """
        if placed or self._fits(wanted):
            self._take(wanted)
            return None
        granted = simpy.Event(self._env)
        self._waiting.append((wanted, granted))
        return granted

    def release(self, held: Footprint, by: int) -> None:
        """Give room back; whoever waits and fits gets it, the longest waiting first, and learns who left."""
        self._free_smem += held.smem_bytes
        self._free_threads += held.threads
        self._free_registers += held.registers
        still: list[tuple[Footprint, simpy.Event]] = []
        for wanted, granted in self._waiting:
            if self._fits(wanted):
                self._take(wanted)
                granted.succeed(by)
            else:
                still.append((wanted, granted))
        self._waiting = still

    def _take(self, wanted: Footprint) -> None:
        self._free_smem -= wanted.smem_bytes
        self._free_threads -= wanted.threads
        self._free_registers -= wanted.registers

    def place(self, work: Work, held: Footprint) -> Placement:
        """Put as many of the wave's blocks on SMs as fit now, evenly; the rest follows as others leave.

        Blocks start in the order of launch, of all streams: while one kernel has blocks that found no room, none of a
        later one start. So a kernel never holds room that an earlier one, which it may wait for, cannot do without.
        """
        needs = _Needs(
            work.smem_bytes_per_block, work.threads_per_block, warps_of(work), WARP * work.registers_per_thread
        )
        placement = Placement(
            needs=needs,
            missing=held.blocks,
            carve_out=self._carve_out(work),
            whole=simpy.Event(self._env),
            begun=simpy.Event(self._env),
            wishes=work.carve_out_percent is not None,
        )
        self._parts.append(placement)
        self._fill(-1)
        placement.waiting = True
        return placement

    def give(self, placement: Placement, shares: list[Share] | None, by: int) -> None:
        """Give back what blocks of a kernel took, as they are done before others; None: of those that began first.

        ``by``: the kernel, for those who get the room.
        """
        given = placement.first if shares is None else shares
        for sm, taken in given:
            self._rooms[sm].change(placement.needs, taken, -1)
            placement.on[sm].remove(taken)
            if not placement.on[sm]:
                del placement.on[sm]
        self._fill(by)

    def leave(self, placement: Placement, by: int = -1) -> None:
        """Give back the SMs of a kernel that has ended; whoever gets room there learns who it was."""
        for sm, blocks in placement.on.items():
            for taken in blocks:
                self._rooms[sm].change(placement.needs, taken, -1)
        placement.on.clear()
        self._fill(by)

    @staticmethod
    def _divide(room: _Room, one: Placement, *, own_blocks: int) -> bool:
        """Divide an SM's memory anew for a kernel's block where that is done; whether a block may start there.

        An SM that has only blocks of this kernel becomes idle as they end, and takes the others then.
        """
        if room.blocks > own_blocks:
            return not (one.wishes and room.carve_out > one.carve_out)
        if own_blocks and room.carve_out >= one.carve_out:
            return True
        if one.waiting and room.carve_out < one.carve_out and room.deal(one.needs) is not None:
            return True
        room.smem_bytes += one.carve_out - room.carve_out
        room.carve_out = one.carve_out
        return True

    def _fill(self, by: int) -> None:
        for one in self._parts:
            before, started = -1, []
            while one.missing and one.missing != before:
                before = one.missing
                # The emptiest SMs first, one block each in a round.
                rooms = self._rooms
                order = sorted(range(self._num_sms), key=lambda sm: (-rooms[sm].registers, -rooms[sm].smem_bytes, sm))
                for sm in order:
                    if not one.missing:
                        break
                    room = rooms[sm]
                    if not self._divide(room, one, own_blocks=len(one.on.get(sm, ()))):
                        continue
                    taken = room.deal(one.needs)
                    if taken is not None:
                        room.change(one.needs, taken, 1)
                        one.on.setdefault(sm, []).append(taken)
                        one.missing -= 1
                        started.append((sm, taken))
            if started and not one.begun.triggered:
                one.begun.succeed(by)
            if one.on_start is None:
                one.first += started
            elif started:
                one.on_start(started)
            if one.missing:
                break
            one.whole.succeed(by)
        self._parts = [one for one in self._parts if one.missing]
