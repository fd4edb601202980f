"""A fit as a profile document, byte for byte, and the shipped profile that it starts from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from k3sim.calibrate.fit.fitted import Fitted
from k3sim.calibrate.samples import SampleFile
from k3sim.errors import UserError
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine, machine_names, profile_path

SOURCE = "k3sim calibrate/probes"


#: Profile of a device by the name that its driver gives.
PROFILES = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA B200": "b200",
    "NVIDIA B300": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a fit found: values, what it could not determine, and the samples it refused."""

    file: SampleFile
    base: Machine
    fitted: tuple[Fitted, ...]
    undetermined: dict[str, str]  # field -> reason
    seed: int

    def profile(self, name: str) -> dict[str, Any]:
        """The profile document: fitted values, and the base's for all others."""
        document: dict[str, Any] = json.loads(profile_path(self.base.name).read_text(encoding="utf-8"))
        own = PROFILES.get(self.file.gpu) == self.base.name
        entries = document["values"]
        if not own:  # what was measured on another GPU is not measured here
            for entry in entries.values():
                if entry["kind"] == "measured":
                    entry["kind"] = "inferred"
                    entry["note"] = f"Inferred from {self.base.name}. {entry.get('note', '')}".strip()
        for one in self.fitted:
            entries[one.field] = profile_entry(one, entries[one.field]["unit"], self.file.date)
        return {**document, "name": name}


def profile_text(document: dict[str, Any]) -> str:
    """A profile as it is stored, byte for byte."""
    return json.dumps(document, indent=2) + "\n"


def base_of(gpu: str, given: str | None = None) -> Machine:
    """Shipped profile whose values stay where samples give none: ``given``, or that of the device.

    Raises UserError for a device without one, and for a name or a file that is no shipped profile.
    """
    if given is not None:
        if given.lower().endswith(".json"):
            raise UserError(f"base is {given!r}; accepted: a shipped profile, {', '.join(machine_names())}")
        return load_machine(given)
    if gpu not in PROFILES:
        raise UserError(
            f"no shipped profile is of {gpu!r}; give one to start from with --base: {', '.join(PROFILES.values())}"
        )
    return load_machine(PROFILES[gpu])


def profile_entry(one: Fitted, unit: str, date: str) -> dict[str, Any]:
    curve = one.field == "hbm_in_flight_curve"
    return {
        "value": one.value,
        "unit": unit,
        "kind": "measured" if one.how == "direct" else "fitted",
        "source": SOURCE,
        "date": date,
        **({"interval": [one.low, one.high]} if curve else {"low": one.low, "high": one.high}),
        "note": one.note,
    }
