"""How kernels differ in speed between ranks.

Every kernel of every rank has a pace near one; ranks meet at exchanges, where the slowest decides. With paces
drawn from a normal distribution of relative standard deviation ``sd``, the slowest of ``n`` ranks after kernels
of durations ``d_i`` is late, in the mean, by ``m_n sd sqrt(sum d_i^2)``, with ``m_n`` the expected maximum of
``n`` standard normals. ``SAMPLED`` draws the paces and simulates all ranks; ``EXPECTED`` simulates one rank and
adds that mean at every exchange; ``OFF`` makes ranks identical.
"""

from __future__ import annotations

import math
import random
from enum import Enum


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

    def pace(self, rank: int, call_index: int) -> float:
        # Keyed by rank and call, so the draw does not depend on the order in which events happen.
        draw = random.Random((self._seed * 1_000_003 + rank) * 1_000_003 + call_index).gauss(0.0, 1.0)
        return 1.0 + self._relative_sd * min(_MOST_SDS, max(-_MOST_SDS, draw))


def expected_maximum_of_normals(count: int) -> float:
    """Expected maximum of ``count`` independent standard normals, by numerical integration."""
    if count <= 1:
        return 0.0
    step, total, x = 0.01, 0.0, -8.0
    while x < 8.0:
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        below = 0.5 * (1.0 + math.erf(x / math.sqrt(2)))
        total += x * count * density * below ** (count - 1) * step
        x += step
    return total
