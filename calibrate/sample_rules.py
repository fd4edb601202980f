"""What a file of samples must hold: types of its fields as models, and that summaries and samples agree.

A file that was cut short or edited is refused; a sample that does not repeat is not a fault (``Sample.instability``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from k3sim.calibrate.probes.recorder import MOST_KEPT, checksum
from k3sim.model.documents.document import Document, shown
from k3sim.model.documents.fields import TEXT, OpenRecord, Refused, Rule, checked, choice, number, one_of, whole
from k3sim.model.documents.lines import Keys

SCHEMAS = (1, 2)
_NUMBER = number(-1e18, 1e18, accepted="a finite number")
_COUNT = whole(1, 2**40)


def _check_run(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 4:
        raise Refused
    median, p10, p90 = (_NUMBER.check(one) for one in value[:3])
    _COUNT.check(value[3])
    if not p10 <= median <= p90:
        raise Refused(f"is {shown(value)}, accepted: p10 <= median <= p90")
    return value


def _check_values(value: Any) -> Any:
    if not isinstance(value, list):
        raise Refused
    for one in value:
        _NUMBER.check(one)
    return value


RUN = Rule("[median, p10, p90, count]", _check_run)
VALUES = Rule("a list of finite numbers", _check_values)


class Reading(OpenRecord):
    """One quantity of a case: its runs, and of each the repetitions where the file keeps them."""

    unit: Annotated[str, TEXT]
    runs: Annotated[list[Annotated[list[Any], RUN]], Field(min_length=1)]
    samples: Annotated[list[Annotated[list[float], VALUES]], Field(default_factory=list)]


class ProbeCase(OpenRecord):
    """One case of one probe."""

    probe: Annotated[str, TEXT]
    parameters: dict[str, Any]
    readings: dict[str, Reading]
    sm_clock_hz: Annotated[list[Annotated[float, number(1e6, 1e12, "Hz")]], Field(default_factory=list)]


class Probes(OpenRecord):
    """What ``k3sim calibrate`` measures; the cases are checked one by one."""

    schema_version: Annotated[int, one_of(*SCHEMAS)]
    gpu: Annotated[str, TEXT]
    num_sms: Annotated[int, whole(1, 10**5)]
    l2_bytes: Annotated[int, whole(1, 2**60)]
    date: Annotated[str, TEXT]
    cases: Annotated[list[Any], Field(min_length=1)]


class Environment(OpenRecord):
    """Where kernels were timed."""

    gpu: Annotated[str, TEXT]
    num_sms: Annotated[int, whole(1, 10**5)]
    l2_bytes: Annotated[int, whole(1, 2**60)]
    date: Annotated[str, TEXT]


class Timing(OpenRecord):
    """A timed kernel, or a peer of it; one that failed has ``error`` instead of times."""

    name: Annotated[str, TEXT]
    peers: list[Any] = Field(default_factory=list)
    operator: Annotated[str, TEXT] = ""
    case: Annotated[str, TEXT] = ""


class Times(Timing):
    """One that did not fail."""

    samples_us: Annotated[list[float], VALUES]
    median_us: Annotated[float, _NUMBER]
    p10_us: Annotated[float, _NUMBER]
    p90_us: Annotated[float, _NUMBER]
    second_median_us: Annotated[float, _NUMBER] = 0.0


class KernelTimes(OpenRecord):
    """What ``k3sim kernels bench`` measures; the timings are checked one by one."""

    environment: Environment
    timings: Annotated[list[Any], Field(min_length=1)]


def check_samples(document: Document, units: Sequence[str]) -> None:
    """Note every fault of a file of probes or of kernels; ``units`` are those that a sample can have."""
    given = document.value
    if "checksum" in given and not document.oddities and given["checksum"] != checksum(given):
        says = f"is {shown(given['checksum'])[:30]}, which the content does not match"
        document.fault(("checksum",), f"{says}; accepted: a file as it was written")
    if "cases" in given:
        checked(document, Probes)
        if given.get("schema_version") == 2 and "checksum" not in given:
            document.fault((), "lacks checksum, which schema 2 requires")
        cases = given["cases"]
        for index, case in enumerate(cases if isinstance(cases, list) else ()):
            if checked(document, ProbeCase, ("cases", index)) is not None:
                _check_case(document, case, ("cases", index), units)
    elif "timings" in given:
        checked(document, KernelTimes)
        timings = given["timings"]
        for index, timing in enumerate(timings if isinstance(timings, list) else ()):
            at: Keys = ("timings", index)
            _check_timing(document, timing, at)
            peers = timing.get("peers") if isinstance(timing, dict) else None
            for number_of, peer in enumerate(peers if isinstance(peers, list) else ()):
                _check_timing(document, peer, (*at, "peers", number_of))
    else:
        document.fault((), "lacks cases of probes and timings of kernels, accepted: one of them")


def _check_case(document: Document, case: Mapping[str, Any], at: Keys, units: Sequence[str]) -> None:
    needs_values = document.value.get("schema_version") == 2
    thinned = "thinned" in document.value
    unit = choice(units)
    for quantity, reading in case["readings"].items():
        here = (*at, "readings", quantity)
        try:
            unit.check(reading["unit"])
        except Refused as refusal:
            document.fault((*here, "unit"), str(refusal))
        rows = reading["runs"]
        kept = reading.get("samples", [[]] * len(rows))
        if len(kept) != len(rows):
            document.fault((*here, "samples"), f"has {len(kept)} lists, accepted: {len(rows)}, one for each run")
            continue
        summarised = "samples" not in reading and thinned
        for index, (row, values) in enumerate(zip(rows, kept, strict=True)):
            says = _disagreement(row, values, needs_values and not summarised)
            if says:
                document.fault((*here, "runs", index), says)


def _disagreement(row: Sequence[Any], values: Sequence[float], needs_values: bool) -> str:
    """What is wrong with a run's summary beside its repetitions; empty where nothing is."""
    median, count = row[0], row[3]
    if not values:
        return "lacks its samples, accepted: every repetition" if needs_values else ""
    if count <= MOST_KEPT and len(values) != count:
        return f"says {count} repetitions and has {len(values)} samples, accepted: as many"
    # Values and summary are both rounded to five digits.
    found = statistics.median(values)
    if abs(found - median) > 2e-4 * max(abs(found), abs(median)):
        return f"says median {median}, that of its samples is {found:.6g}; accepted: the same"
    return ""


def _check_timing(document: Document, timing: Any, at: Keys) -> None:
    if isinstance(timing, dict) and "error" in timing:  # a peer that is not installed
        checked(document, Timing, at)
        return
    if checked(document, Times, at) is None:
        return
    values = timing["samples_us"]
    if len(values) < 2:
        document.fault((*at, "samples_us"), f"has {len(values)} samples, accepted: 2 or more")
        return
    ordered = sorted(values)
    found = {
        "median": statistics.median(values),
        **{
            f"p{percent}": ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]
            for percent in (10, 90)
        },
    }
    for name, from_samples in found.items():
        value = timing[f"{name}_us"]
        # Samples are stored with four digits, the summary with four decimals from before that.
        allowed = 0.51 * 10 ** (math.floor(math.log10(value)) - 3) + 1e-4 if value > 0 else 0.0
        if abs(from_samples - value) > allowed:
            says = f"is {value}, that of the samples is {from_samples:.6g}; accepted: the same"
            document.fault((*at, f"{name}_us"), says)
