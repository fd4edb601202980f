"""HBM and L2 of one GPU: what a read costs depends on where its bytes are.

HBM is shared max-min among the streams that run; a stream's own rate is capped by its bytes in flight. All
bytes, from HBM or from L2, cross the L2 read port.

L2 holds regions and replaces the least recently used lines. Measured on H200 (calibrate/probes, 2026-11): of a
region, what survives other traffic falls linearly, ``(capacity - traffic) / region``, with a capacity of 39 of the
60 MB; random replacement would keep ``exp(-traffic / capacity)``, 66 % in a case where 98 % stayed. The 43 % that
survived 60 MB on GB200 (k3opt design plan, 2026-09) fit the same rule.

A dependent load waits behind the traffic of HBM only near its ceiling: on H200 an L2 hit takes 0.20 us beside a
stream at 94 % of it, 0.52 at 100 %. Beyond, what has been asked for queues, and every L2 hit of others waits for a
share of the queue: 0.53 us with 64 KiB in flight on each SM, 1.06 with 128 KiB, both 0.29 of the time by which the
queue is longer than the 0.59 us that it takes to keep HBM busy. A ring that is filled early is such a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from k3sim.sim.bandwidth import SharedBandwidth
from k3sim.sim.machine import Machine
from k3sim.sim.timeline import Counter

HBM, L2 = "hbm", "l2"
QUEUEING_UTILISATION = 0.93  # of HBM, below which an L2 hit does not queue: H200, calibrate/probes, 2026-11
QUEUE_SHARE = 0.287  # of the queue's time that an L2 hit waits, and the queue that costs nothing: H200, 2026-11
FREE_QUEUE_PS = 590_000
SPENT = ""  # lines in L2 whose data no later read wants


def bytes_per_us(bytes_per_s: float) -> int:
    return max(1, round(bytes_per_s / 1e6))


def picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


@dataclass(frozen=True)
class StreamLimit:
    """Most that one kernel draws, in bytes per microsecond."""

    hbm_bytes_per_us: int
    l2_bytes_per_us: int
    queue_bytes: int = 0  # that it asks for at once


class L2Residency:
    """Bytes of each region in L2, the least recently used first. ``SPENT`` lines keep their room until replaced."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lines: deque[list[Any]] = deque()  # [region, bytes], oldest first
        self._resident: dict[str, int] = {}
        self.used_bytes = 0

    def resident(self, region: str) -> int:
        return 0 if region == SPENT else self._resident.get(region, 0)

    def insert(self, region: str, num_bytes: int) -> None:
        """Bring ``num_bytes`` of a region in as the most recent lines, in place of the oldest."""
        num_bytes = min(num_bytes, self.capacity_bytes)
        if num_bytes <= 0:
            return
        overflow = self.used_bytes + num_bytes - self.capacity_bytes
        while overflow > 0:
            oldest = self._lines[0]
            gone = min(overflow, oldest[1])
            self._take(oldest, gone)
            if not oldest[1]:
                self._lines.popleft()
            overflow -= gone
        if self._lines and self._lines[-1][0] == region:
            self._lines[-1][1] += num_bytes
        else:
            self._lines.append([region, num_bytes])
        self._resident[region] = self._resident.get(region, 0) + num_bytes
        self.used_bytes += num_bytes

    def touch(self, region: str, num_bytes: int, *, spent: bool) -> None:
        """Lines that were hit become the most recent; ``spent`` ones will not be asked for again."""
        left = min(num_bytes, self.resident(region))
        moved = left
        for line in self._lines:
            if left and line[0] == region:
                taken = min(left, line[1])
                self._take(line, taken)
                left -= taken
        self._lines = deque(line for line in self._lines if line[1])
        self.insert(SPENT if spent else region, moved)

    def _take(self, line: list[Any], num_bytes: int) -> None:
        line[1] -= num_bytes
        self._resident[line[0]] -= num_bytes
        self.used_bytes -= num_bytes


