"""Public claims on trial: each is a scenario file, predicted for its own conditions, with a verdict and a boundary.

``k3sim claims`` runs those of ``calibrate/evidence/claims``, or files of the reader's own. A figure is *inside* when
the claimed value, or one that its words allow ("about", "close to"), lies in the middle 90 % of the prediction over
draws of machine values and of errors of kernels, and *outside* otherwise. It is not judged while it needs what this
version does not have (``CAPABILITIES``): then it says so, and is judged as soon as the check succeeds. The alternatives
say on which path or layout the claim would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from k3sim.calibrate.compare import known_bias
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.draws import NUM_DRAWS, steps_us
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.known_bias import KnownBias, is_public_fused
from k3sim.calibrate.evidence.claim_texts import HELD, filled
from k3sim.calibrate.evidence.scenarios import Figure, Scenario, Side
from k3sim.sim.draws import check_draws
from k3sim.sim.intervals import interval_around
from k3sim.sim.predict import predict
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.question import gpus_of, question_of


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A predicted value with the middle 90 % of draws around it."""

    label: str
    predicted: float
    low: float
    high: float
    command: str
    against: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "num_gpus": gpus_of(self.command)}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A figure and its verdict: ``inside``, ``outside``, ``cannot be judged: ...`` or ``needs ...``."""

    figure: Figure
    answer: Answer | None
    series: tuple[Answer, ...]
    verdict: str

    @property
    def case(self) -> ComparedCase | None:
        """The claimed value beside its prediction; None where nothing was predicted, or no value is claimed."""
        if self.answer is None or self.figure.unit == "falls":
            return None
        return ComparedCase(
            kind="claim",
            label=self.figure.label,
            measured=self.figure.value,
            predicted=self.answer.predicted,
            low=self.answer.low,
            high=self.answer.high,
            unit=self.figure.unit,
            command=self.answer.command,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        one, answer = self.figure, self.answer
        return {
            "label": one.label,
            "claimed": None if one.unit == "falls" else one.value,
            "unit": one.unit,
            "predicted": answer.predicted if answer else None,
            "low": answer.low if answer else None,
            "high": answer.high if answer else None,
            "verdict": self.verdict,
            "needs": list(one.missing),
            "command": one.sides[-1].command,
            "num_gpus": gpus_of(one.sides[-1].command),
            "against": one.sides[-1].against,
            "series": [each.to_dict() for each in self.series],
        }


@dataclass(frozen=True, kw_only=True)
class JudgedClaim:
    scenario: Scenario
    figures: tuple[Judgement, ...]
    alternatives: tuple[tuple[Answer, bool], ...]  # and whether the first figure's claim holds there
    bias: KnownBias | None = None  # of the fused path with public kernels, where the claim is about it

    def text(self, name: str) -> str:
        """A text of the scenario, with the numbers that it stands beside in place of what it has in braces."""
        return filled(getattr(self.scenario, name), self._numbers())

    def _numbers(self) -> dict[str, str]:
        """Predicted values by label, and where the first figure's claim holds."""
        answers = [one.answer for one in self.figures if one.answer is not None]
        answers += [point for one in self.figures for point in one.series] + [one for one, _ in self.alternatives]
        held = [one.label for one, holds in self.alternatives if holds]
        return {
            **{one.label: f"{one.predicted:.3g}" for one in answers},
            HELD: ", ".join(held) if held else "none of the alternatives",
        }

    @property
    def verdict(self) -> str:
        """Of the whole claim: that of its figures where they agree, else each by name."""
        verdicts = [one.verdict for one in self.figures]
        if len(set(verdicts)) == 1:
            return verdicts[0]
        return "; ".join(f"{one.figure.label}: {one.verdict}" for one in self.figures)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        one = self.scenario
        return {
            "id": one.id,
            "title": one.title,
            "claim": one.claim,
            "verdict": self.verdict,
            "figures": [each.to_dict() for each in self.figures],
            "boundary": self.text("boundary"),
            "would_hold": self.text("would_hold"),
            "alternatives": [{**each.to_dict(), "claim_holds": holds} for each, holds in self.alternatives],
            "found": self.text("found"),
            "known_bias": self.bias.to_dict() if self.bias else None,
            "source": one.source,
            "date": one.date,
        }


# -- judging ----------------------------------------------------------------------------------------------------------


