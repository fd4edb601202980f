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

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes.recorder import MOST_KEPT, checksum
from k3sim.errors import UserError

PROBE_SCHEMAS = (1, 2)
ACCEPTED = "a sample file that 'k3sim calibrate' or 'k3sim kernels bench' wrote"

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

    @property
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
        for one in self.samples:
            if one.case == case and one.quantity == quantity:
                have = one.parameters
                if all(name in have and have[name] == value for name, value in parameters.items()):
                    yield one

    @property
    def refused(self) -> list[tuple[Sample, str]]:
        """Samples that no fit may use, with the reason."""
        return [(one, one.instability) for one in self.samples if one.instability]


class _Refusal(Exception):
    """What is wrong in a file; ``read_samples`` adds its name."""


def read_samples(path: Path) -> SampleFile:
    """Read and check a file of probes or of kernels.

    Raises UserError, one line with the file, what stood there and what is accepted, where it cannot be read, is no
    whole JSON document, is of another kind or schema, contradicts itself, or differs from its checksum.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read samples {path}: {error.strerror}; accepted is {ACCEPTED}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"samples {path} are no whole JSON document ({error}); accepted is {ACCEPTED}") from None
    try:
        if not isinstance(document, dict):
            raise _Refusal(f"the file holds a {type(document).__name__}; accepted is {ACCEPTED}")
        if "steps" in document or "step_us" in document:
            raise _Refusal(f"these are times of whole decode steps, which no fit may use; accepted is {ACCEPTED}")
        given = document.get("checksum")
        if given is not None and given != checksum(document):
            raise _Refusal(
                f"the content does not match its checksum {str(given)[:19]}...; accepted is a file as it was written"
            )
        if "cases" in document:
            return _primitives(path, document)
        if "timings" in document:
            return _kernels(path, document)
        raise _Refusal(f"it has neither 'cases' nor 'timings'; accepted is {ACCEPTED}")
    except _Refusal as refusal:
        raise UserError(f"samples {path}: {refusal}") from None


def _primitives(path: Path, document: dict[str, Any]) -> SampleFile:
    schema = document.get("schema_version")
    if schema not in PROBE_SCHEMAS or isinstance(schema, bool):
        raise _Refusal(f"schema_version is {schema!r}, accepted are {' and '.join(map(str, PROBE_SCHEMAS))}")
    if schema == 2 and "checksum" not in document:
        raise _Refusal("it lacks 'checksum', which schema 2 requires")
    gpu, num_sms, l2_bytes, date = (
        _entry("the head", document, "gpu", str),
        _entry("the head", document, "num_sms", int),
        _entry("the head", document, "l2_bytes", int),
        _entry("the head", document, "date", str),
    )
    samples = []
    for number, case in enumerate(_entry("the file", document, "cases", list)):
        where = f"case {number}"
        probe = _entry(where, case, "probe", str)
        where = f"{where} ({probe})"
        parameters = _entry(where, case, "parameters", dict)
        clocks = _entry(where, case, "sm_clock_hz", list) if "sm_clock_hz" in case else []
        clock_hz = tuple(_number(f"{where} sm_clock_hz", one) for one in clocks)
        for quantity, reading in _entry(where, case, "readings", dict).items():
            here = f"{where} {quantity}"
            unit = _entry(here, reading, "unit", str)
            if unit not in APART and unit != "ns":
                raise _Refusal(f"{here} has unit {unit!r}, accepted are {', '.join(APART)} and ns")
            rows = _entry(here, reading, "runs", list)
            summarised = "samples" not in reading and "thinned" in document
            kept = reading.get("samples", [[]] * len(rows))
            if not rows or not isinstance(kept, list) or len(kept) != len(rows):
                raise _Refusal(f"{here} has {len(rows)} runs and samples {kept!r:.40}, accepted is a list for each run")
            runs = tuple(
                _run(f"{here} run {index}", row, values, needs_values=schema == 2 and not summarised)
                for index, (row, values) in enumerate(zip(rows, kept, strict=True))
            )
            if unit != "ns":  # steps of a timer are no sample
                samples.append(
                    Sample(
                        case=probe, parameters=parameters, quantity=quantity, unit=unit, runs=runs, clock_hz=clock_hz
                    )
                )
    if not samples:
        raise _Refusal("it holds no case; accepted is at least one")
    head = {name: value for name, value in document.items() if name != "cases"}
    return SampleFile(
        path=path,
        kind="primitives",
        gpu=gpu,
        num_sms=num_sms,
        l2_bytes=l2_bytes,
        date=date,
        metadata=head,
        samples=tuple(samples),
    )


def _run(where: str, row: Any, values: Any, *, needs_values: bool) -> Run:
    if not isinstance(row, list) or len(row) != 4:
        raise _Refusal(f"{where} is {row!r:.60}, accepted is [median, p10, p90, count]")
    median, p10, p90 = (_number(where, one) for one in row[:3])
    count = row[3]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _Refusal(f"{where} has count {count!r:.20}, accepted is a whole number above 0")
    if not p10 <= median <= p90:
        raise _Refusal(f"{where} has p10 {p10}, median {median}, p90 {p90}; accepted is p10 <= median <= p90")
    if not isinstance(values, list) or (needs_values and not values):
        raise _Refusal(f"{where} lacks its samples; accepted is every repetition")
    numbers = tuple(_number(where, one) for one in values)
    if numbers:
        if count <= MOST_KEPT and len(numbers) != count:
            raise _Refusal(f"{where} says {count} repetitions and holds {len(numbers)}; accepted are as many")
        # Values and summary are both rounded to five digits.
        found = statistics.median(numbers)
        if abs(found - median) > 2e-4 * max(abs(found), abs(median)):
            raise _Refusal(f"{where} says median {median}, that of its samples is {found:.6g}; accepted are equal ones")
    return Run(median=median, p10=p10, p90=p90, count=count, values=numbers)


def _kernels(path: Path, document: dict[str, Any]) -> SampleFile:
    where = _entry("the file", document, "environment", dict)
    gpu, date = _entry("environment", where, "gpu", str), _entry("environment", where, "date", str)
    samples = []
    for number, timing in enumerate(_entry("the file", document, "timings", list)):
        name = f"timing {number}"
        title = _entry(name, timing, "name", str)
        case = f"{timing['operator']} {timing['case']}" if {"operator", "case"} <= timing.keys() else title
        peers = _entry(name, timing, "peers", list) if "peers" in timing else []
        rows = [(case, timing), *((f"{case} ({_entry(name, one, 'name', str)})", one) for one in peers)]
        for label, row in rows:
            if "error" not in row:  # a peer that is not installed
                runs = _kernel_runs(f"{name} ({label})", row)
                parameters = {"rows": timing["rows"]} if "rows" in timing else {}
                samples.append(Sample(case=label, parameters=parameters, quantity="time", unit="us", runs=runs))
    if not samples:
        raise _Refusal("it holds no timing; accepted is at least one")
    return SampleFile(
        path=path,
        kind="kernels",
        gpu=gpu,
        num_sms=_entry("environment", where, "num_sms", int),
        l2_bytes=_entry("environment", where, "l2_bytes", int),
        date=date[:7],
        metadata=where,
        samples=tuple(samples),
    )


def _kernel_runs(where: str, row: dict[str, Any]) -> tuple[Run, ...]:
    values = tuple(_number(where, one) for one in _entry(where, row, "samples_us", list))
    if len(values) < 2:
        raise _Refusal(f"{where} has {len(values)} samples, accepted are 2 or more")
    stated = {name: _number(where, row.get(f"{name}_us")) for name in ("median", "p10", "p90")}
    ordered = sorted(values)
    found = {
        "median": statistics.median(values),
        **{
            f"p{percent}": ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]
            for percent in (10, 90)
        },
    }
    for name, value in stated.items():
        # Samples are stored with four digits, the summary with four decimals from before that.
        allowed = 0.51 * 10 ** (math.floor(math.log10(value)) - 3) + 1e-4 if value > 0 else 0.0
        if abs(found[name] - value) > allowed:
            raise _Refusal(f"{where} says {name} {value}, that of its samples is {found[name]:.6g}; accepted are equal")
    runs = [
        Run(median=stated["median"], p10=stated["p10"], p90=stated["p90"], count=len(values), values=values)
    ]
    if "second_median_us" in row:
        second = _number(where, row["second_median_us"])
        runs.append(Run(median=second, p10=None, p90=None, count=len(values)))
    return tuple(runs)


def _entry(where: str, given: Any, name: str, kind: type) -> Any:
    if not isinstance(given, dict) or name not in given:
        raise _Refusal(f"{where} lacks {name!r}; accepted is {ACCEPTED}")
    value = given[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Refusal(f"{where} has {name} {value!r:.40}, accepted is a {kind.__name__}")
    return value


def _number(where: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise _Refusal(f"{where} holds {given!r:.40}, accepted are finite numbers")
    return float(given)


def unstable(samples: Sequence[Sample]) -> list[str]:
    """One line a sample that no fit may use."""
    return [f"{one.label}: {one.instability}" for one in samples if one.instability]
