"""What the samples of one file state of a value: a reader in SI units, and how a field follows from its cases.

Readings of the families of probes (``readings_*.py``) are tables over these; a value is a formula over medians, so that
no model of the machine is needed to read one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from k3sim.calibrate.samples import Sample, SampleFile

MIB = 1 << 20
LOADED_BYTES = 65536  # in flight on each SM: HBM is at its ceiling, and loads queue behind it


class Undetermined(Exception):
    """These samples do not give a value, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case's statement of a value, in SI units; ``central`` ones give the value."""

    label: str
    value: float
    central: bool


Statement = tuple[str, float]


class Reader:
    """Samples in SI units by case, quantity and parameters; ``draw`` replaces medians by bootstrap draws."""

    def __init__(self, file: SampleFile, draw: Callable[[Sample], float] | None = None) -> None:
        self.file = file
        self._draw = draw or (lambda sample: sample.value)
        self._hz: float | None = None
        self.used: set[str] = set()  # labels of the samples that were asked for

    @property
    def clock_hz(self) -> float:
        if self._hz is None:
            self._hz = self.one("clocks", "sm_clock")
        return self._hz

    def one(self, case: str, quantity: str, **parameters: Any) -> float:
        """The only stable sample with these parameters; Undetermined where there is none, or it is unstable."""
        found = list(self.file.matching(case, quantity, **parameters))
        shown = " ".join([case, *(f"{name}={value}" for name, value in parameters.items()), quantity])
        if not found:
            raise Undetermined(f"no sample of {shown}")
        if len(found) > 1:
            raise Undetermined(f"{len(found)} samples of {shown}, accepted is one")
        if found[0].instability:
            raise Undetermined(f"{found[0].label}: {found[0].instability}")
        return self._si(found[0])

    def all(self, case: str, quantity: str, **parameters: Any) -> list[tuple[Sample, float]]:
        """Every stable sample with these parameters."""
        found = self.file.matching(case, quantity, **parameters)
        return [(one, self._si(one)) for one in found if not one.instability]

    def stated(self, case: str, quantity: str, *, scale: float = 1.0, **parameters: Any) -> list[Statement]:
        """What every stable sample says, by its label. A parameter that is a tuple takes each of its values in turn."""
        several = {name: each for name, each in parameters.items() if isinstance(each, tuple)}
        return [
            (one.label, value * scale)
            for chosen in product(*several.values())
            for one, value in self.all(case, quantity, **{**parameters, **dict(zip(several, chosen, strict=True))})
        ]

    def _si(self, sample: Sample) -> float:
        self.used.add(sample.label)
        value = self._draw(sample)
        if sample.unit == "us":
            return value * 1e-6
        return value / self.clock_hz if sample.unit == "cycle" else value

    @property
    def timestamp_s(self) -> float:
        """What reading the clock around a load adds: single loads against the mean of a chain of the same."""
        region = {"region_mib": 8}
        return self.one("l2_chase_resident", "load", **region) - self.one(
            "l2_chase_resident", "mean_without_stamps", **region
        )

    @property
    def queue_factor(self) -> float:
        """How much longer an L2 round trip takes while HBM is at its ceiling, by the hand-over through a flag."""
        loaded = self.one("handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=LOADED_BYTES)
        return loaded / self.one("handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=0)


@dataclass(frozen=True)
class Reading:
    """How one field of the profile follows from samples. ``digits``: significant ones that the cases agree on."""

    field: str
    digits: int
    note: str  # what it is read from; the profile's note, before the cases' range
    centre: Callable[[Reader], list[Statement]]
    around: Callable[[Reader], list[Statement]] = lambda read: []
    joint: bool = False  # a rule of the simulator is inverted over several cases


def needed(found: list[Statement], what: str) -> list[Statement]:
    if not found:
        raise Undetermined(f"no stable sample of {what}")
    return found


def less_timestamp(read: Reader, case: str, quantity: str, **parameters: Any) -> list[Statement]:
    return [(label, value - read.timestamp_s) for label, value in read.stated(case, quantity, **parameters)]


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Straight line through ``points`` by least squares: value at zero, and slope."""
    mean_x, mean_y = (statistics.fmean(one[axis] for one in points) for axis in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def cases_of(reading: Reading, read: Reader) -> tuple[Case, ...]:
    """What the samples state of a field: the cases that give its value, then those around. Undetermined without any."""
    centre = needed(reading.centre(read), reading.field)
    cases = [Case(label=label, value=value, central=True) for label, value in centre]
    seen = {label for label, _ in centre}
    around = [(label, value) for label, value in reading.around(read) if label not in seen]
    cases += [Case(label=label, value=value, central=False) for label, value in around]
    return tuple(cases)
