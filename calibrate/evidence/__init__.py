"""Published results as data: what was measured, where, under what, and which command predicts it.

The tables are the JSON files of this folder, read strictly: a field that is missing or unknown, a unit that is not
known, or a value that cannot be is refused with file, line and what is accepted. They are compared, never used: no
machine value, no Work and no path comes from an end-to-end time in them (``tests/calibrate/test_evidence.py``).

Four kinds of record:

``step``
    a decode step, or a rate that follows from one. ``command`` is the ``k3sim timeline`` that predicts it.
``stage``
    the end of one stage of a layer after the end of the layer before: fields ``stage``, ``layer`` and ``origin``.
``kernel``
    a kernel or a few in a loop: field ``loop`` (machine, launch, trigger, calls), predicted by
    ``k3sim validate ID``.
``ladder`` (a table of its own)
    steps of an optimisation, each with the value after it and the parts of the path that it turns on.

``judged`` is false, with the reason in ``why``, where the model does not describe what was measured: such a record is
listed, and not counted in medians.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.calibrate import located_json
from k3sim.calibrate.located_json import Located
from k3sim.errors import UserError
from k3sim.kernels.costs import all_costs
from k3sim.sim.profile import machine_names
from k3sim.sim.question import question_of

FOLDER = Path(__file__).parent
SCHEMA_VERSION = 1
KINDS = ("step", "stage", "kernel")
HARDWARE = ("gb300", "gb200", "b300", "b200", "h200", "h100")
#: Unit -> (least, most) value that it can have; a slip of a unit lies outside.
UNITS: dict[str, tuple[float, float]] = {
    "ms": (0.3, 10_000.0),
    "us": (0.3, 100_000.0),
    "tok/s/user": (0.1, 3_000.0),
    "tok/s": (0.1, 1e6),
}
UNITS_OF_KIND = {"step": ("ms", "us", "tok/s/user", "tok/s"), "stage": ("us",), "kernel": ("us",)}
LAUNCHES, TRIGGERS = ("graph", "pdl"), ("start", "wait", "stream", "end")

REQUIRED = (
    "id", "kind", "title", "source", "date", "hardware", "num_gpus", "layout", "engine", "flags", "workload", "value",
    "unit", "unknown",
)  # fmt: skip
OPTIONAL = ("judged", "why", "command", "loop", "stage", "layer", "origin")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One published value."""

    id: str
    kind: str
    title: str
    source: str
    date: str
    hardware: str
    num_gpus: int
    layout: str
    engine: str
    flags: str
    workload: str
    value: float
    unit: str
    unknown: str  # what the source does not say
    command: str  # that predicts it
    judged: bool = True
    why: str = ""
    loop: dict[str, Any] | None = None
    stage: str = ""
    layer: int = 0
    origin: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of one step that the unit counts: of one user, or of all of them."""
        return question_of(self.command).workload.concurrency if self.unit == "tok/s" else 1


@dataclass(frozen=True, kw_only=True)
class LadderStep:
    """One step of an optimisation: ``parts`` are what it turns on (ladders.PARTS); none when no switch exists."""

    title: str
    value: float  # after the step, in the ladder's unit
    parts: tuple[str, ...]
    also: tuple[int, ...]  # later steps that complete this one: their savings count with it
    why: str  # why there is no switch, or what the part leaves out; may be empty


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Steps of an optimisation in order; the first is where it begins."""

    id: str
    title: str
    source: str
    date: str
    hardware: str
    engine: str
    unit: str
    unknown: str
    command: str  # of the machine, the layout and the workload
    layers: int  # of the model that was measured; the whole model is predicted, and that share of it taken
    steps: tuple[LadderStep, ...]

    @property
    def all_layers(self) -> int:
        return question_of(self.command).architecture.num_layers


def files() -> list[Path]:
    """Tables of the project."""
    return sorted(path for path in FOLDER.glob("*.json") if path.stem != "ladders")


def load_evidence(paths: Iterable[Path] | None = None) -> list[Evidence]:
    """Every record of the tables, in order. Raises UserError for what is not accepted, or an id that stands twice."""
    found: dict[str, Evidence] = {}
    for path in files() if paths is None else paths:
        document = located_json.read(path)
        records = _list(document, "records")
        for index in range(len(records)):
            one = _evidence(document, ("records", index))
            if one.id in found:
                document.refuse(("records", index, "id"), f"id {one.id!r} stands twice; accepted: one of its own")
            found[one.id] = one
    return list(found.values())


