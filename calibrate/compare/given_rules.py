"""What a user's files of measured steps and kernels must hold, and that their numbers are what their units say.

Steps are rows of ``k3sim decode --table``, or one ``measured.json``; kernels are rows of ``k3sim kernels bench``. A
measured time is held against that of its bytes at the read rate that the same file states: a slip of a unit is a factor
of a thousand, and no step or kernel is so far from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from k3sim.calibrate.compare.shipped_steps import ranks_of
from k3sim.calibrate.sample_rules import check_samples
from k3sim.calibrate.samples import APART
from k3sim.model.documents.document import Accepted, Document, Fault, read_json, shown
from k3sim.model.documents.fields import (
    TEXT,
    OpenRecord,
    Refused,
    Rule,
    checked,
    choice,
    number,
    one_of,
    pattern,
    whole,
)
from k3sim.model.documents.kinds import Kind
from k3sim.model.documents.lines import Keys
from k3sim.model.layout import KV_DTYPE_BYTES
from k3sim.model.paths import PARTS, SWITCHES

STEPS = Accepted(
    what="steps that 'k3sim decode' or 'k3sim decode --table FILE' wrote",
    kinds=(Kind.MEASURED_STEPS, Kind.MEASURED_STEP),
    most_bytes=32 << 20,
)
KERNELS = Accepted(
    what="times that 'k3sim kernels bench' wrote", kinds=(Kind.KERNEL_TIMES,), most_bytes=32 << 20
)
#: Multiples of the time of its bytes between which a time can be. Some bytes of a kernel may lie in L2; a step of few
#: layers is mostly launches.
LEAST_FLOORS, STEP_FLOORS, KERNEL_FLOORS = 0.5, 500.0, 50.0
KERNEL_US = (0.3, 200.0)  # of a kernel in a chain that moves next to nothing


def _check_times(value: Any) -> Any:
    if not isinstance(value, list) or len(value) < 2:
        raise Refused
    for one in value:
        _TIME.check(one)
    return value


_TIME = number(1e-3, 1e9, "us")
_RATE = number(1e10, 1e14, "B/s")
TIMES = Rule("a list of two or more times of 0.001 to 1e+09 us", _check_times)


class Where(OpenRecord):
    """Where a step was measured."""

    date: Annotated[str, TEXT]


class Step(OpenRecord):
    """A measured step: what ran, and how long it took."""

    measured: Annotated[bool, one_of(True)]
    model: Annotated[str, one_of("kimi-k3")] = "kimi-k3"
    machine: Annotated[str, TEXT]
    layout: Annotated[str, pattern(r"tp\d{1,4}(ep1)?(dcp1)?", "tp and a number, without ep and dcp")]
    gpus: Annotated[int, whole(1, 1024)] = 1
    path: Annotated[str, choice(("stock", "fused"), renamed="path")]
    kernels: Annotated[str, one_of("own")] = "own"
    switches: list[Annotated[str, choice((*SWITCHES, *PARTS), renamed="switch", words="switches or their parts")]]
    layers: Annotated[int, whole(1, 4096)]
    concurrency: Annotated[int, whole(1, 1 << 20)]
    context: Annotated[int, whole(1, 1 << 30)]
    kv_dtype: Annotated[str, choice(KV_DTYPE_BYTES)]
    step_us: Annotated[float, _TIME]
    p10_us: Annotated[float, _TIME]
    p90_us: Annotated[float, _TIME]
    samples_us: Annotated[list[float], TIMES]
    read_bytes_per_s: Annotated[float, _RATE]
    moved_bytes: Annotated[int, whole(1, 1 << 50)]
    environment: Where


class Table(OpenRecord):
    """Rows of ``k3sim decode --table``, which are checked one by one."""

    steps: Annotated[list[Any], Field(min_length=1)]


class Rate(OpenRecord):
    """What the GPU of a file of kernels reads."""

    read_bytes_per_s: Annotated[float, _RATE]


class RatedTimes(OpenRecord):
    """A file of kernels, of which other rules check the rest."""

    environment: Rate


class Named(OpenRecord):
    """A row of ``k3sim kernels bench``."""

    operator: Annotated[str, TEXT]
    case: Annotated[str, TEXT]
    date: Annotated[str, TEXT]
    moved_bytes: Annotated[int, whole(0, 1 << 50)]


def read_steps(path: Path) -> tuple[Document, list[tuple[Keys, dict[str, Any]]]]:
    """The measured steps of a file, each with its place; faults are noted in the document, for the caller to settle.

    Raises UserError where the file cannot be read, is of another kind, or holds no step that can be looked at.
    """
    document = read_json(path, STEPS)
    if "step_us" in document.value:
        places: list[Keys] = [()]
    else:
        table = checked(document, Table)
        if table is None:
            document.settle()
            return document, []
        places = [("steps", index) for index in range(len(table.steps))]
    found = []
    for at in places:
        if checked(document, Step, at) is not None:
            step = document.value if not at else document.value["steps"][at[1]]
            faults = _faults_of_step(step)
            document.add(Fault((*at, name), says) for name, says in faults)
            found += [] if faults else [(at, step)]
    if not found:
        document.settle()
    return document, found


def _faults_of_step(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Fields of a step that contradict others, with what is wrong."""
    found = []
    median, step_us = statistics.median(step["samples_us"]), step["step_us"]
    floor_us = step["moved_bytes"] / step["read_bytes_per_s"] * 1e6
    if abs(median - step_us) > 1e-3 + 1e-4 * median:
        found.append(("step_us", f"is {shown(step_us)}, the median of its samples is {median:.6g}; accepted: the same"))
    elif not step["p10_us"] <= step_us <= step["p90_us"]:
        found.append(("step_us", f"is {shown(step_us)}, accepted: from p10_us to p90_us"))
    elif not LEAST_FLOORS * floor_us <= step_us <= STEP_FLOORS * floor_us:
        found.append(("step_us", _wrong_unit(step_us, floor_us)))
    if ranks_of(step) % step.get("gpus", 1):
        found.append(("gpus", f"is {step['gpus']}, accepted: a divisor of the ranks of {step['layout']}"))
    return found


