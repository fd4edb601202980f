"""Folding: simulate each distinct layer once, and repeat it.

Two layers are alike when they run the same kernels on the same sizes between the same neighbours: mixer, ffn,
attention-residual sources, the ffn before (its tail overlaps the start) and the mixer after (whose weights are
fetched early). A folded program runs one layer of each kind in an order that keeps those neighbours; a *cell* of
its timeline, from the end of one layer's main stream to the end of the next, then stands for every layer of its
kind. With ranks identical the folded step equals the full one to within 0.1 % (tests/sim/test_fold.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from k3sim.model.architecture import Architecture
from k3sim.sim.timeline.timeline import Counter, KernelRun, Span, Timeline

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Cell:
    """A stretch of the folded timeline, and the layers of the model that it stands for (-1: before the first)."""

    start_ps: int
    end_ps: int
    layer: int
    stands_for: tuple[int, ...]

    @property
    def duration_ps(self) -> int:
        return self.end_ps - self.start_ps


@dataclass(frozen=True)
class Fold:
    """Layers to simulate, and for each layer of the model the one that stands for it."""

    layers: tuple[int, ...]
    representative: tuple[int, ...]


@lru_cache(maxsize=16)
def fold_layers(architecture: Architecture, stage_ends: frozenset[int] = frozenset()) -> Fold:
    """The distinct layers of an architecture, in an order that keeps each one's neighbours.

    ``stage_ends``: the last layers of pipeline stages, which hand over.
    """
    last = architecture.num_layers - 1

    def next_mixer(layer: int) -> str:
        return architecture.mixer(layer + 1) if layer < last else ""

    def key(layer: int) -> _Key:
        return (
            architecture.mixer(layer),
            architecture.ffn(layer),
            architecture.attn_res_sources(layer, "mixer"),
            architecture.attn_res_sources(layer, "ffn"),
            architecture.ffn(layer - 1) if layer else "",
            next_mixer(layer),
            layer in stage_ends,
            layer - 1 in stage_ends,
        )

    kept: list[int] = []
    seen: dict[_Key, int] = {}

    def keep(layer: int) -> None:
        if kept and kept[-1] != layer - 1 and next_mixer(kept[-1]) != architecture.mixer(layer):
            keep(layer - 1)
        kept.append(layer)
        seen[key(layer)] = layer

    representative: list[int] = []
    for layer in range(architecture.num_layers):
        if key(layer) not in seen:
            keep(layer)
        representative.append(seen[key(layer)])
    return Fold(tuple(kept), tuple(representative))


def cells(timeline: Timeline, fold: Fold | None) -> list[Cell]:
    """Cut a one-rank timeline into layers. Without a fold every layer stands for itself."""
    ends: dict[int, int] = {}
    for run in timeline.of_rank(timeline.critical_rank):
        if run.stream == "main":
            ends[run.layer] = max(ends.get(run.layer, 0), run.end_ps)
    present = sorted(ends)
    inner = present[1:-1]
    # The head and a draft's layers stand for themselves.
    stands: dict[int, list[int]] = {
        layer: [] if fold is not None and layer in fold.layers else [layer] for layer in inner
    }
    if fold is not None:
        for layer, chosen in enumerate(fold.representative):
            stands[chosen].append(layer)
    result = [Cell(0, ends[present[0]], present[0], (present[0],))]
    for layer in inner:
        result.append(Cell(result[-1].end_ps, ends[layer], layer, tuple(stands[layer])))
    result.append(Cell(result[-1].end_ps, timeline.step_ps, present[-1], (present[-1],)))
    return result


def folded_step_ps(parts: list[Cell]) -> int:
    return sum(cell.duration_ps * len(cell.stands_for) for cell in parts)


def expand(timeline: Timeline, parts: list[Cell]) -> Timeline:
    """Lay the cells out for all layers: the timeline that the folded one stands for."""
    by_layer: dict[int, tuple[Cell, int]] = {}
    for cell in parts:
        for layer in cell.stands_for:
            by_layer[layer] = (cell, 0)
    runs_of: dict[int, list[KernelRun]] = {}
    for run in timeline.kernels:
        runs_of.setdefault(run.layer, []).append(run)
    order = sorted(by_layer)
    start_ps, shifts = 0, {}
    for layer in order:
        cell = by_layer[layer][0]
        shifts[layer] = start_ps - cell.start_ps
        start_ps += cell.duration_ps
    # A cause in a neighbouring layer (the one before, or the one behind, whose kernels may hold the SMs) is the kernel
    # of the same stage in the layer that stands there.
    index_of: dict[tuple[int, str], int] = {}
    copies: list[tuple[KernelRun, int, int]] = []
    for layer in order:
        cell = by_layer[layer][0]
        for run in runs_of[cell.layer]:
            index_of[layer, run.stage] = len(copies)
            copies.append((run, layer, shifts[layer]))
    original = {run.index: run for run in timeline.kernels}
    folded_place = {layer: place for place, layer in enumerate(sorted(runs_of))}
    place_of = {layer: place for place, layer in enumerate(order)}

    def moved(cause: int, run: KernelRun, layer: int) -> int:
        if cause < 0:
            return -1
        owner = original[cause]
        place = place_of[layer] + folded_place[owner.layer] - folded_place[run.layer]
        return index_of.get((order[place], owner.stage), -1) if 0 <= place < len(order) else -1

    kernels = [
        _moved_run(run, index, layer, shift_ps, {cause: moved(cause, run, layer) for cause in _causes(run)})
        for index, (run, layer, shift_ps) in enumerate(copies)
    ]
    return replace(
        timeline,
        kernels=kernels,
        num_layers=len(order) - 2,
        counters=[_expand_counter(counter, order, by_layer, shifts) for counter in timeline.counters],
        step_ps=folded_step_ps(parts),
    )


def _causes(run: KernelRun) -> set[int]:
    """Every kernel that a kernel's record names, and -1."""
    of_waves = (cause for wave in run.waves for cause in _causes(wave))
    return {-1, run.launched_by, *run.causes, *(span.cause for span in run.spans), *of_waves}