class Memory:
    """One GPU's HBM and L2."""

    # A prefetch asks for this much at a time, so that a kernel which needs the region can take over the rest.
    PREFETCH_CHUNK_BYTES = 2 << 20

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self._env = env
        self._machine = machine
        self._ports = SharedBandwidth(
            env,
            {HBM: bytes_per_us(machine.hbm_read_bytes_per_s), L2: bytes_per_us(machine.l2_read_bytes_per_s)},
        )
        self.l2 = L2Residency(int(machine.l2_effective_bytes))
        self.asked_bytes = 0  # of rings whose first bytes are still under way
        self._claimed: dict[str, int] = {}  # bytes of a region that kernels have asked for: no prefetch repeats them
        # A block goes on when its slowest line is there, and that lies in the far partition.
        self._idle_latency_ps = picoseconds(machine.l2_far_latency_s)
        self._loaded_latency_ps = picoseconds(machine.l2_loaded_latency_s)

    def limit(
        self, num_blocks: int, resident_blocks: int, bytes_in_flight_per_block: int, *, queues: bool = False
    ) -> StreamLimit:
        """What a kernel can draw: by its bytes in flight (the machine's curve) and by the SMs it runs on."""
        sms = min(num_blocks, int(self._machine.num_sms))
        in_flight = resident_blocks * bytes_in_flight_per_block
        hbm = min(self._machine.hbm_rate_for(in_flight), sms * self._machine.hbm_bytes_per_s_per_sm)
        return StreamLimit(
            bytes_per_us(hbm), bytes_per_us(sms * self._machine.l2_bytes_per_s_per_sm), in_flight if queues else 0
        )

    def latency_ps(self) -> int:
        """Round trip of a block's dependent load to L2 now; it queues behind HBM traffic near the ceiling."""
        share = max(0.0, self._ports.utilisation(HBM) - QUEUEING_UTILISATION) / (1.0 - QUEUEING_UTILISATION)
        loaded_ps = round(self._idle_latency_ps + share * (self._loaded_latency_ps - self._idle_latency_ps))
        return max(loaded_ps, self._idle_latency_ps + self.queueing_ps())

    def queueing_ps(self) -> int:
        """What a trip to L2 takes longer now, behind what kernels have asked for at once."""
        queued_bytes = self._ports.queued_bytes() + self.asked_bytes
        if not queued_bytes:
            return 0
        queue_ps = queued_bytes * 1_000_000 // bytes_per_us(self._machine.hbm_read_bytes_per_s)
        return round(QUEUE_SHARE * max(0, queue_ps - FREE_QUEUE_PS))

    def split(self, region: str, num_bytes: int) -> tuple[int, int]:
        """Of the next ``num_bytes`` of a region: bytes from HBM and bytes from L2."""
        if not region:
            return num_bytes, 0
        held = min(num_bytes, self.l2.resident(region))
        return num_bytes - held, held

    def fetch(
        self, region: str, num_bytes: int, limit: StreamLimit, *, reused: bool
    ) -> tuple[simpy.Event, simpy.Event, int, int]:
        """Start reading; returns (HBM part done, L2 part done, HBM bytes, L2 bytes).

        A region that is ``reused`` stays known to L2; weights are read once a step, so theirs keep their room
        but are not looked for again.
        """
        from_hbm, from_l2 = self.split(region, num_bytes)
        if region and not reused:
            self._claimed[region] = self._claimed.get(region, 0) + num_bytes
        if reused:
            self.l2.touch(region, from_l2, spent=False)
            self.l2.insert(region, from_hbm)
        else:
            self.l2.touch(region, from_l2, spent=True)
            self.l2.insert(SPENT, from_hbm)
        hbm_done = self._ports.transfer(from_hbm, {HBM: 1, L2: 1}, limit.hbm_bytes_per_us, limit.queue_bytes)
        l2_done = self._ports.transfer(from_l2, {L2: 1}, limit.l2_bytes_per_us)
        return hbm_done, l2_done, from_hbm, from_l2

    def write(self, num_bytes: int, limit: StreamLimit) -> simpy.Event:
        """Write back state or cache rows."""
        return self._ports.transfer(num_bytes, {HBM: 1, L2: 1}, limit.hbm_bytes_per_us)

    def prefetch(self, region: str, num_bytes: int, limit: StreamLimit) -> simpy.events.Process:
        """Bring a region into L2 in the background until done or until a kernel reads it itself.

        The value of the process is the number of bytes that came from HBM.
        """
        return self._env.process(self._prefetch(region, num_bytes, limit))

    def _prefetch(self, region: str, num_bytes: int, limit: StreamLimit) -> Generator[simpy.Event, None, int]:
        fetched = 0
        while fetched < num_bytes:
            # What kernels asked for themselves meanwhile, and what is there already, need not be fetched.
            left = num_bytes - max(fetched, self._claimed.get(region, 0) + self.l2.resident(region))
            if left <= 0:
                break
            chunk = min(left, self.PREFETCH_CHUNK_BYTES)
            yield self._ports.transfer(chunk, {HBM: 1, L2: 1}, limit.hbm_bytes_per_us)
            self.l2.insert(region, chunk)
            fetched += chunk
        return fetched

    def counters(self, rank: int) -> list[Counter]:
        return self._ports.counters(rank)
