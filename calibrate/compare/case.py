"""One compared case: what was measured or published, what the model says of it, and how far it may be off.

Everything that is held against a measurement is this one record: a probe's primitive, a chain of kernels, a whole step,
a stage, a step of an optimisation ladder, a figure of a claim. What differs between them is where the two numbers come
from, and that is the business of the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3sim.sim.intervals import interval_around
from k3sim.sim.question import gpus_of


@dataclass(frozen=True, kw_only=True)
class ComparedCase:
    """One measured value and its prediction, both in ``unit``.

    ``low`` and ``high`` hold the middle 90 % over machines drawn within the profile's intervals and errors of kernels
    (``sim/intervals.py``); None where none were drawn.
    """

    kind: str  # "probe", "kernel", "step", "stage", "ladder" or "claim"
    label: str
    measured: float  # or published, or claimed
    predicted: float
    unit: str
    low: float | None = None
    high: float | None = None
    source: str = ""  # where it was published, or which file of samples has it
    used_in_fit: bool = False  # a value of the profile was taken from it
    # Of published results: how they are found, grouped and judged.
    id: str = ""
    hardware: str = ""
    engine: str = ""
    date: str = ""
    judged: bool = True  # whether the model describes what was measured
    why: str = ""  # why not
    unknown: str = ""  # what the source does not say
    command: str = ""
    tokens: int = 1  # of a rate: out of one step

    @property
    def error(self) -> float:
        """Predicted over measured, less one: of a time, positive when the prediction is slower."""
        return self.predicted / self.measured - 1.0

    @property
    def inside_interval(self) -> bool:
        """Whether the interval holds what was measured; never without an interval."""
        return self.low is not None and self.high is not None and self.low <= self.measured <= self.high

    @property
    def interval(self) -> tuple[float, float]:
        """``low`` and ``high``; the prediction itself where no machine was drawn."""
        return (
            self.predicted if self.low is None else self.low,
            self.predicted if self.high is None else self.high,
        )

    def in_ms(self) -> ComparedCase:
        """A case in microseconds as one in milliseconds."""
        assert self.unit == "us", self.unit
        return replace(
            self,
            measured=self.measured / 1e3,
            predicted=self.predicted / 1e3,
            unit="ms",
            low=None if self.low is None else self.low / 1e3,
            high=None if self.high is None else self.high / 1e3,
        )

    def us(self, value: float) -> float:
        """A value of this case's unit as microseconds of a step or a kernel."""
        return value if self.unit == "us" else value * 1e3 if self.unit == "ms" else self.tokens * 1e6 / value

    def to_dict(self) -> dict[str, Any]:
        """As JSON, the same keys for every kind; docs/json.md describes it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "label": self.label,
            "measured": self.measured,
            "predicted": self.predicted,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "error": self.error,
            "inside_interval": None if self.low is None else self.inside_interval,
            "used_in_fit": self.used_in_fit,
            "source": self.source,
            "hardware": self.hardware,
            "engine": self.engine,
            "date": self.date,
            "judged": self.judged,
            "why": self.why,
            "unknown": self.unknown,
            "command": self.command,
            "num_gpus": gpus_of(self.command),
        }


def with_bounds(predictions: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Predicted, low and high, of the prediction with the profile followed by those with drawn machines, or by none."""
    first, *drawn = predictions
    if not drawn:
        return first, None, None
    return first, *interval_around(first, drawn)
