"""Scenario files: a public claim as questions to the simulator, read and checked.

``calibrate/compare/claims.py`` judges them. A figure may need what this version does not have (``CAPABILITIES``): its
commands are then read without being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3sim.calibrate import located_json
from k3sim.calibrate.evidence import FOLDER, Keys, at_keys, choice, date, keys_of, number, text, timeline_command
from k3sim.calibrate.located_json import Located
from k3sim.sim.profile import machine_names
from k3sim.sim.question import has_option, question_of, read_command

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
    "speculation": lambda: has_option("drafted-tokens") and has_option("accepted-tokens"),
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

    def agrees(self, low: float, high: float) -> bool:
        """Whether the interval holds the claimed value, or some value that its words allow."""
        return low <= self.value * (1 + self.about) and self.value * (1 - self.about) <= high

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
    check: Callable[[str], Any] = partial(read_command, not_yet=True) if missing else question_of
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
