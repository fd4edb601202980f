"""Predictions beside published results: ``k3sim validate``.

The results are the tables of ``calibrate/evidence``. They are compared, never used: no machine value, no Work and no
path depends on a step time in them. Every value is predicted with the profile as it is shipped, and with machines drawn
from the intervals of its values, to which errors of kernels are drawn (``sim/kernel_errors.py``); the middle 90 % of
those is the interval. Commands that several records share are simulated once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase, with_bounds
from k3sim.calibrate.compare.chain import chain_us, chain_with_errors, recorded_chain
from k3sim.calibrate.compare.coverage import Coverage, coverage_of
from k3sim.calibrate.compare.draws import NUM_DRAWS, machine_and_draws, predictions
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.ladders import JudgedStep, judge, part_sets, step_ms
from k3sim.calibrate.evidence import Evidence, Ladder, load_evidence, load_ladders
from k3sim.errors import UserError
from k3sim.sim.draws import check_draws
from k3sim.sim.intervals import footprint_draw, with_errors_between, with_errors_of_step
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction, collectives_of
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Everything that ``k3sim validate`` compares."""

    rows: tuple[ComparedCase, ...]
    ladders: tuple[tuple[Ladder, tuple[JudgedStep, ...]], ...]
    num_draws: int
    seed: int


def validate(
    ids: Sequence[str] = (),
    *,
    records: Sequence[Evidence] | None = None,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
    on_case: Callable[[ComparedCase], None] = lambda _: None,
) -> Validation:
    """Predict every record, or those whose id begins with one of ``ids``, and the ladders.

    ``on_done`` is told how many pieces of work are done, and of how many; ``on_case`` gets every compared case as soon
    as it is there. The result is the same for the same seed, whatever ``jobs``, the processes that work at once (all
    cores by default).
    Raises UserError for evidence that is not accepted, an id that no record begins with, or fewer than two draws.
    """
    check_draws(num_draws)
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
    of_command: dict[str, Mapping[str, Values]] = {}
    of_part: dict[tuple[str, tuple[str, ...]], float] = {}
    of_kernel: dict[str, Values] = {}
    rows: dict[str, ComparedCase] = {}
    pieces: list[tuple[dict[Any, Any], Any]] = [
        *((of_command, command) for command in commands),
        *((of_part, part) for part in parts),
        *((of_kernel, one.id) for one in kernels),
    ]
    for (found, key), result in zip(pieces, run_jobs(tasks, jobs=jobs, on_done=on_done), strict=True):
        found[key] = result
        for one in chosen:
            if found is not of_part and key == (one.id if one.kind == "kernel" else one.command):
                rows[one.id] = _validated(one, of_command, of_kernel)
                on_case(rows[one.id])
    return Validation(
        rows=tuple(rows[one.id] for one in chosen),
        ladders=tuple(
            (one, tuple(judge(one, {on: of_part[one.command, on] for on in part_sets(one)}))) for one in ladders
        ),
        num_draws=num_draws,
        seed=seed,
    )


def chosen_records(ids: Sequence[str], records: Iterable[Evidence]) -> list[Evidence]:
    return [one for one in records if not ids or one.id.startswith(tuple(ids))]


Values = list[float]  # with the profile, then drawn


def _validated(
    one: Evidence, of_command: Mapping[str, Mapping[str, Values]], of_kernel: Mapping[str, Values]
) -> ComparedCase:
    if one.kind == "kernel":
        values = of_kernel[one.id]
    elif one.kind == "stage":
        values = of_command[one.command][_stage_key(one)]
    else:
        values = [in_unit(step_us, one.unit, one.tokens) for step_us in of_command[one.command]["step"]]
    predicted, low, high = with_bounds(values)
    return ComparedCase(
        kind=one.kind,
        label=one.title,
        measured=one.value,
        predicted=predicted,
        low=low,
        high=high,
        unit=one.unit,
        source=one.source,
        id=one.id,
        hardware=one.hardware,
        engine=one.engine,
        date=one.date,
        judged=one.judged,
        why=one.why,
        unknown=one.unknown,
        command=one.command,
        tokens=one.tokens,
    )


def in_unit(step_us: float, unit: str, tokens: int = 1) -> float:
    """A step as a value of ``unit``; ``tokens`` come out of one step."""
    return {
        "us": step_us,
        "ms": step_us / 1e3,
        "tok/s/user": tokens * 1e6 / step_us,
        "tok/s": tokens * 1e6 / step_us,
    }[unit]


