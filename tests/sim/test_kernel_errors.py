"""Errors of kernels: what is left out, how many families bound a new one, and how often they do."""

from __future__ import annotations

import math
import random

import pytest

from k3sim.sim.intervals import interval_around, quantiles
from k3sim.sim.kernel_errors import (
    ERRORS_A_DRAW,
    LEAST_FAMILIES,
    LEAST_READINGS,
    conformal_rank,
    drawn_ratios,
    family_of,
    left_out,
    mean_over_families,
    pools_for_chain,
    shipped_errors,
    with_kernel_errors,
)

BIAS, SPREAD, OWN = 0.02, 0.15, 0.05  # of the logarithm of a ratio: of all families, between them, within one
MEAN = math.exp(BIAS + (SPREAD**2 + OWN**2) / 2)


def families(count: int, seed: int) -> list[list[float]]:
    """Ratios of families that are exchangeable: each has an error of its own, and its readings differ around it."""
    generator = random.Random(seed)
    middles = [generator.gauss(BIAS, SPREAD) for _ in range(count)]
    return [[math.exp(generator.gauss(middle, OWN)) for _ in range(12)] for middle in middles]


def test_the_rank_is_that_of_finite_samples() -> None:
    assert [conformal_rank(count) for count in (8, 9, 10, 19, 20, 99)] == [9, 9, 10, 18, 19, 90]
    assert conformal_rank(19, 0.95) == 19
    assert LEAST_FAMILIES == 9  # of eight, the ninth would be needed


def test_a_rank_holds_nine_in_ten() -> None:
    """Of exchangeable numbers the one at the rank is not below a new one with a chance of at least nine in ten."""
    generator = random.Random(1)
    for count in (9, 10, 17, 40):
        held = 0
        for _ in range(4000):
            *known, new = (generator.expovariate(1.0) for _ in range(count + 1))
            held += new <= sorted(known)[conformal_rank(count) - 1]
        assert 0.885 <= held / 4000 <= conformal_rank(count) / (count + 1) + 0.015, count


@pytest.mark.parametrize("count", [11, 20])
def test_a_new_family_is_inside_nine_in_ten(count: int) -> None:
    held = 0
    for seed in range(400):
        *known, new = families(count + 1, seed)
        low, high = quantiles(sorted(drawn_ratios(known, ["chain"], 400, str(seed))["chain"]))
        held += low <= new[0] <= high
    assert 0.86 <= held / 400 <= 0.96


def test_a_family_error_is_carried_to_a_step() -> None:
    """Two stages of one family move together; that every family is 30 % slow moves no step, but a kernel alone."""
    errors = {"a GPU": {f"family {number}": (1.3, 1.3) for number in range(12)}}
    times = {("mla", "a"): 40.0, ("mla", "b"): 20.0}
    same = with_kernel_errors([100.0] * 3, [times] * 3, "another", 0, errors=errors)
    assert same == pytest.approx([100.0] * (1 + 2 * ERRORS_A_DRAW))
    alone = with_kernel_errors([100.0] * 2, [{("mla", "chain"): 100.0}] * 2, "another", 0, in_chain=True, errors=errors)
    assert alone == pytest.approx([100.0] + [130.0] * ERRORS_A_DRAW)
    apart = {"a GPU": {f"family {number}": (0.9 + number / 50,) for number in range(12)}}
    *_, last = with_kernel_errors([100.0] * 2, [times] * 2, "another", 0, errors=apart)
    only = {("mla", "a"): 60.0}
    *_, once = with_kernel_errors([100.0] * 2, [only] * 2, "another", 0, errors=apart)
    assert last == pytest.approx(once)  # each stand-in has one reading, so both stages have it


@pytest.mark.parametrize("num_families", [4, 12])
def test_steps_with_known_noise_are_inside(num_families: int) -> None:
    """Steps of kernels whose families have errors like those that were read: the interval holds nine in ten."""
    held = 0
    for seed in range(250):
        known = families(14 + num_families, seed)
        read = {"read here": {f"read {number}": ratios for number, ratios in enumerate(known[:14])}}
        times = {(f"of the step {number}", "stage"): 100.0 / num_families for number in range(num_families)}
        measured = sum(100.0 / num_families * ratios[0] / MEAN for ratios in known[14:])
        predicted, *drawn = with_kernel_errors([100.0] * 11, [times] * 11, "another", seed, errors=read)
        low, high = interval_around(predicted, drawn)
        assert low <= 100.0 <= high
        held += low <= measured <= high
    assert 0.85 <= held / 250 <= 0.98


