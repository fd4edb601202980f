"""The launch queue of a stream: which kernel lets the next one start, and when its first instruction runs.

| Launch | Not before | First instruction after that |
| --- | --- | --- |
| graph | the end of the kernel before it and of all that it joins | ``grid_completion`` + ``launch_latency`` |
| graph, second node behind one | the same | ``fork`` more |
| behind the host | the end of the host's launches | ``launch_latency`` |
| PDL | the trigger of the kernel before it and of all that it joins | ``pdl_trigger_to_launch`` |
| task of a megakernel | the trigger of the task before it, the end of all that it joins | at once |

Then come ``kernel_prologue`` and ``block_dispatch`` for each block of the first wave. Where a launch has to wait for
SMs, its first instruction comes no sooner than ``block_refill`` after it has some.

All incoming edges of a PDL node are programmatic: capture makes what it joins from another stream let it in by its
trigger too (block timestamps: the tail begins before the shared columns are sent). Its dependency wait is for the end
of all of them, and ``grid_completion`` after that their stores are visible to it. A task sees those of the task that it
waits for ``counter_handoff`` after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from k3sim.model.program import Call
from k3sim.sim.clock import Moment, Steps
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import KernelRun, Phase
from k3sim.sim.units import picoseconds


@dataclass(eq=False)
class KernelState:
    """What others may wait for of one kernel: its trigger and its end."""

    run: KernelRun
    triggered: Moment
    done: Moment
    trigger_ps: int = -1
    sent_ps: int = -1  # when its last store to peers left
    is_host: bool = False

    def trigger(self, now_ps: int) -> None:
        """Let the next launch of a PDL edge in; a kernel triggers once."""
        if not self.triggered.reached:
            self.trigger_ps = now_ps
            self.triggered.reach()

    def end(self, now_ps: int, causes: Iterable[int]) -> None:
        """Note the end and the kernels that were waited for. The trigger comes no later; ``done`` is the caller's."""
        self.run.end_ps = now_ps
        self.run.causes = tuple(dict.fromkeys(causes))
        self.trigger(now_ps)


@dataclass(frozen=True)
class Admission:
    """What let a kernel launch: the last of those it had to wait for, by its end (``completed``) or its trigger."""

    by: KernelState | None
    completed: bool

    @property
    def cause(self) -> int:
        return -1 if self.by is None else self.by.run.index

    @property
    def by_kernel(self) -> bool:
        """A kernel let it in: neither the host nor the start of the step."""
        return self.by is not None and not self.by.is_host


class LaunchQueue:
    """Launches on one GPU. Times are picoseconds."""

    def __init__(self, machine: Machine) -> None:
        self._launch_ps = picoseconds(machine.launch_latency_s)
        self._pdl_ps = picoseconds(machine.pdl_trigger_to_launch_s)
        self._fork_ps = picoseconds(machine.fork_s)
        self._completion_ps = picoseconds(machine.grid_completion_s)
        self._handoff_ps = picoseconds(machine.counter_handoff_s)
        self._dispatch_s = machine.block_dispatch_s
        self._host_launch_s = machine.host_launch_s
        self._host_graph_launch_s = machine.host_graph_launch_s
        self.prologue_ps = picoseconds(machine.kernel_prologue_s)
        self.refill_ps = picoseconds(machine.block_refill_s)

    def run_stream(
        self,
        calls: Sequence[Call],
        states: Mapping[int, KernelState],
        start: Callable[[Call, KernelState | None, Admission], object],
    ) -> Steps:
        """Start each call of a stream when its turn has come, with the call before it and what let it launch."""
        previous: KernelState | None = None
        for call in calls:
            by_end, by_trigger = [states[index] for index in call.after], []
            if previous is not None:
                if call.launch == "pdl":
                    by_end, by_trigger = [], [previous, *by_end]
                elif call.launch == "task":
                    by_trigger = [previous]
                else:
                    by_end = [*by_end, previous]
            for needed in by_end:
                if not needed.done.reached:
                    yield needed.done.wait()
            for needed in by_trigger:
                if not needed.triggered.reached:
                    yield needed.triggered.wait()
            start(call, previous, _last_of(by_end, by_trigger))
            previous = states[call.index]

    def release_ps(self, run: KernelRun, admission: Admission) -> int:
        """From the end of the kernel that a launch waited for until the next node may start."""
        assert admission.by is not None and admission.completed
        # Of several nodes behind one, that of its own stream comes first.
        forks = run.stream != "main" and admission.by.run.stream == "main"
        return self._completion_ps + (self._fork_ps if forks else 0)

    def first_instruction_ps(self, admission: Admission) -> int:
        """From there to the first instruction, on SMs that have room."""
        return self._pdl_ps if admission.by_kernel and not admission.completed else self._launch_ps

    def dispatch_ps(self, num_blocks: int) -> int:
        return picoseconds(num_blocks * self._dispatch_s)

    def settle_ps(self, *, is_task: bool) -> int:
        """From the end of a kernel that was waited for inside, until what it stored is visible."""
        return self._handoff_ps if is_task else self._completion_ps

    def run_host(self, env: simpy.Environment, call: Call, state: KernelState, admission: Admission) -> Steps:
        """Launches that the host does one by one, outside the graph: no kernel, but what its graph waits for."""
        run, start_ps, shape = state.run, int(env.now), call.shape
        run.start_ps, run.launched_by, state.is_host = start_ps, admission.cause, True
        launches_s = shape["num_launches"] * self._host_launch_s
        yield env.timeout(picoseconds(launches_s + shape["num_graph_launches"] * self._host_graph_launch_s))
        run.add_span(Phase.HOST, int(env.now), admission.cause, start_ps)
        state.end(int(env.now), [] if admission.by is None else [admission.cause])
        state.done.reach()


def _last_of(by_end: Sequence[KernelState], by_trigger: Sequence[KernelState]) -> Admission:
    ready_ps, by, completed = 0, None, False
    for needed in by_end:
        if needed.run.end_ps >= ready_ps:
            ready_ps, by, completed = needed.run.end_ps, needed, True
    for needed in by_trigger:
        if needed.trigger_ps >= ready_ps:
            ready_ps, by, completed = needed.trigger_ps, needed, False
    return Admission(by, completed)
