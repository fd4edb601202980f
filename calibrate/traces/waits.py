"""Where a step of a trace goes: busy and idle time, waits between kernels, communication, and the critical path.

Sums of durations are not time: kernels of one stream overlap under PDL and on branches of a graph. So everything is
unions of intervals, and a gap counts from the latest end so far.

* compute, exposed communication, exposed copies and idle tile the step: each instant belongs to the first of them that
  runs.
* An instant without any kernel is a *gap*, which the kernel behind it ends. *Host*: the call that launched that kernel
  had not begun yet. *Graph launch*: a replay's node follows one of the same replay. *Eager launch*: the call had begun,
  and the GPU had not yet got to the kernel. *Unknown* where no call stands in the trace.
* *PDL overlap*: what durations of one stream add up to beyond their union.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from k3sim.calibrate.traces.events import COLLECTIVE, COPY, TraceKernel, TraceStep

Interval = tuple[int, int]
GRAPH_GAP, EAGER_GAP, HOST_GAP, UNKNOWN_GAP = "graph launch", "eager launch", "host", "launch not in the trace"


@dataclass(kw_only=True)
class StepWaits:
    """Picoseconds of one step of one rank. ``gaps_ps`` sum to idle; ``slower_peer_ps`` needs the other ranks."""

    span_ps: int
    busy_ps: int
    compute_ps: int
    exposed_communication_ps: int
    hidden_communication_ps: int
    exposed_copy_ps: int
    overlap_ps: int
    gaps_ps: dict[str, int]
    slower_peer_ps: int | None = None
    copied_bytes: int = 0
    largest_gaps: list[tuple[int, str, str, str]] = field(default_factory=list)  # ps, kind, kernel before, kernel after

    @property
    def idle_ps(self) -> int:
        return self.span_ps - self.busy_ps


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order. Those that touch become one; empty ones are left out."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    """Length of what two lists of disjoint intervals share."""
    total = first = second = 0
    while first < len(one) and second < len(other):
        total += max(0, min(one[first][1], other[second][1]) - max(one[first][0], other[second][0]))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return total


def waits_of(step: TraceStep) -> StepWaits:
    """Parts of one step."""
    kernels = step.kernels
    communication = union(_spans(kernels, lambda one: one == COLLECTIVE))
    copies = union(_spans(kernels, lambda one: one == COPY))
    compute = union(_spans(kernels, lambda one: one not in (COLLECTIVE, COPY)))
    running = union([*compute, *communication])
    busy = union([*running, *copies])
    hidden_ps = overlap(communication, compute)
    streams: dict[int, list[Interval]] = defaultdict(list)
    for kernel in kernels:
        streams[kernel.stream].append((kernel.start_ps, kernel.end_ps))
    gaps_ps, largest = _gaps(kernels)
    return StepWaits(
        span_ps=step.span_ps,
        busy_ps=length(busy),
        compute_ps=length(compute),
        exposed_communication_ps=length(communication) - hidden_ps,
        hidden_communication_ps=hidden_ps,
        exposed_copy_ps=length(busy) - length(running),
        overlap_ps=sum(length(spans) - length(union(spans)) for spans in streams.values()),
        gaps_ps=gaps_ps,
        copied_bytes=sum(kernel.num_bytes or 0 for kernel in kernels if kernel.kernel_class == COPY),
        largest_gaps=largest,
    )


def _spans(kernels: Sequence[TraceKernel], wanted: Callable[[str], bool]) -> list[Interval]:
    return [(one.start_ps, one.end_ps) for one in kernels if wanted(one.kernel_class)]


def _gaps(kernels: Sequence[TraceKernel], most: int = 10) -> tuple[dict[str, int], list[tuple[int, str, str, str]]]:
    totals: dict[str, int] = defaultdict(int)
    found: list[tuple[int, str, str, str]] = []
    last = kernels[0]
    for kernel in kernels[1:]:
        gap_ps = kernel.start_ps - last.end_ps
        if gap_ps > 0:
            pieces = gap_pieces(last, kernel)
            for kind, duration_ps in pieces.items():
                totals[kind] += duration_ps
            found.append((gap_ps, max(pieces, key=lambda kind: pieces[kind]), last.short_name, kernel.short_name))
        if kernel.end_ps > last.end_ps:
            last = kernel
    found.sort(key=lambda one: -one[0])
    return dict(totals), found[:most]


def gap_pieces(before: TraceKernel, after: TraceKernel) -> dict[str, int]:
    """What the gap between the latest end so far and the next start was: kind -> picoseconds."""
    gap_ps = after.start_ps - before.end_ps
    if after.in_graph and before.in_graph and after.correlation == before.correlation:
        return {GRAPH_GAP: gap_ps}
    call = after.launch
    if call is None:
        return {UNKNOWN_GAP: gap_ps}
    host_ps = min(gap_ps, max(0, call.start_ps - before.end_ps))
    kind = GRAPH_GAP if call.is_graph else EAGER_GAP
    return {name: part for name, part in ((HOST_GAP, host_ps), (kind, gap_ps - host_ps)) if part > 0}
