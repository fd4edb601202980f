"""Scenario files: a public claim as questions to the simulator, read and checked.

``calibrate/compare/claims.py`` judges them. A figure may need what this version does not have (``CAPABILITIES``): its
commands are then read without being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3sim.calibrate.evidence import FOLDER
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind
from k3sim.sim.options import has_option
from k3sim.sim.profile import machine_names

SCENARIOS = FOLDER / "claims"
ACCEPTED = Accepted(what="a claim's scenario", kinds=(Kind.SCENARIO,), most_bytes=4 << 20)
TEXTS = ("id", "title", "claim", "source", "found", "boundary", "would_hold")
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
    """The claim in a file. Raises UserError, all faults in one line, for what is not accepted."""
    from k3sim.calibrate.evidence.scenario_rules import check_scenario

    document = read_json(path, ACCEPTED)
    check_scenario(document, {name: has() for name, has in CAPABILITIES.items()})
    document.settle()
    given = document.value
    figures = tuple(_figure(one) for one in given["figures"])
    ratio = figures[0].unit in ("x", "falls")
    alternatives = tuple(_side(one, ratio) for one in given.get("alternatives", ()))
    texts = {name: given[name] for name in TEXTS}
    return Scenario(**texts, date=given["date"], figures=figures, alternatives=alternatives)


def _figure(given: Mapping[str, Any]) -> Figure:
    """A figure that has been checked."""
    falls, ratio = given["unit"] == "falls", given["unit"] == "x"
    return Figure(
        label=given["label"],
        unit=given["unit"],
        value=0.0 if falls else float(given["value"]),
        sides=tuple(_side(one, True) for one in given["series"]) if falls else (_side(given, ratio),),
        needs=tuple(given.get("needs", ())),
        about=float(given.get("about", 0.0)),
    )


def _side(given: Mapping[str, Any], ratio: bool) -> Side:
    """A side that has been checked."""
    return Side(
        label=given["label"],
        command=given["command"],
        against=given["against"] if ratio else "",
        outside_ms=float(given.get("outside_ms", 0.0)),
        output_tokens=int(given.get("output_tokens", 0)),
    )
