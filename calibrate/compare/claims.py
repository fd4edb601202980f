"""Public claims on trial: each is a scenario file, predicted for its own conditions, with a verdict and a boundary.

``k3sim claims`` runs those of ``calibrate/evidence/claims``, or files of the reader's own. A figure is *inside* when
the claimed value, or one that its words allow ("about", "close to"), lies in the middle 90 % of the prediction over
drawn machine values, and *outside* otherwise. It is not judged while it needs what this version does not have
(``CAPABILITIES``): then it says so, and is judged as soon as the check succeeds. The alternatives say on which path or
layout the claim would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3sim.calibrate import located_json
from k3sim.calibrate.compare.commands import asked, options_of, tokens_a_step, workload_has
from k3sim.calibrate.compare.validate import NUM_DRAWS, draws_of, run_tasks
from k3sim.calibrate.evidence import FOLDER, Keys, at_keys, choice, date, keys_of, number, text, timeline_command
from k3sim.calibrate.located_json import Located
from k3sim.errors import UserError
from k3sim.sim.intervals import interval_around
from k3sim.sim.predict import predict
from k3sim.sim.profile import machine_names

SCENARIOS = FOLDER / "claims"
SCHEMA_VERSION = 1
UNITS: Mapping[str, tuple[float, float]] = {
    "tok/s/user": (0.1, 10_000.0),
    "ms": (0.1, 10_000.0),
    "x": (0.01, 100.0),
    "falls": (0.0, 0.0),
}
#: What a figure may need, and whether this version has it.
CAPABILITIES: Mapping[str, Callable[[], bool]] = {
    "speculation": lambda: workload_has("drafted-tokens") and workload_has("accepted-tokens"),
    "prefill kernels": lambda: find_spec("k3sim.kernels.kda_prefill") is not None,
    "a TPU v7 profile": lambda: "tpu-v7" in machine_names(),
    "an Ascend profile": lambda: "ascend-910c" in machine_names(),
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """What predicts a value: a command, and for a ratio the other side too. ``outside_ms`` lies around both."""

    label: str
    command: str
    against: str = ""
    outside_ms: float = 0.0  # time of a request outside decode
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a claim. A claim that something falls has ``series`` instead: gains in the order of the claim."""

    label: str
    unit: str
    value: float
    sides: tuple[Side, ...]
    needs: tuple[str, ...]
    about: float = 0.0  # what the claim's own words leave open: 0.05 for "close to"

    def agrees(self, answer: Answer) -> bool:
        """Whether the interval holds the claimed value, or some value that its words allow."""
        return answer.low <= self.value * (1 + self.about) and self.value * (1 - self.about) <= answer.high

    @property
    def missing(self) -> tuple[str, ...]:
        """What it needs and this version lacks."""
        return tuple(one for one in self.needs if not CAPABILITIES[one]())


