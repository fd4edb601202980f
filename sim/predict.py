"""From a question to a prediction: program, simulation, waits, floor.

``predict`` answers one question; ``ladder`` predicts what each switch of the fused path is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from k3sim.kernels.costs import work_of
from k3sim.model.collectives import BLACKWELL, HOPPER, Collectives, Form
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.program import Program, build_program, stage_ends
from k3sim.model.step import Path
from k3sim.sim.components.skew import Skew
from k3sim.sim.engine import simulate
from k3sim.sim.machine import Machine
from k3sim.sim.question import Question
from k3sim.sim.timeline.critical_path import Part, Segment, critical_path, cut, waits_ps
from k3sim.sim.timeline.fold import Cell, Fold, cells, expand, fold_layers, folded_step_ps
from k3sim.sim.timeline.timeline import PS_PER_US, Timeline
from k3sim.sim.units import total


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One path's step. ``timeline`` is as simulated, with fewer layers when folded; ``full`` has all of them.

    What is not asked for is not worked out: a draw of an interval is asked for its step alone.
    """

    question: Question
    program: Program
    fold: Fold | None
    timeline: Timeline
    cells: tuple[Cell, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The critical path of ``timeline``."""
        return tuple(critical_path(self.timeline))

    @cached_property
    def moved_bytes(self) -> int:
        """HBM bytes of one rank and step when L2 holds nothing."""
        return _moved_bytes(self.program, self.fold)

    @property
    def path(self) -> Path:
        return self.question.path

    @cached_property
    def step_ps(self) -> int:
        return folded_step_ps(list(self.cells))

    @property
    def step_us(self) -> float:
        return self.step_ps / PS_PER_US

    @property
    def tokens_per_step(self) -> float:
        """Of one user: accepted drafts and the target's own; one without speculation, or where nothing is accepted."""
        draft, acceptance = self.question.architecture.draft, self.question.acceptance
        return acceptance.tokens_per_step(draft.num_drafts) if draft and acceptance else 1.0

    @property
    def tokens_per_second_per_user(self) -> float:
        """One token a step and user, or with speculation as many as are accepted."""
        return self.tokens_per_step * 1e6 / self.step_us

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.question.workload.concurrency * self.tokens_per_second_per_user

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """All users' tokens over the GPUs of all replicas."""
        return self.tokens_per_second / self.question.layout.num_gpus

    @cached_property
    def waits_ps(self) -> dict[Part, int]:
        """Picoseconds of each part; they sum to ``step_ps`` exactly."""
        totals: dict[Part, int] = {}
        for cell in self.cells:
            for part, duration_ps in waits_ps(cut(self.segments, cell.start_ps, cell.end_ps)).items():
                totals[part] = totals.get(part, 0) + duration_ps * len(cell.stands_for)
        return {part: totals[part] for part in Part if part in totals}

    @property
    def waits_us(self) -> dict[str, float]:
        return {part.value: duration_ps / PS_PER_US for part, duration_ps in self.waits_ps.items()}

    @property
    def floor_us(self) -> float:
        """Time of the path's bytes at the HBM rate that a read-only stream reaches."""
        return self.moved_bytes / self.question.machine.hbm_read_bytes_per_s * 1e6

    @cached_property
    def hbm_busy_fraction(self) -> float:
        """HBM bytes that moved on the critical rank over what its ceiling could have moved in the step."""
        rank = self.timeline.critical_rank
        counter = next(one for one in self.timeline.counters if one.rank == rank and one.resource == "hbm")
        moved = total(
            (counter.bytes_until(cell.end_ps) - counter.bytes_until(cell.start_ps)) * len(cell.stands_for)
            for cell in self.cells
        )
        return moved / (counter.capacity_bytes_per_us * self.step_us)

    @cached_property
    def full(self) -> Timeline:
        """The timeline of all layers."""
        return expand(self.timeline, list(self.cells)) if self.question.folded else self.timeline

    def contributions(self) -> list[tuple[str, Part, float]]:
        """(stage, part, microseconds of the step) along the critical path, largest first."""
        runs = {run.index: run for run in self.timeline.kernels}
        totals: dict[tuple[str, Part], int] = {}
        for cell in self.cells:
            for one in cut(self.segments, cell.start_ps, cell.end_ps):
                stage = runs[one.kernel].stage if one.kernel in runs else "host"
                key = (stage, one.part)
                totals[key] = totals.get(key, 0) + (one.end_ps - one.start_ps) * len(cell.stands_for)
        ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        return [(stage, part, duration_ps / PS_PER_US) for (stage, part), duration_ps in ordered]


#: Kept, as the draws of a question differ by their machine alone.
_kept_program = lru_cache(maxsize=16)(build_program)


def program_of(question: Question) -> tuple[Program, Fold | None]:
    """The calls of the step that is simulated, and which layers stand for which where alike ones are left out."""
    path = question.path
    layout = path.layout(question.layout, question.workload, question.pad_experts)
    fold: Fold | None = None
    if question.folded and question.skew is not Skew.SAMPLED:
        fold = fold_layers(question.architecture, stage_ends(question.architecture, layout))
    program = _kept_program(
        question.architecture,
        layout,
        question.workload,
        path,
        routing=question.routing,
        collectives=collectives_of(question.machine, question.all_reduce),
        only_layers=fold.layers if fold else None,
    )
    return program, fold


def collectives_of(machine: Machine, form: Form | None = None) -> Collectives:
    """What a library finds on ``machine``: thresholds of its generation, told by FP4, and multicast with sums.

    ``form``: that all its all-reduces take, None where it chooses.
    """
    return Collectives(
        thresholds=BLACKWELL if machine.fp4_flops else HOPPER,
        has_multicast=bool(machine.nvlink_multicast and machine.nvlink_in_switch_reduction),
        forced=form,
    )


def predict(question: Question) -> Prediction:
    """Simulate one step."""
    program, fold = program_of(question)
    timeline = simulate(program, question.machine, skew=question.skew, seed=question.seed, draw=question.footprint_draw)
    return Prediction(
        question=question,
        program=program,
        fold=fold,
        timeline=timeline,
        cells=tuple(cells(timeline, fold)),
    )


Answer = Callable[[Question], Prediction]


def _moved_bytes(program: Program, fold: Fold | None) -> int:
    count: dict[int, int] = {}
    if fold is not None:
        for layer in fold.representative:
            count[layer] = count.get(layer, 0) + 1
    total = 0
    for call in program.calls:
        if call.launch != "host":
            # A layer that was kept only as a neighbour stands for none; start and head are there once.
            times = count.get(call.layer, 0) if fold is not None and call.layer in fold.layers else 1
            work = work_of(call.operator, call.weights, call.shape)
            if not work.prefetches:  # a prefetch moves the bytes of the kernels that use them
                total += work.moved_bytes() * times
    return total


def ladder(question: Question, answer: Answer = predict) -> list[tuple[str, Prediction]]:
    """``stock``, then each switch added in turn, ending with the full fused path; kernels are those of the question.

    ``answer``: what predicts, such as one that also tells how far it is.
    """
    steps = [("stock", answer(on_path(question, "stock")))]
    for count, switch in enumerate(SWITCHES, start=1):
        steps.append((f"+ {switch}", answer(on_path(question, "fused", with_switches=SWITCHES[:count]))))
    return steps


def leave_one_out(
    question: Question, answer: Answer = predict, known: Mapping[frozenset[str], Prediction] | None = None
) -> list[tuple[str, Prediction]]:
    """The full fused path with each switch taken away. ``known``: predictions of the same question, by what is on."""
    without = [(switch, on_path(question, "fused", without=(switch,))) for switch in SWITCHES]
    return [(switch, (known or {}).get(one.path.switches) or answer(one)) for switch, one in without]


def on_path(question: Question, name: str, **switches: tuple[str, ...]) -> Question:
    """The same question of another path, with the same kernels; the megakernel has public ones alone."""
    kernel_set = "public" if name == "megakernel" else question.path.kernel_set
    return replace(
        question, path=find_path(name, kernel_set=kernel_set, engine=question.path.engine, **switches)
    )


def difference_us(before: Prediction, after: Prediction) -> dict[str, float]:
    """Microseconds of each part that ``after`` has more (negative: waiting eliminated)."""
    parts: Sequence[Part] = [part for part in Part if part in before.waits_ps or part in after.waits_ps]
    return {
        part.value: (after.waits_ps.get(part, 0) - before.waits_ps.get(part, 0)) / PS_PER_US for part in parts
    }
