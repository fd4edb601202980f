"""NVLink: ports, flights, visibility, groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY

from k3sim.sim.components.fabric import Fabric, Fence


def fabric(num_ranks: int, *, all_ranks: bool = True, **machine: object) -> tuple[simpy.Environment, Fabric]:
    env = simpy.Environment(initial_time=0)
    ranks = tuple(range(num_ranks)) if all_ranks else (0,)
    return env, Fabric(env, replace(TINY, **machine), ranks)  # type: ignore[arg-type]


def bytes_of(one: Fabric, resource: str, end_ps: int) -> dict[int, float]:
    return {counter.rank: counter.bytes_until(end_ps) for counter in one.counters() if counter.resource == resource}


def test_a_push_is_visible_one_way_later() -> None:
    env, one = fabric(2)
    exchange = one.exchange(7, 0, 2)
    sent = one.push(0, exchange, 100)
    env.run(until=sent)
    assert env.now == 100
    one.push(1, exchange, 50)
    env.run(until=exchange.complete)
    assert exchange.visible_ps == {0: 300, 1: 350}
    assert env.now == 350
    assert bytes_of(one, "nvlink egress", 350) == {0: 100, 1: 50}
    assert bytes_of(one, "nvlink ingress", 350) == {1: 100, 0: 50}


def test_a_fence_delays_what_is_seen_only() -> None:
    env, one = fabric(2, all_ranks=False)
    exchange = one.exchange(0, 0, 2)
    env.run(until=one.push(0, exchange, 100, fence=Fence.OWN))
    assert env.now == 100
    env.run()
    assert exchange.visible_ps == {0: 360}


def test_an_empty_push_is_a_flight() -> None:
    env, one = fabric(2, all_ranks=False)
    exchange = one.exchange(0, 0, 2)
    one.push(0, exchange, 0)
    env.run(until=exchange.complete)
    assert env.now == 200


def test_an_exchange_waits_for_all_simulated_ranks() -> None:
    env, one = fabric(4)
    exchange = one.exchange(0, 0, 4)
    for rank in range(3):
        one.push(rank, exchange, 10)
    env.run()
    assert not exchange.complete.triggered
    one.push(3, exchange, 10)
    env.run()
    assert exchange.complete.triggered


def test_groups_of_one_call_exchange_apart() -> None:
    env, one = fabric(4)
    left, right = one.exchange(0, 1, 2), one.exchange(0, 2, 2)
    assert one.exchange(0, 0, 2) is left
    assert left is not right
    one.push(0, left, 100)
    one.push(1, left, 100)
    env.run()
    assert left.complete.triggered and not right.complete.triggered
    assert bytes_of(one, "nvlink ingress", 300) == {0: 100, 1: 100}


@pytest.mark.parametrize(
    ("multicast", "egress", "end_ps"),
    [(True, 100, 700), (False, 700, 701)],  # without multicast a copy is 142857 bytes/us, rounded down
)
def test_multicast_leaves_the_port_once(
    multicast: bool, egress: int, end_ps: int
) -> None:
    for all_ranks in (False, True):
        env, one = fabric(8, all_ranks=all_ranks, nvlink_multicast=multicast, nvlink_ingress_bytes_per_s=7e12)
        exchange = one.exchange(0, 0, 8)
        for rank in (0,) if not all_ranks else range(8):
            sent = one.push(rank, exchange, 100)
        env.run(until=sent)
        # With multicast the port would be done at 100; all seven peers' data enters at 7 bytes a picosecond.
        assert env.now == (100 if multicast else end_ps)
        assert 100 * one.copies(8) == egress
        assert bytes_of(one, "nvlink egress", 1000)[0] == pytest.approx(egress, abs=1)
        assert bytes_of(one, "nvlink ingress", 1000)[0] == pytest.approx(700, abs=1)


@pytest.mark.parametrize(("in_switch", "received"), [(True, 100), (False, 700)])
def test_a_load_returns_one_sum_or_parts(in_switch: bool, received: int) -> None:
    env, one = fabric(8, nvlink_in_switch_reduction=in_switch)
    env.run(until=one.load(0, one.exchange(0, 0, 8), 100))
    # There, what enters the port, and back; rates are whole, so a seventh of the port is rounded down.
    assert env.now == pytest.approx(200 + 10 + received + 200, abs=1)
    assert bytes_of(one, "nvlink ingress", 2000)[0] == pytest.approx(received, abs=1)
    assert bytes_of(one, "nvlink egress", 2000) == pytest.approx({rank: 100 for rank in range(1, 8)}, abs=1)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((2, 4, 8)), st.booleans(), st.lists(st.integers(1, 5000), min_size=8, max_size=8))
def test_what_leaves_arrives_within_port_capacities(
    group_size: int, multicast: bool, sizes: list[int]
) -> None:
    env, one = fabric(8, nvlink_multicast=multicast)
    for rank, num_bytes in enumerate(sizes):
        one.push(rank, one.exchange(0, rank, group_size), num_bytes)
    env.run()
    end_ps = int(env.now)
    sent, received = bytes_of(one, "nvlink egress", end_ps), bytes_of(one, "nvlink ingress", end_ps)
    for rank, num_bytes in enumerate(sizes):
        group = range(rank // group_size * group_size, (rank // group_size + 1) * group_size)
        assert sent[rank] == pytest.approx(num_bytes * (1 if multicast else group_size - 1), abs=8)
        assert received[rank] == pytest.approx(sum(sizes[peer] for peer in group if peer != rank), abs=8)
    for counter in one.counters():
        assert max(rate for _, rate in counter.steps) <= counter.capacity_bytes_per_us


def test_data_is_not_visible_a_tick_earlier() -> None:
    env, one = fabric(2, all_ranks=False)
    exchange = one.exchange(0, 0, 2)
    one.push(0, exchange, 100)
    env.run(until=299)
    assert not exchange.complete.triggered
    env.run(until=301)
    assert exchange.complete.triggered and exchange.visible_ps == {0: 300}


def test_each_slot_beyond_the_first_takes_longer() -> None:
    _, one = fabric(2, slot_visibility_s=5e-12)
    assert [one.visibility_ps(count) for count in (1, 2, 8)] == [30, 35, 65]