def test_family_and_gpu_are_left_out() -> None:
    errors = {
        "here": {f"family {number}": (1.1,) for number in range(10)},
        "there": {f"family {number}": (1.2, 1.3) for number in range(10)},
    }
    found = left_out(errors, "here", "family 3")
    assert len(found) == 9 and "family 3" not in found
    assert set(found.values()) == {(1.2, 1.3)}
    few = {**errors, "there": {f"family {number}": (1.2,) for number in range(5)}}
    found = left_out(few, "here", "family 3")  # eight families at most elsewhere: those of the GPU bound it too
    assert len(found) == 9 and "family 3" not in found and found["family 9"] == (1.1,)
    for gpu, of in shipped_errors().items():
        for family in of:
            assert len(left_out(shipped_errors(), gpu, family)) >= LEAST_FAMILIES, (gpu, family)


def test_a_reading_of_its_own_family_changes_nothing() -> None:
    """No interval of a family or a GPU depends on what was read of it."""
    times = [{("kda_decode", "kda.decode"): 30.0, ("cublas", "kda.in_proj"): 50.0}] * 3
    moved = {gpu: {family: tuple(ratios) for family, ratios in of.items()} for gpu, of in shipped_errors().items()}
    here = "NVIDIA GB200 NVL72"
    moved[here] = {family: tuple(3 * ratio for ratio in ratios) for family, ratios in moved[here].items()}
    before = with_kernel_errors([100.0] * 3, times, here, 0)
    assert with_kernel_errors([100.0] * 3, times, here, 0, errors=moved) == before
    alone = [{("kda_decode", "chain"): 100.0}] * 3
    for gpu, of in moved.items():
        if "kda_decode" in of:
            moved[gpu] = {**of, "kda_decode": (9.0,)}
    for gpu in moved:
        before = with_kernel_errors([100.0] * 3, alone, gpu, 0, in_chain=True)
        if gpu != here:  # whose other families were moved above
            without = {**moved, here: shipped_errors()[here]}
            assert with_kernel_errors([100.0] * 3, alone, gpu, 0, in_chain=True, errors=without) == before, gpu


def test_a_family_read_often_elsewhere_bounds_itself() -> None:
    """Nineteen readings on other GPUs, the least whose ends hold nine in ten; those of the GPU itself never count."""
    others = {f"family {number}": (2.0,) for number in range(12)}
    own = tuple(1 + number / 100 for number in range(LEAST_READINGS))
    errors = {"there": {**others, "gemv": own}, "here": {"gemv": (5.0,) * 30}}
    assert LEAST_READINGS == 19
    assert pools_for_chain(errors, "here", "gemv") == [(ratio,) for ratio in own]
    few = {**errors, "there": {**others, "gemv": own[1:]}}
    assert set(pools_for_chain(few, "here", "gemv")) == {(2.0,)}
    alone = with_kernel_errors([1.0] * 2, [{("gemv", "chain"): 1.0}] * 2, "here", 0, in_chain=True, errors=errors)
    assert max(alone) <= 1.18 + 1e-9


def test_each_family_counts_once() -> None:
    assert mean_over_families([[1.0] * 50, [2.0], [3.0]]) == 2.0
    few, many = drawn_ratios([[1.0] * 50, [2.0]], ["a"], 3000, "key")["a"], [1.0]
    assert 0.45 < sum(one in many for one in few) / 3000 < 0.55


def test_paths_see_the_same_errors() -> None:
    times = {("cublas", "kda.in_proj"): 50.0}
    one = with_kernel_errors([100.0] * 3, [times] * 3, "any", 4)
    other = with_kernel_errors([100.0] * 3, [{**times, ("mla_decode", "mla.attention"): 0.0}] * 3, "any", 4)
    assert one == other
    assert one != with_kernel_errors([100.0] * 3, [times] * 3, "any", 5)


def test_without_draws_there_is_nothing_to_add() -> None:
    assert with_kernel_errors([100.0], [{("cublas", "a"): 100.0}], "any", 0) == [100.0]


def test_families_are_folders_but_for_all_reduces() -> None:
    assert [family_of(one) for one in ("skinny_gemv.tiled", "unfused.norm", "unfused.all_reduce")] == [
        "skinny_gemv", "unfused", "all_reduce",
    ]  # fmt: skip
