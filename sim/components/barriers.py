"""Barriers between the blocks of a kernel.

| Barrier | Time of one |
| --- | --- |
| cluster | ``cluster_sync``: arrive and wait of all threads (probe ``cluster_barrier``) |
| cluster barrier with DSMEM release fence | twice ``cluster_sync`` |
| grid | ``grid_barrier`` |
| last block | ``last_block``: stores, a ticket from a counter, and the last block loads what all have stored |
| launch | the rest is a kernel of its own: exit, grid completion, launch latency and kernel prologue |

A cluster barrier behind stores of all threads to other blocks' shared memory waits until those are performed. Between
its block timestamps lie 0.55 to 0.61 us in three kernels on an H200 (2026-11-30), where the probe ``cluster_barrier``,
in which one thread stores, reads 0.31: so it is priced as two.
"""

from __future__ import annotations

from k3sim.kernels.work import Barrier
from k3sim.sim.machine import Machine
from k3sim.sim.units import picoseconds


class Barriers:
    """Barriers on one GPU, in picoseconds."""

    def __init__(self, machine: Machine) -> None:
        cluster_ps = picoseconds(machine.cluster_sync_s)
        self._of_kind_ps = {
            Barrier.NONE: 0,
            Barrier.CLUSTER: cluster_ps,
            Barrier.CLUSTER_RELEASE: 2 * cluster_ps,
            Barrier.GRID: picoseconds(machine.grid_barrier_s),
            Barrier.LAST: picoseconds(machine.last_block_s),
            Barrier.LAUNCH: picoseconds(machine.kernel_exit_cold_s)
            + picoseconds(machine.grid_completion_s)
            + picoseconds(machine.launch_latency_s)
            + picoseconds(machine.kernel_prologue_s),
        }

    def wait_ps(self, kind: Barrier) -> int:
        """From the arrival of the last block until all have resumed."""
        return self._of_kind_ps[kind]
