"""What times of kernels say of machine values that no probe reads: a joint fit, reported and not put into a profile.

The decode rate of FP4 weights and the set-up of tensor cores have no probe yet; profiles carry them over. A few kernels
that use them were measured, and the simulator is run backwards here: least squares over the logarithms of the values,
on the logarithms of the times. Whole steps never enter. Three things are asked of the result:

* Do the data determine each value? By the profile likelihood: along a value, all others fitted anew, the sum of squares
  must rise on both sides within the value's range, and within a factor of ``MOST_FACTOR``. Otherwise it is reported as
  not determined, with the reason. Singular values of the residuals' derivatives say the same of combinations.
* How far off is a shape that was left out of the fit?
* Does the profile's value lie inside the interval?

A value found here also takes up whatever a cost function leaves out, which is why it stays out of the profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3sim.calibrate.compare.chain import ChainedKernel, chain_us
from k3sim.calibrate.compare.shipped_kernels import measured_chains
from k3sim.calibrate.fit.fit import require_scipy
from k3sim.sim.machine import Machine
from k3sim.sim.whatif import loopback_fabric

#: Values without a probe, the range within which each is looked for, and the few kernels that depend on it. Groups are
#: fitted apart, so that kernels whose cost is off do not blur what others say.
Parameters = Mapping[str, tuple[float, float]]
GROUPS: Sequence[tuple[Parameters, Sequence[str]]] = (
    (
        {"fp4_weights_per_clock_per_sm": (4.0, 256.0)},
        (
            "expert_gemv 16 experts a row of 384, 1 row",
            "expert_gemv 16 experts a row of 192, 1 row",
            "expert_gemv 16 experts a row of 192, 1 row, two launches",
        ),
    ),
    (
        {"tensor_core_setup_s": (1e-7, 1e-5)},
        # Deep products, which a second launch adds up, and shallow ones.
        (
            "cuBLAS 6288x7168, 1 row",
            "cuBLAS 3584x7168, 1 row",
            "cuBLAS 448x7168, 1 row",
            "cuBLAS 7168x1536, 1 row",
            "cuBLAS 7168x768, 1 row",
            "cuBLAS 1152x1536, 1 row",
        ),
    ),
)
MOST_FACTOR = 2.0  # upper over lower bound of a value that counts as determined
LEAST_NOISE = 0.01  # of a time, relative: what readings of one kernel on two days differ by
THRESHOLD = 2.706  # chi-square of one value at 90 %
GRID = 13  # places of a value's range at which its profile is taken


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A measured chain."""

    case: str
    measured_us: float
    kernels: tuple[ChainedKernel, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the fit says of one value. Bounds are None on a side where the data set none."""

    field: str
    value: float
    low: float | None
    high: float | None
    determined: bool
    reason: str  # why not; empty when determined
    profile_value: float

    @property
    def profile_value_inside(self) -> bool:
        return (self.low is None or self.low <= self.profile_value) and (
            self.high is None or self.profile_value <= self.high
        )


@dataclass(frozen=True, kw_only=True)
class KernelFit:
    """The joint fit: values, errors of the shapes in it, of each shape left out of it, and singular values."""

    found: tuple[Found, ...]
    residuals: Mapping[str, float]  # relative, positive when predicted slower
    left_out_errors: Mapping[str, float]
    singular_values: tuple[float, ...]  # of d log(time) / d log(value), largest first


def stored_shapes(cases: Sequence[str]) -> list[Shape]:
    """Those kernels as they are stored for the measured GPU; a case that is not there is left out."""
    return [
        Shape(case=one.label, measured_us=one.measured_us, kernels=one.kernels)
        for one in measured_chains()
        if one.label in cases
    ]


def fit_stored(machine: Machine) -> list[KernelFit]:
    """The fit of each group of GROUPS to the stored kernels."""
    return [fit_kernels(machine, stored_shapes(cases), parameters) for parameters, cases in GROUPS]


def fit_kernels(
    machine: Machine, shapes: Sequence[Shape], parameters: Parameters, *, leave_out: bool = True
) -> KernelFit:
    """Fit ``parameters`` of ``machine`` to ``shapes``, at least as many. Needs scipy.

    ``leave_out``: also a fit without each shape, which takes as many fits as there are shapes.
    """
    require_scipy()
    assert len(shapes) >= len(parameters), (len(shapes), len(parameters))
    problem = _Problem(machine, shapes, parameters)
    best = problem.solve({})
    residuals = problem.residuals(best)
    freedom = max(1, len(shapes) - len(parameters))
    noise = max(LEAST_NOISE, math.sqrt(sum(one * one for one in residuals) / freedom))
    found = tuple(problem.profile(name, best, noise) for name in parameters)
    left_out = {}
    if leave_out and len(shapes) > len(parameters):
        for index, shape in enumerate(shapes):
            others = _Problem(machine, [*shapes[:index], *shapes[index + 1 :]], parameters)
            left_out[shape.case] = math.exp(problem.log_ratio(shape, others.solve({}))) - 1
    return KernelFit(
        found=found,
        residuals={
            shape.case: math.exp(one) - 1 for shape, one in zip(problem.shapes, residuals, strict=True)
        },
        left_out_errors=left_out,
        singular_values=problem.singular_values(best),
    )


class _Problem:
    """Least squares over the logarithms of some values of a machine."""

    def __init__(self, machine: Machine, shapes: Sequence[Shape], parameters: Parameters) -> None:
        self.machine, self.shapes, self.parameters = machine, list(shapes), parameters

    def log_ratio(self, shape: Shape, values: Mapping[str, float]) -> float:
        changed: dict[str, Any] = dict(values)
        predicted_us = chain_us(shape.kernels, loopback_fabric(replace(self.machine, **changed)))
        return math.log(predicted_us / shape.measured_us)

    def residuals(self, values: Mapping[str, float]) -> list[float]:
        return [self.log_ratio(shape, values) for shape in self.shapes]

    def cost(self, values: Mapping[str, float]) -> float:
        return sum(one * one for one in self.residuals(values))

    def solve(self, fixed: Mapping[str, float]) -> dict[str, float]:
        """Values of least squares with ``fixed`` held, from the best of a coarse grid, since times have kinks."""
        from scipy.optimize import least_squares

        free = [name for name in self.parameters if name not in fixed]
        if not free:
            return dict(fixed)

        def values(logs: Sequence[float]) -> dict[str, float]:
            return {**fixed, **{name: math.exp(float(one)) for name, one in zip(free, logs, strict=True)}}

        bounds = [[math.log(bound) for bound in self.parameters[name]] for name in free]
        start = [math.log(getattr(self.machine, name)) for name in free]
        start = [min(max(one, low), high) for one, (low, high) in zip(start, bounds, strict=True)]
        for index, (low, high) in enumerate(bounds):  # one value after the other
            places = [start[index], *(low + (high - low) * step / 4 for step in range(5))]
            tries = [[*start[:index], place, *start[index + 1 :]] for place in places]
            start = min(tries, key=lambda logs: self.cost(values(logs)))
        found = least_squares(
            lambda logs: self.residuals(values(logs)),
            start,
            bounds=([low for low, _ in bounds], [high for _, high in bounds]),
            diff_step=1e-2,
            max_nfev=30,
        )
        return values(found.x)

    def profile(self, name: str, best: Mapping[str, float], noise: float) -> Found:
        """Range of ``name`` within which the sum of squares stays near its least, all other values fitted anew."""
        least, most = self.parameters[name]
        floor = self.cost(best)

        ends = [self.residuals({**best, name: end}) for end in (least, most)]
        if ends[0] == ends[1] == self.residuals(best):
            return self._found(name, best, None, None, "the times do not depend on it")

        def rise(value: float) -> float:
            return (self.cost(self.solve({name: value})) - floor) / noise**2

        def bound(end: float) -> float | None:
            ratio = math.pow(end / best[name], 1 / GRID)
            inside = best[name]
            for step in range(1, GRID + 1):
                value = best[name] * math.pow(ratio, step)
                if rise(value) > THRESHOLD:
                    for _ in range(4):  # halve the last step
                        middle = math.sqrt(inside * value)
                        inside, value = (inside, middle) if rise(middle) > THRESHOLD else (middle, value)
                    return value
                inside = value
            return None

        low = bound(least) if best[name] > least * 1.0001 else None
        high = bound(most) if best[name] < most * 0.9999 else None
        if low is None and high is None:
            reason = "the times do not bound it"
        elif low is None or high is None:
            reason = f"the times bound it only from {'above' if low is None else 'below'}"
        elif high / low > MOST_FACTOR:
            reason = f"the times fix it only within a factor of {high / low:.1f}"
        else:
            reason = ""
        return self._found(name, best, low, high, reason)

    def _found(
        self, name: str, best: Mapping[str, float], low: float | None, high: float | None, reason: str
    ) -> Found:
        return Found(
            field=name,
            value=best[name],
            low=low,
            high=high,
            determined=not reason,
            reason=reason,
            profile_value=getattr(self.machine, name),
        )

    def singular_values(self, best: Mapping[str, float], step: float = 0.05) -> tuple[float, ...]:
        import numpy

        def moved(name: str, by: float) -> list[float]:
            return self.residuals({**best, name: best[name] * math.exp(by)})

        columns = [
            [(after - before) / (2 * step) for after, before in zip(moved(name, step), moved(name, -step), strict=True)]
            for name in self.parameters
        ]
        values = numpy.linalg.svd(numpy.array(columns).T, compute_uv=False)
        return tuple(float(one) for one in values)
