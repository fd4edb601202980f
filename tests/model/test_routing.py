"""Expected experts per step: closed forms, an independent simulation, and what real text shows."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.routing import TEXT, TEXT_EXPONENT, UNIFORM, Routing, read_routing

# 230 of 896 experts at 24 rows, 28.8 a rank and 35.4 on the busiest of 8: real text on 8 GB300,
# https://github.com/xiaguan/kern-k3-pp-prefill notes/d-mlp.md, 2026-10-10.
REAL_TEXT_ROWS, REAL_TEXT_DISTINCT, REAL_TEXT_BUSIEST = 24, 230, 35.4


def zipf(exponent: float, num_experts: int = 896) -> Routing:
    return Routing(name="counted", counts=tuple(rank**-exponent for rank in range(1, num_experts + 1)))


@pytest.mark.parametrize(("rows", "distinct"), [(1, 16.0), (2, 31.7), (4, 62.3), (8, 120.3), (24, 314.6)])
def test_distinct_experts_under_uniform_routing(rows: int, distinct: float) -> None:
    assert UNIFORM.distinct_experts(896, 16, rows) == pytest.approx(distinct, abs=0.05)


def test_the_skew_that_reproduces_real_text() -> None:
    assert TEXT.distinct_experts(896, 16, REAL_TEXT_ROWS) == pytest.approx(REAL_TEXT_DISTINCT, abs=0.5)
    # What it then says of a few rows, where uniform routing gives 62.3 and 120.3.
    assert TEXT.distinct_experts(896, 16, 4) == pytest.approx(54.4, abs=0.1)
    assert TEXT.distinct_experts(896, 16, 8) == pytest.approx(97.7, abs=0.1)


def test_the_busiest_rank_of_real_text() -> None:
    busiest = TEXT.busiest_rank_experts(896, 16, REAL_TEXT_ROWS, 8)
    assert busiest == pytest.approx(REAL_TEXT_BUSIEST, rel=0.01)


@pytest.mark.parametrize(("ep", "busiest"), [(8, 4.17), (16, 3.05)])
def test_the_busiest_rank_of_one_row(ep: int, busiest: float) -> None:
    assert UNIFORM.busiest_rank_experts(896, 16, 1, ep) == pytest.approx(busiest, abs=0.01)


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
    assert UNIFORM.busiest_rank_experts(896, picked, 1, ranks) == pytest.approx(mean, abs=0.1)


def test_the_busiest_rank_at_the_edges() -> None:
    assert UNIFORM.busiest_rank_experts(896, 16, 4, 1) == pytest.approx(
        UNIFORM.distinct_experts(896, 16, 4)
    )
    assert UNIFORM.busiest_rank_experts(896, 896, 1, 8) == 112
    assert UNIFORM.busiest_rank_experts(896, 1, 1, 8) == pytest.approx(1)
    # Every expert on its own rank: one at most.
    assert UNIFORM.busiest_rank_experts(8, 3, 1, 8) == pytest.approx(1)
    assert UNIFORM.busiest_rank_experts(896, 16, 100_000, 8) == pytest.approx(112)


def test_the_busiest_of_two_ranks_by_hand() -> None:
    # Two of four experts, two a rank: both on one rank in 2 of 6 draws.
    assert UNIFORM.busiest_rank_experts(4, 2, 1, 2) == pytest.approx(1 + 2 / 6)


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
    routing = zipf(skew, num_experts)
    probabilities = routing.probabilities(num_experts, top_k)
    assert len(probabilities) == num_experts
    assert sum(probabilities) == pytest.approx(top_k)
    assert all(0 < p <= 1 for p in probabilities)
    assert all(a >= b for a, b in itertools.pairwise(probabilities))
    distinct = routing.distinct_experts(num_experts, top_k, rows)
    assert top_k - 1e-9 <= distinct <= min(num_experts, rows * top_k) + 1e-9
    assert distinct <= routing.distinct_experts(num_experts, top_k, rows + 1) + 1e-9
    assert distinct <= UNIFORM.distinct_experts(num_experts, top_k, rows) + 1e-9


def test_popular_experts_are_capped_and_others_share() -> None:
    first, second, third = zipf(2.0, 3).probabilities(3, 2)
    # 2 x 1 / (1 + 1/4 + 1/9) > 1, so the first is certain; one pick is left for weights 1/4 and 1/9.
    assert (first, second, third) == pytest.approx((1, 9 / 13, 4 / 13))


def test_text_is_the_zipf_law_that_is_stated() -> None:
    assert TEXT.probabilities(896, 16) == zipf(TEXT_EXPONENT).probabilities(896, 16)


def test_a_stated_number_is_what_is_read() -> None:
    counted = read_routing("181")
    assert counted.distinct_experts(896, 16, 24) == 181
    assert counted.busiest_rank_experts(896, 16, 24, 8) > 181 / 8
    with pytest.raises(UserError, match="routing is 181 distinct experts; 4 rows pick 16 to 64"):
        counted.distinct_experts(896, 16, 4)
    with pytest.raises(UserError, match="routing is 15 distinct experts; 1 row picks 16 to 16"):
        read_routing("15").distinct_experts(896, 16, 1)


def test_counts_of_a_file_are_popularities(tmp_path: Path) -> None:
    one, layers = tmp_path / "one.json", tmp_path / "layers.json"
    one.write_text(json.dumps({"expert_counts": [4, 1, 1, 2]}))
    layers.write_text(json.dumps({"expert_counts": [[4, 1, 1, 2], [1, 2, 4, 1]]}))  # other experts, as popular
    assert read_routing(str(one)).probabilities(4, 1) == pytest.approx((0.5, 0.25, 0.125, 0.125))
    assert read_routing(str(layers)).probabilities(4, 1) == pytest.approx((0.5, 0.25, 0.125, 0.125))
    with pytest.raises(UserError, match=r"routing .*one.json has 4 counts; the model has 896 experts"):
        read_routing(str(one)).distinct_experts(896, 16, 1)


@pytest.mark.parametrize(
    ("written", "refusal"),
    [
        ("even", "unknown routing 'even'; accepted: uniform, text, a number of distinct experts, a file of counts"),
        ("nan", "routing is nan distinct experts; accepted: 1 or more"),
        ("-3", "routing is -3 distinct experts; accepted: 1 or more"),
        ("none.json", "none.json: cannot be read"),
    ],
)
def test_other_routings_are_refused(written: str, refusal: str) -> None:
    with pytest.raises(UserError, match=re.escape(refusal)):
        read_routing(written)


@pytest.mark.parametrize("counts", [[], [0, 0], [1, -1], [1, "2"], [[1, 2], [1]], [[1, 2], [0, 0]], 7, None])
def test_files_without_counts_are_refused(tmp_path: Path, counts: object) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"expert_counts": counts}))
    with pytest.raises(UserError, match=r"expert_counts.* is no list of counts"):
        read_routing(str(path))


def test_impossible_picks_are_refused() -> None:
    with pytest.raises(UserError, match="top_k=17 of 16 experts; 1 to 16 is accepted"):
        UNIFORM.probabilities(16, 17)
    with pytest.raises(UserError, match="ep=5 does not divide 896 experts"):
        UNIFORM.busiest_rank_experts(896, 16, 1, 5)
    with pytest.raises(UserError, match="routing counted has picks of 2 experts; a row picks 3"):
        Routing(name="counted", counts=(1.0, 1.0, 0.0, 0.0)).probabilities(4, 3)
