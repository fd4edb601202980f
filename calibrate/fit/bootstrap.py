"""The noise of a value: samples drawn anew, runs first and then their repetitions.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import cache

from k3sim.calibrate.samples import Run, Sample
from k3sim.model.names import first_named

BOOTSTRAP_DRAWS = 200
_first_named = cache(first_named)


def drawer(seed: int, number: int) -> Callable[[Sample], float]:
    """A bootstrap draw of a sample's value: runs with replacement, then the median of drawn repetitions.

    The generator depends on the sample too, so that adding a case to a file moves no other value.
    """
    drawn: dict[str, float] = {}

    def draw(sample: Sample) -> float:
        key = sample.label
        if key not in drawn:
            random_ = random.Random(f"{seed} {number} {_first_named('probe', key)}")
            runs = random_.choices(sample.runs, k=len(sample.runs))
            drawn[key] = statistics.fmean(_median_of(run, random_) for run in runs)
        return drawn[key]

    return draw


def _median_of(run: Run, random_: random.Random) -> float:
    # The median of so many repetitions is near enough normal; deciles stand for repetitions, which older files lack.
    return random_.gauss(run.median, run.standard_error)
