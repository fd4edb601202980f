"""Expected experts per step: closed forms, an independent simulation, and what real text shows."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.routing import (
    Routing,
    expected_busiest_rank_experts,
    expected_distinct_experts,
    inclusion_probabilities,
)

# 230 of 896 experts at 24 rows, 28.8 a rank and 35.4 on the busiest of 8: real text on 8 GB300,
# https://github.com/xiaguan/kern-k3-pp-prefill notes/d-mlp.md, 2026-10-10.
REAL_TEXT_ROWS, REAL_TEXT_DISTINCT, REAL_TEXT_BUSIEST = 24, 230, 35.4
REAL_TEXT_SKEW = 0.784


@pytest.mark.parametrize(("rows", "distinct"), [(1, 16.0), (2, 31.7), (4, 62.3), (8, 120.3), (24, 314.6)])
def test_distinct_experts_under_uniform_routing(rows: int, distinct: float) -> None:
    assert expected_distinct_experts(896, 16, rows) == pytest.approx(distinct, abs=0.05)


def test_the_skew_that_reproduces_real_text() -> None:
    assert expected_distinct_experts(896, 16, REAL_TEXT_ROWS, REAL_TEXT_SKEW) == pytest.approx(
        REAL_TEXT_DISTINCT, abs=0.5
    )
    # What it then says of a few rows, where uniform routing gives 62.3 and 120.3.
    assert expected_distinct_experts(896, 16, 4, REAL_TEXT_SKEW) == pytest.approx(54.4, abs=0.1)
    assert expected_distinct_experts(896, 16, 8, REAL_TEXT_SKEW) == pytest.approx(97.7, abs=0.1)


def test_the_busiest_rank_of_real_text() -> None:
    busiest = expected_busiest_rank_experts(896, 16, REAL_TEXT_ROWS, 8, REAL_TEXT_SKEW)
    assert busiest == pytest.approx(REAL_TEXT_BUSIEST, rel=0.01)


@pytest.mark.parametrize(("ep", "busiest"), [(8, 4.17), (16, 3.05)])
def test_the_busiest_rank_of_one_row(ep: int, busiest: float) -> None:
    assert expected_busiest_rank_experts(896, 16, 1, ep) == pytest.approx(busiest, abs=0.01)


@pytest.mark.parametrize(("picked", "ranks"), [(16, 8), (120, 4), (300, 32)])
def test_the_busiest_rank_agrees_with_drawing_experts(picked: int, ranks: int) -> None:
    """One row that picks ``picked`` experts: the number is certain, so only the placement is random."""
    draw = random.Random(7)
    slots = 896 // ranks
    largest = []
    for _ in range(2000):
        counts = [0] * ranks
        for expert in draw.sample(range(896), picked):
            counts[expert // slots] += 1
        largest.append(max(counts))
    mean = sum(largest) / len(largest)
    assert expected_busiest_rank_experts(896, picked, 1, ranks) == pytest.approx(mean, abs=0.1)


def test_the_busiest_rank_at_the_edges() -> None:
    assert expected_busiest_rank_experts(896, 16, 4, 1) == pytest.approx(
        expected_distinct_experts(896, 16, 4)
    )
    assert expected_busiest_rank_experts(896, 896, 1, 8) == 112
    assert expected_busiest_rank_experts(896, 1, 1, 8) == pytest.approx(1)
    # Every expert on its own rank: one at most.
    assert expected_busiest_rank_experts(8, 3, 1, 8) == pytest.approx(1)
    assert expected_busiest_rank_experts(896, 16, 100_000, 8) == pytest.approx(112)


def test_the_busiest_of_two_ranks_by_hand() -> None:
    # Two of four experts, two a rank: both on one rank in 2 of 6 draws.
    assert expected_busiest_rank_experts(4, 2, 1, 2) == pytest.approx(1 + 2 / 6)


@settings(deadline=None)
@given(
    num_experts=st.integers(1, 200),
    top_k_share=st.floats(0, 1),
    skew=st.floats(0, 4),
    rows=st.integers(1, 50),
)
def test_probabilities_sum_to_top_k_whatever_the_rows(
    num_experts: int, top_k_share: float, skew: float, rows: int
) -> None:
    top_k = max(1, round(top_k_share * num_experts))
    probabilities = inclusion_probabilities(num_experts, top_k, skew)
    assert len(probabilities) == num_experts
    assert sum(probabilities) == pytest.approx(top_k)
    assert all(0 < p <= 1 for p in probabilities)
    assert all(a >= b for a, b in itertools.pairwise(probabilities))
    distinct = expected_distinct_experts(num_experts, top_k, rows, skew)
    assert top_k - 1e-9 <= distinct <= min(num_experts, rows * top_k) + 1e-9
    assert distinct <= expected_distinct_experts(num_experts, top_k, rows + 1, skew) + 1e-9
    assert distinct <= expected_distinct_experts(num_experts, top_k, rows, 0.0) + 1e-9


def test_popular_experts_are_capped_and_others_share() -> None:
    first, second, third = inclusion_probabilities(3, 2, 2.0)
    # 2 x 1 / (1 + 1/4 + 1/9) > 1, so the first is certain; one pick is left for weights 1/4 and 1/9.
    assert (first, second, third) == pytest.approx((1, 9 / 13, 4 / 13))


@pytest.mark.parametrize("skew", [-0.1, 4.1, float("nan"), float("inf"), "1", None, True])
def test_a_skew_outside_the_limits_is_refused(skew: object) -> None:
    with pytest.raises(UserError, match=r"skew=.*; a number from 0 \(uniform\) to 4 is accepted"):
        Routing(skew=skew)  # type: ignore[arg-type]


def test_impossible_picks_are_refused() -> None:
    with pytest.raises(UserError, match="top_k=17 of 16 experts; 1 to 16 is accepted"):
        inclusion_probabilities(16, 17, 0.0)
    with pytest.raises(UserError, match="ep=5 does not divide 896 experts"):
        expected_busiest_rank_experts(896, 16, 1, 5)
