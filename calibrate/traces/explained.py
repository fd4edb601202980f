"""A trace explained: its steps, the median one with its waits, its kernels by class and name, and what bounds it.

Each figure has a label: *observed* stands in the trace (starts, ends, sizes), *derived* is computed from those by a
rule of this room. Nothing here is predicted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from re import Pattern
from typing import Any

from k3sim.calibrate.traces.align import collectives
from k3sim.calibrate.traces.events import COLLECTIVE, MEASURED, PS_PER_US, Trace, TraceKernel, TraceStep
from k3sim.calibrate.traces.steps import Steps, find_steps, whole_trace
from k3sim.calibrate.traces.waits import GRAPH_GAP, StepWaits, waits_of

OUTLIER_MADS = 5.0  # beyond the median by so many median absolute deviations, and by 2 % of it
OUTLIER_SHARE = 0.02
MOST_OUTLIERS = 20


@dataclass(frozen=True, kw_only=True)
class ExplainedRank:
    """Steps of one rank. ``waits`` has one entry a step; ``median`` is the index of the step of median length."""

    rank: int
    steps: Steps
    waits: list[StepWaits]
    median: int
    whole: StepWaits  # of all kernels of the rank, whatever step they are in

    @property
    def median_step(self) -> TraceStep:
        return self.steps.steps[self.median]

    @property
    def median_waits(self) -> StepWaits:
        return self.waits[self.median]

    @cached_property
    def spans_us(self) -> list[float]:
        return [one.span_ps / PS_PER_US for one in self.waits]

    @property
    def period_us(self) -> float | None:
        """Median from the start of a step to that of the next, where both are there."""
        by_number = {step.number: step.start_ps for step in self.steps.steps}
        found = [by_number[one + 1] - start for one, start in by_number.items() if one + 1 in by_number]
        return statistics.median(found) / PS_PER_US if found else None

    @property
    def outliers(self) -> list[tuple[int, float]]:
        """Steps far from the median: number and microseconds."""
        middle = statistics.median(self.spans_us)
        spread = statistics.median(abs(one - middle) for one in self.spans_us)
        limit = max(OUTLIER_MADS * spread, OUTLIER_SHARE * middle)
        pairs = zip(self.steps.steps, self.spans_us, strict=True)
        return [(step.number, us) for step, us in pairs if abs(us - middle) > limit]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A trace with the steps of all its ranks."""

    trace: Trace
    ranks: list[ExplainedRank]

    @property
    def slowest(self) -> ExplainedRank:
        """The rank with the longest median step; the lowest of them when equal."""
        return max(self.ranks, key=lambda one: (statistics.median(one.spans_us), -one.rank))


