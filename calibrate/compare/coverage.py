"""How many measured values lie inside their 90 % interval, and how many should.

An interval is right when nine in ten of what it is drawn for lie inside, and of use when it is not wider than that
takes. So both are said: the count beside the counts that chance gives when each has its 90 %, and the width. The range
of chance takes cases as independent. Those of one source or engine are not, so that a count outside it says more
than one inside.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.sim.kernel_errors import LEVEL

CHANCE = 0.95  # of the counts that are called likely


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Cases that have an interval."""

    num_cases: int
    num_inside: int
    half_width: float  # median of half the interval over the prediction
    misses: tuple[str, ...]  # cases outside: id, or label where there is none

    @property
    def likely(self) -> tuple[int, int]:
        """Counts inside that right intervals would give, with the chance ``CHANCE``."""
        return likely_counts(self.num_cases)

    def text(self) -> str:
        """In one line."""
        low, high = self.likely
        outside = f"; outside: {', '.join(self.misses)}" if self.misses else ""
        return (
            f"{self.num_inside} of {self.num_cases} inside their 90 % interval (right ones: {low} to {high}), which is "
            f"±{100 * self.half_width:.0f} % wide{outside}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        low, high = self.likely
        return {
            "cases": self.num_cases,
            "inside": self.num_inside,
            "inside_interval": self.num_inside / self.num_cases,
            "likely_low": low,
            "likely_high": high,
            "median_half_width": self.half_width,
            "misses": list(self.misses),
        }


def coverage_of(cases: Iterable[ComparedCase]) -> Coverage | None:
    """Of the cases that have an interval; None where none has."""
    drawn = [one for one in cases if one.low is not None]
    if not drawn:
        return None
    return Coverage(
        num_cases=len(drawn),
        num_inside=sum(one.inside_interval for one in drawn),
        half_width=statistics.median((one.interval[1] - one.interval[0]) / 2 / one.predicted for one in drawn),
        misses=tuple(one.id or one.label for one in drawn if not one.inside_interval),
    )


def likely_counts(num_cases: int, level: float = LEVEL, chance: float = CHANCE) -> tuple[int, int]:
    """Least and most successes of ``num_cases`` trials of chance ``level``, each side cut by half of what is left."""
    cut = (1 - chance) / 2
    below, low, high = 0.0, 0, num_cases
    found_low = False
    for count in range(num_cases + 1):
        below += math.comb(num_cases, count) * level**count * (1 - level) ** (num_cases - count)
        if not found_low and below > cut:
            low, found_low = count, True
        if below >= 1 - cut:
            high = count
            break
    return low, high
