"""Occupancy: which blocks are resident on the SMs of one GPU, and who waits for SMs.

| Kernel | Its blocks become resident |
| --- | --- |
| registers unknown (public) | together, when one full wave of them fits in what is free of the whole chip |
| registers known (own) | SM by SM, the emptiest first, as many as fit (``sm_classes.py``); others as blocks end |
| of a later launch | not before every block of an earlier one, on whatever stream, is resident |

A full wave is the least of blocks by shared memory, threads, registers and the kernel's own limit on one SM, times the
SMs: what CUDA's occupancy calculator gives. Kernels whose registers are not known are counted over the whole chip, as
their blocks are spread evenly.

Kernels whose registers are known are placed SM by SM: a block with 200 KB of shared memory does not fit beside one that
holds the registers, nor on an SM whose shared memory was carved out for less and that is not idle since. Blocks start
in the order of launch (block timestamps on an H200: the shared experts' begin when the last block of the routed ones,
launched before, has begun). So a kernel never holds room that an earlier one, which it may wait for, needs.

Probe ``residency`` (H200), one cause at a time: 200 KB start beside 48 KB that prefer all of an SM's memory as shared,
and not beside 8 KB that leave the choice to the driver, until the SM is idle; then they start 0.2 us after the last
block there has ended (``block_refill_s``), with no launch in between.
"""

from __future__ import annotations

import simpy

from k3sim.errors import UserError
from k3sim.kernels.work import Work
from k3sim.sim.components.placement import Allocation, Footprint, Placement
from k3sim.sim.components.sm import (
    L1_AND_SHARED_BYTES,
    REGISTERS_PER_SM,
    WARP,
    BlockRequest,
    Sm,
    most_blocks_by_registers,
    requested_carve_out,
    resources_of,
    warps_of,
)
from k3sim.sim.components.sm_classes import SmClasses
from k3sim.sim.machine import Machine


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
        self.sms = SmClasses(self._num_sms, Sm.idle(self._smem_per_sm, self._threads_per_sm))
        # Of blocks by their shape: every layer brings the same kernels.
        self._footprints: dict[tuple[int | None, ...], Footprint] = {}
        self._carve_outs: dict[tuple[int | None, ...], int] = {}
        self._pending: list[Placement] = []  # of kernels with pending blocks, in the order of launch

    def footprint(self, work: Work) -> Footprint:
        """The wave that a kernel holds when it has the chip to itself.

        Raises UserError when not even one block fits on an SM.
        """
        shape = (work.num_blocks, *_block_shape(work))
        known = self._footprints.get(shape)
        if known is None:
            known = self._footprints[shape] = self._footprint(work)
        return known

    def _footprint(self, work: Work) -> Footprint:
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
            most_blocks_by_registers(work),
        )
        blocks = min(work.num_blocks, self._num_sms * per_sm)
        registers = blocks * warps_of(work) * WARP * work.registers_per_thread
        return Footprint(blocks, blocks * work.smem_bytes_per_block, blocks * work.threads_per_block, registers)

    def _carve_out(self, work: Work) -> int:
        shape = _block_shape(work)
        known = self._carve_outs.get(shape)
        if known is None:
            known = self._carve_outs[shape] = requested_carve_out(work, self._smem_per_sm, self._threads_per_sm)
        return known

    def l1_bytes(self, work: Work, placement: Placement | None) -> int:
        """What is L1 on the SMs of a kernel's blocks: where it is least, as their shared memory is carved out."""
        carve_outs = [] if placement is None else [state.carve_out for state in self.sms.states_of(placement.sms)]
        return L1_AND_SHARED_BYTES - max(carve_outs, default=self._carve_out(work))

    def _fits(self, wanted: Footprint) -> bool:
        return (
            wanted.smem_bytes <= self._free_smem
            and wanted.threads <= self._free_threads
            and wanted.registers <= self._free_registers
        )

    def acquire(self, wanted: Footprint, *, placed: bool = False) -> simpy.Event | None:
        """Allocate a wave now and return None, or return the event that fires once it has been allocated.

        ``placed``: the kernel's blocks become resident SM by SM; here they only count for others.
        """
        if placed or self._fits(wanted):
            self._allocate(wanted)
            return None
        granted = simpy.Event(self._env)
        self._waiting.append((wanted, granted))
        return granted

    def release(self, footprint: Footprint, by: int) -> None:
        """Release a wave; whoever waits and fits gets its own, the longest waiting first, and learns who ended."""
        self._free_smem += footprint.smem_bytes
        self._free_threads += footprint.threads
        self._free_registers += footprint.registers
        still: list[tuple[Footprint, simpy.Event]] = []
        for wanted, granted in self._waiting:
            if self._fits(wanted):
                self._allocate(wanted)
                granted.succeed(by)
            else:
                still.append((wanted, granted))
        self._waiting = still

    def _allocate(self, wanted: Footprint) -> None:
        self._free_smem -= wanted.smem_bytes
        self._free_threads -= wanted.threads
        self._free_registers -= wanted.registers

    def place(self, work: Work, footprint: Footprint) -> Placement:
        """Make as many of the wave's blocks resident as fit now, evenly; the others are pending until blocks end."""
        request = BlockRequest(
            resources_of(work), self._carve_out(work), work.carve_out_percent is not None, was_pending=False
        )
        placement = Placement(
            request=request,
            num_pending=footprint.blocks,
            all_resident=simpy.Event(self._env),
            first_resident=simpy.Event(self._env),
        )
        self._pending.append(placement)
        self._admit(-1)
        placement.request = request._replace(was_pending=True)
        return placement

    def release_blocks(self, placement: Placement, blocks: list[Allocation] | None, by: int) -> None:
        """Release what some blocks of a kernel hold, as they end before others; None: those of the first wave.

        ``by``: the kernel, for those who become resident in their place.
        """
        self.sms.release_blocks(placement, placement.first_wave if blocks is None else blocks)
        self._admit(by)

    def release_all(self, placement: Placement, by: int = -1) -> None:
        """Release the SMs of a kernel that has ended; whoever becomes resident there learns who it was."""
        self.sms.release_all(placement)
        self._admit(by)

    def _admit(self, by: int) -> None:
        """Make pending blocks resident, kernel by kernel in the order of launch."""
        for one in self._pending:
            admitted = self.sms.admit(one)
            if admitted and not one.first_resident.triggered:
                one.first_resident.succeed(by)
            if one.on_later_wave is None:
                one.first_wave += admitted
            elif admitted:
                one.on_later_wave(admitted, by)
            if one.num_pending:
                break
            one.all_resident.succeed(by)
        self._pending = [one for one in self._pending if one.num_pending]


def _block_shape(work: Work) -> tuple[int | None, ...]:
    """All that a block's room on an SM depends on."""
    return (
        work.threads_per_block,
        work.smem_bytes_per_block,
        work.max_blocks_per_sm,
        work.registers_per_thread,
        work.carve_out_percent,
    )
