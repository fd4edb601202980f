"""Machine values from the probes' samples: what ``k3sim calibrate`` writes into a profile, with intervals.

A value is *direct* when one primitive's cases give it (READINGS: a formula over medians; no model of the machine is
needed), *joint* when a rule of the simulator must be inverted over many cases (``l2_effective_bytes``: what least
recently used replacement leaves of a region). Whole decode steps never enter, and no kernel of the model does:
``kernel_fit.py`` asks what kernels say of the values that no probe gives, and reports it.

Each reading names ``centre`` cases, whose median is the value, and ``around`` cases, which describe the same primitive
under other circumstances (another grid, traffic beside it, another GPU in the file). The interval of a value covers the
bootstrap of its centre (runs and repetitions drawn anew, seeded) and the medians around it: in a kernel, circumstances
move a primitive by far more than the noise of its probe.

A value whose cases are missing or unstable is not guessed: the profile keeps what it had, and the result says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from k3sim.calibrate.fit.bootstrap import BOOTSTRAP_DRAWS, drawer
from k3sim.calibrate.fit.curve import curve_points, in_flight_curve
from k3sim.calibrate.fit.fitted import Fitted, direct, reported
from k3sim.calibrate.fit.l2_capacity import l2_size, survivals
from k3sim.calibrate.fit.profile_text import Calibration
from k3sim.calibrate.fit.readings import READINGS
from k3sim.calibrate.fit.statements import Reader, Reading, Undetermined, cases_of
from k3sim.calibrate.samples import SampleFile
from k3sim.errors import UserError
from k3sim.sim.machine import Machine


class Fitting:
    """A fit under way: the values that one file has given so far, and why it gives no others."""

    def __init__(self, file: SampleFile, base: Machine, seed: int) -> None:
        self.file, self.base, self.seed = file, base, seed
        self.read = Reader(file)
        self.readers = [Reader(file, drawer(seed, number)) for number in range(BOOTSTRAP_DRAWS)]
        self.fitted: list[Fitted] = []
        self.undetermined: dict[str, str] = {}

    def keep(self, name: str, step: Callable[[], Fitted]) -> None:
        """The value of ``step``, or the reason that samples do not determine it."""
        try:
            self.fitted.append(step())
        except Undetermined as reason:
            self.undetermined[name] = str(reason)
        except KeyError as missing:
            self.undetermined[name] = f"a case lacks the parameter {missing}"

    def read_all(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            self.keep(reading.field, partial(direct, reading, self.read, self.readers))

    def value_of(self, name: str) -> Any:
        """A value fitted so far, or that of the profile that the fit starts from."""
        return next((one.value for one in self.fitted if one.field == name), getattr(self.base, name))

    def finished(self, otherwise: str) -> Calibration:
        """The calibration; ``otherwise`` says why values stay that no step was about."""
        known = {one.field for one in self.fitted} | self.undetermined.keys()
        rest = {one.name: otherwise for one in fields(Machine) if one.metadata and one.name not in known}
        return Calibration(
            file=self.file,
            base=self.base,
            fitted=tuple(self.fitted),
            undetermined=self.undetermined | rest,
            seed=self.seed,
        )


def fit(file: SampleFile, base: Machine, seed: int = 0) -> Calibration:
    """All values that the samples of one file of probes determine. Needs scipy.

    Raises UserError where the file is of kernels, or scipy is not installed.
    """
    if file.kind != "primitives":
        raise UserError(f"samples {file.path} are of {file.kind}; accepted for a fit are those of 'k3sim calibrate'")
    require_scipy()
    under_way = Fitting(file, base, seed)
    under_way.read_all(READINGS)
    read, readers = under_way.read, under_way.readers
    ceiling = under_way.value_of("hbm_read_bytes_per_s")
    under_way.keep("hbm_in_flight_curve", partial(in_flight_curve, read, readers, ceiling))
    rate = under_way.value_of("l2_read_bytes_per_s")
    under_way.keep("l2_effective_bytes", partial(l2_size, read, readers, rate))
    under_way.fitted += [reported("num_sms", file.num_sms)]
    return under_way.finished("no probe reads it")


def labels_read(file: SampleFile) -> set[str]:
    """Labels of the stable samples that any value is read from."""
    read = Reader(file)
    steps: list[Callable[[], object]] = [partial(cases_of, one, read) for one in READINGS]
    steps.append(partial(curve_points, read, math.inf))
    for step in steps:
        try:
            step()
        except (Undetermined, KeyError):
            continue  # says nothing of other values
    survivals(read)
    read.all("hbm_loads_in_flight", "read_rate")
    read.all("l2_read", "read_rate")
    return read.used


def require_scipy() -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise UserError("fitting needs scipy: pip install 'k3sim[calibrate]'") from None