# -- pieces of work, each run in whichever process is free ------------------------------------------------------------


def _of_command(command: str, stages: Sequence[tuple[str, str, int]], num_draws: int, seed: int) -> dict[str, Values]:
    found = predictions(command, num_draws, seed)
    return {
        "step": with_errors_of_step(found, seed),
        **{
            " ".join(map(str, key)): with_errors_between(found, [_stage_ps(one, key) for one in found], seed)
            for key in stages
        },
    }


def _stages_of(command: str, records: Iterable[Evidence]) -> list[tuple[str, str, int]]:
    return [(one.stage, one.origin, one.layer) for one in records if one.kind == "stage" and one.command == command]


def _stage_key(one: Evidence) -> str:
    return f"{one.stage} {one.origin} {one.layer}"


def _stage_ps(prediction: Prediction, key: tuple[str, str, int]) -> tuple[int, int]:
    """From the end of ``origin`` in the layer before to that of a stage; one behind that belongs to its own layer.

    A stage that follows ``origin`` in its layer (the tail's up-projection) is counted from ``origin`` of its own layer.
    """
    stage, origin, layer = key
    ends = {(run.stage, run.layer): run.end_ps for run in prediction.full.kernels if layer - 1 <= run.layer <= layer}
    begin = ends[origin, layer - 1]
    if stage != origin and ends[stage, layer] > ends[origin, layer]:
        begin = ends[origin, layer]
    return begin, ends[stage, layer]


def _of_part(command: str, parts: tuple[str, ...]) -> float:
    return step_ms(command, parts)


def _of_loop(loop: Mapping[str, Any], num_draws: int, seed: int) -> Values:
    machines = machine_and_draws(loop["machine"], num_draws, seed)
    values_us = [loop_us(loop, one, draw=footprint_draw(draw, seed)) for draw, one in enumerate(machines)]
    return chain_with_errors(recorded_chain(loop), values_us, machines[0].title, seed)


def loop_us(loop: Mapping[str, Any], machine: Machine | None = None, *, draw: int = 0) -> float:
    """Microseconds of the loop of a kernel's record, by default on the machine that it names."""
    machine = machine or load_machine(loop["machine"])
    kernels = recorded_chain(loop, collectives_of(machine))
    return chain_us(kernels, machine, kernel_set="public", group_size=loop.get("ranks", 1), draw=draw)


# -- summaries --------------------------------------------------------------------------------------------------------


def groups(rows: Iterable[ComparedCase]) -> dict[tuple[str, str, str], list[ComparedCase]]:
    """Cases by kind, hardware and engine, in the order of the kinds and then of the names."""
    order = {"step": 0, "stage": 1, "kernel": 2}
    found: dict[tuple[str, str, str], list[ComparedCase]] = {}
    for row in sorted(rows, key=lambda row: (order[row.kind], row.hardware, row.engine)):
        found.setdefault((row.kind, row.hardware, row.engine), []).append(row)
    return found


def coverage(rows: Iterable[ComparedCase]) -> dict[str, Coverage]:
    """Of the judged cases of each kind, how many lie inside their interval."""
    judged = [row for row in rows if row.judged]
    found = {kind: coverage_of(row for row in judged if row.kind == kind) for kind in ("step", "stage", "kernel")}
    return {kind: one for kind, one in found.items() if one is not None}


def summary(rows: Iterable[ComparedCase]) -> dict[str, dict[str, float]]:
    """Of the judged cases of each kind: how many, median and worst error, and the share inside the interval."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("step", "stage", "kernel"):
        judged = [row for row in rows if row.kind == kind and row.judged]
        if judged:
            errors = [abs(row.error) for row in judged]
            found[kind] = {
                "rows": len(judged),
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
                "inside_interval": sum(row.inside_interval for row in judged) / len(judged),
            }
    return found


def kernel_cases() -> list[ComparedCase]:
    """Public kernels in a graph of repeated calls, in microseconds a call, without intervals."""
    return [
        ComparedCase(
            kind="kernel",
            label=one.title,
            measured=one.value,
            predicted=loop_us(one.loop),
            unit="us",
            source=one.source,
            hardware=one.hardware,
        )
        for one in load_evidence()
        if one.loop is not None
    ]
