"""The load pipeline of a kernel's blocks: the ring that keeps bytes in flight, and what it reads early.

| Constraint | |
| --- | --- |
| bytes in flight of a block | at most ``bytes_in_flight_per_block``; early ``early_bytes_in_flight_per_block`` |
| a ring that is filled for one tile after the other | the bytes of a tile, ``Pass.fill_bytes`` |
| loads into registers (``Work.register_loads``) | L1 of an SM over its blocks: a load has its place there on its way |
| early reads, which need no predecessor | at most the bytes in flight of all resident blocks, and their part |
| first bytes | ``hbm_latency`` after they were asked for; again for a pipeline that has drained |
| asking for early reads | bytes of an SM's blocks over ``hbm_bytes_per_s_per_sm``; a PDL trigger behind it waits |

With the 28 KB of L1 that are left of 256 when all is shared memory, an SM reads 66 GB/s by loads into registers, with
60 KB or more 134 (H200, probe ``register_loads``).
"""

from __future__ import annotations

import simpy

from k3sim.kernels.work import Pass, Read, ReadKind
from k3sim.sim.clock import Clock, Steps
from k3sim.sim.components.memory import Memory, StreamLimit
from k3sim.sim.components.stream import Stream
from k3sim.sim.components.wave import Wave
from k3sim.sim.machine import Machine
from k3sim.sim.units import picoseconds

Pieces = list[tuple[Read, int]]  # a read and how many of its bytes


def late_reads(one: Pass, early: Stream | None) -> Pieces:
    """Reads of a pass, less what was started early."""
    left = 0 if early is None else early.budget_bytes
    if early is not None and early.later is not None:
        left += early.later.budget_bytes
    late: Pieces = []
    for read in one.reads:
        num_bytes = read.num_bytes
        if read.early:
            there = min(left, num_bytes)
            left -= there
            num_bytes -= there
        if num_bytes > 0:
            late.append((read, num_bytes))
    return late