def explain_trace(trace: Trace, step_kernel: Pattern[str] | None = None, nvtx: Pattern[str] | None = None) -> Explained:
    """Steps and waits of every rank. Raises UserError where what the user names as a step is not there."""
    late_ps = _slower_peers(trace)
    ranks = []
    for rank in trace.ranks:
        # What k3sim wrote is one step, whose layers repeat.
        one_step = trace.format == MEASURED and step_kernel is None
        steps = whole_trace(rank) if one_step else find_steps(rank, step_kernel, nvtx)
        waits = []
        for step in steps.steps:
            one = waits_of(step)
            if late_ps is not None:
                one.slower_peer_ps = sum(late_ps.get(id(kernel), 0) for kernel in step.kernels)
            waits.append(one)
        order = sorted(range(len(waits)), key=lambda index: (waits[index].span_ps, index))
        whole = waits_of(TraceStep(rank=rank.rank, number=0, kernels=rank.kernels))
        median = order[(len(order) - 1) // 2]
        ranks.append(ExplainedRank(rank=rank.rank, steps=steps, waits=waits, median=median, whole=whole))
    return Explained(trace=trace, ranks=ranks)


def _slower_peers(trace: Trace) -> dict[int, int] | None:
    """By kernel: how long a collective ran before that of the last rank began. None for a trace of one rank."""
    if len(trace.ranks) < 2:
        return None
    found: dict[int, int] = {}
    of_rank = [collectives(rank) for rank in trace.ranks]
    for key in set.intersection(*(set(one) for one in of_rank)):
        last_ps = max(one[key].start_ps for one in of_rank)
        for one in of_rank:
            kernel = one[key]
            found[id(kernel)] = min(kernel.duration_ps, last_ps - kernel.start_ps)
    return found


def by_class(steps: Sequence[TraceStep]) -> dict[str, list[float]]:
    """Microseconds of each class in each step: durations added up, so what overlaps counts twice."""
    return _totals(steps, lambda kernel: kernel.kernel_class)


def by_name(steps: Sequence[TraceStep]) -> dict[str, list[float]]:
    """The same by short name."""
    return _totals(steps, lambda kernel: kernel.short_name)


def _totals(steps: Sequence[TraceStep], key: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for number, step in enumerate(steps):
        totals: dict[str, int] = defaultdict(int)
        for kernel in step.kernels:
            totals[key(kernel)] += kernel.duration_ps
        for word, total_ps in totals.items():
            if word not in found:
                found[word] = [0.0] * len(steps)
            found[word][number] = total_ps / PS_PER_US
    return found


def document_of(explained: Explained) -> dict[str, Any]:
    """The figures as the JSON document has them, in microseconds."""
    slowest = explained.slowest
    return {
        "format": explained.trace.format,
        "gpu": explained.trace.gpu,
        "kernels": explained.trace.num_kernels,
        "slowest_rank": slowest.rank,
        "step_us": slowest.median_waits.span_ps / PS_PER_US,
        "ranks": [_rank_row(one) for one in explained.ranks],
        "classes": _class_rows(slowest),
        "names": _name_rows(slowest),
        "notes": [*explained.trace.notes, *notes_of(explained)],
        "labels": {"observed": "stands in the trace", "derived": "computed from what stands there"},
    }


def _rank_row(one: ExplainedRank) -> dict[str, Any]:
    waits, spans = one.median_waits, sorted(one.spans_us)

    def us(duration_ps: int | None) -> dict[str, Any]:
        return {"us": None if duration_ps is None else duration_ps / PS_PER_US, "label": "derived"}

    return {
        "rank": one.rank,
        "steps": len(one.steps.steps),
        "other_steps": len(one.steps.others),
        "found_by": one.steps.how,
        "kernels": len(one.median_step.kernels),
        "step": {"us": waits.span_ps / PS_PER_US, "label": "observed"},
        "step_p10_us": spans[len(spans) // 10],
        "step_p90_us": spans[min(len(spans) - 1, len(spans) * 9 // 10)],
        "period_us": one.period_us,
        "whole_trace": {
            "span_us": one.whole.span_ps / PS_PER_US,
            "busy_us": one.whole.busy_ps / PS_PER_US,
            "idle_us": one.whole.idle_ps / PS_PER_US,
        },
        "outliers": [{"step": number, "us": found_us} for number, found_us in one.outliers[:MOST_OUTLIERS]],
        "busy": us(waits.busy_ps),
        "idle": us(waits.idle_ps),
        "compute": us(waits.compute_ps),
        "exposed_communication": us(waits.exposed_communication_ps),
        "hidden_communication": us(waits.hidden_communication_ps),
        "exposed_copies": us(waits.exposed_copy_ps),
        "overlap_on_a_stream": us(waits.overlap_ps),
        "slower_peer": us(waits.slower_peer_ps),
        "gaps": {kind: us(gap_ps) for kind, gap_ps in sorted(waits.gaps_ps.items())},
        "largest_gaps": [
            {"us": gap_ps / PS_PER_US, "kind": kind, "after": before, "before": after}
            for gap_ps, kind, before, after in waits.largest_gaps
        ],
    }


def _class_rows(one: ExplainedRank) -> list[dict[str, Any]]:
    counts: dict[str, int] = defaultdict(int)
    for kernel in one.median_step.kernels:
        counts[kernel.kernel_class] += 1
    totals = by_class(one.steps.steps)
    rows = [{"class": word, "kernels": counts[word], "us": statistics.median(us)} for word, us in totals.items()]
    return sorted(rows, key=lambda row: (-float(row["us"]), str(row["class"])))


def _name_rows(one: ExplainedRank, most: int = 50) -> list[dict[str, Any]]:
    found: dict[str, list[TraceKernel]] = defaultdict(list)
    for kernel in one.median_step.kernels:
        found[kernel.short_name].append(kernel)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "class": kernels[0].kernel_class,
            "kernels": len(kernels),
            "us": sum(kernel.duration_ps for kernel in kernels) / PS_PER_US,
        }
        for name, kernels in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["us"], row["name"]))[:most]


def notes_of(explained: Explained) -> list[str]:
    """What a reader must know of the figures: what the trace lacks, and what looks like a fault of the recording."""
    one, notes = explained.slowest, []
    waits, kernels = one.median_waits, one.median_step.kernels
    idle = waits.idle_ps / max(1, waits.span_ps)
    if idle > 0.9:
        notes.append(f"{100 * idle:.0f} % of the step is idle: kernels may be missing from the trace")
    if idle == 0 and len(kernels) > 10:
        notes.append("no gap at all between kernels: some profilers put the gaps of a graph replay into the durations")
    if any(kernel.duration_ps == 0 for kernel in kernels):
        notes.append("kernels of no duration: the profiler lost times")
    if waits.overlap_ps:
        notes.append(
            f"kernels of one stream overlap by {waits.overlap_ps / PS_PER_US:.1f} us (PDL or branches of a graph): "
            "classes add up to more than the busy time"
        )
    if any(kernel.kernel_class == COLLECTIVE for kernel in kernels) and len(explained.ranks) == 1:
        notes.append("collectives of one rank: a wait for a slower peer cannot be told from the transfer")
    if GRAPH_GAP in waits.gaps_ps:
        notes.append("edges of the graph, PDL attributes and triggers stand in no trace")
    notes.append("HBM floor: no format holds what a kernel read or wrote; bytes are known of copies only")
    return notes
