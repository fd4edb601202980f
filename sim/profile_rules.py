"""What a machine profile may hold: each value with its unit, a range that any machine lies in, and its provenance.

The ranges are wide, and narrow enough that every time which follows fits a trace's 64 bits of picoseconds and no rate
rounds to nothing: a slip of a unit shows here and not as an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import create_model

from k3sim.model.documents.document import Document, Fault, shown
from k3sim.model.documents.fields import FLAG, MOST_ENTRIES, TEXT, Record, Refused, Rule, checked, choice, one_of
from k3sim.model.documents.lines import Keys
from k3sim.sim.machine import KINDS, PROFILE_FIELDS

SCHEMA_VERSION = 2  # 2: values have the field's names (model/names.py)

#: Least and most of a value by its unit; times and shares may be zero where their field says so.
RANGES: Mapping[str, tuple[float, float]] = {
    "s": (1e-15, 1.0),
    "1": (1e-6, 10.0),
    "Hz": (1e8, 1e12),
    "B": (1, 1e18),
    "B/s": (1e8, 1e18),
    "FLOP/s": (1e9, 1e21),
    "FMA/clock/SM": (1, 1e6),
    "weight/clock/SM": (1, 1e6),
    "SM": (1, 1e5),
    "thread": (1, 1e6),
    "GPU": (1, 1e6),
}
POINT = "[bytes in flight per SM, bytes/s]"

#: A value that cannot be above another.
AT_MOST = (
    ("max_smem_bytes_per_block", "smem_bytes_per_sm"),
    ("hbm_copy_bytes_per_s", "hbm_read_bytes_per_s"),
)


def _between(given: Any, least: float, most: float) -> bool:
    """Whether a number lies between; bool is an int to Python, and no number here."""
    return isinstance(given, int | float) and not isinstance(given, bool) and least <= given <= most


def scalar(spec: Field[Any]) -> Rule:
    """The rule of a field's value and bounds."""
    if spec.type == "bool":
        return FLAG
    unit = spec.metadata["unit"]
    least, most = RANGES[unit]
    is_whole = spec.type == "int"

    def check(given: Any) -> Any:
        zero = spec.metadata["zero"] and _between(given, 0, 0)
        if not (zero or _between(given, least, most)) or (is_whole and given != int(given)):
            raise Refused
        return given

    accepted = f"{least:g} to {most:g} {unit}" if unit != "1" else f"{least:g} to {most:g}"
    accepted = f"0 or {accepted}" if spec.metadata["zero"] else accepted
    return Rule(f"a whole number from {accepted}" if is_whole else accepted, check)


def _check_curve(given: Any) -> Any:
    if not isinstance(given, list) or not 0 < len(given) <= 1000:
        raise Refused
    before: list[Any] = [0, 0]
    for index, point in enumerate(given):
        if not isinstance(point, list) or len(point) != 2:
            raise Refused(f"has point {index} {shown(point)}, accepted: {POINT}")
        if not _between(point[0], 1, 1e9) or not _between(point[1], 1e8, 1e18):
            raise Refused(f"has point {index} {shown(point)}, accepted: 1 to 1e+09 B/SM and 1e+08 to 1e+18 B/s")
        if point[0] <= before[0] or point[1] < before[1]:
            raise Refused(
                f"has point {index} {shown(point)} after {shown(before)}, accepted: bytes in flight that increase and "
                "rates that do not fall"
            )
        before = point
    return given


def _check_factors(given: Any) -> Any:
    if not isinstance(given, list) or len(given) != 2 or not all(_between(one, 1e-3, 1e3) for one in given):
        raise Refused
    if not given[0] <= 1 <= given[1]:
        raise Refused
    return given


def _check_date(given: Any) -> Any:
    if given is not None:
        if not isinstance(given, str) or len(given) != 7 or given[4] != "-" or not given.isascii():
            raise Refused
        year, month = given[:4], given[5:]
        if not (year.isdigit() and month.isdigit() and 1 <= int(month) <= 12):
            raise Refused
    return given


CURVE = Rule(f"a list of {POINT}", _check_curve)
FACTORS = Rule("[low factor, high factor] around 1", _check_factors)
DATE = Rule('"YYYY-MM" or null', _check_date)


