"""Exchanges as one rank takes part in them: it pushes, polls, pulls.

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

from k3sim.model.program import Call
from k3sim.sim.components.fabric import FLAG_BYTES, Fabric
from k3sim.sim.components.launch_queue import KernelState
from k3sim.sim.components.memory import Memory
from k3sim.sim.components.skew import Lateness
from k3sim.sim.timeline.timeline import KernelRun, Phase

Steps = Generator[simpy.Event, Any, None]
TRIPS = 3  # of a hand-over through memory


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

    def push(self, state: KernelState, call: Call, bytes_per_peer: int, *, fenced: bool = False) -> Steps:
        """Send to every peer, until the last store has left."""
        run, sent_ps = state.run, int(self._env.now)
        exchange = self._fabric.exchange(call.index, self._rank, call.group_size)
        yield self._fabric.push(self._rank, exchange, bytes_per_peer, fenced=fenced)
        run.add_span(Phase.SEND, int(self._env.now), -1, sent_ps)
        run.sent_bytes = self._fabric.sent_bytes(bytes_per_peer, call.group_size)
        state.sent_ps = int(self._env.now)

    def poll(self, run: KernelRun, call: Call, sender: KernelState, num_slots: int = 0) -> Steps:
        """Wait until every rank's data of ``call`` is visible, then until this poller has seen it.

        ``sender`` is this rank's own kernel of that exchange. ``num_slots``: that it looks at, 0 for all ranks'.
        """
        env, exchange = self._env, self._fabric.exchange(call.index, self._rank, call.group_size)
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

    def swap(self, state: KernelState, call: Call, bytes_per_peer: int) -> Steps:
        """Send and then take what all peers sent: push and poll, or a fenced flag and a load."""
        if call.transport != "pull":
            yield from self.push(state, call, bytes_per_peer)
            yield from self.poll(state.run, call, state)
            return
        yield from self.push(state, call, FLAG_BYTES, fenced=True)
        yield from self.poll(state.run, call, state)
        exchange = self._fabric.exchange(call.index, self._rank, call.group_size)
        yield self._fabric.load(self._rank, exchange, bytes_per_peer)
        state.run.sent_bytes += bytes_per_peer * (call.group_size - 1)  # every peer loads this rank's part
        state.run.add_span(Phase.SEND, int(self._env.now))
