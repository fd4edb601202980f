"""Where the step goes: every instant of the critical rank, attributed to one part.

The walk starts at the end of the step and goes back along what each kernel waited for: through its active spans,
and from a wait to the kernel that ended it, on whatever stream. A wait for SMs goes on in the kernel that held them, in
the wave that released them. The walk stays on one rank: a wait for peers is NVLink flight from this rank's own send
until its data was visible everywhere, and beyond that a slower peer. The segments tile the step, so the parts sum to it
exactly, in integer picoseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from k3sim.sim.timeline.timeline import KernelRun, Phase, Timeline


class Part(str, Enum):
    """What the critical rank does at an instant. The first four are work; the rest are waits."""

    __hash__ = str.__hash__  # as equality has it; that of Enum is a call of Python for every look-up

    WEIGHTS = "weights"
    KV_STATE = "kv_state"
    L2 = "l2"
    COMPUTE = "compute"
    LAUNCH = "launch"
    RAMP_DRAIN = "ramp_drain"
    IN_FLIGHT = "bytes_in_flight"
    ISSUE = "instruction_issue"
    L2_TRIPS = "l2_round_trips"
    SETUP = "tensor_core_setup"
    BLOCK_REDUCTION = "block_reduction"
    SELECTION = "selection_rounds"
    BARRIER = "barrier"
    NVLINK = "nvlink_flight"
    SLOWER_PEER = "slower_peer"
    HOST = "host"
    UNKNOWN = "kernel"  # a measured kernel beyond its bytes: start and end tell no more
    EXCHANGE = "exchange"  # likewise, of one that takes what peers sent

    @property
    def word(self) -> str:
        """The part's name in tables and charts."""
        return _WORD_OF_PART[self]

    @property
    def meaning(self) -> str:
        """What the part is, in one line."""
        return _MEANINGS[self.value]


_MEANINGS = {
    "weights": "weights stream at HBM speed",
    "kv_state": "KV cache or recurrent state streams at HBM speed",
    "l2": "bytes that L2 holds are read",
    "compute": "arithmetic beyond the streaming time",
    "launch": "a kernel starts: node to first instruction, parameters and constants",
    "ramp_drain": "first bytes on their way, slowest warps and stores, completion becoming visible",
    "bytes_in_flight": "HBM below its speed: too few SMs or bytes in flight",
    "instruction_issue": "code that one warp runs straight through, fetched where it is cold; a full ring's first slot",
    "l2_round_trips": "dependent loads in series, and the input of a block",
    "tensor_core_setup": "scales, pipeline fill and TMEM allocation before the first MMA",
    "block_reduction": "sums and maxima within a block",
    "selection_rounds": "rounds of a search for the largest scores, a block reduction each",
    "barrier": "barrier of a cluster or grid, or hand-over by a counter",
    "nvlink_flight": "data on its way to peers, and not yet seen by their poll",
    "slower_peer": "this rank's data has arrived, another rank's has not",
    "host": "the host, outside the graph",
    "kernel": "a measured kernel beyond its bytes: first bytes, latency, arithmetic, barriers, drain",
    "exchange": "a measured kernel that takes what peers sent: seeing it arrive, and its own latency",
}
_WORDS = {
    "kv_state": "KV and state",
    "l2": "L2",
    "ramp_drain": "ramp and drain",
    "l2_round_trips": "L2 round trips",
    "tensor_core_setup": "tensor-core set-up",
    "nvlink_flight": "NVLink flight",
}

_WORD_OF_PART = {part: _WORDS.get(part.value, part.value.replace("_", " ")) for part in Part}

WORK_PARTS = (Part.WEIGHTS, Part.KV_STATE, Part.L2, Part.COMPUTE)

PART_OF_PHASE: Mapping[Phase, Part] = {
    Phase.RELEASE: Part.RAMP_DRAIN,
    Phase.LAUNCH: Part.LAUNCH,
    Phase.SM_SLOTS: Part.LAUNCH,  # where the kernel that held the SMs is not in the timeline
    Phase.POLL: Part.NVLINK,
    Phase.RAMP: Part.RAMP_DRAIN,
    Phase.WEIGHTS: Part.WEIGHTS,
    Phase.KV_STATE: Part.KV_STATE,
    Phase.IN_FLIGHT: Part.IN_FLIGHT,
    Phase.L2: Part.L2,
    Phase.COMPUTE: Part.COMPUTE,
    Phase.SERIAL_CODE: Part.ISSUE,
    Phase.RING_STALL: Part.ISSUE,
    Phase.DEPENDENT_LOADS: Part.L2_TRIPS,
    Phase.TENSOR_CORE_SETUP: Part.SETUP,
    Phase.BLOCK_REDUCTION: Part.BLOCK_REDUCTION,
    Phase.SELECTION: Part.SELECTION,
    Phase.BARRIER: Part.BARRIER,
    Phase.DRAIN: Part.RAMP_DRAIN,
    Phase.SEND: Part.NVLINK,
    Phase.HOST: Part.HOST,
    Phase.RUN: Part.UNKNOWN,
    Phase.EXCHANGE: Part.EXCHANGE,
}


