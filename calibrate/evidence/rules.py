"""What a table of published results may hold, as models; ``docs/evidence.md`` prints their fields.

This module alone of the folder needs pydantic, and is imported once a table is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from k3sim.kernels.costs import all_costs
from k3sim.model.documents.document import Document, shown
from k3sim.model.documents.fields import (
    FLAG,
    TEXT,
    Record,
    Refused,
    Rule,
    asking,
    checked,
    choice,
    number,
    one_of,
    pattern,
    whole,
)
from k3sim.model.documents.lines import Keys
from k3sim.model.paths import PARTS
from k3sim.sim.profile import machine_names, value_names
from k3sim.sim.question import question_of

SCHEMA_VERSION = 1
HARDWARE = ("gb300", "gb200", "b300", "b200", "h200", "h100")
#: Unit -> (least, most) value that it can have; a slip of a unit lies outside.
UNITS: Mapping[str, tuple[float, float]] = {
    "ms": (0.3, 10_000.0),
    "us": (0.3, 100_000.0),
    "tok/s/user": (0.1, 3_000.0),
    "tok/s": (0.1, 1e6),
}


def _check_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused
    return value


def _check_weight(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 3:
        raise Refused
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= 10**12:
            raise Refused
    return value


NUMBER = Rule("a number within the range of its unit", _check_number)
WEIGHT = Rule("[outputs, depth, bytes], each a whole number from 1 to 1000000000000", _check_weight)
ID = pattern(r"[a-z0-9][a-z0-9.\-]*", "small letters, digits, '-' and '.'")
DATE = pattern(r"20\d\d(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?", "YYYY, YYYY-MM or YYYY-MM-DD")
COMMAND = asking("a k3sim timeline command that can be asked", question_of)


class Table(Record):
    """A file of records."""

    schema_version: Annotated[int, one_of(SCHEMA_VERSION)]
    records: Annotated[list[Any], Field(min_length=1)]


class Published(Record):
    """Fields of every record."""

    id: Annotated[str, ID, Field(description="its name, in no other record")]
    kind: Annotated[str, choice(("step", "stage", "kernel")), Field(description="what was measured")]
    title: Annotated[str, TEXT, Field(description="what was measured, in a few words")]
    source: Annotated[str, TEXT, Field(description="link, or name and place of the publication")]
    date: Annotated[str, DATE, Field(description="of the publication")]
    hardware: Annotated[str, choice(HARDWARE), Field(description="the GPU, by the name of its profile")]
    num_gpus: Annotated[int, whole(1, 576), Field(description="GPUs that ran together")]
    layout: Annotated[str, TEXT, Field(description="parallel layout as the source names it")]
    engine: Annotated[str, TEXT, Field(description="serving engine and version")]
    flags: Annotated[str, TEXT, Field(description="its options, or what the source says of them")]
    workload: Annotated[str, TEXT, Field(description="requests, input and output lengths")]
    value: Annotated[float, NUMBER, Field(description="as published")]
    unit: Annotated[str, choice(UNITS), Field(description="of the value")]
    unknown: Annotated[str, TEXT, Field(description="what the source does not say")]
    judged: Annotated[bool, FLAG, Field(description="false where the model does not describe what was measured")] = True
    why: Annotated[str, TEXT, Field(description="why it is not judged; with judged false only")] = ""


#: Inputs of the model that may have been read inside a step: values of a profile, and how often the host launches.
INPUTS = (*value_names(), "host launches")
READ_INSIDE = "inputs of the model that were read inside this very step: it is listed then, and not judged"


class StepRecord(Published):
    """A decode step, or a rate that follows from one."""

    command: Annotated[str, COMMAND, Field(description="the command that predicts it")]
    read_inside: Annotated[
        list[Annotated[str, choice(INPUTS, words="a value of a profile, or host launches")]],
        Field(default_factory=list, description=READ_INSIDE),
    ]


class StageRecord(Published):
    """The end of one stage of a layer after the end of a stage of the layer before."""

    unit: Annotated[str, choice(("us",)), Field(description="of the value")]
    command: Annotated[str, COMMAND, Field(description="the command that predicts it")]
    stage: Annotated[str, TEXT, Field(description="stage whose end was measured, as 'k3sim paths' names it")]
    layer: Annotated[int, whole(1, 92), Field(description="layer, counted from 0")]
    origin: Annotated[str, TEXT, Field(description="stage of the layer before, from whose end on is measured")]
    read_inside: Annotated[
        list[Annotated[str, choice(INPUTS, words="a value of a profile, or host launches")]],
        Field(default_factory=list, description=READ_INSIDE),
    ]


class Call(Record):
    """One kernel of a loop."""

    operator: Annotated[
        str,
        choice(all_costs(), words="an operator that a path names, as `k3sim paths` lists them"),
        Field(description="what prices it"),
    ]
    weights: Annotated[list[Annotated[list[int], WEIGHT]], Field(description="matrices that it reads")]
    shape: Annotated[dict[str, Annotated[int, whole(0, 10**12)]], Field(description="what its cost asks for, by name")]


class Loop(Record):
    """Kernels that ran one after another, again and again."""

    machine: Annotated[str, choice(machine_names()), Field(description="profile of the GPU")]
    launch: Annotated[str, choice(("graph", "pdl")), Field(description="how each follows the one before")]
    trigger: Annotated[
        str, choice(("start", "wait", "stream", "end")), Field(description="when a kernel lets its successor launch")
    ] = "start"
    ranks: Annotated[int, whole(1, 576), Field(description="GPUs of an exchange")] = 1
    calls: Annotated[list[Call], Field(min_length=1, description="the kernels in order")]


class KernelRecord(Published):
    """A kernel, or a few in a loop."""

    unit: Annotated[str, choice(("us",)), Field(description="of the value")]
    loop: Annotated[Loop, Field(description="what ran")]


RECORDS: Mapping[str, type[Published]] = {"step": StepRecord, "stage": StageRecord, "kernel": KernelRecord}


class LadderStepRecord(Record):
    """One step of an optimisation."""

    title: Annotated[str, TEXT]
    value: Annotated[float, NUMBER]
    parts: Annotated[list[Annotated[str, choice(PARTS, renamed="part")]], Field(default_factory=list)]
    also: Annotated[list[Annotated[int, whole(1, 1000)]], Field(default_factory=list)]
    why: Annotated[str, TEXT] = ""


class LadderRecord(Record):
    """Steps of an optimisation in order; the first is where it begins."""

    id: Annotated[str, TEXT]
    title: Annotated[str, TEXT]
    source: Annotated[str, TEXT]
    date: Annotated[str, DATE]
    hardware: Annotated[str, choice(HARDWARE)]
    engine: Annotated[str, TEXT]
    unit: Annotated[str, choice(("ms", "tok/s/user"))]
    unknown: Annotated[str, TEXT]
    noise: Annotated[float, number(0.0, 0.5, accepted="a share of a step, 0 to 0.5")] = 0.0
    noise_source: Annotated[str, TEXT] = ""
    command: Annotated[str, COMMAND]
    layers: Annotated[int, whole(1, 4096)]
    steps: Annotated[list[LadderStepRecord], Field(min_length=2)]


class LadderTable(Record):
    """A file of ladders."""

    schema_version: Annotated[int, one_of(SCHEMA_VERSION)]
    ladders: Annotated[list[LadderRecord], Field(min_length=1)]


def check_table(document: Document) -> None:
    """Note every fault of a table of published results."""
    checked(document, Table)
    records = document.value.get("records")
    for index, record in enumerate(records if isinstance(records, list) else ()):
        at: Keys = ("records", index)
        kind = record.get("kind") if isinstance(record, dict) else None
        if not isinstance(record, dict) or not isinstance(kind, str) or kind not in RECORDS:
            checked(document, Published, at)
            continue
        if checked(document, RECORDS[kind], at) is not None and kind == "stage":
            _check_stages(document, record, at)
        _check_value(document, record, at)
        judged, why = record.get("judged", True), record.get("why", "")
        if isinstance(judged, bool) and isinstance(why, str) and judged == bool(why):
            document.fault(at, "has why or judged false without the other, accepted: both or neither")


def _check_stages(document: Document, record: Mapping[str, Any], at: Keys) -> None:
    stages = sorted({row.stage for table in question_of(record["command"]).path.tables.values() for row in table})
    rule = choice(stages)
    for name in ("stage", "origin"):
        try:
            rule.check(record[name])
        except Refused as refusal:
            document.fault((*at, name), str(refusal))


def _check_value(document: Document, record: Mapping[str, Any], at: Keys) -> None:
    value, unit = record.get("value"), record.get("unit")
    if not isinstance(unit, str) or unit not in UNITS or isinstance(value, bool) or not isinstance(value, int | float):
        return
    least, most = UNITS[unit]
    if not least <= value <= most:
        document.fault((*at, "value"), f"is {shown(value)}, accepted: {least:g} to {most:g} {unit}")


def check_ladders(document: Document) -> None:
    """Note every fault of a table of ladders."""
    if checked(document, LadderTable) is None:
        return
    for place, ladder in enumerate(document.value["ladders"]):
        at: Keys = ("ladders", place)
        if bool(ladder.get("noise")) != bool(ladder.get("noise_source")):
            document.fault(at, "has noise or noise_source without the other, accepted: both or neither")
        num_layers = question_of(ladder["command"]).architecture.num_layers
        if ladder["layers"] > num_layers:
            document.fault((*at, "layers"), f"is {ladder['layers']}, accepted: at most {num_layers}")
        for index, step in enumerate(ladder["steps"]):
            here = (*at, "steps", index)
            _check_value(document, {**step, "unit": ladder["unit"]}, here)
            if any(not index < one < len(ladder["steps"]) for one in step.get("also", [])):
                document.fault((*here, "also"), f"is {shown(step['also'])}, accepted: later steps by number")
            if index and not step.get("parts") and not step.get("why"):
                document.fault(here, "has neither parts nor why, accepted: parts, or why there is no switch")
