"""Every stored measurement of a machine beside what its profile predicts: ``k3sim calibrate --check``.

Three kinds of case, from the smallest up. *probe*: one primitive as a probe read it, predicted by the profile's value;
those named as centre of a reading are what the value was taken from. *kernel*: a chain of the shipped kernels or
of cuBLAS, predicted by the simulator; none gave a value. *step*: a whole decode step of one rank, which never does.
Each kind holds what was measured between GPUs over NVLink as well (shipped_links.py).

The interval of a probe is that of the value. Those of kernels and steps are the middle 90 % over machines drawn within
the profile's intervals, with errors of kernels drawn from other families (sim/intervals.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import shipped_links, shipped_steps
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.shipped_kernels import measured_chains
from k3sim.calibrate.fit.link_fit import LINK_READINGS
from k3sim.calibrate.fit.readings import READINGS
from k3sim.calibrate.fit.statements import Case, Reader, Reading, Undetermined, cases_of
from k3sim.calibrate.samples import SampleFile, read_samples
from k3sim.errors import UserError
from k3sim.sim.draws import check_draws
from k3sim.sim.intervals import draw_machines
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress

DATA = Path(__file__).parents[1] / "data"
NUM_DRAWS = 20
STORED = "h200"  # the one machine with measured kernels and steps
KINDS = ("probe", "kernel", "step")
RATE_BYTES = 1e9  # a rate is shown as the time of so many bytes
LARGE_ERROR_PERCENTILE = 0.95


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
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
    on_case: Callable[[ComparedCase], None] = lambda _: None,
) -> list[ComparedCase]:
    """Stored cases in microseconds, as ``machine``, a profile of the measured GPU, predicts them: probes, kernels,
    steps.

    ``most``: at most so many of each kind, for a quick look. ``on_done`` is told how many pieces of work are done, and
    of how many; ``on_case`` of each case, in order. The result is the same for the same seed, whatever ``jobs``, the
    processes that work at once (all cores by default).
    Raises UserError for a profile of another GPU, or fewer than two draws.
    """
    measured = load_machine(STORED)
    if machine.title != measured.title:
        raise UserError(f"no stored measurements of {machine.title}; accepted: profiles of {measured.title} ({STORED})")
    check_draws(num_draws)
    machines = (machine, *draw_machines(machine, num_draws, seed))
    tasks: list[Callable[[], list[ComparedCase]]] = []
    for kind in kinds:
        tasks += _tasks(kind, machines, seed)[:most] if kind != "probe" else [partial(_all_probes, machine, most)]
    found = []
    for cases in run_jobs(tasks, jobs=jobs, on_done=on_done):
        for one in cases:
            found.append(one)
            on_case(one)
    return found


def _tasks(kind: str, machines: Sequence[Machine], seed: int) -> list[Callable[[], list[ComparedCase]]]:
    if kind == "kernel":
        chains = (*measured_chains(), *shipped_links.link_chains())
        return [partial(_alone, one.compared, machines, seed) for one in chains]
    steps = [*shipped_steps.labelled_steps(), *shipped_links.labelled_link_steps()]
    return [
        partial(_alone, shipped_steps.step_case, step, label, source, machines, seed) for label, source, step in steps
    ]


def _alone(compare: Callable[..., ComparedCase], *arguments: object) -> list[ComparedCase]:
    return [compare(*arguments)]


def _all_probes(machine: Machine, most: int | None) -> list[ComparedCase]:
    one_gpu = _probes(read_samples(shipped_samples(STORED)), READINGS, machine)
    return [*one_gpu, *_probes(shipped_links.link_samples(), LINK_READINGS, machine)][:most]


def _probes(file: SampleFile, readings: Sequence[Reading], machine: Machine) -> Iterator[ComparedCase]:
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
            low, high = sorted(_us(bound, origin.unit) for bound in (origin.low, origin.high))
            yield ComparedCase(
                kind="probe",
                label=f"{reading.field}: {one.label}",
                measured=_us(one.value, origin.unit),
                predicted=_us(value, origin.unit),
                low=low,
                high=high,
                unit="us",
                source=f"calibrate/data/{file.path.name}, {file.date}",
                used_in_fit=one.central,
                hardware=STORED,
            )


def _us(value: float, unit: str) -> float:
    """A duration in microseconds; of a rate, the time of 1 GB."""
    return value * 1e6 if unit == "s" else RATE_BYTES / value * 1e6


def families(cases: Sequence[ComparedCase]) -> list[dict[str, Any]]:
    """Kernels by operator and steps by path and switches: how many, errors, and the worst of them by name."""
    found: dict[tuple[str, str], list[ComparedCase]] = {}
    for one in cases:
        if one.kind in KINDS[1:]:
            found.setdefault((one.kind, family_of(one)), []).append(one)
    rows = []
    for (kind, family), group in sorted(found.items()):
        worst = max(group, key=lambda one: abs(one.error))
        rows.append(
            {
                "kind": kind,
                "family": family,
                "cases": len(group),
                "median_error": statistics.median(abs(one.error) for one in group),
                "mean_signed_error": statistics.fmean(one.error for one in group),
                "worst_error": worst.error,
                "worst": worst.label,
                "inside_interval": sum(one.inside_interval for one in group) / len(group),
            }
        )
    return rows


def family_of(case: ComparedCase) -> str:
    """The operator of a kernel, the first word of its label; path and switches of a step, up to its first comma."""
    return case.label.split()[0] if case.kind == "kernel" else case.label.partition(",")[0]


def summary(cases: Sequence[ComparedCase]) -> dict[str, dict[str, float]]:
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