@dataclass(frozen=True, kw_only=True)
class Scenario:
    id: str
    title: str
    claim: str
    source: str
    date: str
    found: str  # what stands behind the claim
    boundary: str
    would_hold: str
    figures: tuple[Figure, ...]
    alternatives: tuple[Side, ...]  # of the first figure


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
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A figure and its verdict: ``inside``, ``outside``, ``cannot be judged: ...`` or ``needs ...``."""

    figure: Figure
    answer: Answer | None
    series: tuple[Answer, ...]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
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
            "against": one.sides[-1].against,
            "series": [each.to_dict() for each in self.series],
        }


@dataclass(frozen=True, kw_only=True)
class JudgedClaim:
    scenario: Scenario
    figures: tuple[Judgement, ...]
    alternatives: tuple[tuple[Answer, bool], ...]  # and whether the first figure's claim holds there

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
            "boundary": one.boundary,
            "would_hold": one.would_hold,
            "alternatives": [{**each.to_dict(), "claim_holds": holds} for each, holds in self.alternatives],
            "found": one.found,
            "source": one.source,
            "date": one.date,
        }


# -- files ------------------------------------------------------------------------------------------------------------


def shipped_scenarios() -> list[Path]:
    return sorted(SCENARIOS.glob("*.json"))


def load_scenario(path: Path) -> Scenario:
    """Raises UserError with file, line and what is accepted."""
    document = located_json.read(path)
    texts = ("id", "title", "claim", "source", "found", "boundary", "would_hold")
    keys_of(document, (), ("schema_version", *texts, "date", "figures"), ("alternatives",))
    if document.value["schema_version"] is not SCHEMA_VERSION:
        version = document.value["schema_version"]
        document.refuse(("schema_version",), f"schema_version is {version!r:.40}; accepted: {SCHEMA_VERSION}")
    figures = _each(document, ("figures",), _figure)
    if not figures:
        document.refuse(("figures",), "figures is empty; accepted: one figure or more")
    ratio, needs = figures[0].unit in ("x", "falls"), figures[0].needs
    alternatives: list[Side] = []
    if "alternatives" in document.value:
        alternatives = _each(document, ("alternatives",), partial(_side, ratio=ratio, needs=needs))
    return Scenario(
        **{name: text(document, (name,)) for name in texts},
        date=date(document, ("date",)),
        figures=tuple(figures),
        alternatives=tuple(alternatives),
    )


def _each(document: Located, keys: Keys, read: Callable[[Located, Keys], Any]) -> list[Any]:
    found = at_keys(document, keys)
    if not isinstance(found, list):
        document.refuse(keys, f"{keys[-1]} is {found!r:.40}; accepted: a list")
    return [read(document, (*keys, index)) for index in range(len(found))]


def _figure(document: Located, at: Keys) -> Figure:
    optional = ("value", "command", "against", "outside_ms", "output_tokens", "series", "needs", "about")
    fields = keys_of(document, at, ("label", "unit"), optional)
    unit = choice(document, (*at, "unit"), tuple(UNITS))
    needs = fields.get("needs", [])
    if not isinstance(needs, list) or any(one not in CAPABILITIES for one in needs):
        document.refuse((*at, "needs"), f"needs is {needs!r:.60}; accepted: a list of {', '.join(CAPABILITIES)}")
    if unit == "falls":
        keys_of(document, at, ("label", "unit", "series"), ("needs",))
        sides = _each(document, (*at, "series"), partial(_side, ratio=True, needs=needs))
        if len(sides) < 2:
            document.refuse((*at, "series"), "series has fewer than two sides; accepted: two or more, in order")
        return Figure(
            label=text(document, (*at, "label")), unit=unit, value=0.0, sides=tuple(sides), needs=tuple(needs)
        )
    keys_of(document, at, ("label", "unit", "value", "command"), optional)
    if "series" in fields:
        document.refuse((*at, "series"), "series belongs to the unit 'falls'")
    return Figure(
        label=text(document, (*at, "label")),
        unit=unit,
        value=number(document, (*at, "value"), *UNITS[unit], unit),
        sides=(_side(document, at, ratio=unit == "x", needs=needs),),
        needs=tuple(needs),
        about=number(document, (*at, "about"), 0.001, 0.2, "of the value") if "about" in fields else 0.0,
    )


def _side(document: Located, at: Keys, *, ratio: bool, needs: Sequence[str]) -> Side:
    own = ("label", "command", *(("against",) if ratio else ()))
    whole = ("label", "unit", "value", "needs", "about") if at[0] == "figures" and len(at) == 2 else ()
    fields = keys_of(document, at, own, (*whole, "outside_ms", "output_tokens"))
    missing = [one for one in needs if not CAPABILITIES[one]()]
    check: Callable[[str], Any] = partial(options_of, later=True) if missing else asked
    outside = {name for name in ("outside_ms", "output_tokens") if name in fields}
    if outside and (len(outside) < 2 or not ratio):
        document.refuse(at, "outside_ms and output_tokens belong together, on a figure with 'against'")
    return Side(
        label=text(document, (*at, "label")),
        command=timeline_command(document, (*at, "command"), check),
        against=timeline_command(document, (*at, "against"), check) if ratio else "",
        outside_ms=number(document, (*at, "outside_ms"), 0, 1e6, "ms") if outside else 0.0,
        output_tokens=int(number(document, (*at, "output_tokens"), 1, 1e6, "tokens")) if outside else 0,
    )


# -- judging ----------------------------------------------------------------------------------------------------------


def judge_claims(
    scenarios: Sequence[Scenario],
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[JudgedClaim]:
    """Verdicts of all scenarios, the same for the same seed. Raises UserError for fewer than two draws."""
    if num_draws < 2:
        raise UserError(f"draws is {num_draws}; accepted: 2 or more")
    sides = [side for one in scenarios for side in _sides(one)]
    commands = sorted({command for side in sides for command in (side.command, side.against)} - {""})
    tasks = [partial(_steps_us, command, num_draws, seed) for command in commands]
    steps = dict(zip(commands, run_tasks(tasks, on_done), strict=True))
    return [_judged(one, steps) for one in scenarios]


def _sides(scenario: Scenario) -> list[Side]:
    """Those that can be asked."""
    figures = [side for figure in scenario.figures if not figure.missing for side in figure.sides]
    return figures + ([] if scenario.figures[0].missing else list(scenario.alternatives))


@lru_cache(maxsize=256)
def _steps_us(command: str, num_draws: int, seed: int) -> tuple[float, ...]:
    """Step with the profile as shipped, then with each drawn machine, in microseconds a token."""
    case = asked(command)
    each = [predict(case.question, case.path), *draws_of(command, num_draws, seed)]
    return tuple(one.step_us / tokens_a_step(command) for one in each)


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
            alternatives.append((answer, first.agrees(answer)))
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
        verdict = "inside" if figure.agrees(answer) else "outside"
        return Judgement(figure=figure, answer=answer, series=(), verdict=verdict)
    series = tuple(_answer(side, "x", steps) for side in figure.sides)
    first, last = (_values(side, "x", steps) for side in (figure.sides[0], figure.sides[-1]))
    ratios = [after / before for before, after in zip(first, last, strict=True)]
    low, high = interval_around(ratios[0], ratios[1:])
    answer = Answer(label=figure.label, predicted=ratios[0], low=low, high=high, command="", against="")
    verdict = "inside" if high < 1 else "outside" if low > 1 else "cannot be judged: the interval holds both directions"
    return Judgement(figure=figure, answer=answer, series=series, verdict=verdict)