def _moved_run(run: KernelRun, index: int, layer: int, shift_ps: int, moved: Mapping[int, int]) -> KernelRun:
    """A kernel as it runs in another layer; ``moved``: the kernels that stand there for those it names."""
    causes = (moved[cause] for cause in run.causes)
    return replace(
        run,
        index=index,
        layer=layer,
        start_ps=run.start_ps + shift_ps,
        end_ps=run.end_ps + shift_ps,
        spans=[
            Span(
                phase,
                start_ps + shift_ps,
                end_ps + shift_ps,
                moved[cause],
                cause_ps if cause_ps < 0 else cause_ps + shift_ps,
                arrival_ps if arrival_ps < 0 else arrival_ps + shift_ps,
                complete_ps if complete_ps < 0 else complete_ps + shift_ps,
            )
            for phase, start_ps, end_ps, cause, cause_ps, arrival_ps, complete_ps in run.spans
        ],
        launched_by=moved[run.launched_by],
        causes=tuple(dict.fromkeys(cause for cause in causes if cause >= 0)),
        waves=[_moved_run(wave, index, layer, shift_ps, moved) for wave in run.waves],
    )


def _expand_counter(
    counter: Counter, order: list[int], by_layer: dict[int, tuple[Cell, int]], shifts: dict[int, int]
) -> Counter:
    times = [time_ps for time_ps, _ in counter.steps]
    steps: list[tuple[int, int]] = []

    def put(time_ps: int, rate: int) -> None:
        if steps and steps[-1][0] == time_ps:
            steps[-1] = (time_ps, rate)
        elif not steps or steps[-1][1] != rate:
            steps.append((time_ps, rate))

    for layer in order:
        cell = by_layer[layer][0]
        shift_ps = shifts[layer]
        first = bisect_right(times, cell.start_ps) - 1
        if first >= 0:
            put(cell.start_ps + shift_ps, counter.steps[first][1])
        for time_ps, rate in counter.steps[first + 1 : bisect_left(times, cell.end_ps)]:
            put(time_ps + shift_ps, rate)
    return replace(counter, steps=tuple(steps))
