"""Predictions beside published results: ``k3sim validate``.

The results are the tables of ``calibrate/evidence``. They are compared, never used: no machine value, no Work and no
path depends on a step time in them. Every value is predicted with the profile as it is shipped and with machines drawn
from the intervals of its values; the middle 90 % of those is the interval. Commands that several records share are
simulated once, and two processes share the work.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from k3sim.calibrate.compare.ladders import JudgedStep, judge, part_sets, step_ms
from k3sim.calibrate.evidence import Evidence, Ladder, load_evidence, load_ladders
from k3sim.errors import UserError
from k3sim.model.paths import find_path
from k3sim.model.program import Call, Program, Weight
from k3sim.sim.engine import simulate
from k3sim.sim.intervals import draw_machines, interval_around
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import question_of
from k3sim.sim.timeline.timeline import PS_PER_US

LOOPS = 12  # calls of a kernel back to back; the first ones are not counted
WARM_UP = 3
NUM_DRAWS = 10  # machines; stratified draws, so that few give steady percentiles
MAX_PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reading and its prediction, in the unit of the table."""

    label: str
    measured: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """Relative error; positive when the prediction is slower."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class Validated:
    """One published value and what the model says of it. ``low`` and ``high`` hold the middle 90 % of draws."""

    evidence: Evidence
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.evidence.value - 1.0

    @property
    def inside_interval(self) -> bool:
        return self.low <= self.evidence.value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        one = self.evidence
        return {
            "id": one.id,
            "predicted": self.predicted,
            "published": one.value,
            "unit": one.unit,
            "error": self.error,
            "inside_interval": self.inside_interval,
            "source": one.source,
            "low": self.low,
            "high": self.high,
            "kind": one.kind,
            "title": one.title,
            "hardware": one.hardware,
            "engine": one.engine,
            "date": one.date,
            "judged": one.judged,
            "why": one.why,
            "unknown": one.unknown,
            "command": one.command,
        }


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Everything that ``k3sim validate`` compares."""

    rows: tuple[Validated, ...]
    ladders: tuple[tuple[Ladder, tuple[JudgedStep, ...]], ...]
    num_draws: int
    seed: int


