"""What a claim's scenario may hold: types of its fields as models, and what its fields say together.

Which fields a figure has follows from its unit: a ratio (``x``) has two sides, a claim that something falls has a
series of ratios, any other one command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from k3sim.calibrate.evidence.claim_texts import unknown_names
from k3sim.calibrate.evidence.rules import DATE
from k3sim.errors import UserError
from k3sim.model.documents.document import Document, shown
from k3sim.model.documents.fields import TEXT, Record, checked, choice, listed, nearest, number, one_of
from k3sim.model.documents.lines import Keys
from k3sim.sim.options import read_command
from k3sim.sim.question import question_of

SCHEMA_VERSION = 1
#: Unit -> (least, most) value that it can have; what falls has none.
UNITS: Mapping[str, tuple[float, float]] = {
    "tok/s/user": (0.1, 10_000.0),
    "ms": (0.1, 10_000.0),
    "x": (0.01, 100.0),
    "falls": (0.0, 0.0),
}
_OUTSIDE = ("outside_ms", "output_tokens")


class SideRecord(Record):
    """What predicts a value: a command, and for a ratio the one that it is compared with."""

    label: Annotated[str, TEXT]
    command: Annotated[str, TEXT]
    against: Annotated[str, TEXT] = ""
    outside_ms: Annotated[float, number(0, 1e6, "ms")] = 0.0
    output_tokens: Annotated[float, number(1, 1e6, "tokens")] = 1.0


class FigureRecord(Record):
    """One number of a claim."""

    label: Annotated[str, TEXT]
    unit: Annotated[str, choice(UNITS)]
    value: Annotated[float, number(-1e12, 1e12, accepted="a number")] = 0.0
    command: Annotated[str, TEXT] = ""
    against: Annotated[str, TEXT] = ""
    outside_ms: Annotated[float, number(0, 1e6, "ms")] = 0.0
    output_tokens: Annotated[float, number(1, 1e6, "tokens")] = 1.0
    series: Annotated[list[SideRecord], Field(min_length=2, default_factory=list)]
    needs: Annotated[list[Annotated[str, TEXT]], Field(default_factory=list)]
    about: Annotated[float, number(0.001, 0.2, "of the value")] = 0.0


class ScenarioRecord(Record):
    """A claim with its figures and the conditions under which it would hold."""

    schema_version: Annotated[int, one_of(SCHEMA_VERSION)]
    id: Annotated[str, TEXT]
    title: Annotated[str, TEXT]
    claim: Annotated[str, TEXT]
    source: Annotated[str, TEXT]
    date: Annotated[str, DATE]
    found: Annotated[str, TEXT]
    boundary: Annotated[str, TEXT]
    would_hold: Annotated[str, TEXT]
    figures: Annotated[list[FigureRecord], Field(min_length=1)]
    alternatives: Annotated[list[SideRecord], Field(default_factory=list)]


def check_scenario(document: Document, capabilities: Mapping[str, bool]) -> None:
    """Note every fault of a scenario; ``capabilities`` says what a figure may need and whether this version has it."""
    checked(document, ScenarioRecord)
    figures, alternatives = (document.value.get(name, []) for name in ("figures", "alternatives"))
    for index, figure in enumerate(figures if isinstance(figures, list) else ()):
        if isinstance(figure, dict):
            _check_figure(document, figure, ("figures", index), capabilities)
    _check_texts(document, figures, alternatives)
    first = figures[0] if isinstance(figures, list) and figures and isinstance(figures[0], dict) else {}
    later = _lacks(first, capabilities)
    for index, side in enumerate(alternatives if isinstance(alternatives, list) else ()):
        if isinstance(side, dict):
            _check_side(document, side, ("alternatives", index), first.get("unit") in ("x", "falls"), later)


def _check_texts(document: Document, figures: Any, alternatives: Any) -> None:
    """What texts have in braces must be a label of the file, or published."""
    sides = [one for part in (figures, alternatives) if isinstance(part, list) for one in part if isinstance(one, dict)]
    sides += [
        point
        for one in sides
        if isinstance(one.get("series"), list)
        for point in one["series"]
        if isinstance(point, dict)
    ]
    labels = [str(one.get("label")) for one in sides]
    for name in ("found", "boundary", "would_hold"):
        text = document.value.get(name)
        for unknown in unknown_names(text, labels) if isinstance(text, str) else ():
            near = nearest(unknown, tuple(labels))
            document.fault((name,), f"has {{{unknown}}}{near}, accepted in braces: a label, or 'published ID'")


def _check_figure(document: Document, figure: Mapping[str, Any], at: Keys, capabilities: Mapping[str, bool]) -> None:
    needs = figure.get("needs", [])
    for index, one in enumerate(needs if isinstance(needs, list) else ()):
        if isinstance(one, str) and one not in capabilities:
            near = nearest(one, tuple(capabilities))
            document.fault((*at, "needs", index), f"is {shown(one)}{near}, accepted: {listed(capabilities)}")
    unit, later = figure.get("unit"), _lacks(figure, capabilities)
    if unit == "falls":
        for name in ("value", "command", "against", "about", *_OUTSIDE):
            if name in figure:
                document.fault((*at, name), "stands beside a series, accepted: label, unit, series, needs")
        if "series" not in figure:
            document.fault(at, "lacks series")
        series = figure.get("series")
        for index, side in enumerate(series if isinstance(series, list) else ()):
            if isinstance(side, dict):
                _check_side(document, side, (*at, "series", index), True, later)
        return
    if "series" in figure:
        document.fault((*at, "series"), "belongs to the unit 'falls'")
    missing = [name for name in ("value", "command") if name not in figure]
    if missing:
        document.fault(at, f"lacks {', '.join(missing)}")
    value = figure.get("value")
    if isinstance(unit, str) and unit in UNITS and isinstance(value, int | float) and not isinstance(value, bool):
        least, most = UNITS[unit]
        if not least <= value <= most:
            document.fault((*at, "value"), f"is {shown(value)}, accepted: {least:g} to {most:g} {unit}")
    _check_side(document, figure, at, unit == "x", later)


def _lacks(figure: Mapping[str, Any], capabilities: Mapping[str, bool]) -> bool:
    """Whether a figure needs something that this version has not: its commands are read and not asked then."""
    needs = figure.get("needs", [])
    return isinstance(needs, list) and any(isinstance(one, str) and not capabilities.get(one, True) for one in needs)


def _check_side(document: Document, side: Mapping[str, Any], at: Keys, ratio: bool, later: bool) -> None:
    if ratio and "against" not in side:
        document.fault(at, "lacks against")
    if not ratio and "against" in side:
        document.fault((*at, "against"), "belongs to the units 'x' and 'falls'")
    outside = [name for name in _OUTSIDE if name in side]
    if outside and (len(outside) < 2 or not ratio):
        document.fault(at, "has outside_ms and output_tokens not together, or without against; accepted: all three")
    for name in ("command", "against"):
        command = side.get(name)
        if isinstance(command, str) and command.strip():
            try:
                read_command(command, not_yet=True) if later else question_of(command)
            except UserError as refusal:
                document.fault((*at, name), f"is refused: {refusal}")
