"""HBM and L2 of one GPU: what a read costs depends on where its bytes are.

| Constraint | At most |
| --- | --- |
| a stream, by its bytes in flight | ``Machine.hbm_rate_for``: a measured curve, not bytes over idle latency |
| a stream, by its SMs | SMs x ``hbm_bytes_per_s_per_sm``; L2 hits: SMs x ``l2_bytes_per_s_per_sm`` |
| a stream on part of the SMs | ``hbm_read_bytes_per_s`` x ``Machine.partial_grid_efficiency`` |
| all streams from HBM | ``hbm_read_bytes_per_s``, shared by bytes in flight (``bandwidth.py``) |
| all bytes, from HBM or from L2 | ``l2_read_bytes_per_s`` |

Streams that together ask for more than HBM gives queue, and a queue serves whoever has more in it: each gets a share in
proportion to its bytes in flight (H200, calibrate/probes ``shared_hbm``: two streams with 2, 4 and 8 times the other's
bytes in flight take 1.9, 3.5 and 6.7 times its rate), and what a cap leaves goes to the others. A written byte costs
``2 hbm_read / hbm_copy - 1`` read ones, by what HBM loses when it turns around.

A dependent load takes ``l2_far_latency_s``: a block resumes when its slowest line is there. It waits behind the traffic
of HBM only near its ceiling (``l2_queueing_utilisation``): on H200 an L2 hit takes 0.20 us beside a stream at 93 % of
it, 0.52 at 100 %. Beyond, what has been asked for queues, and every L2 hit of others waits ``l2_hit_queueing_fraction x
(queue / hbm_read - hbm_queue_threshold_s)``. A ring that is filled early is such a queue.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import simpy

from k3sim.kernels.work import Work
from k3sim.sim.components.bandwidth import SharedBandwidth
from k3sim.sim.components.l2 import SPENT, L2Residency
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import Counter
from k3sim.sim.units import bytes_per_us, picoseconds

HBM, L2 = "hbm", "l2"
FROM_HBM, FROM_L2 = {HBM: 1, L2: 1}, {L2: 1}  # the ports that bytes cross


class StreamLimit(NamedTuple):
    """Most that one kernel draws, in bytes per microsecond."""

    hbm_bytes_per_us: int
    l2_bytes_per_us: int
    queue_bytes: int = 0  # that it asks for at once
    share: int = 1  # its bytes in flight: its part of HBM and of L2's port where they are full

    def at_pace(self, pace: float) -> StreamLimit:
        """The limit of a kernel whose rank is slower by the factor ``pace``."""
        if pace == 1.0:
            return self
        return StreamLimit(
            max(1, round(self.hbm_bytes_per_us / pace)),
            max(1, round(self.l2_bytes_per_us / pace)),
            self.queue_bytes,
            self.share,
        )


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
        self.asked_bytes = 0  # of rings whose first bytes are still on their way
        self._limits: dict[tuple[int, int, int, bool], StreamLimit] = {}  # of kernels, which come again in every layer
        self._claimed: dict[str, int] = {}  # bytes of a region that kernels have asked for: no prefetch repeats them
        # A block resumes when its slowest line is there, and that lies in the far partition.
        self._idle_latency_ps = picoseconds(machine.l2_far_latency_s)
        self._loaded_latency_ps = picoseconds(machine.l2_loaded_latency_s)
        self._queue_threshold_ps = picoseconds(machine.hbm_queue_threshold_s)
        # What a written byte takes of HBM, in read ones: a copy is one of each.
        self._write_cost = 2 * machine.hbm_read_bytes_per_s / machine.hbm_copy_bytes_per_s - 1

    def limit(
        self,
        num_blocks: int,
        resident_blocks: int,
        bytes_in_flight_per_block: int,
        *,
        deep_prefetch: bool = False,
    ) -> StreamLimit:
        """What a kernel can draw: by its bytes in flight (the machine's curve) and by the SMs it runs on."""
        key = (num_blocks, resident_blocks, bytes_in_flight_per_block, deep_prefetch)
        known = self._limits.get(key)
        if known is None:
            known = self._limits[key] = self._limit(*key)
        return known

    def _limit(
        self, num_blocks: int, resident_blocks: int, bytes_in_flight_per_block: int, deep_prefetch: bool
    ) -> StreamLimit:
        sms = min(num_blocks, int(self._machine.num_sms))
        in_flight = resident_blocks * bytes_in_flight_per_block
        hbm = min(self._machine.hbm_rate_for(in_flight), sms * self._machine.hbm_bytes_per_s_per_sm)
        hbm = min(hbm, self._machine.hbm_read_bytes_per_s * self._machine.partial_grid_efficiency(num_blocks))
        return StreamLimit(
            bytes_per_us(hbm),
            bytes_per_us(sms * self._machine.l2_bytes_per_s_per_sm),
            in_flight if deep_prefetch else 0,
            max(1, in_flight),
        )

    def prefetch_limit(self, num_blocks: int, bytes_in_flight_per_block: int) -> StreamLimit:
        """What blocks that issue bulk prefetches, one on an SM, bring into L2: the issue bounds them, no ring."""
        rate = min(
            self._machine.hbm_rate_for(num_blocks * bytes_in_flight_per_block),
            num_blocks * self._machine.prefetch_bytes_per_s_per_sm,
        )
        return StreamLimit(bytes_per_us(rate), bytes_per_us(rate), 0, num_blocks * bytes_in_flight_per_block)

    def latency_ps(self) -> int:
        """Round trip of a block's dependent load to L2 now; it queues behind HBM traffic near the ceiling."""
        free = self._machine.l2_queueing_utilisation
        share = max(0.0, self._ports.utilisation(HBM) - free) / (1.0 - free)
        loaded_ps = round(self._idle_latency_ps + share * (self._loaded_latency_ps - self._idle_latency_ps))
        return max(loaded_ps, self._idle_latency_ps + self.queueing_ps())

    def queueing_ps(self) -> int:
        """What a trip to L2 takes longer now, behind what kernels have asked for at once."""
        queued_bytes = self._ports.queued_bytes() + self.asked_bytes
        if not queued_bytes:
            return 0
        queue_ps = queued_bytes * 1_000_000 // bytes_per_us(self._machine.hbm_read_bytes_per_s)
        return round(self._machine.l2_hit_queueing_fraction * max(0, queue_ps - self._queue_threshold_ps))

    def split(self, region: str, num_bytes: int) -> tuple[int, int]:
        """Of the next ``num_bytes`` of a region: bytes from HBM and bytes from L2."""
        if not region:
            return num_bytes, 0
        held = min(num_bytes, self.l2.resident(region))
        return num_bytes - held, held

    def fetch(
        self, region: str, num_bytes: int, limit: StreamLimit, *, reused: bool
    ) -> tuple[simpy.Event | None, simpy.Event | None, int, int]:
        """Start reading; returns (HBM part done, L2 part done, HBM bytes, L2 bytes), None for a part without bytes.

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
        hbm_done = l2_done = None
        if from_hbm:
            hbm_done = self._ports.transfer(
                from_hbm, FROM_HBM, limit.hbm_bytes_per_us, limit.queue_bytes, limit.share
            )
        if from_l2:
            l2_done = self._ports.transfer(from_l2, FROM_L2, limit.l2_bytes_per_us, share=limit.share)
        return hbm_done, l2_done, from_hbm, from_l2

    def write(self, num_bytes: int, limit: StreamLimit) -> simpy.Event:
        """Write back state or cache rows."""
        cost = round(num_bytes * self._write_cost)
        return self._ports.transfer(cost, FROM_HBM, limit.hbm_bytes_per_us, share=limit.share)

    def prefetch_all(self, work: Work) -> Generator[simpy.Event, Any, int]:
        """Bring what a prefetch kernel reads into L2, a region after the other; returns bytes that came from HBM."""
        limit, from_hbm = self.prefetch_limit(work.num_blocks, work.bytes_in_flight_per_block), 0
        for one in work.passes:
            for read in one.reads:
                from_hbm += yield from self.prefetch(read.region, read.num_bytes, limit)
        return from_hbm

    def prefetch(self, region: str, num_bytes: int, limit: StreamLimit) -> Generator[simpy.Event, Any, int]:
        """Bring a region into L2 until done or until a kernel reads it itself; returns bytes that came from HBM."""
        fetched = 0
        while fetched < num_bytes:
            # What kernels asked for themselves meanwhile, and what is there already, need not be fetched.
            left = num_bytes - max(fetched, self._claimed.get(region, 0) + self.l2.resident(region))
            if left <= 0:
                break
            chunk = min(left, self.PREFETCH_CHUNK_BYTES)
            yield self._ports.transfer(chunk, FROM_HBM, limit.hbm_bytes_per_us, share=limit.share)
            self.l2.insert(region, chunk)
            fetched += chunk
        return fetched

    def counters(self, rank: int) -> list[Counter]:
        return self._ports.counters(rank)
