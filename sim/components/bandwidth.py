"""Bandwidth that transfers share: the one rule for HBM, L2 and NVLink ports.

Every transfer ``f`` has one rate ``r_f``, a cap ``c_f``, a share ``s_f`` and a weight ``w_fk`` on each resource ``k``
it crosses (a push to seven peers leaves its port with weight seven). Rates are max-min fair for their shares:

    r_f <= c_f for all f,   sum_f w_fk r_f <= C_k for all k,

and no ``r_f / s_f`` can rise without lowering one that is not larger. They are found by progressive filling: raise all
rates together, in proportion to their shares; whoever reaches its cap, or crosses a resource that is full, stops there.
Memory gives a stream the share of its bytes in flight, which is how a queue serves those that fill it; ports share
evenly. Outstanding bytes are capped by remaining bytes, as these are when another stream comes: one that is near its
end then ends with the burst of requests that joins it, and a small burst when the queue that it joined is through.

Time is integer picoseconds and rates are integer bytes per microsecond, so the unit of progress, one byte per
microsecond for one picosecond, is 1e-6 byte and the accounting is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import simpy

from k3sim.sim.timeline.timeline import PS_PER_US, Counter

# Rates settle after every other event of an instant, so that transfers that start together share from the start.
_SETTLE_PRIORITY = 2


@dataclass(eq=False, slots=True)
class _Transfer:
    left: int  # in units of 1e-6 byte
    cap: int
    weights: Mapping[str, int]
    done: simpy.Event
    queue: int = 0  # most of it that is asked for at once, in the units of ``left``
    share: int = 1
    rate: int = 0
    standing: int = 0  # its part on a full resource: the share, or what it had left when the last one came
    level: float = 0.0  # cap over standing: where filling stops it


class SharedBandwidth:
    """A set of resources with capacities in bytes per microsecond, and the transfers that cross them."""

    def __init__(self, env: simpy.Environment, capacities_bytes_per_us: Mapping[str, int]) -> None:
        self._env = env
        self._capacities = dict(capacities_bytes_per_us)
        self._transfers: list[_Transfer] = []
        self._settled_ps = 0
        self._settle_pending = False
        self._generation = 0
        self._joined = False  # transfers have come since the last time
        self._used: dict[str, int] = {}
        self._wanted = dict.fromkeys(self._capacities, 0)  # what all transfers would use at their caps
        self._steps: dict[str, list[tuple[int, int]]] = {name: [(0, 0)] for name in self._capacities}

    def transfer(
        self, num_bytes: int, weights: Mapping[str, int], cap_bytes_per_us: int, queue_bytes: int = 0, share: int = 1
    ) -> simpy.Event:
        """Start moving ``num_bytes`` over the weighted resources; the event fires when the last byte is through.

        ``queue_bytes``: as many of them are asked for at once, and count in ``queued_bytes``. ``share``: of a resource
        that is full, against the shares of the others.
        """
        assert cap_bytes_per_us > 0 and share > 0, "a transfer needs a positive cap and share"
        done = simpy.Event(self._env)
        if num_bytes <= 0:
            done.succeed()
            return done
        self._transfers.append(
            _Transfer(num_bytes * PS_PER_US, cap_bytes_per_us, weights, done, queue_bytes * PS_PER_US, share)
        )
        for name, weight in weights.items():
            self._wanted[name] += weight * cap_bytes_per_us
        self._joined = True
        self._settle_soon()
        return done

    def utilisation(self, resource: str) -> float:
        """Share of a resource's capacity in use now."""
        return self._steps[resource][-1][1] / self._capacities[resource]

    def queued_bytes(self) -> int:
        """Bytes that have been asked for and are not there yet, of transfers that say how many they ask for at once."""
        elapsed_ps, queued = int(self._env.now) - self._settled_ps, 0
        for one in self._transfers:
            if one.queue:
                queued += min(one.queue, max(0, one.left - one.rate * elapsed_ps))
        return queued // PS_PER_US

    def counters(self, rank: int) -> list[Counter]:
        """Rates over time, one counter a resource that was used."""
        return [
            Counter(rank, name, self._capacities[name], tuple(steps))
            for name, steps in self._steps.items()
            if len(steps) > 1
        ]

    def _settle_soon(self) -> None:
        if not self._settle_pending:
            self._settle_pending = True
            event = simpy.Event(self._env)
            event._ok, event._value = True, None
            event.callbacks = [self._settle]
            self._env.schedule(event, priority=_SETTLE_PRIORITY)  # type: ignore[arg-type]  # a priority after NORMAL

    def _settle(self, _: simpy.Event) -> None:
        self._settle_pending = False
        self._advance()
        self._note(self._share() if self._transfers else {})
        self._schedule_next()

    def _advance(self) -> None:
        """Move every transfer on to the present, and finish those that are through."""
        now = int(self._env.now)
        elapsed_ps = now - self._settled_ps
        self._settled_ps = now
        if not elapsed_ps or not self._transfers:
            return
        through = False
        for transfer in self._transfers:
            transfer.left -= transfer.rate * elapsed_ps
            # The last picosecond may offer more than was left: the transfer takes only what it asked for.
            if transfer.left <= 0:
                transfer.done.succeed()
                through = True
                for name, weight in transfer.weights.items():
                    self._wanted[name] -= weight * transfer.cap
        if through:
            self._transfers = [one for one in self._transfers if one.left > 0]

    def _share(self) -> dict[str, int]:
        """Find the rates of all transfers; returns what they use of each resource that they cross."""
        transfers, capacities = self._transfers, self._capacities
        if self._joined:
            self._joined = False
            for transfer in transfers:
                left = transfer.left // PS_PER_US if transfer.standing else transfer.share
                transfer.standing = max(1, min(transfer.share, left))
                transfer.level = transfer.cap / transfer.standing
        # Where all of them fit at their caps, filling stops each of them at its cap.
        for name, rate in self._wanted.items():
            if rate > capacities[name]:
                break
        else:
            for transfer in transfers:
                transfer.rate = transfer.cap
            return {name: rate for name, rate in self._wanted.items() if rate}
        if len(transfers) == 1:
            (only,) = transfers
            only.rate = min(only.cap, *(capacities[name] // weight for name, weight in only.weights.items()))
        else:
            self._fill()
        used: dict[str, int] = {}
        for transfer in transfers:
            rate = transfer.rate
            for name, weight in transfer.weights.items():
                used[name] = used.get(name, 0) + weight * rate
        return used

    def _fill(self) -> None:
        """Progressive filling: whoever reaches its cap first, or crosses the first resource that is full, stops."""
        free = dict(self._capacities)
        rising = self._transfers
        while rising:
            demand: dict[str, int] = {}
            lowest_cap = math.inf
            for transfer in rising:
                if transfer.level < lowest_cap:
                    lowest_cap = transfer.level
                standing = transfer.standing
                for name, weight in transfer.weights.items():
                    demand[name] = demand.get(name, 0) + weight * standing
            level, tightest = min([(free[name] / total, name) for name, total in demand.items()])
            capped = lowest_cap <= level
            room, total = free[tightest], demand[tightest]
            still = []
            for transfer in rising:
                if transfer.level != lowest_cap if capped else tightest not in transfer.weights:
                    still.append(transfer)
                    continue
                rate = transfer.cap if capped else room * transfer.standing // total
                # Never zero: integer division must not stall a transfer behind a full resource.
                transfer.rate = rate or 1
                for name, weight in transfer.weights.items():
                    free[name] -= weight * rate
            rising = still

    def _note(self, used: dict[str, int]) -> None:
        """Note what is used of each resource from now on."""
        before = self._used
        if used == before:
            return
        now = self._settled_ps
        for name in before:
            if name not in used:
                self._note_rate(name, now, 0)
        for name, rate in used.items():
            if before.get(name) != rate:
                self._note_rate(name, now, rate)
        self._used = used

    def _note_rate(self, name: str, now: int, rate: int) -> None:
        steps = self._steps[name]
        last_ps, before = steps[-1]
        if before == rate:
            return
        if last_ps == now:
            steps[-1] = (now, rate)
        else:
            steps.append((now, rate))

    def _schedule_next(self) -> None:
        """Wake when the first transfer is through, unless others come before: then there is a later generation."""
        if not self._transfers:
            return
        self._generation += 1
        delay_ps = min([-(-transfer.left // transfer.rate) for transfer in self._transfers])
        wake = self._env.timeout(delay_ps, self._generation)
        assert wake.callbacks is not None
        wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value == self._generation and not self._settle_pending:
            self._settle(event)
