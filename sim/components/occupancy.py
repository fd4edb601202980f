"""Occupancy: which blocks are resident on the SMs of one GPU, and who waits for SMs.

Blocks are placed SM by SM, the emptiest first, as many as fit (``sm.py``, ``sm_classes.py``); the others of their
kernel are pending, and become resident as blocks end. Those of a later launch do not before every block of an earlier
one, on whatever stream, is resident (block timestamps on an H200: the shared experts' begin when the last block of the
routed ones, launched before, has begun). So a kernel never holds room that an earlier one, which it may wait for,
needs.

A full wave is the least of blocks by shared memory, threads, registers, block slots and the kernel's own limit on one
SM, times the SMs: what CUDA's occupancy calculator gives. A grid beyond it is one wave that does all of the work.

Probe ``residency`` (H200), one cause at a time: 200 KB start beside 48 KB that prefer all of an SM's memory as shared,
and not beside 8 KB that leave the choice to the driver, until the SM is idle; then they start 0.2 us after the last
block there has ended (``block_refill_s``), with no launch in between.
"""

from __future__ import annotations

import simpy

from k3sim.errors import UserError
from k3sim.kernels.work import Work
from k3sim.sim.components.placement import Allocation, Placement
from k3sim.sim.components.sm import (
    L1_AND_SHARED_BYTES,
    BlockRequest,
    Sm,
    most_blocks,
    requested_carve_out,
    resources_of,
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
        self.sms = SmClasses(self._num_sms, Sm.idle(self._smem_per_sm, self._threads_per_sm))
        # Of blocks by their shape, as every layer brings the same kernels: the request, and how many an SM takes.
        self._requests: dict[tuple[int | None, ...], tuple[BlockRequest, int]] = {}
        self._pending: list[Placement] = []  # of kernels with pending blocks, in the order of launch

    def full_wave(self, work: Work) -> int:
        """Blocks of a kernel that are resident together when it has the chip to itself.

        Raises UserError when not even one block fits on an SM.
        """
        return min(work.num_blocks, self._num_sms * self._request(work)[1])

    def _request(self, work: Work) -> tuple[BlockRequest, int]:
        shape = _block_shape(work)
        known = self._requests.get(shape)
        if known is None:
            self._check(work)
            carve_out = requested_carve_out(work, self._smem_per_sm, self._threads_per_sm)
            request = BlockRequest(
                resources_of(work), carve_out, work.carve_out_percent is not None, was_pending=False
            )
            known = self._requests[shape] = request, most_blocks(work, carve_out, self._threads_per_sm)
            assert known[1] > 0, f"{work.registers_per_thread} registers for each of {work.threads_per_block} threads"
        return known

    def _check(self, work: Work) -> None:
        for what, needed, available in (
            ("bytes of shared memory", work.smem_bytes_per_block, self._smem_per_block),
            ("threads", work.threads_per_block, self._threads_per_sm),
        ):
            if needed > available:
                raise UserError(
                    f"a kernel of this path needs {needed} {what} in a block and {self._machine_name} has "
                    f"{available}; use another machine or path, or correct the profile"
                )

    def l1_bytes(self, placement: Placement) -> int:
        """What is L1 on the SMs of a kernel's blocks: where it is least, as their shared memory is carved out."""
        carve_outs = [state.carve_out for state in self.sms.states_of(placement.sms)]
        return L1_AND_SHARED_BYTES - max(carve_outs, default=placement.request.carve_out)

    def place(self, work: Work) -> Placement:
        """Make as many blocks of a full wave resident as fit now, evenly; the others are pending until blocks end."""
        num_blocks, request = self.full_wave(work), self._request(work)[0]
        placement = Placement(
            request=request,
            num_blocks=num_blocks,
            num_pending=num_blocks,
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
