"""Shared bandwidth: exact times, and the max-min property and conservation on random transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import simpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3sim.sim.components.bandwidth import SharedBandwidth
from k3sim.sim.timeline.timeline import PS_PER_US, Counter

BYTE_PER_PS = 1_000_000  # the same in bytes per microsecond


@dataclass(frozen=True)
class Wanted:
    start_ps: int
    num_bytes: int
    weights: Mapping[str, int]
    cap: int
    share: int = 1


def run(capacities: Mapping[str, int], wanted: Sequence[Wanted]) -> tuple[list[int], dict[str, Counter]]:
    """End of each transfer, and the counters."""
    env = simpy.Environment(initial_time=0)
    ports = SharedBandwidth(env, capacities)
    ends = [-1] * len(wanted)

    def one(index: int, what: Wanted):  # type: ignore[no-untyped-def]
        yield env.timeout(what.start_ps)
        yield ports.transfer(what.num_bytes, what.weights, what.cap)
        ends[index] = int(env.now)

    for index, what in enumerate(wanted):
        env.process(one(index, what))
    env.run()
    return ends, {counter.resource: counter for counter in ports.counters(0)}


def rates_at_once(capacities: Mapping[str, int], wanted: Sequence[Wanted]) -> list[int]:
    """Rates of transfers that have all started, in bytes per microsecond."""
    env = simpy.Environment(initial_time=0)
    ports = SharedBandwidth(env, capacities)
    for what in wanted:
        ports.transfer(10**12, what.weights, what.cap, share=what.share)
    env.run(until=1)
    return [transfer.rate for transfer in ports._transfers]


def test_outstanding_bytes_are_capped_by_remaining_bytes() -> None:
    env = simpy.Environment(initial_time=0)
    ports = SharedBandwidth(env, {"hbm": BYTE_PER_PS})
    ends: dict[str, int] = {}

    def one(name: str, start_ps: int, num_bytes: int, share: int):  # type: ignore[no-untyped-def]
        yield env.timeout(start_ps)
        yield ports.transfer(num_bytes, {"hbm": 1}, 10 * BYTE_PER_PS, share=share)
        ends[name] = int(env.now)

    # A stream with 1000 bytes in flight has 300 left when a burst of 600 comes: both end after all 900. A small burst
    # that meets it earlier is through when the queue that it met is.
    for what in (("stream", 0, 5000, 1000), ("small", 1000, 10, 10), ("burst", 4710, 600, 600)):
        env.process(one(*what))
    env.run()
    assert ends["small"] == pytest.approx(1000 + 1000 + 10, abs=2)
    assert ends["stream"] == pytest.approx(4710 + 900, abs=3) and ends["burst"] == pytest.approx(4710 + 900, abs=3)


# -- exact ----------------------------------------------------------------------------------------------------------


def test_one_transfer_runs_at_the_tightest_bound() -> None:
    ends, counters = run(
        {"hbm": 2 * BYTE_PER_PS, "l2": BYTE_PER_PS},
        [Wanted(10, 1000, {"hbm": 1, "l2": 1}, 5 * BYTE_PER_PS)],
    )
    assert ends == [1010]
    assert counters["hbm"].steps == ((0, 0), (10, BYTE_PER_PS), (1010, 0))


def test_a_transfer_ends_with_its_last_byte() -> None:
    ends, counters = run({"hbm": BYTE_PER_PS}, [Wanted(0, 2, {"hbm": 1}, 300_000)])
    assert ends == [7]  # 2 / 0.3 = 6.67
    assert counters["hbm"].bytes_until(7) == pytest.approx(2.1)


def test_transfers_started_together_share_from_the_start() -> None:
    ends, _ = run(
        {"hbm": BYTE_PER_PS},
        [Wanted(0, 1000, {"hbm": 1}, 10 * BYTE_PER_PS), Wanted(0, 3000, {"hbm": 1}, 10 * BYTE_PER_PS)],
    )
    assert ends == [2000, 4000]


def test_a_capped_transfer_leaves_the_rest_to_others() -> None:
    ends, _ = run(
        {"hbm": BYTE_PER_PS},
        [
            Wanted(0, 1000, {"hbm": 1}, BYTE_PER_PS // 5),
            Wanted(0, 2000, {"hbm": 1}, BYTE_PER_PS),
            Wanted(0, 2000, {"hbm": 1}, BYTE_PER_PS),
        ],
    )
    assert ends == [5000, 5000, 5000]  # 0.2, 0.4, 0.4


def test_a_joining_transfer_slows_the_running_one() -> None:
    ends, counters = run(
        {"hbm": BYTE_PER_PS},
        [Wanted(0, 1000, {"hbm": 1}, BYTE_PER_PS), Wanted(600, 100, {"hbm": 1}, BYTE_PER_PS)],
    )
    assert ends == [1100, 800]
    assert counters["hbm"].steps == ((0, BYTE_PER_PS), (1100, 0))


def test_a_full_resource_leaves_others_alone() -> None:
    ends, _ = run(
        {"in 1": BYTE_PER_PS, "in 2": BYTE_PER_PS, "out": 10 * BYTE_PER_PS},
        [
            Wanted(0, 1000, {"out": 1, "in 1": 1}, 10 * BYTE_PER_PS),
            Wanted(0, 1000, {"out": 1, "in 1": 1}, 10 * BYTE_PER_PS),
            Wanted(0, 1000, {"out": 1, "in 2": 1}, 10 * BYTE_PER_PS),
        ],
    )
    assert ends == [2000, 2000, 1000]


def test_a_weight_counts_every_copy() -> None:
    ends, counters = run({"out": BYTE_PER_PS}, [Wanted(0, 100, {"out": 7}, BYTE_PER_PS)])
    assert ends == [701]  # 142857 bytes/us: a rate is a whole number
    assert counters["out"].bytes_until(701) == pytest.approx(700, abs=1)


def test_nothing_to_move_takes_no_time() -> None:
    ends, counters = run({"hbm": 1}, [Wanted(5, 0, {"hbm": 1}, 1)])
    assert ends == [5]
    assert counters == {}


def test_utilisation_is_the_share_in_use() -> None:
    env = simpy.Environment(initial_time=0)
    ports = SharedBandwidth(env, {"hbm": 1000})
    assert ports.utilisation("hbm") == 0
    ports.transfer(1, {"hbm": 1}, 250)
    env.run(until=1)
    assert ports.utilisation("hbm") == 0.25
    env.run()
    assert ports.utilisation("hbm") == 0


# -- properties -----------------------------------------------------------------------------------------------------

RESOURCES = ("a", "b", "c")
CAPACITIES = st.fixed_dictionaries({name: st.integers(1000, 10**7) for name in RESOURCES})
TRANSFERS = st.lists(
    st.builds(
        Wanted,
        st.integers(0, 3000),
        st.integers(1, 5000),
        st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 7), min_size=1),
        st.integers(100, 10**7),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(CAPACITIES, TRANSFERS)
@example({"a": 1000, "b": 1000, "c": 1000}, [Wanted(0, 1, {"a": 7}, 10**7)] * 8)
def test_bytes_served_are_bytes_asked_for(
    capacities: dict[str, int], wanted: list[Wanted]
) -> None:
    ends, counters = run(capacities, wanted)
    last_ps = max(ends)
    for name in RESOURCES:
        asked = sum(what.num_bytes * what.weights.get(name, 0) for what in wanted)
        if not asked:
            assert name not in counters
            continue
        assert max(rate for _, rate in counters[name].steps) <= capacities[name]
        # The counter runs at full rate through the picosecond in which a transfer ends: less than one of each.
        slack = Fraction(sum(what.weights.get(name, 0) * min(what.cap, capacities[name]) for what in wanted), PS_PER_US)
        served = counters[name].bytes_until(last_ps)
        assert asked - 1e-6 <= served <= asked + float(slack) + 1e-6
    for what, end_ps in zip(wanted, ends, strict=True):
        fastest = min(what.cap, *(capacities[name] // weight for name, weight in what.weights.items()))
        assert end_ps >= what.start_ps + -(-what.num_bytes * PS_PER_US // fastest)


def used_of(rates: Sequence[int], wanted: Sequence[Wanted]) -> dict[str, int]:
    """What the transfers take of each resource together."""
    pairs = list(zip(rates, wanted, strict=True))
    return {name: sum(rate * what.weights.get(name, 0) for rate, what in pairs) for name in RESOURCES}


def held_back(rates: Sequence[int], wanted: Sequence[Wanted]) -> list[tuple[int, Wanted]]:
    """Transfers that are slower than their cap; none is faster, and none stands."""
    pairs = list(zip(rates, wanted, strict=True))
    assert all(1 <= rate <= what.cap for rate, what in pairs)
    return [(rate, what) for rate, what in pairs if rate != what.cap]


@settings(max_examples=200, deadline=None)
@given(CAPACITIES, TRANSFERS)
def test_rates_are_max_min_fair(capacities: dict[str, int], wanted: list[Wanted]) -> None:
    rates = rates_at_once(capacities, wanted)
    used = used_of(rates, wanted)
    for name in RESOURCES:
        assert used[name] <= capacities[name]
    for rate, what in held_back(rates, wanted):
        # A bottleneck: a resource too full for one more byte per microsecond for each of its transfers, on which
        # nobody is faster. Whole rates leave less than one byte per microsecond and unit of weight.
        assert any(
            capacities[name] - used[name] < sum(other.weights.get(name, 0) for other in wanted)
            and all(
                other_rate <= rate for other_rate, other in zip(rates, wanted, strict=True) if name in other.weights
            )
            for name in what.weights
        ), (rates, what)


@settings(max_examples=200, deadline=None)
@given(CAPACITIES, TRANSFERS, st.lists(st.integers(1, 50), min_size=8, max_size=8))
def test_rates_are_fair_for_shares(capacities: dict[str, int], wanted: list[Wanted], shares: list[int]) -> None:
    wanted = [replace(one, share=share) for one, share in zip(wanted, shares, strict=False)]
    rates = rates_at_once(capacities, wanted)
    used = used_of(rates, wanted)
    for rate, what in held_back(rates, wanted):
        # As above, by rate over share; a whole rate is less than one below its share.
        assert any(
            capacities[name] - used[name] < sum(other.weights.get(name, 0) for other in wanted)
            and all(
                other_rate * what.share <= (rate + 1) * other.share
                for other_rate, other in zip(rates, wanted, strict=True)
                if name in other.weights and other_rate > 1
            )
            for name in what.weights
        ), (rates, what)


def test_the_order_of_asking_changes_no_rate() -> None:
    capacities = {"a": 1000, "b": 3000, "c": 500}
    wanted = [
        Wanted(0, 1, {"a": 1, "b": 2}, 10**6),
        Wanted(0, 1, {"b": 1}, 700),
        Wanted(0, 1, {"c": 1, "b": 1}, 10**6),
        Wanted(0, 1, {"a": 3}, 10**6),
    ]
    # a: 1000 over four shares is 250; c: 500; b has 3000 - 500 - 500 left for the capped 700.
    assert rates_at_once(capacities, wanted) == [250, 700, 500, 250]
    assert rates_at_once(capacities, wanted[::-1]) == [250, 500, 700, 250]
