"""Two traces beside each other, kernel class by kernel class, with the noise of their steps.

A change is the difference of medians over steps. Its noise is twice the standard error of that difference, from the
median absolute deviations of both; with fewer than three steps on a side it is unknown, and so is whether the change is
real.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from k3sim.calibrate.traces.explained import Explained, by_class, by_name

FEWEST_STEPS = 3
MAD_TO_SIGMA = 1.4826  # of a normal distribution
MEDIAN_TO_MEAN = 1.2533  # standard error of a median over that of a mean, sqrt(pi / 2)


def compare(before: Explained, after: Explained) -> dict[str, Any]:
    """The step, its classes and its names: before, after, change and noise in microseconds, of the slowest ranks."""
    one, other = before.slowest, after.slowest
    steps = {"step": (one.spans_us, other.spans_us), "idle": (_idle_us(before), _idle_us(after))}
    names = _rows(by_name(one.steps.steps), by_name(other.steps.steps))
    return {
        "step": [_row(word, *pair) for word, pair in steps.items()],
        "classes": _rows(by_class(one.steps.steps), by_class(other.steps.steps)),
        "names": [row for row in names if row["change_us"]][:50],
    }


def _idle_us(explained: Explained) -> list[float]:
    return [waits.idle_ps / 1e6 for waits in explained.slowest.waits]


def _rows(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    rows = [_row(word, before.get(word), after.get(word)) for word in {**before, **after}]
    return sorted(rows, key=lambda row: (-abs(row["change_us"]), row["what"]))


def _row(what: str, before: Sequence[float] | None, after: Sequence[float] | None) -> dict[str, Any]:
    first, second = (statistics.median(side) if side else 0.0 for side in (before, after))
    errors = [0.0 if side is None else standard_error(side) for side in (before, after)]
    noise = None if None in errors else 2 * math.hypot(*(error or 0.0 for error in errors))
    change = second - first
    return {
        "what": what,
        "before_us": first,
        "after_us": second,
        "change_us": change,
        "noise_us": noise,
        "beyond_noise": None if noise is None else abs(change) > noise,
        "label": "derived",
    }


def standard_error(samples: Sequence[float]) -> float | None:
    """Of the median of samples; None where there are too few to know."""
    if len(samples) < FEWEST_STEPS:
        return None
    middle = statistics.median(samples)
    spread = statistics.median(abs(one - middle) for one in samples)
    return MEDIAN_TO_MEAN * MAD_TO_SIGMA * spread / math.sqrt(len(samples))
