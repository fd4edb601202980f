"""Instruction caches of the SMs: whether a launch fetches its code, what its serial code takes, and its exit.

| Quantity | Code in the cache (warm) | Code fetched (cold) |
| --- | --- | --- |
| a launch | its code and what others launched since its last run are at most 64 KB | any other |
| an instruction of serial code | ``instruction`` | the longer of that and ``cold_instruction`` |
| and no less than issue | warps of the SM / 4 schedulers / clock | the same |
| code whose pace is part of another count | nothing | ``cold_instruction``, ``icache_miss_instructions`` times |
| kernel exit | ``kernel_exit_warm`` | ``kernel_exit_cold`` |

Serial code is what one warp runs straight through behind the kernel's dependency wait. Of code that ran before:
straight code of 32 KB runs again at its pace, behind 192 KB of others' it is fetched anew (H200, probe ``cold_code``);
64 is assumed between them. Which SMs a kernel's blocks ran on is not followed. Products of other shapes are other code:
they are compiled, or chosen by cuBLAS, for their shape. Of public kernels neither size nor code is known: they have no
serial code, and exit as cold ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3sim.kernels.costs import code_of
from k3sim.kernels.work import MachineCode, Work
from k3sim.model.program import Call
from k3sim.sim.components.sm import warps_of
from k3sim.sim.components.sm_timing import SCHEDULERS
from k3sim.sim.machine import Machine
from k3sim.sim.units import picoseconds

WARM_CODE_BYTES = 64 * 1024


UNKNOWN = MachineCode()


@dataclass(frozen=True)
class LaunchedCode:
    """Code of one launch, and whether the SMs had it."""

    counts: MachineCode
    is_warm: bool


def _name(call: Call) -> str:
    """What tells a kernel's machine code from others'."""
    return " ".join([call.operator, *(f"{one.num_outputs}x{one.depth}" for one in call.weights)])


class InstructionCache:
    """Code that the SMs of one GPU hold, by the order of the last launches.

    ``counts_code``: its kernels are the project's own, whose machine code is known.
    """

    def __init__(self, machine: Machine, *, counts_code: bool) -> None:
        self._counts_code = counts_code
        self._num_sms = int(machine.num_sms)
        self._clock_hz = machine.sm_clock_hz
        self._instruction_s = machine.instruction_s
        self._cold_instruction_s = machine.cold_instruction_s
        self._exit_warm_ps = picoseconds(machine.kernel_exit_warm_s)
        self.exit_cold_ps = picoseconds(machine.kernel_exit_cold_s)
        self._launched: dict[str, int] = {}  # bytes of each code, in the order of the last launch

    def launch(self, call: Call) -> LaunchedCode:
        """Note that a kernel is launched now."""
        counts = code_of(call.operator) if self._counts_code else UNKNOWN
        if not counts.num_bytes:
            return LaunchedCode(UNKNOWN, is_warm=False)
        name, others_bytes = _name(call), 0
        for other, num_bytes in reversed(self._launched.items()):
            if other == name:
                break
            others_bytes += num_bytes
        is_warm = name in self._launched and others_bytes + counts.num_bytes <= WARM_CODE_BYTES
        self._launched.pop(name, None)
        self._launched[name] = counts.num_bytes
        return LaunchedCode(counts, is_warm)

    def serial_ps(self, code: LaunchedCode, work: Work, num_blocks: int) -> float:
        """What a warp takes to run through the serial code behind its wait, with the others of its SM."""
        counts = code.counts
        if not counts.num_bytes:
            return 0.0
        if counts.icache_miss_instructions:
            return 0.0 if code.is_warm else 1e12 * counts.icache_miss_instructions * self._cold_instruction_s
        warps = warps_of(work) * -(-num_blocks // self._num_sms)
        issue_s = warps / SCHEDULERS / self._clock_hz
        # What is fetched runs no faster than what the SM holds.
        each_s = max(issue_s, self._instruction_s, 0.0 if code.is_warm else self._cold_instruction_s)
        return 1e12 * each_s * (work.serial_instructions or counts.serial_instructions)

    def exit_ps(self, code: LaunchedCode, *, pushes: bool) -> tuple[int, int]:
        """What a kernel's exit takes, and how much of it comes behind its push to peers, who wait for no exit."""
        exit_ps = self._exit_warm_ps if code.is_warm else self.exit_cold_ps
        return exit_ps, min(exit_ps, self._exit_warm_ps) if pushes else 0