def validate(
    ids: Sequence[str] = (),
    *,
    records: Sequence[Evidence] | None = None,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> Validation:
    """Predict every record, or those whose id begins with one of ``ids``, and the ladders.

    ``on_done`` is told how many pieces of work are done, and of how many. The result is the same for the same seed.
    Raises UserError for evidence that is not accepted, an id that no record begins with, or fewer than two draws.
    """
    if num_draws < 2:
        raise UserError(f"draws is {num_draws}; accepted: 2 or more")
    chosen = chosen_records(ids, load_evidence() if records is None else records)
    ladders = [one for one in load_ladders() if one.id.startswith(tuple(ids))] if ids else []
    if not ids and records is None:
        ladders = load_ladders()
    if not chosen and not ladders:
        raise UserError(f"no evidence begins with {ids[0]!r}; accepted: how an id begins, such as gb200 or b300-sglang")
    commands = sorted({one.command for one in chosen if one.kind != "kernel"})
    stages = {command: _stages_of(command, chosen) for command in commands}
    kernels = [one for one in chosen if one.kind == "kernel"]
    parts = sorted({(one.command, on) for one in ladders for on in part_sets(one)})
    tasks: list[Callable[[], Any]] = [
        *(partial(_of_command, command, stages[command], num_draws, seed) for command in commands),
        *(partial(_of_part, *one) for one in parts),
        *(partial(_of_loop, one.loop or {}, num_draws, seed) for one in kernels),
    ]
    results = list(run_tasks(tasks, on_done))
    of_command = dict(zip(commands, results, strict=False))
    of_part = dict(zip(parts, results[len(commands) :], strict=False))
    of_kernel = {one.id: found for one, found in zip(kernels, results[len(commands) + len(parts) :], strict=True)}
    return Validation(
        rows=tuple(_validated(one, of_command, of_kernel) for one in chosen),
        ladders=tuple(
            (one, tuple(judge(one, {on: of_part[one.command, on] for on in part_sets(one)}))) for one in ladders
        ),
        num_draws=num_draws,
        seed=seed,
    )


def chosen_records(ids: Sequence[str], records: Iterable[Evidence]) -> list[Evidence]:
    return [one for one in records if not ids or one.id.startswith(tuple(ids))]


Values = tuple[float, list[float]]  # with the profile, and with each drawn machine


def _validated(
    one: Evidence, of_command: Mapping[str, Mapping[str, Values]], of_kernel: Mapping[str, Values]
) -> Validated:
    if one.kind == "kernel":
        predicted, draws = of_kernel[one.id]
    elif one.kind == "stage":
        predicted, draws = of_command[one.command][_stage_key(one)]
    else:
        step_us, drawn = of_command[one.command]["step"]
        predicted, draws = in_unit(step_us, one.unit, one.tokens), [in_unit(us, one.unit, one.tokens) for us in drawn]
    low, high = interval_around(predicted, draws)
    return Validated(evidence=one, predicted=predicted, low=low, high=high)


def in_unit(step_us: float, unit: str, tokens: int = 1) -> float:
    """A step as a value of ``unit``; ``tokens`` come out of one step."""
    return {
        "us": step_us,
        "ms": step_us / 1e3,
        "tok/s/user": tokens * 1e6 / step_us,
        "tok/s": tokens * 1e6 / step_us,
    }[unit]


# -- pieces of work, each run in whichever process is free ------------------------------------------------------------


def run_tasks(tasks: Sequence[Callable[[], Any]], on_done: Callable[[int, int], None]) -> Iterator[Any]:
    with _pool(len(tasks)) as mapped:
        for number, result in enumerate(mapped(_call, tasks), start=1):
            on_done(number, len(tasks))
            yield result


@contextmanager
def _pool(num_tasks: int) -> Iterator[Callable[..., Iterable[Any]]]:
    workers = min(MAX_PROCESSES, os.cpu_count() or 1)
    if workers < 2 or num_tasks < 4:
        yield map
        return
    with ProcessPoolExecutor(workers) as pool:
        yield pool.map


def _call(task: Callable[[], Any]) -> Any:
    return task()


@lru_cache(maxsize=16)
def _drawn(machine: str, num_draws: int, seed: int) -> list[Machine]:
    return draw_machines(load_machine(machine), num_draws, seed)


def draws_of(command: str, num_draws: int, seed: int) -> list[Prediction]:
    """The command's prediction on each drawn machine; the same draws for all commands on one machine."""
    question = question_of(command)
    machines = _drawn(question.machine.name, num_draws, seed)
    return [predict(replace(question, machine=one)) for one in machines]


def _of_command(command: str, stages: Sequence[tuple[str, str, int]], num_draws: int, seed: int) -> dict[str, Values]:
    predictions = [predict(question_of(command)), *draws_of(command, num_draws, seed)]
    step, *steps = [one.step_us for one in predictions]
    found: dict[str, Values] = {"step": (step, steps)}
    for key in stages:
        end, *ends = [_stage_end_us(one, key) for one in predictions]
        found[" ".join(map(str, key))] = (end, ends)
    return found


def _stages_of(command: str, records: Iterable[Evidence]) -> list[tuple[str, str, int]]:
    return [(one.stage, one.origin, one.layer) for one in records if one.kind == "stage" and one.command == command]


def _stage_key(one: Evidence) -> str:
    return f"{one.stage} {one.origin} {one.layer}"


def _stage_end_us(prediction: Prediction, key: tuple[str, str, int]) -> float:
    """End of a stage after the end of ``origin`` in the layer before; a stage behind that belongs to its own layer.

    A stage that follows ``origin`` in its layer (the tail's up-projection) is counted from ``origin`` of its own layer.
    """
    stage, origin, layer = key
    ends = {(run.stage, run.layer): run.end_ps for run in prediction.full.kernels if layer - 1 <= run.layer <= layer}
    begin = ends[origin, layer - 1]
    if stage != origin and ends[stage, layer] > ends[origin, layer]:
        begin = ends[origin, layer]
    return (ends[stage, layer] - begin) / PS_PER_US


def _of_part(command: str, parts: tuple[str, ...]) -> float:
    return step_ms(command, parts)


def _of_loop(loop: Mapping[str, Any], num_draws: int, seed: int) -> Values:
    machines = [load_machine(loop["machine"]), *_drawn(loop["machine"], num_draws, seed)]
    first, *rest = [loop_us(one, loop["launch"], loop["calls"], loop.get("trigger", "stream")) for one in machines]
    return first, rest


def loop_us(machine: Machine, launch: str, kernels: Sequence[Mapping[str, Any]], trigger: str) -> float:
    """Time of one round of ``kernels`` in a long graph in which every round reads its own weights (cold L2)."""
    calls: list[Call] = []
    for loop in range(LOOPS):
        for position, kernel in enumerate(kernels):
            weights = tuple(
                Weight(region=f"{loop}/{position}/{number}", num_outputs=outputs, depth=depth, num_bytes=num_bytes)
                for number, (outputs, depth, num_bytes) in enumerate(kernel["weights"])
            )
            calls.append(
                Call(
                    index=len(calls),
                    layer=loop,
                    kind="loop",
                    stage=kernel["operator"],
                    operator=kernel["operator"],
                    weights=weights,
                    shape=kernel["shape"],
                    stream="main",
                    launch=launch,
                    trigger=trigger,
                    after=(),
                    sends="",
                    transport="push",
                    group_size=1,
                    receives=(),
                )
            )
    program = Program(path=find_path("stock"), num_ranks=1, layers=tuple(range(LOOPS)), calls=tuple(calls))
    timeline = simulate(program, machine)
    ends = [max(run.end_ps for run in timeline.kernels if run.layer == loop) for loop in range(LOOPS)]
    return (ends[-1] - ends[WARM_UP - 1]) / (LOOPS - WARM_UP) / PS_PER_US


# -- summaries --------------------------------------------------------------------------------------------------------


def groups(rows: Iterable[Validated]) -> dict[tuple[str, str, str], list[Validated]]:
    """Rows by kind, hardware and engine, in the order of the kinds and then of the names."""
    order = {"step": 0, "stage": 1, "kernel": 2}
    found: dict[tuple[str, str, str], list[Validated]] = {}
    for row in sorted(rows, key=lambda row: (order[row.evidence.kind], row.evidence.hardware, row.evidence.engine)):
        one = row.evidence
        found.setdefault((one.kind, one.hardware, one.engine), []).append(row)
    return found


def summary(rows: Iterable[Validated]) -> dict[str, dict[str, float]]:
    """Of the judged rows of each kind: how many, median and worst error, and the share inside the interval."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("step", "stage", "kernel"):
        judged = [row for row in rows if row.evidence.kind == kind and row.evidence.judged]
        if judged:
            errors = [abs(row.error) for row in judged]
            found[kind] = {
                "rows": len(judged),
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
                "inside_interval": sum(row.inside_interval for row in judged) / len(judged),
            }
    return found


def kernel_rows() -> list[Row]:
    """Public kernels in a graph of repeated calls, in microseconds a call, without intervals."""
    return [
        Row(
            label=f"{one.hardware}: {one.title}",
            measured=one.value,
            predicted=loop_of(one.loop),
            source=one.source,
        )
        for one in load_evidence()
        if one.loop is not None
    ]


def loop_of(loop: Mapping[str, Any]) -> float:
    """Microseconds of the loop of a kernel record on the machine that it names."""
    return loop_us(load_machine(loop["machine"]), loop["launch"], loop["calls"], loop.get("trigger", "stream"))
