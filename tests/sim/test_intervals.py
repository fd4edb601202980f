"""Draws of a profile's values, and the interval of a step that follows from them."""

from __future__ import annotations

import dataclasses

import pytest

from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.sim.intervals import draw_machines, drawn_steps_us, gain_interval, interval_around, quantiles
from k3sim.sim.kernel_errors import LEAST_FAMILIES
from k3sim.sim.machine import Machine
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import Question

H200 = load_machine("h200")


def question(machine: Machine, path: str = "fused") -> Question:
    return Question(
        architecture=load_architecture(),
        layout=Layout(tp=16),
        workload=Workload(),
        machine=machine,
        path=find_path(path),
    )


def exact(machine: Machine, **known: float) -> Machine:
    """``machine`` without any uncertainty but that of the values given with their upper bound."""
    provenance = {}
    for name, origin in machine.provenance.items():
        value = getattr(machine, name)
        middle = 1.0 if isinstance(value, tuple) else value
        provenance[name] = dataclasses.replace(origin, low=middle, high=known.get(name, middle))
    return dataclasses.replace(machine, provenance=provenance)


def test_low_and_high_are_percentiles_of_draws() -> None:
    drawn = draw_machines(H200, 2000)
    for name in ("grid_completion_s", "counter_handoff_s", "l2_loaded_latency_s", "rank_skew_relative_sd"):
        origin, value = H200.provenance[name], getattr(H200, name)
        values = sorted(getattr(one, name) for one in drawn)
        low, high = quantiles(values)
        assert low == pytest.approx(origin.low, rel=0.02), name
        assert high == pytest.approx(origin.high, rel=0.02), name
        assert values[1000] == pytest.approx(value, rel=0.01), name


def test_few_draws_are_spread_evenly() -> None:
    """One in each slice of equal chance: half of any number of draws lie below the value."""
    for num_draws in (2, 10, 40):
        values = [one.grid_completion_s for one in draw_machines(H200, num_draws, seed=3)]
        assert sum(one < H200.grid_completion_s for one in values) == num_draws // 2


def test_what_is_known_does_not_move() -> None:
    for one in draw_machines(H200, 200):
        assert (one.num_sms, one.nvlink_multicast, one.fp4_flops) == (132, True, 0)
        assert isinstance(one.l2_effective_bytes, int)
        assert one.hbm_copy_bytes_per_s <= one.hbm_read_bytes_per_s
        assert one.hbm_in_flight_curve[-1][1] <= one.hbm_read_bytes_per_s
        assert [at for at, _ in one.hbm_in_flight_curve] == [at for at, _ in H200.hbm_in_flight_curve]


def test_draws_follow_the_seed() -> None:
    again, other = draw_machines(H200, 10, seed=1), draw_machines(H200, 10, seed=2)
    assert draw_machines(H200, 10, seed=1) == again != other
    moved = dataclasses.replace(H200, launch_latency_s=2.95e-7)
    for before, after in zip(again, draw_machines(moved, 10, seed=1), strict=True):
        assert before.grid_completion_s == after.grid_completion_s
        assert before.launch_latency_s != after.launch_latency_s


def test_values_do_not_move_together() -> None:
    drawn = draw_machines(H200, 400)
    slow = [one for one in drawn if one.grid_completion_s > H200.grid_completion_s]
    both = sum(one.counter_handoff_s > H200.counter_handoff_s for one in slow)
    assert len(slow) == 200
    assert 70 < both < 130  # of 200; 100 when independent


def test_quantiles_interpolate() -> None:
    assert quantiles([0.0, 1.0, 2.0, 3.0, 4.0], level=0.5) == (1.0, 3.0)
    assert quantiles([0.0, 10.0]) == pytest.approx((0.5, 9.5))


def interval_of(asked: Question, *, num_draws: int, seed: int = 0) -> tuple[float, float]:
    predicted, *steps = drawn_steps_us(asked, num_draws=num_draws, seed=seed)
    return interval_around(predicted, steps)


def test_a_gain_is_taken_draw_by_draw() -> None:
    """Twice as fast on every machine that was drawn, however far the steps themselves move."""
    assert gain_interval([100.0, 80.0, 140.0], [50.0, 40.0, 70.0]) == (2.0, 2.0)
    assert gain_interval([100.0, 90.0, 120.0], [50.0, 50.0, 50.0]) == (pytest.approx(1.83), pytest.approx(2.37))


def test_an_interval_holds_its_prediction() -> None:
    assert interval_around(5.0, [6.0, 7.0, 8.0]) == (5.0, pytest.approx(7.9))
    assert interval_around(6.5, [6.0, 7.0, 8.0]) == (pytest.approx(6.1), pytest.approx(7.9))


@pytest.fixture
def right_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were all predicted as they were measured."""
    table = {"a GPU": {f"family {number}": (1.0, 1.0) for number in range(LEAST_FAMILIES)}}
    monkeypatch.setattr("k3sim.sim.kernel_errors.shipped_errors", lambda: table)


@pytest.mark.usefixtures("right_kernels")
def test_a_machine_known_exactly_gives_no_interval() -> None:
    """Of the project's kernels, whose footprints are known; those of public ones open an interval of their own."""
    asked = dataclasses.replace(question(exact(H200)), path=find_path("fused", kernel_set="own"))
    step_us = predict(asked).step_us
    assert interval_of(asked, num_draws=2) == (step_us, step_us)


@pytest.mark.usefixtures("right_kernels")
def test_unpublished_footprints_open_an_interval() -> None:
    low, high = interval_of(question(exact(H200)), num_draws=4)
    assert high > 1.01 * low


@pytest.mark.usefixtures("right_kernels")
def test_the_interval_is_that_of_its_parts() -> None:
    """Every one of the stock path's kernel boundaries has a release: what it may take longer is found in each."""
    asked = question(exact(H200, grid_completion_s=12e-7), "stock")
    step_us = predict(asked).step_us
    low, high = interval_of(asked, num_draws=12)
    assert low == step_us  # nothing can be faster
    slowest = predict(question(dataclasses.replace(H200, grid_completion_s=12e-7), "stock")).step_us
    assert high == pytest.approx(slowest, rel=0.03)
    assert high > 1.03 * step_us


def test_the_seed_decides_the_interval() -> None:
    asked = question(H200)
    first, again, other = (interval_of(asked, num_draws=3, seed=seed) for seed in (4, 4, 5))
    assert first == again != other
    assert first[0] <= predict(asked).step_us <= first[1]
