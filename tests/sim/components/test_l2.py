"""What L2 holds: replacement, spent lines, lines that are read again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import check_lines

from k3sim.sim.components.l2 import SPENT, L2Residency


def held(l2: L2Residency, *regions: str) -> list[int]:
    return [l2.resident(region) for region in regions]


def test_a_full_cache_loses_its_oldest_lines() -> None:
    l2 = L2Residency(1000)
    l2.insert("a", 600)
    l2.insert("b", 300)
    l2.insert("c", 400)  # 300 too many
    assert held(l2, "a", "b", "c") == [300, 300, 400]
    l2.insert("c", 500)
    assert held(l2, "a", "b", "c") == [0, 100, 900]
    assert l2.used_bytes == 1000


def test_what_exceeds_the_cache_fills_it_alone() -> None:
    l2 = L2Residency(1000)
    l2.insert("a", 600)
    l2.insert("b", 5000)
    assert held(l2, "a", "b") == [0, 1000]


@pytest.mark.parametrize(("traffic", "survives"), [(0, 400), (600, 400), (700, 300), (900, 100), (1000, 0), (5000, 0)])
def test_what_survives_other_traffic_falls_linearly(traffic: int, survives: int) -> None:
    l2 = L2Residency(1000)
    l2.insert("w", 400)
    for _ in range(traffic // 100):
        l2.insert(SPENT, 100)
    assert l2.resident("w") == survives


def test_lines_that_were_hit_go_last() -> None:
    l2 = L2Residency(1000)
    l2.insert("a", 300)
    l2.insert("b", 300)
    l2.insert("a", 200)
    l2.touch("a", 400, spent=False)  # all of the first 300 and 100 of the 200
    l2.insert("c", 500)  # 300 too many: all of b
    assert held(l2, "a", "b", "c") == [500, 0, 500]
    l2.insert("c", 100)
    assert held(l2, "a", "c") == [400, 600]


def test_spent_lines_keep_their_room() -> None:
    l2 = L2Residency(1000)
    l2.insert("a", 600)
    l2.touch("a", 200, spent=True)
    assert held(l2, "a", SPENT) == [400, 0]
    assert l2.used_bytes == 600
    l2.insert("b", 700)  # 300 too many, and the spent lines are the younger ones
    assert held(l2, "a", "b") == [100, 700]


def test_no_more_is_touched_than_is_there() -> None:
    l2 = L2Residency(1000)
    l2.insert("a", 100)
    l2.touch("a", 500, spent=True)
    l2.touch("b", 500, spent=False)
    assert held(l2, "a", "b") == [0, 0]
    assert l2.used_bytes == 100


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 1000),
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 1500), st.sampled_from((None, True, False))), max_size=40
    ),
)
def test_residency_is_never_negative_and_never_above_capacity(
    capacity: int, steps: list[tuple[str, int, bool | None]]
) -> None:
    l2 = L2Residency(capacity)
    for region, num_bytes, spent in steps:
        before = l2.used_bytes
        if spent is None:
            l2.insert(region, num_bytes)
            assert l2.resident(region) >= min(num_bytes, capacity)
        else:
            l2.touch(region, num_bytes, spent=spent)
            assert l2.used_bytes == before
        check_lines(l2)
