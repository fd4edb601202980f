"""What a file of a step must hold to be compared or shown: its kernels, and what is read beside them.

Fields that nobody reads may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from k3sim.model.documents.document import Document, shown
from k3sim.model.documents.fields import FLAG, TEXT, OpenRecord, Refused, Rule, checked, choice, number, pattern, whole
from k3sim.model.documents.lines import Keys
from k3sim.model.layout import KV_DTYPE_BYTES
from k3sim.model.paths import PARTS, PATH_NAMES, SWITCHES
from k3sim.sim.export.document import SCHEMA_VERSION
from k3sim.sim.timeline.critical_path import Part

_US = number(0, 1e9, "us")
_COUNT = whole(0, 2**60)
_PARTS = tuple(part.value for part in Part)
_FORMER_PARTS = {  # of files of before, and what became of them
    "dependency_latency": "is l2_round_trips, tensor_core_setup, block_reduction and selection_rounds now",
    "reduction_barrier": "is called barrier now",
    "side_stream": "is divided now among the parts of the kernels that held the SMs",
}


def _or_null(rule: Rule) -> Rule:
    """The rule, or null."""
    return Rule(f"{rule.accepted}, or null", lambda value: None if value is None else rule.check(value))


def _refusal_of(part: Any) -> str:
    """What is wrong with the name of a part; empty for one that is known."""
    if part in _PARTS:
        return ""
    if isinstance(part, str) and part in _FORMER_PARTS:
        return f"{shown(part)}, which {_FORMER_PARTS[part]}; predict it again"
    return f"{shown(part)}, accepted: {', '.join(_PARTS)}"


def _check_part(value: Any) -> Any:
    if refusal := _refusal_of(value):
        raise Refused(f"is {refusal}")
    return value


def _check_waits(value: Any) -> Any:
    if not isinstance(value, dict):
        raise Refused
    for part, us in value.items():
        if refusal := _refusal_of(part):
            raise Refused(f"has part {refusal}")
        try:
            _US.check(us)
        except Refused:
            raise Refused(f"has {part} {shown(us)}, accepted: {_US.accepted}") from None
    return value


def _check_pair(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise Refused
    return [_COUNT.check(one) for one in value]


def _check_notes(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Refused
    return value


PART = Rule(", ".join(_PARTS), _check_part)
WAITS = Rule("an object of parts and their microseconds", _check_waits)
PREFETCH = Rule("[call, bytes]", _check_pair)
NOTES = Rule("a list of texts", _check_notes)
NAME = _or_null(TEXT)
SWITCH = choice((*SWITCHES, *PARTS), renamed="switch")


class KernelRow(OpenRecord):
    """A kernel: where it ran and when."""

    rank: Annotated[int, whole(0, 4096)]
    layer: Annotated[int, whole(-1, 2**20)]
    kind: Annotated[str, TEXT]
    stage: Annotated[str, TEXT]
    stream: Annotated[str, TEXT]
    start_us: Annotated[float, _US]
    end_us: Annotated[float, _US]


class CallRow(KernelRow):
    """A kernel of a measured step, with what the program knows of its call."""

    call: Annotated[int, _COUNT]
    launch: Annotated[str, TEXT]
    waits_for: list[Annotated[int, _COUNT]]
    polls: Annotated[bool, FLAG]
    weight_bytes: Annotated[int, _COUNT]
    kv_state_bytes: Annotated[int, _COUNT]
    early_bytes: Annotated[int, _COUNT]
    prefetched: list[Annotated[list[int], PREFETCH]]


class PathRow(OpenRecord):
    """What one stage holds of the critical path."""

    stage: Annotated[str, TEXT]
    part: Annotated[str, PART]
    us: Annotated[float, _US]


class MachineValue(OpenRecord):
    """A value of the machine that was predicted on."""

    field: Annotated[str, TEXT]


class Environment(OpenRecord):
    """Of a measurement."""

    num_sms: Annotated[int, whole(1, 10**5)] = 1


class Step(OpenRecord):
    """A step, measured or predicted. The kernels are checked one by one."""

    step_us: Annotated[float, number(1e-3, 1e9, "us")]
    stages: Annotated[list[Any], Field(min_length=1)]
    measured: Annotated[bool, FLAG] = False
    read_bytes_per_s: Annotated[float, number(1e6, 1e18, "bytes a second")] = 1e6
    path: Annotated[str, choice(PATH_NAMES, renamed="path")] = ""
    switches: Annotated[list[Annotated[str, SWITCH]], Field(default_factory=list)]
    layout: Annotated[str, pattern(r"tp\d{1,4}(dp\d{1,4})?ep\d{1,4}dcp\d{1,4}", "a layout such as tp16ep1dcp1")] = ""
    layers: Annotated[int, whole(1, 4096)] = 1
    concurrency: Annotated[int, whole(1, 2**20)] = 1
    context: Annotated[int, whole(1, 2**40)] = 1
    kv_dtype: Annotated[str, choice(KV_DTYPE_BYTES)] = ""
    waits_us: Annotated[dict[str, float], WAITS, Field(default_factory=dict)]
    critical_path: Annotated[list[PathRow], Field(default_factory=list)]
    machine_values: Annotated[list[MachineValue], Field(default_factory=list)]
    environment: Annotated[Environment | None, Field(default=None)]
    floor_us: Annotated[float | None, _or_null(_US)] = None
    notes: Annotated[list[str], NOTES, Field(default_factory=list)]
    model: Annotated[str | None, NAME] = None
    machine: Annotated[str | None, NAME] = None
    command: Annotated[str | None, NAME] = None


def check_step(document: Document) -> None:
    """Note every fault of a step."""
    given = document.value
    is_measured = given.get("measured") is True
    version = given.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        what = "measure it again, or correct the file" if is_measured else "predict it again"
        document.fault(("schema_version",), f"is {shown(version)}, accepted: {SCHEMA_VERSION}; {what}")
    if is_measured and given.get("stages") == []:
        document.fault(("stages",), "is [], since this step was not profiled; measure it without --no-profile")
        return
    if is_measured and "read_bytes_per_s" not in given:
        document.fault((), "lacks read_bytes_per_s (a number of bytes a second)")
    checked(document, Step)
    stages = given.get("stages")
    rows = stages if isinstance(stages, list) else []
    # A file of before calls were kept gets them from the program.
    has_calls = is_measured and any(isinstance(row, dict) and "call" in row for row in rows)
    before = len(document.faults)
    for index, row in enumerate(rows):
        at: Keys = ("stages", index)
        if checked(document, CallRow if has_calls else KernelRow, at) is not None and row["start_us"] > row["end_us"]:
            document.fault(at, f"has start_us {shown(row['start_us'])} after end_us {shown(row['end_us'])}")
        if len(document.faults) > before + 100:
            return
    if has_calls and len(document.faults) == before:
        _check_calls(document, rows)


def _check_calls(document: Document, rows: list[Mapping[str, Any]]) -> None:
    """Calls are of one rank, each is one kernel, and waits for earlier ones."""
    ranks = {row["rank"] for row in rows}
    if len(ranks) > 1:
        document.fault(("stages",), f"has kernels of {len(ranks)} ranks, accepted: those of one in a measured step")
    seen: set[int] = set()
    for index, row in enumerate(rows):
        call = row["call"]
        if call in seen:
            document.fault(("stages", index, "call"), f"is {call}, which another kernel is too; accepted: one each")
        seen.add(call)
        if any(one >= call for one in row["waits_for"]):
            document.fault(("stages", index, "waits_for"), f"is {shown(row['waits_for'])}, accepted: earlier calls")
