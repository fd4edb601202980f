"""A comparison must find one wrong element, a small bias everywhere, a NaN and a shape."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.kernels.harness.tolerance import TOLERANCES, compare  # noqa: E402


def _reference() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def test_one_rounding_to_bf16_is_accepted() -> None:
    ref = _reference()
    assert compare(ref.bfloat16(), ref, "bf16_sum")


def test_bf16_rounding_is_refused_where_fp32_is_due() -> None:
    ref = _reference()
    assert not compare(ref.bfloat16(), ref, "fp32_sum")


def test_one_wrong_element_is_named() -> None:
    ref = _reference()
    out = ref.clone()
    out[3, 5] += 0.1
    verdict = compare(out, ref, "bf16_sum", name="y")
    assert not verdict
    assert "y: " in str(verdict) and "1 of 1024" in str(verdict) and "(3, 5)" in str(verdict)


def test_a_bias_below_every_single_bound_is_refused() -> None:
    ref = _reference()
    tolerance = TOLERANCES["bf16_sum"]
    out = ref + 0.9 * tolerance.relative * ref.abs() + 0.9 * tolerance.absolute
    verdict = compare(out, ref, "bf16_sum")
    assert not verdict and "0 of 1024" in str(verdict)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_unwritten_element_is_refused(value: float) -> None:
    ref = _reference()
    out = ref.clone()
    out[0, 0] = value
    assert not compare(out, ref, "attention_fp8")


def test_equal_infinities_are_accepted() -> None:
    ref = _reference()
    ref[0, 0] = -math.inf  # the log-sum-exp of an empty shard
    assert compare(ref.clone(), ref, "log_sum_exp")
    out = ref.clone()
    out[0, 0] = math.inf
    assert not compare(out, ref, "log_sum_exp")


def test_another_shape_is_refused() -> None:
    verdict = compare(torch.zeros(4), torch.zeros(1, 4), "fp32_sum")
    assert not verdict and "(4,)" in str(verdict) and "(1, 4)" in str(verdict)


def test_every_family_gives_its_reason() -> None:
    assert all(len(one.reason) > 20 for one in TOLERANCES.values())
