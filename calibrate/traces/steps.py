"""Steps of a trace: where the list of kernels begins anew.

In this order, the first that applies: a kernel that the user names (``--step-kernel``); the graph launch with the most
kernels, where it is replayed; ranges that engines put around a step (vLLM, SGLang, torch's ProfilerStep, or NVTX with a
name that the user gives); a repetition of the kernel list. Else the whole trace is one step, and ``how`` says so.

What comes before the first step and behind the last one is in none. Steps whose list of names differs from the most
frequent list are kept as ``others``: a prefill between decode steps, or a step that lost kernels.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from re import Pattern

from k3sim.calibrate.traces.events import TraceKernel, TraceRank, TraceStep
from k3sim.errors import UserError

LEAST_REPEATS = 3
LEAST_COVERED = 0.5
LONG_GAP = 10  # times the median
_MOST_ANCHORS = 300
MARKS = re.compile(r"^execute_context_\d|^execute_model|^step\[DECODE|^decode\[|^ProfilerStep#\d", re.I)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of one rank with equal lists of kernels, those with other lists, and how they were found."""

    rank: int
    how: str
    steps: list[TraceStep]
    others: list[TraceStep]


def find_steps(rank: TraceRank, step_kernel: Pattern[str] | None = None, nvtx: Pattern[str] | None = None) -> Steps:
    """Steps of a rank. Raises UserError where the kernel or the range that the user names is not there."""
    kernels = rank.kernels
    if step_kernel is not None:
        begins = [index for index, kernel in enumerate(kernels) if step_kernel.search(kernel.name)]
        if not begins:
            raise UserError(f"--step-kernel: no kernel of {rank.source} matches {step_kernel.pattern!r}")
        return _steps(rank, f"every kernel {step_kernel.pattern!r} begins a step", _cut(kernels, begins))
    if nvtx is not None:
        parts = _of_marks(rank, nvtx)
        if not parts:
            raise UserError(f"--nvtx: no range of {rank.source} with kernels matches {nvtx.pattern!r}")
        return _steps(rank, f"range {nvtx.pattern!r}", parts)
    begins = _graph_begins(kernels)
    if begins:
        return _steps(rank, "replays of the largest graph", _cut(kernels, begins))
    parts = _of_marks(rank, MARKS)
    if len(parts) > 1:
        return _steps(rank, "ranges that the engine marked", parts)
    begins = _repetition(kernels)
    if begins:
        return _steps(rank, "repetition of the kernel list", _cut(kernels, begins))
    return whole_trace(rank)


def whole_trace(rank: TraceRank) -> Steps:
    """All kernels as one step."""
    return _steps(rank, "none found: the whole trace is one", [rank.kernels])


def _steps(rank: TraceRank, how: str, parts: Sequence[Sequence[TraceKernel]]) -> Steps:
    found = [TraceStep(rank=rank.rank, number=number, kernels=part) for number, part in enumerate(parts)]
    # What runs on several streams starts in an order that varies, so lists are equal when they hold the same kernels.
    keys = [hash(tuple(sorted(kernel.name for kernel in step.kernels))) for step in found]
    counted = Counter(keys)
    # The last of a cut has what comes behind it too; the most frequent list decides.
    usual = max(counted, key=lambda key: counted[key])  # the first of those that are as frequent
    return Steps(
        rank=rank.rank,
        how=how,
        steps=[step for step, key in zip(found, keys, strict=True) if key == usual],
        others=[step for step, key in zip(found, keys, strict=True) if key != usual],
    )


def _cut(kernels: Sequence[TraceKernel], begins: Sequence[int]) -> list[Sequence[TraceKernel]]:
    """Parts from each beginning to the next. The last goes as far as it repeats the one before."""
    parts = [kernels[begin:end] for begin, end in pairwise(begins)]
    last = kernels[begins[-1] :]
    if parts:
        usual = Counter(len(part) for part in parts).most_common(1)[0][0]
        last = last[:usual]
    return [*parts, last]


def _graph_begins(kernels: Sequence[TraceKernel]) -> list[int]:
    """First kernels of the replays of the graph with most kernels, if it is replayed and holds most of the trace."""
    replays: dict[int, list[int]] = defaultdict(list)
    for index, kernel in enumerate(kernels):
        if kernel.in_graph and kernel.correlation:
            replays[kernel.correlation].append(index)
    if len(replays) < 2:
        return []
    lists: dict[int, list[int]] = defaultdict(list)
    for indices in replays.values():
        lists[hash(tuple(sorted(kernels[index].name for index in indices)))].append(indices[0])
    sizes = {key: len(replays[kernels[begins[0]].correlation or 0]) for key, begins in lists.items()}
    repeated = [key for key, begins in lists.items() if len(begins) > 1 and sizes[key] > 1]
    if not repeated:
        return []
    largest = max(repeated, key=lambda key: (sizes[key], len(lists[key])))
    begins = sorted(lists[largest])
    held = sum(end - begin for begin, end in pairwise(begins)) + sizes[largest]
    # Piecewise graphs of one layer are replayed within a step: then a step has many of them, and a repetition finds it.
    return begins if held >= LEAST_COVERED * len(kernels) and not _is_piecewise(replays, len(kernels)) else []


