"""Coverage: how many cases lie inside their interval, how many should, and the table that the intervals draw from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from k3sim.calibrate.compare import kernel_errors
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.coverage import coverage_of, likely_counts
from k3sim.sim import engine
from k3sim.sim.intervals import families_of, with_errors_of_step
from k3sim.sim.kernel_errors import TABLE, family_of
from k3sim.sim.predict import predict
from k3sim.sim.question import question_of

CASE = ComparedCase(kind="step", label="a step", measured=100.0, predicted=95.0, unit="us")


def test_the_table_of_errors_is_fresh() -> None:
    fresh = kernel_errors.text_of(kernel_errors.measured_errors())
    assert TABLE.read_text(encoding="utf-8") == fresh, "python -m k3sim.calibrate.compare.kernel_errors writes it"


def test_coverage_of_known_noise_is_right() -> None:
    """Normal noise in intervals of 1.645 standard deviations: nine in ten, and likely counts nearly always."""
    generator = random.Random(3)
    counts = []
    for _ in range(300):
        cases = [replace(CASE, measured=generator.gauss(100, 5), low=100 - 8.224, high=100 + 8.224) for _ in range(40)]
        found = coverage_of(cases)
        assert found is not None and found.num_cases == 40 and len(found.misses) == 40 - found.num_inside
        counts.append(found.num_inside)
    assert sum(counts) / 300 / 40 == pytest.approx(0.9, abs=0.01)
    low, high = likely_counts(40)
    assert sum(low <= one <= high for one in counts) / 300 > 0.93


@pytest.mark.parametrize(("num_cases", "counts"), [(1, (0, 1)), (10, (7, 10)), (27, (21, 27)), (100, (84, 95))])
def test_likely_counts_are_those_of_a_binomial(num_cases: int, counts: tuple[int, int]) -> None:
    assert likely_counts(num_cases) == counts


def test_misses_are_named() -> None:
    cases = [
        CASE,
        replace(CASE, low=90.0, high=99.0, id="gb200-one"),
        replace(CASE, low=90.0, high=109.0, label="another"),
        replace(CASE, low=101.0, high=109.0, label="third"),
    ]
    found = coverage_of(cases)
    assert found is not None
    assert (found.num_cases, found.num_inside, found.misses) == (3, 1, ("gb200-one", "third"))
    assert found.half_width == pytest.approx(4.5 / 95)
    assert found.text() == (
        "1 of 3 inside their 90 % interval (right ones: 1 to 3), which is ±5 % wide; outside: gb200-one, third"
    )
    assert coverage_of([CASE]) is None


def test_each_left_out_family_is_bounded_by_others() -> None:
    errors = {"here": {f"family {number}": [0.9 + number / 100] for number in range(12)}}
    rows = kernel_errors.left_out_table(errors)
    assert {one.num_pools for one in rows} == {11}
    assert all(one.low >= 0.9 and one.high <= 1.02 for one in rows)
    assert sum(one.num_inside for one in rows) in (10, 11, 12)


@pytest.mark.parametrize("family", ["expert_gemv", "latent_tail"])
def test_a_step_grows_by_what_its_kernels_grow(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Kernels of one family slower in the engine: to first order the step gains what they gain on its path."""
    question = question_of("k3sim timeline --machine gb200 --path stock --no-skew")
    families = families_of(question)

    def step_and_family_us() -> tuple[float, float]:
        prediction = predict(question)
        on_path = (us for stage, _, us in prediction.contributions() if families.get(stage) == family)
        return prediction.step_us, sum(on_path)

    process = engine.KernelProcess

    def slower(**given: Any) -> engine.KernelProcess:
        return process(**{**given, "pace": 1.1 if family_of(given["call"].operator) == family else 1.0})

    step_us, on_path_us = step_and_family_us()
    monkeypatch.setattr(engine, "KernelProcess", slower)
    grown_us, grown_on_path_us = step_and_family_us()
    assert grown_on_path_us > on_path_us + 10
    assert grown_us - step_us == pytest.approx(grown_on_path_us - on_path_us, rel=0.05)


def test_an_interval_holds_its_prediction_on_every_path() -> None:
    for path in ("stock", "fused", "megakernel"):
        prediction = predict(question_of(f"k3sim timeline --path {path}"))
        values = with_errors_of_step([prediction, prediction, prediction], 0)
        assert values[0] == prediction.step_us
        assert min(values[1:]) < prediction.step_us < max(values[1:])
