"""A profile of ten lines: another by ``like``, and the values that differ.

A short profile names a shipped one and states only what is known. What is left out is that profile's, except for what
a stated value forces: the curve of bytes in flight counts all SMs and ends at the read rate, so it goes with both; a
copy keeps its share of the read rate. What was adapted so is marked ``inferred``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from k3sim.model.documents.document import Document, shown
from k3sim.sim.machine import PROFILE_FIELDS

READ, COPY, CURVE = "hbm_read_bytes_per_s", "hbm_copy_bytes_per_s", "hbm_in_flight_curve"
SOURCE = "stated by the user"


def stated(value: Any, unit: str, date: str | None) -> dict[str, Any]:
    """The entry of a value that a user states without an interval."""
    return {"value": value, "unit": unit, "kind": "user", "source": SOURCE, "date": date, "low": value, "high": value}


def expand(document: Document, shipped: Mapping[str, Path]) -> None:
    """Fill a profile with ``like`` up to a whole one; note a fault for a ``like`` that is no shipped profile."""
    profile = document.value
    if not isinstance(profile, dict) or "like" not in profile:
        return
    like = profile["like"]
    path = shipped.get(like.lower()) if isinstance(like, str) else None
    if path is None:
        document.fault(("like",), f"is {shown(like)}, accepted: {', '.join(sorted(shipped))}")
        path = shipped["b200"]  # so that the faults of the other keys are said as well
    whole = json.loads(path.read_text(encoding="utf-8"))
    given = profile.get("values", {})
    if isinstance(given, dict):
        date = profile.get("date")
        whole["values"] = _merged(whole["values"], given, date if isinstance(date, str) else None)
    else:
        whole["values"] = given
    rest = {key: value for key, value in profile.items() if key not in ("like", "values", "date")}
    document.value = {**whole, "title": profile.get("name", whole["title"]), **rest}


def _merged(base: Mapping[str, Any], given: Mapping[str, Any], date: str | None) -> dict[str, Any]:
    values = {**deepcopy(dict(base)), **{name: _entry(name, value, date) for name, value in given.items()}}
    _adapt(values, base, given)
    return values


def _entry(name: str, value: Any, date: str | None) -> Any:
    """A value alone becomes an entry, and an entry gets the parts that it leaves out."""
    if name not in PROFILE_FIELDS or (isinstance(value, dict) and "value" not in value):
        return value
    parts = value if isinstance(value, dict) else {"value": value}
    entry = stated(parts["value"], PROFILE_FIELDS[name].metadata["unit"], date)
    if PROFILE_FIELDS[name].type == "Curve":
        del entry["low"], entry["high"]
        entry["interval"] = [1, 1]
    return {**entry, **parts}


def _adapt(values: dict[str, Any], base: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """What SMs and read rate force on values that are not given."""
    read, sms = _number(values, READ), _number(values, "num_sms")
    if not read or not sms or not {READ, "num_sms"} & set(given):
        return
    was = base[READ]["value"]
    if COPY not in given and READ in given:
        share = read / was
        values[COPY] = _inferred(base[COPY], "the share of the read rate that it has there")
        for part in ("value", "low", "high"):
            values[COPY][part] = min(base[COPY][part] * share, read) if part != "high" else base[COPY][part] * share
    if CURVE not in given:
        more_sms = sms / base["num_sms"]["value"]
        values[CURVE] = _inferred(base[CURVE], "by the number of SMs, up to the read rate")
        values[CURVE]["value"] = [[at, min(rate * more_sms, read)] for at, rate in base[CURVE]["value"]]


def _number(values: Mapping[str, Any], name: str) -> float | None:
    entry = values.get(name)
    found = entry.get("value") if isinstance(entry, dict) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1e30 else None


def _inferred(entry: Mapping[str, Any], how: str) -> dict[str, Any]:
    return {**deepcopy(dict(entry)), "kind": "inferred", "source": f"scaled {how}: {entry['source']}"}