def _is_piecewise(replays: dict[int, list[int]], num_kernels: int) -> bool:
    """Whether eager kernels lie between replays in number: over a third of all."""
    return sum(map(len, replays.values())) < 0.66 * num_kernels


def _of_marks(rank: TraceRank, pattern: Pattern[str]) -> list[Sequence[TraceKernel]]:
    """Kernels that start in the ranges that match; where a range is the host's, those that it launched."""
    starts = [kernel.start_ps for kernel in rank.kernels]
    marks = sorted((one for one in rank.marks if pattern.search(one.name)), key=lambda one: one.start_ps)
    calls = sorted(
        (kernel.launch.start_ps, index) for index, kernel in enumerate(rank.kernels) if kernel.launch is not None
    )
    launched, by_launch = [start for start, _ in calls], [index for _, index in calls]
    parts: list[Sequence[TraceKernel]] = []
    free_ps = marks[0].start_ps if marks else 0
    for mark in marks:
        if mark.start_ps < free_ps:  # nested in the step before, or beside it on another thread
            continue
        free_ps = mark.end_ps
        begin, end = bisect_left(launched, mark.start_ps), bisect_left(launched, mark.end_ps)
        if end > begin:
            part = [rank.kernels[index] for index in sorted(by_launch[begin:end])]
        else:
            part = rank.kernels[bisect_left(starts, mark.start_ps) : bisect_left(starts, mark.end_ps)]
        if part:
            parts.append(part)
    return parts


def _repetition(kernels: Sequence[TraceKernel]) -> list[int]:
    """Beginnings of the longest list of names that repeats and covers most of the trace; empty where none does.

    Every name with few occurrences is tried as the begin of a step, and kernels behind long gaps, for a step may have
    no kernel that its layers do not repeat. Then the begin is moved to where the gap before it is longest, because that
    is where an engine samples and prepares the next step.
    """
    numbers: dict[str, int] = {}
    names = [numbers.setdefault(kernel.name, len(numbers)) for kernel in kernels]
    places: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        places[name].append(index)
    anchors = sorted((one for one in places.values() if len(one) >= LEAST_REPEATS), key=len)[:_MOST_ANCHORS]
    long_gaps = _behind_long_gaps(kernels)
    if len(long_gaps) >= LEAST_REPEATS:
        anchors.append(long_gaps)
    best: tuple[int, list[int]] | None = None
    for begins in anchors:
        parts = Counter((end - begin, hash(tuple(names[begin:end]))) for begin, end in pairwise(begins))
        (length, key), count = max(parts.items(), key=lambda item: item[1] * item[0][0])
        if count < LEAST_REPEATS - 1 or (count + 1) * length < LEAST_COVERED * len(names):
            continue
        if best is None or length > best[0]:
            equal = [
                begin
                for begin, end in pairwise(begins)
                if (end - begin, hash(tuple(names[begin:end]))) == (length, key)
            ]
            if names[begins[-1] : begins[-1] + length] == names[equal[0] : equal[0] + length]:
                equal.append(begins[-1])
            best = (length, equal)
    return _moved_to_gap(kernels, *best) if best is not None and len(best[1]) >= LEAST_REPEATS else []


def _gaps_before(kernels: Sequence[TraceKernel]) -> list[int]:
    """Picoseconds without any kernel before each."""
    found, latest = [], kernels[0].end_ps
    for kernel in kernels:
        found.append(max(0, kernel.start_ps - latest))
        latest = max(latest, kernel.end_ps)
    return found


def _behind_long_gaps(kernels: Sequence[TraceKernel]) -> list[int]:
    """Kernels behind gaps that are far longer than the usual one."""
    gaps = _gaps_before(kernels)
    limit = LONG_GAP * max(1, sorted(gaps)[len(gaps) // 2])
    return [index for index, gap_ps in enumerate(gaps) if not index or gap_ps > limit]


def _moved_to_gap(kernels: Sequence[TraceKernel], length: int, begins: list[int]) -> list[int]:
    gaps = [0] * length
    of_index = _gaps_before(kernels)
    inner = begins[1:-1] or begins
    for begin in inner:
        for place in range(min(length, len(kernels) - begin)):
            gaps[place] += of_index[begin + place]
    place = max(range(length), key=lambda one: (gaps[one], -one))
    moved = [begin + place for begin in begins if begin + place < len(kernels)]
    # A whole one may lie before the first anchor.
    if place and begins[0] + place - length >= 0:
        moved.insert(0, begins[0] + place - length)
    return moved