def _wrong_unit(given_us: float, floor_us: float) -> str:
    return f"is {given_us:.6g} us, where its bytes alone take {floor_us:.4g} us; accepted: microseconds, as measured"


def read_kernels(path: Path) -> tuple[Document, list[dict[str, Any]]]:
    """The timings of a file of ``k3sim kernels bench``. Raises UserError, all faults in one line."""
    document = read_json(path, KERNELS)
    given = document.value
    if "timings" not in given:
        document.fault((), "lacks timings, accepted: those that 'k3sim kernels bench' wrote")
        document.settle()
    check_samples(document, tuple(APART))
    document.settle()
    rated = checked(document, RatedTimes)
    for index, timing in enumerate(given["timings"]):
        at: Keys = ("timings", index)
        if checked(document, Named, at) is not None and rated is not None:
            _check_units(document, timing, at, timing["moved_bytes"] / rated.environment.read_bytes_per_s * 1e6)
    document.settle()
    return document, given["timings"]


def _check_units(document: Document, timing: Mapping[str, Any], at: Keys, floor_us: float) -> None:
    """Of a kernel and of those that were timed beside it, which move the same bytes."""
    least_us = max(KERNEL_US[0], LEAST_FLOORS * floor_us)
    most_us = KERNEL_US[1] + KERNEL_FLOORS * floor_us
    peers = enumerate(timing.get("peers", ()))
    for here, row in [(at, timing), *(((*at, "peers", place), one) for place, one in peers)]:
        if "error" not in row and not least_us <= row["median_us"] <= most_us:
            document.fault((*here, "median_us"), _wrong_unit(row["median_us"], floor_us))