def load_ladders(path: Path | None = None) -> list[Ladder]:
    """Every ladder. Raises UserError for what is not accepted."""
    document = located_json.read(path or FOLDER / "ladders.json")
    return [_ladder(document, ("ladders", index)) for index in range(len(_list(document, "ladders")))]


Keys = tuple[str | int, ...]


def _list(document: Located, name: str) -> list[Any]:
    keys_of(document, (), ("schema_version", name))
    version = document.value["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        document.refuse(("schema_version",), f"schema_version is {version!r}; accepted: {SCHEMA_VERSION}")
    found = document.value[name]
    if not isinstance(found, list) or not found:
        document.refuse((name,), f"{name} is {found!r:.40}; accepted: a list that is not empty")
    return found


def _evidence(document: Located, at: Keys) -> Evidence:
    fields = keys_of(document, at, REQUIRED, OPTIONAL)
    texts: dict[str, Any] = {
        name: text(document, (*at, name))
        for name in (
            "id",
            "kind",
            "title",
            "source",
            "hardware",
            "layout",
            "engine",
            "flags",
            "workload",
            "unit",
            "unknown",
        )
    }
    if not re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", texts["id"]):
        document.refuse((*at, "id"), f"id is {texts['id']!r}; accepted: small letters, digits, '-' and '.'")
    choice(document, (*at, "kind"), KINDS)
    choice(document, (*at, "hardware"), HARDWARE)
    unit = choice(document, (*at, "unit"), UNITS_OF_KIND[texts["kind"]])
    value = number(document, (*at, "value"), *UNITS[unit], unit)
    num_gpus = whole(document, (*at, "num_gpus"), 1, 576)
    judged = fields.get("judged", True)
    if not isinstance(judged, bool):
        document.refuse((*at, "judged"), f"judged is {judged!r:.40}; accepted: true or false")
    why = text(document, (*at, "why")) if "why" in fields else ""
    if judged == bool(why):
        document.refuse(at, "why belongs to records with judged false, and they need it")
    return Evidence(
        **texts,
        date=date(document, (*at, "date")),
        num_gpus=num_gpus,
        value=value,
        judged=judged,
        why=why,
        **_how(document, at, texts["kind"], texts["id"]),
    )


def _how(document: Located, at: Keys, kind: str, name: str) -> dict[str, Any]:
    """What predicts a record, by its kind."""
    own = {"step": ("command",), "stage": ("command", "stage", "layer", "origin"), "kernel": ("loop",)}
    fields = keys_of(document, at, (*REQUIRED, *own[kind]), ("judged", "why"))
    if kind == "kernel":
        return {"command": f"k3sim validate {name}", "loop": _loop(document, (*at, "loop"))}
    found: dict[str, Any] = {"command": timeline_command(document, (*at, "command"))}
    if kind == "stage":
        found["stage"], found["origin"] = text(document, (*at, "stage")), text(document, (*at, "origin"))
        found["layer"] = whole(document, (*at, "layer"), 1, 92)
        rows = {row.stage for table in question_of(fields["command"]).path.tables.values() for row in table}
        for key in ("stage", "origin"):
            choice(document, (*at, key), sorted(rows))
    return found


def _loop(document: Located, at: Keys) -> dict[str, Any]:
    fields = keys_of(document, at, ("machine", "launch", "calls"), ("trigger",))
    choice(document, (*at, "machine"), machine_names())
    choice(document, (*at, "launch"), LAUNCHES)
    if "trigger" in fields:
        choice(document, (*at, "trigger"), TRIGGERS)
    if not isinstance(fields["calls"], list) or not fields["calls"]:
        document.refuse((*at, "calls"), "calls is not a list of kernels; accepted: one kernel or more")
    for index in range(len(fields["calls"])):
        here = (*at, "calls", index)
        call = keys_of(document, here, ("operator", "weights", "shape"))
        choice(document, (*here, "operator"), all_costs())
        if not isinstance(call["weights"], list):
            document.refuse((*here, "weights"), "weights is not a list; accepted: a list of [outputs, depth, bytes]")
        for number_of, weight in enumerate(call["weights"]):
            place = (*here, "weights", number_of)
            if not isinstance(weight, list) or len(weight) != 3:
                document.refuse(place, f"weight is {weight!r:.40}; accepted: [outputs, depth, bytes]")
            for index_of in range(3):
                whole(document, (*place, index_of), 1, 10**12)
        if not isinstance(call["shape"], dict):
            document.refuse((*here, "shape"), "shape is not an object; accepted: numbers by name")
        for key in call["shape"]:
            whole(document, (*here, "shape", key), 0, 10**12)
    return fields


def _ladder(document: Located, at: Keys) -> Ladder:
    from k3sim.model.paths import PARTS

    names = ("id", "title", "source", "hardware", "engine", "unit", "unknown", "command")
    keys_of(document, at, (*names, "date", "layers", "steps"))
    texts = {name: text(document, (*at, name)) for name in names if name != "command"}
    choice(document, (*at, "hardware"), HARDWARE)
    unit = choice(document, (*at, "unit"), ("ms", "tok/s/user"))
    command = timeline_command(document, (*at, "command"))
    layers = whole(document, (*at, "layers"), 1, question_of(command).architecture.num_layers)
    found = at_keys(document, (*at, "steps"))
    if not isinstance(found, list) or len(found) < 2:
        document.refuse((*at, "steps"), "steps is not a list of two or more; accepted: where it begins, then each step")
    steps = []
    for index in range(len(found)):
        here = (*at, "steps", index)
        fields = keys_of(document, here, ("title", "value"), ("parts", "also", "why"))
        parts, also = fields.get("parts", []), fields.get("also", [])
        if not isinstance(parts, list) or any(one not in PARTS for one in parts):
            document.refuse((*here, "parts"), f"parts is {parts!r:.60}; accepted: a list of {', '.join(PARTS)}")
        if not isinstance(also, list) or any(one not in range(index + 1, len(found)) for one in also):
            document.refuse((*here, "also"), f"also is {also!r:.60}; accepted: a list of later steps by number")
        why = text(document, (*here, "why")) if "why" in fields else ""
        if index and not parts and not why:
            document.refuse(here, "a step without parts says in why that no switch exists")
        value = number(document, (*here, "value"), *UNITS[unit], unit)
        title = text(document, (*here, "title"))
        steps.append(LadderStep(title=title, value=value, parts=tuple(parts), also=tuple(also), why=why))
    when = date(document, (*at, "date"))
    return Ladder(**texts, date=when, command=command, layers=layers, steps=tuple(steps))


# -- one field at a time; scenario files are read with these too ------------------------------------------------------


def at_keys(document: Located, keys: Keys) -> Any:
    found = document.value
    for key in keys:
        found = found[key]
    return found


def keys_of(document: Located, keys: Keys, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The object under ``keys``, which has all of ``required`` and nothing but those and ``optional``."""
    found = at_keys(document, keys)
    accepted = ", ".join((*required, *optional))
    if not isinstance(found, dict):
        document.refuse(keys, f"{found!r:.40} stands where an object is needed; accepted: {accepted}")
    missing = [name for name in required if name not in found]
    if missing:
        document.refuse(keys, f"missing {', '.join(missing)}; accepted: {accepted}")
    unknown = [name for name in found if name not in required and name not in optional]
    if unknown:
        document.refuse((*keys, unknown[0]), f"unknown field {unknown[0]!r}; accepted: {accepted}")
    return found


def text(document: Located, keys: Keys) -> str:
    found = at_keys(document, keys)
    if not isinstance(found, str) or not found.strip():
        document.refuse(keys, f"{keys[-1]} is {found!r:.40}; accepted: a text that is not empty")
    return found


def choice(document: Located, keys: Keys, accepted: Sequence[str]) -> str:
    found = text(document, keys)
    if found not in accepted:
        document.refuse(keys, f"unknown {keys[-1]} {found!r}; accepted: {', '.join(accepted)}")
    return found


def number(document: Located, keys: Keys, least: float, most: float, unit: str) -> float:
    found = at_keys(document, keys)
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
        document.refuse(keys, f"{keys[-1]} is {found!r:.40}; accepted: {least:g} to {most:g} {unit}")
    return float(found)


def whole(document: Located, keys: Keys, least: int, most: int) -> int:
    found = at_keys(document, keys)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        document.refuse(keys, f"{keys[-1]} is {found!r:.40}; accepted: a whole number from {least} to {most}")
    return found


def date(document: Located, keys: Keys) -> str:
    found = text(document, keys)
    if not re.fullmatch(r"20\d\d(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?", found):
        document.refuse(keys, f"date is {found!r}; accepted: YYYY, YYYY-MM or YYYY-MM-DD")
    return found


def timeline_command(document: Located, keys: Keys, check: Callable[[str], Any] = question_of) -> str:
    """A ``k3sim timeline`` that can be asked."""
    found = text(document, keys)
    try:
        check(found)
    except UserError as error:
        document.refuse(keys, str(error))
    return found
