"""The median step of a trace as a ``Timeline``: page, Perfetto trace and critical path are those of predictions.

A trace has no edges, so what a kernel waited for is derived: the kernel before it on its stream, and of the kernels of
other streams the last to end by its start. A collective that began before that of another rank waited for a slower
peer until then. The first kernel of the slowest rank begins the step.
"""

from __future__ import annotations

from bisect import bisect_right

from k3sim.calibrate.traces.align import collectives
from k3sim.calibrate.traces.events import COLLECTIVE, TraceKernel, TraceStep
from k3sim.calibrate.traces.explained import Explained
from k3sim.sim.timeline.timeline import KernelRun, Phase, Span, Timeline


def timeline_of_trace(explained: Explained) -> tuple[Timeline, dict[int, TraceKernel]]:
    """The median step of the slowest rank, and the kernel of the trace behind each index of the timeline."""
    step = explained.slowest.median_step
    last_starts = _last_starts(explained)
    runs, kernels = _runs(step, last_starts)
    timeline = Timeline(
        machine=explained.trace.gpu or "GPU of the trace",
        num_ranks=len(explained.ranks),
        ranks=(step.rank,),
        num_layers=1,
        kernels=runs,
        counters=[],
        step_ps=step.span_ps,
    )
    return timeline, kernels


def _last_starts(explained: Explained) -> dict[int, int]:
    """By kernel: when the same collective began on the last rank."""
    if len(explained.trace.ranks) < 2:
        return {}
    of_rank = [collectives(rank) for rank in explained.trace.ranks]
    found: dict[int, int] = {}
    for key in set.intersection(*(set(one) for one in of_rank)):
        last_ps = max(one[key].start_ps for one in of_rank)
        found.update((id(one[key]), last_ps) for one in of_rank)
    return found


def _runs(step: TraceStep, last_starts: dict[int, int]) -> tuple[list[KernelRun], dict[int, TraceKernel]]:
    origin = step.start_ps
    by_end = sorted(range(len(step.kernels)), key=lambda index: (step.kernels[index].end_ps, index))
    ends = [step.kernels[index].end_ps for index in by_end]
    before_on_stream: dict[int, int] = {}
    runs: list[KernelRun] = []
    for index, kernel in enumerate(step.kernels):
        causes = [before_on_stream[kernel.stream]] if kernel.stream in before_on_stream else []
        place = bisect_right(ends, kernel.start_ps) - 1
        # Of kernels that end as this one starts, one without duration could be itself.
        if place >= 0 and by_end[place] < index:
            causes.append(by_end[place])
        causes = [one for one in dict.fromkeys(causes) if step.kernels[one].end_ps < kernel.end_ps]
        last = max(causes, key=lambda one: (step.kernels[one].end_ps, one), default=-1)
        run = KernelRun(
            index=index,
            rank=step.rank,
            stream=f"stream {kernel.stream}",
            layer=0,
            kind=kernel.kernel_class,
            stage=kernel.short_name,
            start_ps=kernel.start_ps - origin,
            end_ps=kernel.end_ps - origin,
            launched_by=last,
            causes=tuple(causes),
        )
        _add_spans(run, kernel, last, runs, last_starts.get(id(kernel), kernel.start_ps) - origin)
        runs.append(run)
        if kernel.stream not in before_on_stream or runs[before_on_stream[kernel.stream]].end_ps <= run.end_ps:
            before_on_stream[kernel.stream] = index
    return runs, dict(enumerate(step.kernels))


def _add_spans(run: KernelRun, kernel: TraceKernel, last: int, runs: list[KernelRun], peers_ps: int) -> None:
    if last >= 0 and runs[last].end_ps > run.start_ps:
        run.add_span(Phase.DEPENDENCY, runs[last].end_ps, last, runs[last].end_ps)
    now = run.spanned_ps
    if peers_ps > now:
        # Its own data was visible from its start on, as far as a trace can tell.
        run.spans.append(Span(Phase.PEERS, now, min(peers_ps, run.end_ps), -1, now, now))
    run.add_span(Phase.EXCHANGE if kernel.kernel_class == COLLECTIVE else Phase.RUN, run.end_ps)
