"""Exchanges as one rank takes part in them: it pushes, polls, pulls, or sums up with its peers (``all_reduce``).

| Wait of a poller | Until |
| --- | --- |
| peers | the data of all ranks is visible; where one rank stands for all: of the slowest in the mean (``skew.py``) |
| poll | it has seen it: ``Fabric.visibility_ps``, and three of the waits that an L2 hit has now |

A store, its way to be seen, and the look that finds it: beside a deep stream a hand-over takes three of the waits of an
L2 hit longer (calibrate/probes, ``handoff_beside_stream``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from k3sim.model.collectives import Form
from k3sim.model.program import Call
from k3sim.sim.components.fabric import FLAG_BYTES, Fabric, Fence, Reach
from k3sim.sim.components.launch_queue import KernelState
from k3sim.sim.components.memory import Memory
from k3sim.sim.components.skew import Lateness
from k3sim.sim.timeline.timeline import KernelRun, Phase

Steps = Generator[simpy.Event, Any, None]
TRIPS = 3  # of a hand-over through memory
FORM_NAMES = frozenset(form.value for form in Form)


class Peers:
    """The peers of one rank. ``lateness``: of the slowest of them, where the rank stands for all."""

    def __init__(
        self, env: simpy.Environment, fabric: Fabric, memory: Memory, rank: int, lateness: Lateness | None
    ) -> None:
        self._env = env
        self._fabric = fabric
        self._memory = memory
        self._rank = rank
        self._lateness = lateness

    def worked(self, duration_ps: int) -> None:
        """The rank did work of its own for so long, which differs between ranks."""
        if self._lateness is not None:
            self._lateness.add(duration_ps)

    def push(
        self, state: KernelState, call: Call, num_bytes: int, *,
        step: int = 0, reach: Reach = Reach.PEERS, fence: Fence = Fence.NONE,
    ) -> Steps:  # fmt: skip
        """Send to every peer, or to whom ``reach`` says, until the last store has left."""
        run, sent_ps = state.run, int(self._env.now)
        exchange = self._fabric.exchange(call.index, self._rank, call.group_size, step, call.group_stride)
        yield self._fabric.push(self._rank, exchange, num_bytes, reach=reach, fence=fence)
        run.add_span(Phase.SEND, int(self._env.now), -1, sent_ps)
        run.sent_bytes += num_bytes * self._fabric.copies(call.group_size, reach)
        state.sent_ps = int(self._env.now)

    def poll(self, run: KernelRun, call: Call, sender: KernelState, num_slots: int = 0, step: int = 0) -> Steps:
        """Wait until every rank's data of ``call`` is visible, then until this poller has seen it.

        ``sender`` is this rank's own kernel of that exchange. ``num_slots``: that it looks at, 0 for all ranks'.
        """
        env = self._env
        exchange = self._fabric.exchange(call.index, self._rank, call.group_size, step, call.group_stride)
        if not exchange.complete.triggered:
            yield exchange.complete
        complete_ps = max(exchange.visible_ps.values())
        if self._lateness is not None:
            complete_ps += self._lateness.wait_ps(exchange.group_size)
            if complete_ps > env.now:
                yield env.timeout(complete_ps - int(env.now))
        arrival_ps = exchange.visible_ps[self._rank]
        run.add_span(Phase.PEERS, int(env.now), sender.run.index, sender.sent_ps, arrival_ps)
        seen_ps = complete_ps + self._fabric.visibility_ps(num_slots or exchange.group_size)
        left_ps = seen_ps + TRIPS * self._memory.queueing_ps() - int(env.now)
        if left_ps > 0:
            yield env.timeout(left_ps)
            run.add_span(Phase.POLL, int(env.now), sender.run.index, sender.sent_ps, arrival_ps, complete_ps)

    def swap(self, state: KernelState, call: Call, num_bytes: int) -> Steps:
        """Send and then take what all peers sent: push and poll, or a fenced flag and a load; or one of the forms."""
        if call.transport in FORM_NAMES:
            yield from self.all_reduce(Form(call.transport), state, call, num_bytes)
            return
        if call.transport != "pull":
            # What is another for every peer leaves in as many copies; counters of tokens follow it behind a fence.
            each = call.transport in ("each", "all-to-all")
            fence = Fence.PEERS if call.transport == "all-to-all" else Fence.NONE
            yield from self.push(state, call, num_bytes, reach=Reach.EACH if each else Reach.PEERS, fence=fence)
            yield from self.poll(state.run, call, state)
            return
        yield from self.push(state, call, FLAG_BYTES, fence=Fence.OWN)
        yield from self.poll(state.run, call, state)
        yield from self._load(state, call, num_bytes)

    def _load(self, state: KernelState, call: Call, num_bytes: int, *, summed: bool | None = None) -> Steps:
        """Load from every peer, which all load this rank's part as well."""
        exchange = self._fabric.exchange(call.index, self._rank, call.group_size, 0, call.group_stride)
        yield self._fabric.load(self._rank, exchange, num_bytes, summed=summed)
        state.run.sent_bytes += num_bytes * (call.group_size - 1)
        state.run.add_span(Phase.SEND, int(self._env.now))

    def all_reduce(self, form: Form, state: KernelState, call: Call, num_bytes: int) -> Steps:
        """A library's all-reduce of ``num_bytes``, of which every rank sums a slice, or in one-shot all of it.

        Two-shot: a flag says that the input is there, the slice is loaded from all and added up, its sum is stored to
        all, and a flag behind a fence says so. In-switch is the same with a load that the switch sums, and one store.
        A ring passes a slice on until it is whole, and then once more.
        """
        run, slice_bytes = state.run, -(-num_bytes // call.group_size)
        if form is Form.ONE_SHOT:
            yield from self.push(state, call, num_bytes, reach=Reach.EACH)
            yield from self.poll(run, call, state)
        elif form is Form.RING:
            for step in range(2 * (call.group_size - 1)):
                yield from self.push(state, call, slice_bytes, step=step, reach=Reach.NEXT)
                yield from self.poll(run, call, state, 1, step)
        else:
            in_switch = form is Form.IN_SWITCH
            reach = Reach.PEERS if in_switch else Reach.EACH
            yield from self.push(state, call, FLAG_BYTES, reach=reach)
            yield from self.poll(run, call, state)
            yield from self._load(state, call, slice_bytes, summed=in_switch)
            yield from self.push(state, call, slice_bytes, step=1, reach=reach, fence=Fence.PEERS)
            yield from self.poll(run, call, state, step=1)
