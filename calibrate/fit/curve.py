"""The curve of HBM's rate by bytes in flight: a value of many points, whose interval is a factor on all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from k3sim.calibrate.fit.fitted import Fitted, outward, rounded
from k3sim.calibrate.fit.statements import Case, Reader, Undetermined
from k3sim.sim.intervals import quantiles

CURVE_NOTE = (
    "Ring of four bulk copies on each SM, capped at the ceiling; the interval is of plain loads with as many bytes in "
    "flight. Eight copies of 1 to 2 KiB each are bound by issue and not inside it."
)
CURVE_DIGITS = 4


def in_flight_curve(read: Reader, readers: Sequence[Reader], ceiling: float) -> Fitted:
    points = curve_points(read, ceiling)
    rates = dict(points)
    others = [
        (one.label, value / rates[one.parameters["bytes_in_flight_per_sm"]])
        for one, value in read.all("hbm_loads_in_flight", "read_rate")
        if one.parameters["bytes_in_flight_per_sm"] in rates
    ]
    draws = sorted(
        statistics.fmean(rate / rates[at] for at, rate in curve_points(one, ceiling) if at in rates) for one in readers
    )
    statistical = quantiles(draws)
    bounds = [1.0, *statistical, *(one for _, one in others)]
    cases = [Case(label=f"hbm_bulk_in_flight at {at} B, of the curve", value=1.0, central=True) for at, _ in points]
    cases += [Case(label=f"{label}, of the curve", value=one, central=False) for label, one in others]
    left_out = [
        abs(_between(points[index - 1], points[index + 1], points[index][0]) / points[index][1] - 1)
        for index in range(1, len(points) - 1)
    ]
    return Fitted(
        field="hbm_in_flight_curve",
        value=[[at, rounded(rate, CURVE_DIGITS)] for at, rate in points],
        low=min(1.0, outward(min(bounds), -1)),
        high=max(1.0, outward(max(bounds), +1)),
        statistical=statistical,
        cases=tuple(cases),
        note=CURVE_NOTE,
        how="direct",
        left_out_error=max(left_out, default=None),
    )


def curve_points(read: Reader, ceiling: float) -> list[tuple[int, float]]:
    """(bytes in flight per SM, B/s) of the ring of four copies, up to the first point at the ceiling."""
    found = sorted(
        (one.parameters["bytes_in_flight_per_sm"], value)
        for one, value in read.all("hbm_bulk_in_flight", "read_rate", stages=4, blocks=read.file.num_sms)
    )
    if len(found) < 3:
        raise Undetermined(f"{len(found)} stable samples of hbm_bulk_in_flight, four stages; accepted are 3 or more")
    points: list[tuple[int, float]] = []
    for at, rate in found:
        points.append((at, min(rate, ceiling)))
        if rate >= ceiling:
            break
    return points


def _between(before: tuple[int, float], after: tuple[int, float], at: int) -> float:
    """The curve at ``at`` by a straight line in log-log, as the machine interpolates it."""
    share = math.log(at / before[0]) / math.log(after[0] / before[0])
    return before[1] * math.pow(after[1] / before[1], share)
