"""Machine profiles as files: which ship, how one is read, and what is refused.

A profile states unit, kind, source, date and interval of every value; ``Machine`` is the only list of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.sim.machine import KINDS, Curve, Machine, Provenance

SCHEMA_VERSION = 2  # 2: values have the field's names (model/names.py)

_SHIPPED = Path(__file__).parent / "machines"
_FIELDS: dict[str, Field[Any]] = {f.name: f for f in fields(Machine) if f.metadata}


def machine_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def profile_path(name: str) -> Path:
    """File of the shipped profile of that name."""
    return _SHIPPED / f"{name}.json"


def load_machine(name_or_path: str) -> Machine:
    """The shipped profile of that name (in any case), or the profile in a file whose path ends in ``.json``.

    Raises:
        UserError: no such name, or a file that is unreadable, malformed, incomplete, or holds a value outside
            what its field accepts.
    """
    if name_or_path.lower().endswith(".json"):
        return _read(Path(name_or_path).expanduser())
    names = machine_names()
    name = name_or_path.lower()
    if name not in names:
        from difflib import get_close_matches

        near = get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"unknown machine {name_or_path!r}: {hint}Shipped machines: {', '.join(names)}; "
            "or give the path of a profile that ends in .json"
        )
    return _read(profile_path(name))


def _read(path: Path) -> Machine:
    """Parse and check one profile; a refusal names file, field, what stood there and what is accepted."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError(f"cannot read machine profile {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"machine profile {path} is not valid JSON: {error}") from None
    return machine_of(profile, f"machine profile {path}")


def machine_of(profile: object, where: str) -> Machine:
    """The machine of a profile document; ``where`` begins the line of a refusal, which is a UserError."""
    try:
        return _machine(profile)
    except _Refusal as refusal:
        raise UserError(f"{where}: {refusal}") from None


class _Refusal(Exception):
    """What is wrong inside a profile; ``machine_of`` adds the file and turns it into a UserError."""


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice in one object")
        result[key] = value
    return result


def _machine(profile: object) -> Machine:
    top = _keys("profile", profile, required=("schema_version", "name", "title", "values"))
    if top["schema_version"] != SCHEMA_VERSION or isinstance(top["schema_version"], bool):
        raise _Refusal(f"schema_version is {top['schema_version']!r}, accepted is {SCHEMA_VERSION}")
    entries = _keys("values", top["values"], required=tuple(_FIELDS))
    values: dict[str, Any] = {}
    provenance: dict[str, Provenance] = {}
    for name in _FIELDS:
        values[name], provenance[name] = _entry(name, entries[name])
    machine = Machine(
        name=_text("name", top["name"]), title=_text("title", top["title"]), provenance=provenance, **values
    )
    _check_consistency(machine)
    return machine


def _keys(where: str, given: object, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Refusal(f"{where} is {given!r:.60}, accepted is an object with {', '.join(required)}")
    missing = [key for key in required if key not in given]
    if missing:
        raise _Refusal(f"{where} lacks {', '.join(missing)}; all of these are required")
    unknown = [key for key in given if key not in required and key not in optional]
    if unknown:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], [*required, *optional], n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join([*required, *optional])}"
        raise _Refusal(f"{where} has unknown {', '.join(unknown)}; {hint}")
    return given