def judge_claims(
    scenarios: Sequence[Scenario],
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
    on_claim: Callable[[JudgedClaim], None] = lambda _: None,
) -> list[JudgedClaim]:
    """Verdicts of all scenarios, the same for the same seed, whatever ``jobs``, the processes that work at once.

    ``on_claim`` gets every verdict as soon as what it needs is predicted.
    Raises UserError for fewer than two draws.
    """
    check_draws(num_draws)
    needed = [
        {command for side in _sides(one) for command in (side.command, side.against)} - {""} for one in scenarios
    ]
    biased = [any(is_public_fused(command) for command in one) for one in needed]
    commands = sorted(set[str]().union(*needed))
    published = sorted(known_bias.commands()) if any(biased) else []
    tasks: list[Callable[[], Any]] = [
        *(partial(_published_us, command) for command in published),
        *(partial(_steps_us, command, num_draws, seed) for command in commands),
    ]
    steps: dict[str, tuple[float, ...]] = {}
    of_published: dict[str, float] = {}
    judged: dict[int, JudgedClaim] = {}

    def judge_what_is_there() -> None:
        for number, one in enumerate(scenarios):
            if number not in judged and needed[number] <= steps.keys():
                bias = known_bias.known_bias(of_published) if biased[number] else None
                judged[number] = replace(_judged(one, steps), bias=bias)
                on_claim(judged[number])

    judge_what_is_there()
    found = run_jobs(tasks, jobs=jobs, on_done=on_done)
    for command in published:
        of_published[command] = next(found)
    for command in commands:
        steps[command] = next(found)
        judge_what_is_there()
    return [judged[number] for number in range(len(scenarios))]


def _sides(scenario: Scenario) -> list[Side]:
    """Those that can be asked."""
    figures = [side for figure in scenario.figures if not figure.missing for side in figure.sides]
    return figures + ([] if scenario.figures[0].missing else list(scenario.alternatives))


def _published_us(command: str) -> float:
    """Step with the profile as shipped, in microseconds."""
    return predict(question_of(command)).step_us


@lru_cache(maxsize=256)
def _steps_us(command: str, num_draws: int, seed: int) -> tuple[float, ...]:
    """``steps_us`` of a command, kept."""
    return tuple(steps_us(command, num_draws, seed))


Steps = Mapping[str, Sequence[float]]


def _answer(side: Side, unit: str, steps: Steps) -> Answer:
    values = _values(side, unit, steps)
    low, high = interval_around(values[0], values[1:])
    return Answer(label=side.label, predicted=values[0], low=low, high=high, command=side.command, against=side.against)


def _values(side: Side, unit: str, steps: Steps) -> list[float]:
    """The value with the profile, then with each draw; both sides of a ratio see the same machine."""
    after = steps[side.command]
    if not side.against:
        return [us / 1e3 if unit == "ms" else 1e6 / us for us in after]
    outside_us, tokens = side.outside_ms * 1e3, side.output_tokens or 1
    pairs = zip(steps[side.against], after, strict=True)
    return [(outside_us + tokens * before) / (outside_us + tokens * us) for before, us in pairs]


def _judged(scenario: Scenario, steps: Steps) -> JudgedClaim:
    first = scenario.figures[0]
    alternatives = []
    if not first.missing and first.unit != "falls":
        for side in scenario.alternatives:
            answer = _answer(side, first.unit, steps)
            alternatives.append((answer, first.agrees(answer.low, answer.high)))
    return JudgedClaim(
        scenario=scenario,
        figures=tuple(_judgement(one, steps) for one in scenario.figures),
        alternatives=tuple(alternatives),
    )


def _judgement(figure: Figure, steps: Steps) -> Judgement:
    if figure.missing:
        return Judgement(figure=figure, answer=None, series=(), verdict=f"needs {' and '.join(figure.missing)}")
    if figure.unit != "falls":
        answer = _answer(figure.sides[0], figure.unit, steps)
        verdict = "inside" if figure.agrees(answer.low, answer.high) else "outside"
        return Judgement(figure=figure, answer=answer, series=(), verdict=verdict)
    series = tuple(_answer(side, "x", steps) for side in figure.sides)
    first, last = (_values(side, "x", steps) for side in (figure.sides[0], figure.sides[-1]))
    ratios = [after / before for before, after in zip(first, last, strict=True)]
    low, high = interval_around(ratios[0], ratios[1:])
    answer = Answer(label=figure.label, predicted=ratios[0], low=low, high=high, command="", against="")
    verdict = "inside" if high < 1 else "outside" if low > 1 else "cannot be judged: the interval holds both directions"
    return Judgement(figure=figure, answer=answer, series=series, verdict=verdict)
