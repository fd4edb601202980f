"""Published results as data: what was measured, where, under what, and which command predicts it.

The tables are the JSON files of this folder, read strictly (``rules.py``): fields that are missing or unknown, units
that are not known and values that cannot be are refused in one line, each with its line and what is accepted. They are
compared, never used: no machine value, no Work and no path is fitted to an end-to-end time in them
(``tests/calibrate/compare/test_published.py``).

Four kinds of record:

``step``
    a decode step, or a rate that follows from one. ``command`` is the ``k3sim timeline`` that predicts it.
``stage``
    the end of one stage of a layer after the end of the layer before: fields ``stage``, ``layer`` and ``origin``.
``kernel``
    a kernel or a few in a loop: field ``loop`` (machine, launch, trigger, calls), predicted by
    ``k3sim validate ID``.
``ladder`` (a table of its own)
    steps of an optimisation, each with the value after it and the parts of the path that it turns on.

``judged`` is false, with the reason in ``why``, where the model does not describe what was measured: such a record is
listed, and not counted in medians. So is one whose step gave the model an input (``read_inside``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind
from k3sim.sim.question import question_of

FOLDER = Path(__file__).parent
ACCEPTED = Accepted(
    what="a table of published results (docs/evidence.md)", kinds=(Kind.EVIDENCE,), most_bytes=4 << 20
)
LADDERS = Accepted(what="a table of optimisation ladders", kinds=(Kind.LADDERS,), most_bytes=4 << 20)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One published value."""

    id: str
    kind: str
    title: str
    source: str
    date: str
    hardware: str
    num_gpus: int
    layout: str
    engine: str
    flags: str
    workload: str
    value: float
    unit: str
    unknown: str  # what the source does not say
    command: str  # that predicts it
    judged: bool = True
    why: str = ""
    loop: dict[str, Any] | None = None
    stage: str = ""
    layer: int = 0
    origin: str = ""
    read_inside: tuple[str, ...] = ()  # inputs of the model that were read inside this very step

    @property
    def tokens(self) -> int:
        """Tokens of one step that the unit counts: of one user, or of all of them."""
        return question_of(self.command).workload.concurrency if self.unit == "tok/s" else 1


@dataclass(frozen=True, kw_only=True)
class LadderStep:
    """One step of an optimisation: ``parts`` are what it turns on (ladders.PARTS); none when no switch exists."""

    title: str
    value: float  # after the step, in the ladder's unit
    parts: tuple[str, ...]
    also: tuple[int, ...]  # later steps that complete this one: their savings count with it
    why: str  # why there is no switch, or what the part leaves out; may be empty


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Steps of an optimisation in order; the first is where it begins."""

    id: str
    title: str
    source: str
    date: str
    hardware: str
    engine: str
    unit: str
    unknown: str
    command: str  # of the machine, the layout and the workload
    layers: int  # of the model that was measured; the whole model is predicted, and that share of it taken
    steps: tuple[LadderStep, ...]
    noise: float = 0.0  # share of a step by which repeated measurements differ; 0 where the source does not say
    noise_source: str = ""  # where it says so

    @property
    def all_layers(self) -> int:
        return question_of(self.command).architecture.num_layers


def files() -> list[Path]:
    """Tables of the project."""
    return sorted(path for path in FOLDER.glob("*.json") if path.stem != "ladders")


def load_evidence(paths: Iterable[Path] | None = None) -> list[Evidence]:
    """Every record of the tables, in order.

    Raises UserError, all faults of a table in one line, for what is not accepted or an id that stands twice.
    """
    from k3sim.calibrate.evidence.rules import check_table

    found: dict[str, Evidence] = {}
    for path in files() if paths is None else paths:
        document = read_json(path, ACCEPTED)
        check_table(document)
        records = document.value.get("records")
        ids = [one.get("id") if isinstance(one, dict) else None for one in records] if isinstance(records, list) else []
        for index, name in enumerate(ids):
            if isinstance(name, str) and (name in found or name in ids[:index]):
                document.fault(("records", index, "id"), f"{name!r} stands twice, accepted: an id of its own")
        document.settle()
        for record in document.value["records"]:
            found[record["id"]] = _evidence(record)
    return list(found.values())


def _evidence(record: dict[str, Any]) -> Evidence:
    """A record that has been checked."""
    command = f"k3sim validate {record['id']}" if record["kind"] == "kernel" else record["command"]
    inputs = tuple(record.get("read_inside", ()))
    judged = {} if not inputs else {"judged": False, "why": f"read inside this step: {', '.join(inputs)}"}
    given = {**record, "read_inside": inputs, "value": float(record["value"]), "command": command, **judged}
    return Evidence(**given)


def load_ladders(path: Path | None = None) -> list[Ladder]:
    """Every ladder. Raises UserError for what is not accepted."""
    from k3sim.calibrate.evidence.rules import check_ladders

    document = read_json(path or FOLDER / "ladders.json", LADDERS)
    check_ladders(document)
    document.settle()
    return [_ladder(one) for one in document.value["ladders"]]


def _ladder(record: dict[str, Any]) -> Ladder:
    """A ladder that has been checked."""
    steps = tuple(
        LadderStep(
            title=step["title"],
            value=float(step["value"]),
            parts=tuple(step.get("parts", ())),
            also=tuple(step.get("also", ())),
            why=step.get("why", ""),
        )
        for step in record["steps"]
    )
    return Ladder(**{**record, "steps": steps})
