"""Which machine values a prediction hangs on most, and how wrong each would have to be to move the verdict of a claim.

Every value of the profile is set to the lower and to the upper end of its interval, all others as they are; the larger
change of the predicted figure ranks the values. For the first ones a factor is searched that carries the prediction,
with its interval, to the claimed number (or, where the claim is inside, out of the interval).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from k3sim.calibrate.compare.claims import Judgement, judge_claims
from k3sim.calibrate.compare.draws import NUM_DRAWS
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.evidence.scenarios import Figure, load_scenario, shipped_scenarios
from k3sim.errors import UserError
from k3sim.sim.machine import Machine
from k3sim.sim.predict import predict
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.quantities import quantity, quantity_range
from k3sim.sim.question import gpus_of, question_of

SCENARIO = "gb300-one-user"
NUM_VALUES = 5
FURTHEST = 16.0  # a factor beyond which a value is not looked at: nothing would be left of the machine
STEPS = 7  # halvings of the logarithm of the factor


@dataclass(frozen=True, kw_only=True)
class Sensitive:
    """One value of the machine and what it does to one figure."""

    field: str
    value: float  # 1 for a curve, whose points move together
    low: float
    high: float
    unit: str
    at_low: float  # the figure with the value at the lower end of its interval
    at_high: float
    factor_to_move: float | None  # on the value, that moves the verdict; None when none within FURTHEST does

    @property
    def swing(self) -> float:
        """Largest minus smallest figure over the interval of the value."""
        return abs(self.at_high - self.at_low)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "swing": self.swing}


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The values that one figure of a claim hangs on, largest swing first."""

    scenario: str
    label: str
    unit: str
    claimed: float
    predicted: float
    low: float
    high: float
    verdict: str
    values: tuple[Sensitive, ...]
    num_gpus: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "values": [one.to_dict() for one in self.values]}


def sensitivity(
    scenario: str = SCENARIO,
    *,
    num_values: int = NUM_VALUES,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
    on_phase: Callable[[str], None] = lambda _: None,
) -> list[Sensitivity]:
    """For every judged figure of a shipped scenario. Raises UserError for a scenario that does not exist.

    ``on_phase`` is told what comes next, ``on_done`` how many of its pieces are done, and of how many.
    """
    paths = {path.stem: path for path in shipped_scenarios()}
    if scenario not in paths:
        raise UserError(f"no claim {scenario!r}; accepted: {', '.join(paths)}")
    on_phase("judging the claim")
    asked = [load_scenario(paths[scenario])]
    (claim,) = judge_claims(asked, num_draws=num_draws, seed=seed, jobs=jobs, on_done=on_done)
    judged = [one for one in claim.figures if one.case is not None]
    if not judged:
        raise UserError(f"claim {scenario!r} has no figure that is judged: {claim.verdict}")
    machine = question_of(judged[0].figure.sides[0].command).machine
    moved = [field for field, origin in machine.provenance.items() if origin.low != origin.high]
    commands = sorted({c for one in judged for c in (one.figure.sides[0].command, one.figure.sides[0].against)} - {""})
    cases = [(field, command) for field in moved for command in commands]
    tasks = [partial(_ends_us, *case) for case in cases]
    on_phase("both ends of every value")
    ends = dict(zip(cases, run_jobs(tasks, jobs=jobs, on_done=on_done), strict=True))
    on_phase("how far values must move")
    return [_of_figure(one, scenario, machine, moved, ends, num_values, jobs, on_done) for one in judged]


Ends = Mapping[tuple[str, str], tuple[float, float]]  # by field and command: steps at both ends of the interval, in us


def _of_figure(
    judged: Judgement,
    scenario: str,
    machine: Machine,
    moved: Sequence[str],
    ends: Ends,
    num_values: int,
    jobs: int | None,
    on_done: OnDone,
) -> Sensitivity:
    case, figure = judged.case, judged.figure
    assert case is not None and case.low is not None and case.high is not None
    side = figure.sides[0]
    values = []
    for field in moved:
        at = [
            _figure(figure, ends[field, side.command][end], ends[field, side.against][end] if side.against else 0.0)
            for end in (0, 1)
        ]
        values.append((abs(at[1] - at[0]), field, at))
    values.sort(key=lambda each: (-each[0], each[1]))
    # Where the prediction must go: the nearer end of its interval onto the claim, or beyond it.
    target = case.predicted * case.measured / (case.high if case.measured > case.predicted else case.low)
    chosen = values[:num_values]
    tasks = [partial(_factor, field, figure, target) for _, field, _ in chosen]
    factors = run_jobs(tasks, jobs=jobs, on_done=on_done)
    return Sensitivity(
        scenario=scenario,
        label=figure.label,
        unit=figure.unit,
        claimed=case.measured,
        predicted=case.predicted,
        low=case.low,
        high=case.high,
        verdict=judged.verdict,
        num_gpus=gpus_of(figure.sides[-1].command),
        values=tuple(
            Sensitive(
                field=field,
                value=_value(machine, field),
                low=machine.provenance[field].low,
                high=machine.provenance[field].high,
                unit=machine.provenance[field].unit,
                at_low=at[0],
                at_high=at[1],
                factor_to_move=factor,
            )
            for (_, field, at), factor in zip(chosen, factors, strict=True)
        ),
    )


