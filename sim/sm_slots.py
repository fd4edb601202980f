"""Room on the SMs: shared memory, threads and registers that running kernels hold.

Blocks are spread evenly, so room is counted over the whole chip. A kernel that would run in several waves holds
one full wave. A kernel is admitted when its wave fits beside those that run, in the order of asking within a
stream; where it does not fit it waits, and with it the gain of an early launch is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from k3sim.errors import UserError
from k3sim.kernels.work import Work
from k3sim.sim.machine import Machine

REGISTERS_PER_SM = 64 * 1024  # compute capability 9.0, 10.0 and 10.3 (CUDA C++ Programming Guide)


@dataclass(frozen=True)
class Footprint:
    """One wave of a kernel: its resident blocks and what they hold."""

    blocks: int
    smem_bytes: int
    threads: int
    registers: int = 0


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
            REGISTERS_PER_SM // max(1, work.registers_per_thread * work.threads_per_block),
        )
        blocks = min(work.num_blocks, self._num_sms * per_sm)
        threads = blocks * work.threads_per_block
        return Footprint(blocks, blocks * work.smem_bytes_per_block, threads, threads * work.registers_per_thread)

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
