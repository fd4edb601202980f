"""Room on the SMs: shared memory, threads and registers that running kernels hold.

Blocks are spread evenly, so room is counted over the whole chip. A kernel that would run in several waves holds
one full wave. A kernel is admitted when its wave fits beside those that run, in the order of asking within a
stream; where it does not fit it waits, and with it the gain of an early launch is gone.

Kernels whose registers are known are placed SM by SM as well: a block with 200 KB of shared memory finds no room beside
one that holds the registers, nor on an SM whose shared memory was carved out for less and that is not idle since. That
kernel starts with the blocks that fit; the others follow when room is left, and only then has all of it started. In a
profiled step of an H200 the launch that is started by such a one (kda.decode) begins when the last small kernel on the
chip (attn_res.mixer) has ended, as this says. Probes (``residency``) agree, one cause at a time: 200 KB start beside 48
KB that prefer all of an SM's memory as shared, and not beside 8 KB that leave the choice to the driver, until the SM is
idle; then they start 0.2 us after the last block there has ended (``block_refill_s``), with no launch in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from k3sim.errors import UserError
from k3sim.kernels.work import Work
from k3sim.sim.machine import Machine

# Shared memory that an SM can be set to (CUDA C++ Programming Guide, compute capability 9.0 and 10.0). The first block
# on an idle SM sets it, and it stays until the SM is idle again.
CARVE_OUTS = tuple(1024 * one for one in (8, 16, 32, 64, 100, 132, 164, 196, 228))
REGISTERS_PER_SM = 64 * 1024  # compute capability 9.0, 10.0 and 10.3 (CUDA C++ Programming Guide)
# Registers lie in four parts of an SM, over which the warps of a block are dealt out: beside 13 warps with 128 each no
# block of eight finds room, beside 12 it does (H200, calibrate/probes, ``residency``).
WARP = 32
PARTS = 4


def registers_of(work: Work) -> int:
    """Registers that a block takes from an SM."""
    warps = -(-work.threads_per_block // WARP)
    return work.registers_per_thread * WARP * -(-warps // PARTS) * PARTS


@dataclass(frozen=True)
class Footprint:
    """One wave of a kernel: its resident blocks and what they hold."""

    blocks: int
    smem_bytes: int
    threads: int
    registers: int = 0


@dataclass(eq=False)
class Placement:
    """Where the blocks of one kernel are: ``missing`` ones have no room yet; ``whole`` fires when all have started."""

    needs: tuple[int, int, int]  # shared memory, threads, registers of a block
    missing: int
    carve_out: int  # shared memory of an SM that the first of its blocks sets
    whole: simpy.Event
    stream: str = ""
    on: dict[int, int] = field(default_factory=dict)


class SmSlots:
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
        # Of each SM: shared memory as carved out, threads and registers that are free, blocks there, carve-out.
        self._rooms = [
            [self._smem_per_sm, self._threads_per_sm, REGISTERS_PER_SM, 0, self._smem_per_sm]
            for _ in range(self._num_sms)
        ]
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
            self._smem_per_sm // max(1, work.smem_bytes_per_block),
            REGISTERS_PER_SM // max(1, registers_of(work)),
        )
        blocks = min(work.num_blocks, self._num_sms * per_sm)
        return Footprint(
            blocks, blocks * work.smem_bytes_per_block, blocks * work.threads_per_block, blocks * registers_of(work)
        )

    def _fits(self, wanted: Footprint) -> bool:
        return (
            wanted.smem_bytes <= self._free_smem
            and wanted.threads <= self._free_threads
            and wanted.registers <= self._free_registers
        )

    def acquire(self, wanted: Footprint) -> simpy.Event | None:
        """Take room now and return None, or return the event that fires once the room has been given."""
        if self._fits(wanted):
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

    def place(self, work: Work, held: Footprint, stream: str = "") -> Placement:
        """Put as many of the wave's blocks on SMs as fit now, evenly; the rest follows as others leave.

        Blocks of one stream start in the order of launch.
        """
        needs = (
            work.smem_bytes_per_block,
            work.threads_per_block,
            registers_of(work),
        )
        have = (self._smem_per_sm, self._threads_per_sm, REGISTERS_PER_SM)
        most = min(work.max_blocks_per_sm, *(one // max(1, need) for one, need in zip(have, needs, strict=True)))
        # For as many blocks as an SM takes, without the KB of each that the system reserves: with 8 KB in a block of
        # 256 threads 64 KB do not fit beside it, with 48 KB 128 KB do. Neither is it counted when blocks are placed.
        wanted = max(1, most) * needs[0]
        placement = Placement(
            needs=needs,
            missing=held.blocks,
            carve_out=next(
                (one for one in CARVE_OUTS if one >= wanted and work.driver_carve_out), self._smem_per_sm
            ),
            whole=simpy.Event(self._env),
            stream=stream,
        )
        self._parts.append(placement)
        self._fill()
        return placement

    def leave(self, placement: Placement) -> None:
        """Give back the SMs of a kernel that has ended."""
        for sm, count in placement.on.items():
            room = self._rooms[sm]
            for number, needed in enumerate(placement.needs):
                room[number] += count * needed
            room[3] -= count
        placement.on.clear()
        self._fill()

    def _fill(self) -> None:
        held_up: set[str] = set()
        for one in self._parts:
            if one.stream in held_up:
                continue
            before = -1
            while one.missing and one.missing != before:
                before = one.missing
                # The emptiest SMs first, one block each in a round.
                order = sorted(range(self._num_sms), key=lambda sm: (-self._rooms[sm][2], -self._rooms[sm][0], sm))
                for sm in order:
                    room = self._rooms[sm]
                    # An SM that has only blocks of this kernel becomes idle as they end, and takes the others then.
                    if one.missing and room[3] == one.on.get(sm, 0) and (not room[3] or room[4] < one.carve_out):
                        room[0] += one.carve_out - room[4]
                        room[4] = one.carve_out
                    if one.missing and all(room[number] >= need for number, need in enumerate(one.needs)):
                        room[3] += 1
                        for number, needed in enumerate(one.needs):
                            room[number] -= needed
                        one.on[sm] = one.on.get(sm, 0) + 1
                        one.missing -= 1
            if one.missing:
                held_up.add(one.stream)
            else:
                one.whole.succeed()
        self._parts = [one for one in self._parts if one.missing]
