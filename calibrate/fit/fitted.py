"""One fitted value with its bounds, and how a reading gives it: median of the centre, bounds of all cases and draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3sim.calibrate.fit.statements import Case, Reader, Reading, cases_of
from k3sim.sim.intervals import quantiles


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One determined value. ``low`` and ``high`` are in its unit, for the curve factors on all points."""

    field: str
    value: Any
    low: float
    high: float
    statistical: tuple[float, float]  # 90 % of the bootstrap alone, in the unit of low and high
    cases: tuple[Case, ...]
    note: str
    how: str  # "direct" or "joint"
    left_out_error: float | None  # worst relative error of a central case predicted without it; None: only one case


def direct(reading: Reading, read: Reader, readers: Sequence[Reader]) -> Fitted:
    cases = cases_of(reading, read)
    centre = [one.value for one in cases if one.central]
    value = rounded(statistics.median(centre), reading.digits)
    draws = sorted(statistics.median(value for _, value in reading.centre(one)) for one in readers)
    statistical = quantiles(draws)
    bounds = [value, *statistical, *(one.value for one in cases)]
    return Fitted(
        field=reading.field,
        value=value,
        low=min(value, outward(min(bounds), -1)),
        high=max(value, outward(max(bounds), +1)),
        statistical=statistical,
        cases=cases,
        note=reading.note,
        how="joint" if reading.joint else "direct",
        left_out_error=left_out(centre),
    )


def left_out(values: Sequence[float]) -> float | None:
    """Worst error of predicting one case by the median of the others."""
    if len(values) < 2:
        return None
    return max(
        abs(statistics.median([*values[:index], *values[index + 1 :]]) / value - 1)
        for index, value in enumerate(values)
    )


def reported(name: str, value: int) -> Fitted:
    """A size that the device states of itself."""
    return Fitted(
        field=name,
        value=value,
        low=value,
        high=value,
        statistical=(value, value),
        cases=(Case(label="the device's own report", value=float(value), central=True),),
        note="As the device reports it.",
        how="direct",
        left_out_error=None,
    )


def rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def outward(value: float, direction: int) -> float:
    """Four significant digits, away from the value that it bounds."""
    if value == 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    units = value / step
    near = round(units)
    # A quotient of a value that has four digits is off them by rounding alone.
    whole = near if abs(units - near) < 1e-6 else (math.ceil(units) if direction > 0 else math.floor(units))
    return float(f"{whole * step:.3e}")
