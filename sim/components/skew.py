"""How kernels differ in speed between ranks.

Every kernel of every rank has a pace near one; at an exchange ranks wait for each other, and the slowest decides. With
paces drawn from a normal distribution of relative standard deviation ``sd``, the slowest of ``n`` ranks after kernels
of durations ``d_i`` is late, in the mean, by

    m_n sd sqrt(sum d_i^2),

with ``m_n`` the expected maximum of ``n`` standard normals.

| Skew | Ranks that are simulated | Lateness |
| --- | --- | --- |
| off | one, or all, which are identical | none |
| expected | one stands for all | the mean of the slowest, at every exchange |
| sampled | all | paces drawn from the seed, within three standard deviations |
"""

from __future__ import annotations

import math
import random
from enum import Enum

from k3sim.model.routing import expected_maximum_of_normals


class Skew(str, Enum):
    OFF = "off"
    EXPECTED = "expected"
    SAMPLED = "sampled"


# A pace outside this range would be a failing GPU, not a slower one.
_MOST_SDS = 3.0


class Paces:
    """Seeded pace of each kernel on each rank: a factor on its durations, with mean one."""

    def __init__(self, relative_sd: float, seed: int) -> None:
        self._relative_sd = relative_sd
        self._seed = seed
        self._random = random.Random()  # seeded anew for every draw

    def pace(self, rank: int, call_index: int) -> float:
        # Keyed by rank and call, so the draw does not depend on the order in which events happen.
        self._random.seed((self._seed * 1_000_003 + rank) * 1_000_003 + call_index)
        draw = self._random.gauss(0.0, 1.0)
        return 1.0 + self._relative_sd * min(_MOST_SDS, max(-_MOST_SDS, draw))


class Lateness:
    """How late the slowest rank of an exchange is in the mean, of a rank that stands for all (``EXPECTED``).

    The variance of the rank's own time since the last exchange adds up kernel by kernel.
    """

    def __init__(self, relative_sd: float) -> None:
        self._relative_sd = relative_sd
        self._variance_ps2 = 0.0
        self._maxima: dict[int, float] = {}

    def add(self, duration_ps: int) -> None:
        """A kernel took ``duration_ps``, waits for peers left out: those have no variance of their own."""
        self._variance_ps2 += (self._relative_sd * duration_ps) ** 2

    def wait_ps(self, group_size: int) -> int:
        """Mean lateness in picoseconds of the slowest of ``group_size`` ranks, which are alike from now on."""
        if not self._variance_ps2:
            return 0
        if group_size not in self._maxima:
            self._maxima[group_size] = expected_maximum_of_normals(group_size)
        late_ps = round(self._maxima[group_size] * math.sqrt(self._variance_ps2))
        self._variance_ps2 = 0.0
        return late_ps
