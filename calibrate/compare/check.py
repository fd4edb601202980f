"""Every stored measurement of a machine beside what its profile predicts: ``k3sim calibrate --check``.

Three kinds of case, from the smallest up. *probe*: one primitive as a probe read it, predicted by the profile's value;
those named as centre of a reading are what the value was taken from. *kernel*: a chain of the project's own kernels or
of cuBLAS, predicted by the simulator; none gave a value. *step*: a whole decode step of one rank, which never does.
Each kind holds what was measured between GPUs over NVLink as well (own_links.py).

The interval of a probe is that of the value. Those of kernels and steps are the middle 90 % over machines drawn within
the profile's intervals (sim/intervals.py): what the machine's values leave open, not what a cost function leaves out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import own_kernels, own_links, own_steps
from k3sim.calibrate.fit.link_fit import LINK_READINGS
from k3sim.calibrate.fit.readings import READINGS
from k3sim.calibrate.fit.statements import Case, Reader, Reading, Undetermined, cases_of
from k3sim.calibrate.samples import SampleFile, read_samples
from k3sim.errors import UserError
from k3sim.sim.intervals import draw_machines, interval_around
from k3sim.sim.machine import Machine
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine
from k3sim.sim.whatif import loopback_fabric, of_card

DATA = Path(__file__).parents[1] / "data"
NUM_DRAWS = 20
STORED = "h200"  # the one machine with measured kernels and steps
KINDS = ("probe", "kernel", "step")
RATE_BYTES = 1e9  # a rate is shown as the time of so many bytes
LARGE_ERROR_PERCENTILE = 0.95


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One measured case and its prediction."""

    case: str
    kind: str  # one of KINDS
    measured_us: float
    predicted_us: float
    low_us: float
    high_us: float
    used_in_fit: bool

    @property
    def error(self) -> float:
        """Relative; positive when the prediction is slower."""
        return self.predicted_us / self.measured_us - 1.0

    @property
    def inside_interval(self) -> bool:
        return self.low_us <= self.measured_us <= self.high_us

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "kind": self.kind,
            "measured_us": self.measured_us,
            "predicted_us": self.predicted_us,
            "low_us": self.low_us,
            "high_us": self.high_us,
            "error": self.error,
            "inside_interval": self.inside_interval,
            "used_in_fit": self.used_in_fit,
        }


def shipped_samples(name: str) -> Path:
    """File of the stored probes of a shipped machine. Raises UserError where there is none."""
    path = DATA / f"{name}-primitives.json"
    if not path.exists():
        have = ", ".join(sorted(one.name.removesuffix("-primitives.json") for one in DATA.glob("*-primitives.json")))
        raise UserError(f"no stored samples of {name!r}; accepted: a sample file, or one of {have}")
    return path


def check(
    machine: Machine,
    *,
    kinds: Sequence[str] = KINDS,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    most: int | None = None,
    on_case: Callable[[Checked], None] = lambda _: None,
) -> list[Checked]:
    """Stored cases as ``machine``, a profile of the measured GPU, predicts them: probes, kernels, steps.

    ``most``: at most so many of each kind, for a quick look. The result is the same for the same seed.
    Raises UserError for a profile of another GPU, or fewer than two draws.
    """
    measured = load_machine(STORED)
    if machine.title != measured.title:
        raise UserError(f"no stored measurements of {machine.title}; accepted: profiles of {measured.title} ({STORED})")
    if num_draws < 2:
        raise UserError(f"draws is {num_draws}; accepted: 2 or more")
    drawn = list(draw_machines(machine, num_draws, seed))
    makers: dict[str, Callable[[], Iterator[Checked]]] = {
        "probe": lambda: chain(
            _probes(read_samples(shipped_samples(STORED)), READINGS, machine),
            _probes(own_links.link_samples(), LINK_READINGS, machine),
        ),
        "kernel": lambda: chain(_kernels(machine, drawn), _link_kernels(machine, drawn)),
        "step": lambda: _steps(machine, drawn),
    }
    found = []
    for kind in kinds:
        for number, one in enumerate(makers[kind]()):
            if most is not None and number >= most:
                break
            found.append(one)
            on_case(one)
    return found