def _value(machine: Machine, field: str) -> float:
    value = getattr(machine, field)
    return 1.0 if isinstance(value, tuple) else float(value)


def _scaled(machine: Machine, field: str, factor: float) -> Machine:
    value = getattr(machine, field)
    changed: Any = (
        tuple((at, rate * factor) for at, rate in value)
        if isinstance(value, tuple)
        else max(1, round(value * factor))
        if isinstance(value, int)
        else value * factor
    )
    values: Mapping[str, Any] = {field: changed}
    scaled = replace(machine, **values)
    if field == "hbm_read_bytes_per_s":  # the curve of bytes in flight ends at the ceiling
        curve = tuple((at, min(rate, scaled.hbm_read_bytes_per_s)) for at, rate in machine.hbm_in_flight_curve)
        top = [(at, scaled.hbm_read_bytes_per_s) if rate == machine.hbm_read_bytes_per_s else (at, limited)
               for (at, rate), (_, limited) in zip(machine.hbm_in_flight_curve, curve, strict=True)]  # fmt: skip
        scaled = replace(scaled, hbm_in_flight_curve=tuple(top))
    return scaled


def _step_us(command: str, field: str, factor: float) -> float:
    question = question_of(command)
    return predict(replace(question, machine=_scaled(question.machine, field, factor))).step_us


def _ends_us(field: str, command: str) -> tuple[float, float]:
    machine = question_of(command).machine
    origin, value = machine.provenance[field], _value(machine, field)
    low, high = (
        _step_us(command, field, bound / value) if value else _step_at_us(command, field, bound)
        for bound in (origin.low, origin.high)
    )
    return low, high


def _step_at_us(command: str, field: str, bound: float) -> float:
    """Of a value that is zero in the profile, which no factor moves."""
    question = question_of(command)
    values: Mapping[str, Any] = {field: bound}
    return predict(replace(question, machine=replace(question.machine, **values))).step_us


def _figure(figure: Figure, after_us: float, before_us: float) -> float:
    if figure.unit == "x":
        side = figure.sides[0]
        outside_us, tokens = side.outside_ms * 1e3, side.output_tokens or 1
        return (outside_us + tokens * before_us) / (outside_us + tokens * after_us)
    return after_us / 1e3 if figure.unit == "ms" else 1e6 / after_us


def _factor(field: str, figure: Figure, target: float) -> float | None:
    """The factor nearest to one that brings the figure to ``target``."""
    side = figure.sides[0]

    def at(factor: float) -> float:
        before = _step_us(side.against, field, factor) if side.against else 0.0
        return _figure(figure, _step_us(side.command, field, factor), before) - target

    here = at(1.0)
    best: float | None = None
    for direction in (1, -1):
        inside, far = 0.0, direction * math.log(FURTHEST)
        outer: float | None = None
        for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
            place = far * share
            if at(math.exp(place)) * here <= 0:
                outer = place
                break
            inside = place
        if outer is None:
            continue
        for _ in range(STEPS):
            middle = (inside + outer) / 2
            inside, outer = (inside, middle) if at(math.exp(middle)) * here <= 0 else (middle, outer)
        if best is None or abs(outer) < abs(math.log(best)):
            best = math.exp(outer)
    return best


def _in_units(value: Sensitive) -> str:
    """``420 ns (388 to 442 ns)``; the points of a curve move together by a factor."""
    if "," in value.unit:  # of its two axes
        return f"all points (x {quantity_range(value.low, value.high, '1')})"
    like = value.value or value.high
    shown = quantity(value.value, value.unit, like=like)
    return f"{shown} ({quantity_range(value.low, value.high, value.unit, like=like)})"


def lines_of(found: Sequence[Sensitivity]) -> list[str]:
    """In plain words, one line a value."""
    lines = []
    for one in found:
        on = f" on {one.num_gpus} GPUs" if one.num_gpus else ""
        claimed = f"claimed {one.claimed:g} {one.unit}, predicted {one.predicted:.4g}, {one.verdict}"
        lines.append(f"{one.label}{on}: {claimed}")
        for value in one.values:
            ends = f"{value.at_low:.4g} to {value.at_high:.4g} over its interval"
            moves = (
                f"x {value.factor_to_move:.2f} would move the verdict"
                if value.factor_to_move
                else f"no factor up to {FURTHEST:g} either way moves the verdict"
            )
            lines.append(f"  {value.field}, {_in_units(value)}: {ends}; {moves}")
    return lines
