"""The timeline of one decode step: kernels, the spans inside them, and resource use over time.

A simulated timeline and one measured on a GPU are the same type, so every report works on both; a measured one
lacks counters, and has the spans that start and end of its kernels allow (``measured``).

Times are integer picoseconds from the start of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

PS_PER_US = 1_000_000


class Phase(str, Enum):
    """What a kernel is doing in a span. The value is the label shown in traces."""

    __hash__ = str.__hash__  # as equality has it; that of Enum is a call of Python for every look-up

    RELEASE = "release"  # the predecessor's stores drain and its completion becomes visible
    LAUNCH = "launch"  # graph node to first instruction
    SM_SLOTS = "sm slots"  # its blocks wait for SMs that kernels hold, on whatever stream
    DEPENDENCY = "dependency"  # waits for a kernel of the same rank
    PEERS = "peers"  # polls for data from other ranks
    POLL = "poll"  # data arrived in memory but is not yet seen by the poller
    RAMP = "ramp"  # first bytes of a stream are on their way
    WEIGHTS = "weights"  # weights at HBM speed
    KV_STATE = "kv and state"  # KV cache or recurrent state at HBM speed
    IN_FLIGHT = "bytes in flight"  # HBM below its speed: too few SMs or bytes in flight
    L2 = "l2"  # weights or state served by L2
    COMPUTE = "compute"  # arithmetic beyond the streaming time
    SERIAL_CODE = "serial code"  # instructions that one warp runs straight through, fetched where they are cold
    RING_STALL = "ring stall"  # a load pipeline that stands full waits for its first slot to be multiplied
    DEPENDENT_LOADS = "dependent loads"  # L2 round trips in series, and a block's input
    TENSOR_CORE_SETUP = "tensor-core set-up"  # scales, pipeline fill, TMEM allocation
    SELECTION = "selection"  # rounds of a radix search, a block reduction each
    BLOCK_REDUCTION = "block reduction"  # sums and maxima within a block
    BARRIER = "barrier"  # of a cluster or grid, task counters
    DRAIN = "drain"  # the slowest warps and the stores at a kernel's end
    SEND = "send"  # stores to peers leave the port
    HOST = "host"  # the host, outside the graph
    RUN = "run"  # a measured kernel whose inside is not known
    EXCHANGE = "exchange"  # a measured kernel that takes what peers sent


class Span(NamedTuple):
    """``[start_ps, end_ps)`` of one phase. ``cause`` is the index of the kernel whose end closed a wait, else -1.

    ``cause_ps`` is when that cause happened (its completion, its trigger, or its last store to peers), so that a
    walk back along the critical path continues there.
    """

    phase: Phase
    start_ps: int
    end_ps: int
    cause: int = -1
    cause_ps: int = -1
    arrival_ps: int = -1  # PEERS, POLL: when this rank's own data was visible; waiting beyond it is for a slower peer
    complete_ps: int = -1  # POLL: when the data of all ranks was visible


@dataclass
class KernelRun:
    """One kernel on one rank: identity, times, spans in order, and the kernels it waited for."""

    index: int
    rank: int
    stream: str
    layer: int  # -1 before the first layer, num_layers after the last
    kind: str  # kind of layer, such as "kda+moe"
    stage: str  # operator within the layer, such as "kda.in_proj"
    start_ps: int = -1
    end_ps: int = -1
    spans: list[Span] = field(default_factory=list)
    launched_by: int = -1  # kernel whose end or trigger let it start
    causes: tuple[int, ...] = ()
    hbm_bytes: int = 0
    l2_bytes: int = 0
    sent_bytes: int = 0  # over NVLink, all peers together
    # Behind the first: blocks that came in the place of others. One has spans of its own, and was let in
    # (``launched_by``) by the kernel, perhaps its own, that made room on the SMs.
    waves: list[KernelRun] = field(default_factory=list)

    @property
    def duration_ps(self) -> int:
        return self.end_ps - self.start_ps

    def add_span(
        self, phase: Phase, end_ps: int, cause: int = -1, cause_ps: int = -1,
        arrival_ps: int = -1, complete_ps: int = -1,
    ) -> None:  # fmt: skip
        """Append a span from where the last one ended, or from the start, to ``end_ps``; none when that is empty."""
        spans = self.spans
        start_ps = spans[-1].end_ps if spans else self.start_ps
        if end_ps > start_ps:
            spans.append(Span(phase, start_ps, end_ps, cause, cause_ps, arrival_ps, complete_ps))

    def later_wave(self, start_ps: int, made_room: int) -> KernelRun:
        """The record of a wave that starts now in place of blocks of the kernel ``made_room``."""
        wave = replace(
            self, spans=[], waves=[], start_ps=start_ps, end_ps=-1, launched_by=made_room, hbm_bytes=0, l2_bytes=0
        )
        self.waves.append(wave)
        return wave

    def show_later_waves(self) -> None:
        """Append spans from the end of the first wave to that of the last, once all waves have ended.

        They are those of the wave that ended last, of the one in whose place it came, and so on. Where another kernel
        made room, the wave waited for SMs until then.
        """
        first_end_ps, found = self.spanned_ps, list[Span]()
        now = max((wave.end_ps for wave in self.waves), default=first_end_ps)
        for wave in sorted(self.waves, key=lambda wave: -wave.end_ps):
            if wave.end_ps != now or now <= first_end_ps:
                continue
            found += reversed([span for span in wave.spans if span.end_ps > first_end_ps])
            now = wave.start_ps
            if wave.launched_by != self.index and now > first_end_ps:
                found.append(Span(Phase.SM_SLOTS, first_end_ps, now, wave.launched_by, now))
                break
        for span in reversed(found):
            self.add_span(span.phase, span.end_ps, span.cause, span.cause_ps)

    def count_bytes(self, hbm_bytes: int, l2_bytes: int) -> None:
        """Add bytes that came from HBM and from L2."""
        self.hbm_bytes += hbm_bytes
        self.l2_bytes += l2_bytes

    @property
    def spanned_ps(self) -> int:
        """Where the last span ended, or the start."""
        return self.spans[-1].end_ps if self.spans else self.start_ps


@dataclass(frozen=True)
class Counter:
    """A resource's rate over time: steps of (time_ps, bytes per microsecond) from each time to the next."""

    rank: int
    resource: str  # "hbm", "l2", "nvlink egress", "nvlink ingress"
    capacity_bytes_per_us: int
    steps: tuple[tuple[int, int], ...]

    @cached_property
    def _moved(self) -> tuple[list[int], list[int]]:
        """When each step begins, and what has moved by then, in units of 1e-6 byte."""
        times, moved, total, before_ps, before = [], [], 0, 0, 0
        for start_ps, rate in self.steps:
            total += before * (start_ps - before_ps)
            times.append(start_ps)
            moved.append(total)
            before_ps, before = start_ps, rate
        return times, moved

    def bytes_until(self, end_ps: int) -> float:
        """Integral of the rate up to ``end_ps`` in bytes."""
        times, moved = self._moved
        step = bisect_right(times, end_ps) - 1
        return (moved[step] + self.steps[step][1] * (end_ps - times[step])) / PS_PER_US if step >= 0 else 0.0


@dataclass
class Timeline:
    """Kernels of every simulated rank, ordered by index, with counters and the length of the step."""

    machine: str
    num_ranks: int  # ranks of the tensor-parallel group
    ranks: tuple[int, ...]  # ranks that are present: all of them, or rank 0 when ranks are identical
    num_layers: int
    kernels: list[KernelRun]
    counters: list[Counter]
    step_ps: int
    # What ``critical_path`` found: page and trace both draw it. A timeline with other kernels (``replace``) has none.
    walked: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def of_rank(self, rank: int) -> Iterator[KernelRun]:
        return (kernel for kernel in self.kernels if kernel.rank == rank)

    @property
    def critical_rank(self) -> int:
        """The rank whose last kernel ends last; the lowest of them when equal."""
        return min(self.ranks, key=lambda rank: (-max(k.end_ps for k in self.of_rank(rank)), rank))

    @property
    def step_us(self) -> float:
        return self.step_ps / PS_PER_US


def layers(timeline: Timeline) -> Sequence[int]:
    """Layer indices present in the timeline, in order."""
    return sorted({kernel.layer for kernel in timeline.kernels})
