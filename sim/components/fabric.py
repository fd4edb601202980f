"""NVLink between the ranks: ports, the switch, and exchanges that every rank feeds and polls.

| Step | Time |
| --- | --- |
| a push leaves | bytes x copies over ``nvlink_egress``: one a peer; one with multicast, or to the next of a ring |
| it enters a peer | with those of all peers over ``nvlink_ingress`` (``bandwidth.py``: ports are shared evenly) |
| it is visible | ``nvlink_one_way`` after its last byte left; a flag behind a fence ``system_fence`` later |
| a fence behind it | stores to peers are acknowledged before the fence can end: as long as an empty load |
| a poller has seen it | ``nvlink_visibility`` later, and ``slot_visibility`` for each slot beyond the first |
| a load | there, an access to L2 there, and back, and bytes over the ingress port; a pull is a fenced flag before it |

An exchange is complete when the data of all its ranks is visible. A load's bytes are summed by the switch, and then one
part enters the port, or every peer's part does.

When ranks are identical one is simulated: it stands for all, so its own port carries what the peers send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import simpy

from k3sim.sim.components.bandwidth import SharedBandwidth
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import Counter
from k3sim.sim.units import bytes_per_us, picoseconds

FLAG_BYTES = 128  # one line to each peer


class Reach(Enum):
    """Whom a push goes to, and in how many copies it leaves."""

    PEERS = "every peer, in one copy where the machine has multicast"
    EACH = "every peer, in a copy for each"
    NEXT = "the next rank of a ring"


class Fence(Enum):
    """What is ordered before the flag that follows a push."""

    NONE = "nothing: the data itself is polled"
    OWN = "stores to the rank's own memory"
    PEERS = "stores to peers, which have to be acknowledged"


@dataclass(eq=False)
class Exchange:
    """One exchange of a group of ranks: whose data is visible, and since when."""

    group_size: int
    stride: int
    complete: simpy.Event
    visible_ps: dict[int, int] = field(default_factory=dict)  # by rank


class Fabric:
    """Ports of the simulated ranks and the exchanges between them."""

    def __init__(self, env: simpy.Environment, machine: Machine, ranks: tuple[int, ...]) -> None:
        self._env = env
        self._ranks = ranks
        self._multicast = bool(machine.nvlink_multicast)
        self._one_way_ps = picoseconds(machine.nvlink_one_way_s)
        self._far_access_ps = picoseconds(machine.l2_far_latency_s)
        self._fence_ps = picoseconds(machine.system_fence_s)
        self._visibility_ps = picoseconds(machine.nvlink_visibility_s)
        self._slot_ps = picoseconds(machine.slot_visibility_s)
        self._in_switch_reduction = bool(machine.nvlink_in_switch_reduction)
        self._egress = bytes_per_us(machine.nvlink_egress_bytes_per_s)
        self._ingress = bytes_per_us(machine.nvlink_ingress_bytes_per_s)
        capacities = {}
        for rank in ranks:
            capacities[f"egress {rank}"] = self._egress
            capacities[f"ingress {rank}"] = self._ingress
        self._ports = SharedBandwidth(env, capacities)
        self._fence_delay_ps = {
            Fence.NONE: 0,
            Fence.OWN: self._fence_ps,
            Fence.PEERS: 2 * self._one_way_ps + self._far_access_ps + self._fence_ps,
        }
        self._exchanges: dict[tuple[int, int, int], Exchange] = {}
        self._weights: dict[tuple[int, int, int, int], dict[str, int]] = {}  # by rank, receivers, copies, stride

    def exchange(self, index: int, rank: int, group_size: int, step: int = 0, stride: int = 1) -> Exchange:
        """The exchange that call ``index`` feeds among the group of ``rank``, made at first use; one of each step.

        ``stride``: from one rank of the group to the next.
        """
        group = self._group(rank, group_size, stride)
        key = (index, step, group.start)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(group_size, stride, simpy.Event(self._env))
        return self._exchanges[key]

    def copies(self, group_size: int, reach: Reach = Reach.PEERS) -> int:
        """Copies of a push that leave the port."""
        if reach is Reach.NEXT or (reach is Reach.PEERS and self._multicast):
            return 1
        return group_size - 1

    def visibility_ps(self, num_slots: int) -> int:
        """From when all data of an exchange is visible until a poller of ``num_slots`` slots has seen it."""
        return self._visibility_ps + (num_slots - 1) * self._slot_ps

    def push(
        self, rank: int, exchange: Exchange, num_bytes: int, *,
        reach: Reach = Reach.PEERS, fence: Fence = Fence.NONE,
    ) -> simpy.Event:  # fmt: skip
        """Send ``num_bytes`` to whom ``reach`` says; the event fires when the last store has left."""
        weights = self._push_weights(rank, exchange.group_size, exchange.stride, reach)
        sent = self._ports.transfer(num_bytes, weights, self._egress)
        delay_ps = self._one_way_ps + self._fence_delay_ps[fence]

        def arrive(_: simpy.Event) -> None:
            self._env.timeout(delay_ps).callbacks.append(lambda _: self._visible(rank, exchange))

        assert sent.callbacks is not None
        if sent.triggered:
            arrive(sent)
        else:
            sent.callbacks.append(arrive)
        return sent

    def _push_weights(self, rank: int, group_size: int, stride: int, reach: Reach) -> Mapping[str, int]:
        """Copies of a push that leave the port of a rank, and that enter those of its peers."""
        copies = self.copies(group_size, reach)
        receivers = 1 if reach is Reach.NEXT else group_size - 1
        key = (rank, receivers, copies, stride)
        if key in self._weights:
            return self._weights[key]
        weights = {f"egress {rank}": copies}
        if len(self._ranks) == 1:
            # Its peers do the same at the same time, so this port receives from all that send to it.
            weights[f"ingress {rank}"] = receivers
        else:
            group = self._group(rank, group_size, stride)
            for ahead in range(1, receivers + 1):
                weights[f"ingress {group[(group.index(rank) + ahead) % group_size]}"] = 1
        self._weights[key] = weights
        return weights

    def load(self, rank: int, exchange: Exchange, num_bytes: int, *, summed: bool | None = None) -> simpy.Event:
        """Load ``num_bytes`` of every peer's buffer; the event fires when the last byte is here.

        Every peer loads too, so a port sends once for each of them. What comes in is one sum where the switch adds up
        (``summed``; None: where the machine can), and every peer's part where it does not.
        """
        peers = exchange.group_size - 1
        parts = 1 if (self._in_switch_reduction if summed is None else summed) else peers
        weights = {f"egress {rank}": peers, f"ingress {rank}": parts}
        if len(self._ranks) > 1:
            weights = {f"ingress {rank}": parts}
            for other in self._group(rank, exchange.group_size, exchange.stride):
                if other != rank:
                    weights[f"egress {other}"] = 1
        loaded = simpy.Event(self._env)

        def arrived(_: simpy.Event) -> None:
            loaded.succeed()

        def request_arrived(_: simpy.Event) -> None:
            moved = self._ports.transfer(num_bytes, weights, self._ingress)
            assert moved.callbacks is not None
            moved.callbacks.append(lambda _: self._after(self._one_way_ps, arrived))

        self._after(self._one_way_ps + self._far_access_ps, request_arrived)
        return loaded

    def _after(self, delay_ps: int, then: Callable[[simpy.Event], None]) -> None:
        timeout = self._env.timeout(delay_ps)
        assert timeout.callbacks is not None
        timeout.callbacks.append(then)

    @staticmethod
    def _group(rank: int, group_size: int, stride: int) -> range:
        span = group_size * stride
        first = rank // span * span + rank % stride
        return range(first, first + span, stride)

    def _visible(self, rank: int, exchange: Exchange) -> None:
        exchange.visible_ps[rank] = int(self._env.now)
        expected = 1 if len(self._ranks) == 1 else exchange.group_size
        if len(exchange.visible_ps) == expected:
            exchange.complete.succeed()

    def counters(self) -> list[Counter]:
        named = []
        for counter in self._ports.counters(-1):
            direction, rank = counter.resource.split()
            named.append(
                Counter(int(rank), f"nvlink {direction}", counter.capacity_bytes_per_us, counter.steps)
            )
        return named