@dataclass(frozen=True)
class Segment:
    """``[start_ps, end_ps)`` of the critical path: the kernel on it and the part it was."""

    start_ps: int
    end_ps: int
    part: Part
    kernel: int


def critical_path(timeline: Timeline) -> list[Segment]:
    """Segments that tile the step of the critical rank, in time order. A timeline is walked once."""
    if timeline.walked is None:
        timeline.walked = tuple(_walk(timeline))
    return list(timeline.walked)


def _walk(timeline: Timeline) -> list[Segment]:
    rank = timeline.critical_rank
    runs = {run.index: run for run in timeline.of_rank(rank)}
    segments: list[Segment] = []
    run: KernelRun | None = max(runs.values(), key=lambda one: (one.end_ps, one.index))
    now = timeline.step_ps

    def attribute(until_ps: int, part: Part, index: int) -> None:
        nonlocal now
        if until_ps < now:
            segments.append(Segment(until_ps, now, part, index))
            now = until_ps

    while run is not None and now > 0:
        run, now = _walk_kernel(run, runs, now, attribute)
    attribute(0, Part.HOST, -1)
    segments.reverse()
    return segments


def _walk_kernel(
    run: KernelRun, runs: Mapping[int, KernelRun], now: int, attribute: Callable[[int, Part, int], None]
) -> tuple[KernelRun | None, int]:
    """Back through one kernel, or one of its later waves, from ``now``; returns what it waited for, and when."""
    for position in range(len(run.spans) - 1, -1, -1):
        span = run.spans[position]
        if span.start_ps >= now:
            continue
        if run.waves and (wave := _wave_until(run, now)) is not None:
            return wave, now
        if span.phase in (Phase.PEERS, Phase.POLL):
            cause = runs.get(span.cause)
            if span.phase is Phase.POLL:
                attribute(max(span.start_ps, span.complete_ps), Part.NVLINK, run.index)
                if position and run.spans[position - 1].phase is Phase.PEERS:
                    continue
                # Complete before the poller came: it had only the rest of the flight to wait for.
                attribute(span.complete_ps, Part.NVLINK, run.index)
            attribute(max(span.arrival_ps, span.cause_ps), Part.SLOWER_PEER, run.index)
            attribute(span.cause_ps, Part.NVLINK, run.index)
            now = min(now, span.cause_ps)
            if cause is None or cause is run:
                # A kernel that sends and then waits: the walk resumes with what it did before it sent.
                continue
            return cause, now
        if span.phase is Phase.DEPENDENCY or (span.phase in (Phase.RELEASE, Phase.BARRIER) and span.cause >= 0):
            cause = runs.get(span.cause)
            # Waited for, though the timeline lacks its kernel: nothing is known but that this one had been launched.
            part = PART_OF_PHASE.get(span.phase, Part.LAUNCH)
            attribute(max(0, span.cause_ps), part, run.index)
            return cause, min(now, span.cause_ps)
        if span.phase is Phase.SM_SLOTS and span.cause in runs:
            # Other kernels had the SMs: the walk resumes with what the one that released them did.
            return runs[span.cause], min(now, span.cause_ps)
        attribute(span.start_ps, PART_OF_PHASE[span.phase], run.index)
        now = min(now, span.start_ps)
    cause = runs.get(run.launched_by)
    attribute(run.start_ps, Part.LAUNCH, run.index)
    if cause is None:
        return None, min(now, run.start_ps)
    # A simulated kernel starts when it may, a measured one when it is seen to run.
    attribute(cause.end_ps, Part.LAUNCH, run.index)
    return cause, min(now, run.start_ps, cause.end_ps)


def _wave_until(run: KernelRun, end_ps: int) -> KernelRun | None:
    """The later wave of a kernel that ended then, and so released its SMs or was what the kernel's end waited for."""
    return next((wave for wave in run.waves if wave.start_ps < wave.end_ps == end_ps), None)


def waits_ps(segments: Iterable[Segment]) -> dict[Part, int]:
    """Sum of the segments of each part."""
    totals: dict[Part, int] = {}
    for segment in segments:
        totals[segment.part] = totals.get(segment.part, 0) + segment.end_ps - segment.start_ps
    return {part: totals[part] for part in Part if part in totals}


def cut(segments: Sequence[Segment], start_ps: int, end_ps: int) -> list[Segment]:
    """The segments between two times, those at the edges shortened. They come in time order and do not overlap."""
    first = bisect_right(segments, start_ps, key=lambda one: one.end_ps)
    last = bisect_left(segments, end_ps, key=lambda one: one.start_ps)
    inside = list(segments[first:last])
    for edge in {0, len(inside) - 1} if inside else ():
        one = inside[edge]
        inside[edge] = Segment(max(one.start_ps, start_ps), min(one.end_ps, end_ps), one.part, one.kernel)
    return inside