class LoadPipeline:
    """Load pipelines of the blocks on one GPU."""

    def __init__(self, env: Clock, machine: Machine, memory: Memory) -> None:
        self._env = env
        self._memory = memory
        self._num_sms = int(machine.num_sms)
        self._hbm_bytes_per_s_per_sm = machine.hbm_bytes_per_s_per_sm
        self.first_bytes_ps = picoseconds(machine.hbm_latency_s)

    def limit(self, wave: Wave, one: Pass, started: int | None = None, *, early: bool = False) -> StreamLimit:
        """What the blocks of a pass can draw, at the kernel's pace: those that are resident, or ``started`` of them.

        ``early``: before the kernel's wait, where it may have less on its way at once.
        """
        blocks = one.num_blocks or wave.work.num_blocks
        if started is not None:
            blocks = min(blocks, started)
        resident = min(blocks, wave.resident_blocks if started is None else started)
        in_flight = self._in_flight_bytes(wave, resident, early=early)
        if one.fill_bytes:
            in_flight = min(in_flight, one.fill_bytes)
        limit = self._memory.limit(blocks, resident, in_flight, deep_prefetch=wave.work.deep_prefetch)
        return limit.at_pace(wave.pace)

    def _in_flight_bytes(self, wave: Wave, blocks: int, *, early: bool = False) -> int:
        """What a block may have on its way at once, of ``blocks`` that are resident."""
        work = wave.work
        in_flight = work.bytes_in_flight_per_block
        if early and work.early_bytes_in_flight_per_block:
            in_flight = min(in_flight, work.early_bytes_in_flight_per_block)
        if work.register_loads:
            in_flight = min(in_flight, wave.l1_bytes // -(-blocks // self._num_sms))
        return in_flight

    def start_early(
        self, wave: Wave, one: Pass, *, blocks: int | None = None, skipped_bytes: int = 0, per_sm: int = 0
    ) -> Stream | None:
        """Start the reads of a pass that need no predecessor, as far as the load pipeline of ``blocks`` holds them.

        The first ``skipped_bytes`` are read by blocks that started before. ``per_sm``: most of the blocks on one SM, 0
        where they are spread evenly. None where nothing can be read early.
        """
        limit, resident = self.limit(wave, one, blocks, early=True), wave.resident_blocks if blocks is None else blocks
        reads = [read for read in one.reads if read.early and read.num_bytes]
        if not reads:
            return None
        budget_bytes = resident * self.early_bytes_of_a_block(wave, one)
        asked = simpy.Event(self._env)
        wave.asking.append(asked)
        stream = Stream(
            through=simpy.Event(self._env), asked=asked, budget_bytes=budget_bytes, began_ps=self._env.now
        )
        pieces: Pieces = []
        left, skipped = budget_bytes, skipped_bytes
        for read in reads:
            passed = min(skipped, read.num_bytes)
            skipped -= passed
            num_bytes = min(left, read.num_bytes - passed)
            left -= num_bytes
            if num_bytes > 0:
                pieces.append((read, num_bytes))
        on_the_way = resident * self._in_flight_bytes(wave, resident, early=True)
        asking_ps = 0
        if wave.work.triggers_after_loads:
            each = wave.work.bytes_in_flight_per_block * (per_sm or -(-resident // self._num_sms))
            asking_ps = round(each * 1e12 / self._hbm_bytes_per_s_per_sm)
        self._env.start(self._read_early(stream, pieces, limit, on_the_way, asking_ps))
        return stream

    def early_bytes_of_a_block(self, wave: Wave, one: Pass) -> int:
        """What a block reads of a pass before its wait: its own part, as far as the load pipeline holds it."""
        part = -(-sum(read.num_bytes for read in one.reads if read.early) // wave.num_blocks)
        return min(wave.work.bytes_in_flight_per_block, part)

    def _read_early(self, stream: Stream, pieces: Pieces, limit: StreamLimit, on_the_way: int, asking_ps: int) -> Steps:
        """Bring in what is asked for early: all but the last ``on_the_way`` bytes, then these.

        ``asking_ps``: what the SMs take to ask for all of it where all may be on its way.
        """
        assert stream.asked is not None and stream.through is not None
        # Asked for from now on, though the first bytes take their time.
        num_bytes = sum(one for _, one in pieces)
        asked_bytes = min(num_bytes, limit.queue_bytes)
        self._memory.asked_bytes += asked_bytes
        yield self._env.timeout(self.first_bytes_ps)
        self._memory.asked_bytes -= asked_bytes
        left = max(0, num_bytes - on_the_way)
        in_turns, last = [], []
        for read, whole in pieces:
            before = min(whole, left)
            left -= before
            in_turns.append((read, before))
            last.append((read, whole - before))
        for part in self._read_pieces(stream, in_turns, limit):
            if not part.processed:
                yield part
        if (left_ps := stream.began_ps + asking_ps - self._env.now) > 0:
            # Nobody waits for what comes meanwhile.
            self._env.start(self._fire_later(stream.asked, left_ps))
        else:
            stream.asked.succeed()
        for part in self._read_pieces(stream, last, limit):
            if not part.processed:
                yield part
        stream.through.succeed()

    def _fire_later(self, event: simpy.Event, left_ps: int) -> Steps:
        yield self._env.timeout(left_ps)
        event.succeed()

    def _read_pieces(self, stream: Stream, pieces: Pieces, limit: StreamLimit) -> list[simpy.Event]:
        before = len(stream.parts)
        for read, num_bytes in pieces:
            if num_bytes:
                self.read(stream, read, num_bytes, limit)
        return stream.parts[before:]

    def read(self, stream: Stream, read: Read, num_bytes: int, limit: StreamLimit) -> None:
        """Start reading ``num_bytes``, from L2 as far as it holds them; ``stream.parts`` fire when they are there."""
        reused = bool(read.region) and read.kind is ReadKind.KV_STATE
        hbm, l2, hbm_bytes, l2_bytes = self._memory.fetch(read.region, num_bytes, limit, reused=reused)
        stream.hbm_bytes += hbm_bytes
        stream.l2_bytes += l2_bytes
        if read.kind is ReadKind.KV_STATE:
            stream.kv_state_bytes += hbm_bytes
        if hbm is not None:
            self._note_end(stream, hbm, "hbm_end_ps")
        if l2 is not None:
            self._note_end(stream, l2, "l2_end_ps")

    def _note_end(self, stream: Stream, part: simpy.Event, name: str) -> None:
        """Make ``part`` one of the stream's, and note under ``name`` when it was through."""
        stream.parts.append(part)
        assert part.callbacks is not None
        part.callbacks.append(lambda _: setattr(stream, name, self._env.now))
