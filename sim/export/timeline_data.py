"""What the charts of a timeline are drawn from: kernels, phases, critical path and rates of one rank, as plain lists.

The page holds every kernel of the step with its phases, because a reader may zoom into any of them. Layers repeat, so
phases are stored once for all kernels with the same ones, relative to their kernel's start. Times are integer
picoseconds, so that nothing is lost between the timeline and the screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from k3sim.sim.export.colours import word_of_phase
from k3sim.sim.export.lanes import assign_lanes
from k3sim.sim.export.nesting import sublayers
from k3sim.sim.timeline.critical_path import Part, critical_path
from k3sim.sim.timeline.timeline import Counter, KernelRun, Phase, Span, Timeline

RATES = {"hbm": "HBM", "nvlink egress": "NVLink out"}  # resource -> name of its chart

Relative = tuple[Any, ...]  # spans of a kernel from its start on


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """The critical rank of a timeline as ``timeline.js`` reads it.

    ``kernels`` holds a list a column, in order of start; ``patterns`` the phases of a kernel as offset and length in
    ps, word, and phase; words, phases and stages are numbers of the lists of these names.
    """
    rank = timeline.critical_rank
    lanes = assign_lanes(timeline.of_rank(rank))
    placed = sorted(
        ((kernel, row) for row, lane in enumerate(lanes.values()) for kernel in lane),
        key=lambda item: (item[0].start_ps, item[0].index),
    )
    stages = _Numbered()
    number_of_pattern: dict[Relative, int] = {}
    patterns: list[list[list[int]]] = []
    words, phases = _Numbered(), _Numbered()
    columns: dict[str, list[int]] = {
        name: [] for name in ("stage", "lane", "layer", "start", "length", "pattern", "hbm", "l2", "sent")
    }
    number_of: dict[int, int] = {}  # index of a kernel to its place in the columns
    for number, (kernel, row) in enumerate(placed):
        number_of[kernel.index] = number
        relative = _relative(kernel)
        pattern = number_of_pattern.setdefault(relative, len(patterns))
        if pattern == len(patterns):
            patterns.append(_pattern(kernel, words, phases))
        values = (
            stages[kernel.stage],
            row,
            kernel.layer,
            kernel.start_ps,
            kernel.duration_ps,
            pattern,
            kernel.hbm_bytes,
            kernel.l2_bytes,
            kernel.sent_bytes,
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    columns["start"] = _differences(columns["start"])
    return {
        "step": timeline.step_ps,
        "num_layers": timeline.num_layers,
        "layers": _layers(timeline),
        "lanes": list(lanes),
        "kernels": columns,
        "patterns": patterns,
        "path": _path(timeline, number_of, words),
        "rates": _rates(timeline.counters, rank, timeline.step_ps),
        "stages": list(stages),
        "words": list(words),
        "phases": list(phases),
    }


def layer_window(timeline: Timeline, layer: int) -> tuple[int, int] | None:
    """When a layer runs on the critical rank, in ps. None where the timeline has no kernel of it."""
    of_layer = [kernel for kernel in timeline.of_rank(timeline.critical_rank) if kernel.layer == layer]
    # A prefetch runs in an earlier layer; the main stream says when this one happens.
    extent = [kernel for kernel in of_layer if kernel.stream == "main"] or of_layer
    return (min(k.start_ps for k in extent), max(k.end_ps for k in extent)) if extent else None


def _layers(timeline: Timeline) -> list[dict[str, Any]]:
    """The sublayers that tile the step, as the trace has them, each with its names from the longest on."""
    inner = sublayers(timeline.of_rank(timeline.critical_rank), timeline.num_layers, timeline.step_ps)
    return [
        {
            "names": [f"layer {one.layer} {one.name}", f"{one.layer} {one.name}", one.name]
            if 0 <= one.layer < timeline.num_layers
            else [one.name],
            "start": one.start_ps,
            "end": one.end_ps,
        }
        for one in inner
    ]


class _Numbered(dict[str, int]):
    """Strings by number, in order of first use."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _relative(kernel: KernelRun) -> Relative:
    """The spans of a kernel from its start on: kernels with the same ones are drawn alike."""
    start_ps = kernel.start_ps
    return tuple(
        (span.phase, span.start_ps - start_ps, span.end_ps - start_ps, _arrival_ps(span) - start_ps)
        if span.phase is Phase.PEERS
        else (span.phase, span.start_ps - start_ps, span.end_ps - start_ps)
        for span in kernel.spans
    )


def _pattern(kernel: KernelRun, words: _Numbered, phases: _Numbered) -> list[list[int]]:
    """The phases of a kernel that take time: offset from its start, length, word of the waits, phase."""
    return [
        [start_ps - kernel.start_ps, end_ps - start_ps, words[word], phases[span.phase.value]]
        for span in kernel.spans
        for word, start_ps, end_ps in worded_spans(span)
        if end_ps > start_ps
    ]


def worded_spans(span: Span) -> Iterable[tuple[str, int, int]]:
    """A span under the words of the waits: for peers it waits until its own data arrived, and then for a slower one."""
    if span.phase is Phase.PEERS:
        arrival_ps = _arrival_ps(span)
        yield Part.NVLINK.word, span.start_ps, arrival_ps
        yield Part.SLOWER_PEER.word, arrival_ps, span.end_ps
    else:
        yield word_of_phase(span.phase), span.start_ps, span.end_ps


def _arrival_ps(span: Span) -> int:
    """When this rank's own data was visible, as far as the span waited for it."""
    return min(max(span.start_ps, span.arrival_ps), span.end_ps)


def _path(timeline: Timeline, number_of: Mapping[int, int], words: _Numbered) -> dict[str, list[int]]:
    """The critical path from 0 to the end of the step: length in ps, word, and kernel (-1: none) of each segment."""
    drawn: list[tuple[int, Part, int]] = []  # what follows one another in a kernel under one word is one
    for segment in critical_path(timeline):
        length_ps = segment.end_ps - segment.start_ps
        if drawn and drawn[-1][1] is segment.part and drawn[-1][2] == segment.kernel:
            drawn[-1] = (drawn[-1][0] + length_ps, segment.part, segment.kernel)
        else:
            drawn.append((length_ps, segment.part, segment.kernel))
    number_of_part = {part: words[part.word] for part in dict.fromkeys(part for _, part, _ in drawn)}
    return {
        "length": [length_ps for length_ps, _, _ in drawn],
        "word": [number_of_part[part] for _, part, _ in drawn],
        "kernel": [number_of.get(kernel, -1) for _, _, kernel in drawn],
    }


def _rates(counters: Iterable[Counter], rank: int, step_ps: int) -> list[dict[str, Any]]:
    """Steps of each rate that has a chart: since the step before (ps), and bytes per microsecond from then on."""
    found = {counter.resource: counter for counter in counters if counter.rank == rank}
    return [
        {
            "name": name,
            "capacity": found[resource].capacity_bytes_per_us,
            "time": _differences([time_ps for time_ps, _ in found[resource].steps]),
            "rate": [rate for _, rate in found[resource].steps],
            "end": step_ps,
        }
        for resource, name in RATES.items()
        if resource in found and found[resource].steps
    ]


def _differences(values: list[int]) -> list[int]:
    """The first value, and of all others what they have more than the one before: short numbers, which pack well."""
    return values[:1] + [after - before for before, after in pairwise(values)]
