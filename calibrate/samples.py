"""Measured samples as the fit and the comparisons read them, from the two kinds of file that measuring writes.

``k3sim calibrate`` (probes/) writes cases of single primitives, ``k3sim kernels bench`` times of kernels. Either
becomes a ``SampleFile`` of ``Sample``: one quantity of one case, with every repetition where the file keeps them and
median, deciles and count where it does not. A file that was cut short, edited, or is of another kind is refused in one
line; a sample that does not repeat is kept, and says why no fit may use it (``Sample.instability``).

Schema 1 of the probes' files keeps summaries of two complete runs. Schema 2 keeps the values too (every repetition;
of more than ``MOST_KEPT`` single loads their percentiles), the SM clock around each case, and a checksum. A file whose
head says ``thinned`` keeps the values of those quantities that a machine value is read from, or that are refused, and
of the others the summaries.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, read_json, shown_path
from k3sim.model.documents.kinds import Kind

ACCEPTED = Accepted(
    what="a sample file that 'k3sim calibrate' or 'k3sim kernels bench' wrote",
    kinds=(Kind.PROBES, Kind.KERNEL_TIMES),
    most_bytes=32 << 20,
)

#: By unit: how far the medians of two runs may lie apart, and how wide the middle 80 % of repetitions may be. Each is
#: a share of the median or an absolute amount, whichever is more. Timer steps (32 ns, averaged over a graph's nodes)
#: and the SM that a block lands on (a trip within L2, 10 cycles) set the absolute ones.
APART = {"B/s": (0.01, 0.0), "us": (0.02, 0.012), "cycle": (0.02, 12.0), "Hz": (0.002, 0.0), "1": (0.02, 0.02)}
SPREAD = {"B/s": (0.04, 0.0), "us": (0.10, 0.04), "cycle": (0.20, 40.0), "Hz": (0.004, 0.0), "1": (0.1, 0.1)}
CLOCK_DRIFT = 0.008  # of the SM clock over one case: one step of a boosting clock, 15 MHz
CHANCE = 3.0  # standard errors by which two medians of the same repetitions may differ
SINGLE_LOADS = 2000  # counts above are of single loads, whose width is the memory's and not the noise


@dataclass(frozen=True, kw_only=True)
class Run:
    """Repetitions of one case, one complete run. Deciles are None where the file has the median alone."""

    median: float
    p10: float | None
    p90: float | None
    count: int
    values: tuple[float, ...] = ()

    @property
    def standard_error(self) -> float:
        """Of the median, from the deciles, as if the repetitions were normal and independent; 0 where unknown."""
        if self.p10 is None or self.p90 is None:
            return 0.0
        return 1.2533 * (self.p90 - self.p10) / 2.5631 / math.sqrt(self.count)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One quantity of one case, measured on one machine."""

    case: str
    parameters: Mapping[str, Any] = field(hash=False)
    quantity: str
    unit: str  # a key of APART
    runs: tuple[Run, ...]
    clock_hz: tuple[float, ...] = ()  # of the SM before and after the case

    @property
    def value(self) -> float:
        """Mean of the runs' medians."""
        return statistics.fmean(run.median for run in self.runs)

    @cached_property
    def label(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        return " ".join(one for one in (self.case, shown, self.quantity) if one)

    @cached_property
    def instability(self) -> str:
        """Why this sample may not enter a fit; empty when it may."""
        if len(self.clock_hz) == 2 and abs(self.clock_hz[1] / self.clock_hz[0] - 1) > CLOCK_DRIFT:
            low, high = (f"{one / 1e6:.0f}" for one in self.clock_hz)
            return f"the SM clock went from {low} to {high} MHz, accepted is {100 * CLOCK_DRIFT:g} %"
        medians = [run.median for run in self.runs]
        apart = max(medians) - min(medians)
        allowed = max(self._allowed(APART), CHANCE * math.hypot(*(run.standard_error for run in self.runs)))
        if apart > allowed:
            return f"its runs are {apart:.4g} {self.unit} apart, accepted is {allowed:.4g}"
        for run in self.runs:
            if run.count > SINGLE_LOADS:
                continue
            if run.p10 is not None and run.p90 is not None:
                width, allowed = run.p90 - run.p10, self._allowed(SPREAD)
                if width > allowed:
                    return f"its middle 80 % are {width:.4g} {self.unit} wide, accepted is {allowed:.4g}"
            third = len(run.values) // 3
            if third >= 5:
                drift = abs(statistics.median(run.values[-third:]) - statistics.median(run.values[:third]))
                # Each third is the median of a third of the repetitions.
                allowed = max(self._allowed(APART), CHANCE * math.sqrt(6) * run.standard_error)
                if drift > allowed:
                    return f"its last third is {drift:.4g} {self.unit} from its first, accepted is {allowed:.4g}"
        return ""

    def _allowed(self, limits: Mapping[str, tuple[float, float]]) -> float:
        relative, absolute = limits[self.unit]
        return max(relative * abs(self.value), absolute)


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """All samples of one file. ``metadata`` is the file's own head, as it stands there."""

    path: Path
    kind: str  # "primitives" or "kernels"
    gpu: str
    num_sms: int
    l2_bytes: int
    date: str  # YYYY-MM
    metadata: Mapping[str, Any] = field(hash=False)
    samples: tuple[Sample, ...]

    def matching(self, case: str, quantity: str, **parameters: Any) -> Iterator[Sample]:
        """Samples of a case's quantity whose parameters include these."""
        for one in self._by_quantity.get((case, quantity), ()):
            have = one.parameters
            if all(name in have and have[name] == value for name, value in parameters.items()):
                yield one

    @cached_property
    def _by_quantity(self) -> dict[tuple[str, str], list[Sample]]:
        """In the order of the file; a fit asks a hundred thousand times."""
        found: dict[tuple[str, str], list[Sample]] = {}
        for one in self.samples:
            found.setdefault((one.case, one.quantity), []).append(one)
        return found

    @property
    def refused(self) -> list[tuple[Sample, str]]:
        """Samples that no fit may use, with the reason."""
        return [(one, one.instability) for one in self.samples if one.instability]


def read_samples(path: Path) -> SampleFile:
    """Read and check a file of probes or of kernels.

    Raises UserError, all faults in one line, where the file cannot be read, is of another kind or schema, contradicts
    itself, or differs from its checksum.
    """
    from k3sim.calibrate.sample_rules import check_samples

    document = read_json(path, ACCEPTED)
    check_samples(document, (*APART, "ns"))
    document.settle()
    given = document.value
    samples = _of_probes(given["cases"]) if "cases" in given else _of_kernels(given["timings"])
    if not samples:
        raise UserError(f"{shown_path(path)}: it has no sample; accepted: {ACCEPTED.what}")
    if "cases" in given:
        kind, where = "primitives", {name: value for name, value in given.items() if name != "cases"}
    else:
        kind, where = "kernels", given["environment"]
    return SampleFile(
        path=path,
        kind=kind,
        gpu=where["gpu"],
        num_sms=where["num_sms"],
        l2_bytes=where["l2_bytes"],
        date=where["date"][:7],
        metadata=where,
        samples=tuple(samples),
    )


def _of_probes(cases: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples of cases that have been checked."""
    return [
        Sample(
            case=case["probe"],
            parameters=case["parameters"],
            quantity=quantity,
            unit=reading["unit"],
            runs=tuple(
                Run(median=float(median), p10=float(p10), p90=float(p90), count=count, values=tuple(map(float, values)))
                for (median, p10, p90, count), values in zip(
                    reading["runs"], reading.get("samples", [[]] * len(reading["runs"])), strict=True
                )
            ),
            clock_hz=tuple(map(float, case.get("sm_clock_hz", ()))),
        )
        for case in cases
        for quantity, reading in case["readings"].items()
        if reading["unit"] != "ns"  # steps of a timer are no sample
    ]


def _of_kernels(timings: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples of timings that have been checked, peers beside them."""
    samples = []
    for timing in timings:
        case = f"{timing['operator']} {timing['case']}" if {"operator", "case"} <= timing.keys() else timing["name"]
        parameters = {"rows": timing["rows"]} if "rows" in timing else {}
        rows = [(case, timing), *((f"{case} ({one['name']})", one) for one in timing.get("peers", ()))]
        samples += [
            Sample(case=label, parameters=parameters, quantity="time", unit="us", runs=_kernel_runs(row))
            for label, row in rows
            if "error" not in row  # a peer that is not installed
        ]
    return samples


def _kernel_runs(row: Mapping[str, Any]) -> tuple[Run, ...]:
    values = tuple(map(float, row["samples_us"]))
    median, p10, p90 = (float(row[f"{name}_us"]) for name in ("median", "p10", "p90"))
    runs = [Run(median=median, p10=p10, p90=p90, count=len(values), values=values)]
    if "second_median_us" in row:
        runs.append(Run(median=float(row["second_median_us"]), p10=None, p90=None, count=len(values)))
    return tuple(runs)


def unstable(samples: Sequence[Sample]) -> list[str]:
    """One line a sample that no fit may use."""
    return [f"{one.label}: {one.instability}" for one in samples if one.instability]
