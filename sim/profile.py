"""Machine profiles as files: which ship, and how one becomes a machine.

A profile states unit, kind, source, date and interval of every value; ``Machine`` is the only list of its fields. A
user's file is checked field by field (``profile_rules.py``). The shipped ones are checked by the tests and read
straight, since every command reads one and the models of the check cost 0.15 s. A file with ``like`` is a shipped
profile with other values (``profile_like.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, Document, read_json, shown_path
from k3sim.model.documents.kinds import Kind, is_regular
from k3sim.sim.machine import PROFILE_FIELDS, Machine, Provenance

ACCEPTED = Accepted(what="a machine profile (docs/machines.md)", kinds=(Kind.PROFILE,), most_bytes=4 << 20)

_SHIPPED = Path(__file__).parent / "machines"


def machine_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def value_names() -> tuple[str, ...]:
    """Names of a profile's values, in its order."""
    return tuple(PROFILE_FIELDS)


def profile_path(name: str) -> Path:
    """File of the shipped profile of that name."""
    return _SHIPPED / f"{name}.json"


def load_machine(name_or_path: str) -> Machine:
    """The shipped profile of that name (in any case), or the profile in a file whose path ends in ``.json``.

    Raises:
        UserError: no such name, or a file that cannot be read, is something else, or has faults: all of them in one
            line, each with field, value, what is accepted, and line.
    """
    if name_or_path.lower().endswith(".json"):
        return read_profile(name_or_path)
    names = machine_names()
    name = name_or_path.lower()
    if name not in names:
        if is_regular(name_or_path):
            return read_profile(name_or_path)
        from difflib import get_close_matches

        near = get_close_matches(name[:40], names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"unknown machine {shown_path(name_or_path)!r}: {hint}Shipped machines: {', '.join(names)}; "
            "or give the path of a profile that ends in .json"
        )
    return build(json.loads(profile_path(name).read_text(encoding="utf-8")))


def read_profile(path: str | Path) -> Machine:
    """The machine in a user's file. Raises UserError as ``load_machine``."""
    try:
        file = Path(path).expanduser()
    except RuntimeError:  # no home of that user
        file = Path(path)
    return _checked(read_json(file, ACCEPTED))


def machine_of(profile: object, where: str) -> Machine:
    """The machine of a profile document; ``where`` begins the line of a refusal, which is a UserError."""
    return _checked(Document(name=where, value=profile))


def _checked(document: Document) -> Machine:
    from k3sim.sim.profile_like import expand
    from k3sim.sim.profile_rules import check_profile

    expand(document, {name: profile_path(name) for name in machine_names()})
    check_profile(document)
    document.settle()
    return build(document.value)


def build(profile: Mapping[str, Any]) -> Machine:
    """The machine of a profile that has been checked."""
    values: dict[str, Any] = {}
    provenance: dict[str, Provenance] = {}
    for name, spec in PROFILE_FIELDS.items():
        entry = profile["values"][name]
        if spec.type == "Curve":
            values[name] = tuple((float(at), float(rate)) for at, rate in entry["value"])
            low, high = map(float, entry["interval"])
        else:
            kind: Any = {"int": int, "float": float, "bool": bool}[str(spec.type)]
            values[name], low, high = (kind(entry.get(part, entry["value"])) for part in ("value", "low", "high"))
            if spec.type == "bool" and not low <= values[name] <= high:
                low = high = values[name]  # switched over in a copy of a profile
        provenance[name] = Provenance(
            unit=entry["unit"],
            kind=entry["kind"],
            source=entry["source"],
            date=entry["date"],
            low=low,
            high=high,
            note=entry.get("note", ""),
        )
    return Machine(name=profile["name"], title=profile["title"], provenance=provenance, **values)