def _text(where: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise _Refusal(f"{where} is {given!r:.60}, accepted is a text that is not empty")
    return given


def _entry(name: str, given: object) -> tuple[Any, Provenance]:
    """Value and provenance of one field."""
    spec = _FIELDS[name]
    curve = spec.type == "Curve"
    bounds = ("interval",) if curve else ("low", "high")
    entry = _keys(
        name, given, required=("value", "unit", "kind", "source", "date", *bounds), optional=("note",)
    )
    if entry["unit"] != spec.metadata["unit"]:
        raise _Refusal(f"{name} has unit {entry['unit']!r}, accepted is {spec.metadata['unit']!r}")
    if entry["kind"] not in KINDS:
        raise _Refusal(f"{name} has kind {entry['kind']!r}, accepted are {', '.join(KINDS)}")
    if curve:
        value: Any = _curve(name, entry["value"])
        interval = entry["interval"]
        if not isinstance(interval, list) or len(interval) != 2:
            raise _Refusal(f"{name} interval is {interval!r:.60}, accepted is [low factor, high factor]")
        low, high = (_number(f"{name} interval", bound, zero=False) for bound in interval)
        ordered = low <= 1 <= high
    else:
        value, low, high = (_scalar(f"{name} {part}", entry[part], spec) for part in ("value", "low", "high"))
        ordered = low <= value <= high
    if not ordered:
        middle = 1 if curve else value
        raise _Refusal(f"{name} has low {low}, value {middle}, high {high}; accepted is low <= value <= high")
    return value, Provenance(
        unit=entry["unit"],
        kind=entry["kind"],
        source=_text(f"{name} source", entry["source"]),
        date=_date(name, entry["date"], required=entry["kind"] == "measured"),
        low=low,
        high=high,
        note=_text(f"{name} note", entry["note"]) if "note" in entry else "",
    )


def _scalar(where: str, given: object, spec: Field[Any]) -> float | int | bool:
    if spec.type == "bool":
        if not isinstance(given, bool):
            raise _Refusal(f"{where} is {given!r:.60}, accepted is true or false")
        return given
    number = _number(where, given, zero=spec.metadata["zero"])
    # Bounds wide enough for any machine, so that arithmetic stays finite: a unit slip shows here, not as overflow.
    time = spec.metadata["unit"] in ("s", "s/B")
    most = 1.0 if time else 1e21
    least = 0.0 if number == 0 else 1e-15 if time else 1e-6
    if not least <= number <= most:
        raise _Refusal(f"{where} is {given!r}, accepted is {least:g} to {most:g} {spec.metadata['unit']}")
    if spec.type == "int":
        if number != int(number):
            raise _Refusal(f"{where} is {given!r}, accepted is a whole number")
        return int(number)
    return number


def _number(where: str, given: object, *, zero: bool) -> float:
    accepted = "a finite number that is not negative" if zero else "a finite number above zero"
    # bool is an int to Python, and integers beyond the range of a float cannot be computed with
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= 1e300:
        raise _Refusal(f"{where} is {given!r:.60}, accepted is {accepted}")
    if given < 0 or (given == 0 and not zero):
        raise _Refusal(f"{where} is {given!r}, accepted is {accepted}")
    return float(given)


def _curve(name: str, given: object) -> Curve:
    if not isinstance(given, list) or not given:
        raise _Refusal(
            f"{name} value is {given!r:.60}, accepted is a list of [bytes in flight per SM, bytes/s]"
        )
    points = []
    for index, point in enumerate(given):
        where = f"{name} point {index}"
        if not isinstance(point, list) or len(point) != 2:
            raise _Refusal(f"{where} is {point!r:.60}, accepted is [bytes in flight per SM, bytes/s]")
        points.append((_number(where, point[0], zero=False), _number(where, point[1], zero=False)))
    for index in range(1, len(points)):
        if points[index][0] <= points[index - 1][0] or points[index][1] < points[index - 1][1]:
            raise _Refusal(
                f"{name} point {index} is {list(points[index])} after {list(points[index - 1])}; "
                "accepted are bytes in flight that increase and rates that do not fall"
            )
    return tuple(points)


def _date(name: str, given: object, *, required: bool) -> str | None:
    if given is None and not required:
        return None
    if isinstance(given, str) and len(given) == 7 and given[4] == "-" and given.isascii():
        year, month = given[:4], given[5:]
        if year.isdigit() and month.isdigit() and 1 <= int(month) <= 12:
            return given
    accepted = '"YYYY-MM"' if required else '"YYYY-MM" or null'
    raise _Refusal(f"{name} date is {given!r:.60}, accepted is {accepted}")


def _check_consistency(machine: Machine) -> None:
    """Refuse profiles whose values contradict each other."""
    for smaller, larger in (
        ("max_smem_bytes_per_block", "smem_bytes_per_sm"),
        ("hbm_read_bytes_per_s", "hbm_datasheet_bytes_per_s"),
        ("hbm_copy_bytes_per_s", "hbm_read_bytes_per_s"),
        ("l2_effective_bytes", "l2_capacity_bytes"),
        ("l2_near_latency_s", "l2_far_latency_s"),
    ):
        low, high = getattr(machine, smaller), getattr(machine, larger)
        if low > high:
            raise _Refusal(f"{smaller} is {low}, accepted is at most {larger}, which is {high}")
    if machine.hbm_partial_grid_loss >= 1:
        raise _Refusal(f"hbm_partial_grid_loss is {machine.hbm_partial_grid_loss}, accepted is a share below 1")
    if not 0 < machine.l2_queueing_utilisation < 1:
        raise _Refusal(
            f"l2_queueing_utilisation is {machine.l2_queueing_utilisation}, accepted is a share between 0 and 1"
        )
    top_rate = machine.hbm_in_flight_curve[-1][1]
    if top_rate > machine.hbm_read_bytes_per_s:
        raise _Refusal(
            f"hbm_in_flight_curve reaches {top_rate} B/s, accepted is at most hbm_read_bytes_per_s, "
            f"which is {machine.hbm_read_bytes_per_s}"
        )
