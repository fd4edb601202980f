"""How far predictions are from what was measured, in bands with two sides.

A band holds the mean error of a group of stored measurements. A change that moves a mean out of its band is looked at,
better or worse: an improvement that nobody expected is a mistake as often as not. When it is understood, the centre is
moved (``python tests/calibrate/test_accuracy.py`` prints the present means); a band is never widened.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import pytest

from k3sim.calibrate import own_kernels, own_steps
from k3sim.calibrate.validate import Row

WIDTH = 0.01  # to either side of a centre


@cache
def steps() -> tuple[Row, ...]:
    return tuple(own_steps.own_step_rows())


def steps_of(path: str) -> list[Row]:
    return [row for row in steps() if row.label.removeprefix("h200: ").startswith(path)]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "own kernels": own_kernels.own_kernel_rows,
    "cuBLAS": own_kernels.cublas_rows,
    "stock steps": lambda: steps_of("stock,"),
    "fused steps": lambda: steps_of("fused,"),
    "steps with some switches": lambda: steps_of("fused with"),
}
# Centre: mean relative error, positive when predicted slower.
CENTRES = {
    "own kernels": -0.094,
    "cuBLAS": -0.097,
    "stock steps": -0.151,
    "fused steps": -0.227,
    "steps with some switches": -0.173,
}


def mean_error(group: str) -> float:
    return statistics.fmean(row.error for row in GROUPS[group]())


@pytest.mark.parametrize("group", GROUPS)
def test_the_mean_error_is_where_it_was(group: str) -> None:
    assert mean_error(group) == pytest.approx(CENTRES[group], abs=WIDTH)


def test_every_stored_step_is_in_a_group() -> None:
    assert len(steps()) == sum(len(GROUPS[name]()) for name in GROUPS if "steps" in name)


if __name__ == "__main__":
    for name in GROUPS:
        print(f'    "{name}": {mean_error(name):.3f},')