class Entry(Record):
    """Provenance of one value."""

    kind: Annotated[str, choice(KINDS)]
    source: Annotated[str, TEXT]
    date: Annotated[str | None, DATE]
    note: Annotated[str, TEXT] = "none"


class Values(Record):
    """All values; its fields are those of ``Machine``."""

    renamed = "machine value"


@lru_cache(maxsize=1)
def profile_model() -> type[Record]:
    """The model of a profile, made from the fields of ``Machine``."""
    make: Any = create_model  # its types do not allow fields by keyword arguments from a dictionary
    entries: dict[str, Any] = {}
    for name, spec in PROFILE_FIELDS.items():
        unit = Annotated[str, one_of(spec.metadata["unit"])]
        if spec.type == "Curve":
            parts: dict[str, Any] = {"value": Annotated[list[Any], CURVE], "interval": Annotated[list[Any], FACTORS]}
        else:
            parts = dict.fromkeys(("value", "low", "high"), Annotated[Any, scalar(spec)])
        own: dict[str, Any] = {part: (rule, ...) for part, rule in {**parts, "unit": unit}.items()}
        if spec.type == "bool":  # a switch is on or off, with an interval or without
            own |= dict.fromkeys(("low", "high"), (Annotated[Any, FLAG], False))
        entries[name] = (make(f"Entry of {name}", __base__=Entry, **own), ...)
    values = make("Values of a profile", __base__=Values, **entries)
    return create_model(
        "Profile",
        __base__=Record,
        schema_version=(Annotated[int, one_of(SCHEMA_VERSION)], ...),
        name=(Annotated[str, TEXT], ...),
        title=(Annotated[str, TEXT], ...),
        values=(values, ...),
    )


def check_profile(document: Document) -> None:
    """Note every fault of a profile, those that its values have together included."""
    checked(document, profile_model())
    entries = document.value.get("values") if isinstance(document.value, dict) else None
    if not isinstance(entries, dict) or max(len(document.value), len(entries)) > MOST_ENTRIES:  # not looked at
        return
    document.faults[:] = [one for one in document.faults if not _is_repeated(one, document.faults, entries)]
    faulty = {str(one.keys[1]) for one in document.faults if len(one.keys) > 1}
    good = {name: entries[name] for name in PROFILE_FIELDS if name in entries and name not in faulty}
    for name, entry in good.items():
        at: Keys = ("values", name)
        if PROFILE_FIELDS[name].type not in ("bool", "Curve") and not entry["low"] <= entry["value"] <= entry["high"]:
            given = ", ".join(f"{part} {shown(entry[part])}" for part in ("low", "value", "high"))
            document.fault(at, f"has {given}, accepted: low <= value <= high")
        if entry["kind"] == "measured" and entry["date"] is None:
            document.fault((*at, "date"), 'is null, accepted: "YYYY-MM", since the value is measured')
    _check_consistency(document, {name: entry["value"] for name, entry in good.items()})


def _is_repeated(fault: Fault, faults: Sequence[Fault], entries: Mapping[str, Any]) -> bool:
    """Whether a bound is refused for the very number that is refused as the value: an interval of one point."""
    match fault.keys:
        case ("values", str(name), "low" | "high" as bound):
            entry = entries[name]
            same = isinstance(entry, dict) and entry.get("kind") == "user" and entry.get(bound) == entry.get("value")
            return same and any(one.keys == ("values", name, "value") for one in faults)
    return False


def _check_consistency(document: Document, values: Mapping[str, Any]) -> None:
    """Note values that contradict each other."""
    for smaller, larger in AT_MOST:
        if smaller in values and larger in values and values[smaller] > values[larger]:
            says = f"is {shown(values[smaller])}, accepted: at most {shown(values[larger])} ({larger})"
            document.fault(("values", smaller, "value"), says)
    for name in ("hbm_partial_grid_loss", "l2_queueing_utilisation"):
        if name in values and values[name] >= 1:
            document.fault(("values", name, "value"), f"is {shown(values[name])}, accepted: a share below 1")
    if "hbm_in_flight_curve" in values and "hbm_read_bytes_per_s" in values:
        top, most = values["hbm_in_flight_curve"][-1][1], values["hbm_read_bytes_per_s"]
        if top > most:
            says = f"reaches {shown(top)} B/s, accepted: at most {shown(most)} (hbm_read_bytes_per_s)"
            document.fault(("values", "hbm_in_flight_curve", "value"), says)
