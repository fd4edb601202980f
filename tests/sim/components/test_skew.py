"""Paces of kernels, and the mean of the slowest rank."""

from __future__ import annotations

import math
import statistics

import pytest

from k3sim.model.routing import expected_maximum_of_normals
from k3sim.sim.components.skew import Lateness, Paces


@pytest.mark.parametrize(
    ("count", "mean"),
    # Closed forms for two and three; Harter, "Expected values of normal order statistics" (1961), table 1.
    [(0, 0.0), (1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (8, 1.42360), (16, 1.76599)],
)
def test_the_expected_maximum_of_normals(count: int, mean: float) -> None:
    assert expected_maximum_of_normals(count) == pytest.approx(mean, abs=1e-5)


def test_paces_have_mean_one_and_no_outliers() -> None:
    paces = [Paces(0.1, seed=5).pace(rank, index) for rank in range(16) for index in range(500)]
    # 8000 draws: three standard errors of the mean are 0.0034, of the deviation 0.0024.
    assert statistics.fmean(paces) == pytest.approx(1.0, abs=0.0034)
    assert statistics.stdev(paces) == pytest.approx(0.1, abs=0.0024)
    assert min(paces) >= 0.7 and max(paces) <= 1.3


def test_a_pace_depends_on_seed_rank_kernel() -> None:
    paces = Paces(0.1, seed=5)
    assert paces.pace(3, 4) == Paces(0.1, seed=5).pace(3, 4)
    assert len({paces.pace(3, 4), paces.pace(4, 3), paces.pace(3, 5), Paces(0.1, seed=6).pace(3, 4)}) == 4


def test_ranks_are_independent() -> None:
    paces = Paces(0.1, seed=0)
    first = [paces.pace(0, index) for index in range(2000)]
    second = [paces.pace(1, index) for index in range(2000)]
    mean_product = statistics.fmean((a - 1) * (b - 1) for a, b in zip(first, second, strict=True))
    assert abs(mean_product) < 3 * 0.01 / math.sqrt(2000)


def test_without_deviation_every_pace_is_one() -> None:
    assert Paces(0.0, seed=1).pace(2, 3) == 1.0


def test_lateness_is_that_of_summed_variances() -> None:
    late = Lateness(0.1)
    assert late.wait_ps(2) == 0
    late.add(3000)
    late.add(4000)
    # sqrt(300^2 + 400^2) = 500, times 1/sqrt(pi) for two ranks.
    assert late.wait_ps(2) == round(500 / math.sqrt(math.pi))
    assert late.wait_ps(2) == 0, "ranks are alike after they waited for each other"