def _probes(file: SampleFile, readings: Sequence[Reading], machine: Machine) -> Iterator[Checked]:
    read = Reader(file)
    for reading in readings:
        origin, value = machine.provenance[reading.field], getattr(machine, reading.field)
        try:
            cases: Sequence[Case] = cases_of(reading, read)
        except Undetermined:
            continue
        if origin.unit not in ("s", "B/s"):
            continue
        for one in cases:
            bounds = sorted(_us(bound, origin.unit) for bound in (origin.low, origin.high))
            yield Checked(
                case=f"{reading.field}: {one.label}",
                kind="probe",
                measured_us=_us(one.value, origin.unit),
                predicted_us=_us(value, origin.unit),
                low_us=bounds[0],
                high_us=bounds[1],
                used_in_fit=one.central,
            )


def _us(value: float, unit: str) -> float:
    """A duration in microseconds; of a rate, the time of 1 GB."""
    return value * 1e6 if unit == "s" else RATE_BYTES / value * 1e6


def measured_chains() -> Iterator[tuple[str, float, Sequence[own_kernels.Link], float]]:
    """Name, microseconds a round, kernels, and read rate of the card, of every stored chain that has costs."""
    for timing in own_kernels.readings():
        links = own_kernels.CHAINS.get((timing["operator"], timing["case"]))
        if links is None:
            continue
        rate = timing["read_bytes_per_s"]
        yield f"{timing['operator']} {timing['case']}", timing["median_us"], links, rate
        for peer in timing["peers"]:
            if timing["operator"] == "skinny_gemv" and peer["name"] == "cuBLAS" and "median_us" in peer:
                plain = replace(links[0], operator="cublas.gemm", launch="graph", trigger="end")
                yield f"cuBLAS {timing['case']}", peer["median_us"], (plain,), rate


def _kernels(machine: Machine, drawn: Sequence[Machine]) -> Iterator[Checked]:
    for label, measured_us, links, rate in measured_chains():
        cards = [loopback_fabric(of_card(one, rate)) for one in (machine, *drawn)]
        predicted_us, *others = (own_kernels.chain_us(links, one) for one in cards)
        low_us, high_us = interval_around(predicted_us, others)
        yield Checked(
            case=label,
            kind="kernel",
            measured_us=measured_us,
            predicted_us=predicted_us,
            low_us=low_us,
            high_us=high_us,
            used_in_fit=False,
        )


def _link_kernels(machine: Machine, drawn: Sequence[Machine]) -> Iterator[Checked]:
    for one in own_links.link_chains():
        predicted_us = one.predicted_us(machine)
        low_us, high_us = interval_around(predicted_us, [one.predicted_us(other) for other in drawn])
        yield Checked(
            case=one.label,
            kind="kernel",
            measured_us=one.sample.value,
            predicted_us=predicted_us,
            low_us=low_us,
            high_us=high_us,
            used_in_fit=False,
        )


def _steps(machine: Machine, drawn: Sequence[Machine]) -> Iterator[Checked]:
    labelled = [(own_steps.label_of(step), step) for step in own_steps.measured_steps()]
    labelled += [(own_links.link_label(step), step) for step in own_links.measured_link_steps()]
    for label, step in labelled:
        reference = own_steps.predict_measured(step)
        predicted_us, *steps = (
            predict(replace(reference.question, machine=own_steps.machine_for(step, one))).step_us
            for one in (machine, *drawn)
        )
        low_us, high_us = interval_around(predicted_us, steps)
        yield Checked(
            case=label,
            kind="step",
            measured_us=step["step_us"],
            predicted_us=predicted_us,
            low_us=low_us,
            high_us=high_us,
            used_in_fit=False,
        )


def summary(cases: Sequence[Checked]) -> dict[str, dict[str, float]]:
    """Of kernels and of steps, which no fit used: how many, errors, and the share inside the interval."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS[1:]:  # what a probe reads under other circumstances is no prediction of them
        held_out = [one for one in cases if one.kind == kind and not one.used_in_fit]
        if held_out:
            errors = sorted(abs(one.error) for one in held_out)
            found[kind] = {
                "cases": len(held_out),
                "median_error": statistics.median(errors),
                "p95_error": errors[min(len(errors) - 1, int(LARGE_ERROR_PERCENTILE * len(errors)))],
                "worst_error": errors[-1],
                "mean_signed_error": statistics.fmean(one.error for one in held_out),
                "inside_interval": sum(one.inside_interval for one in held_out) / len(held_out),
            }
    return found

