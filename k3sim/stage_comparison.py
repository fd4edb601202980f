"""Two timelines out of files, part by part and stage by stage: a measured step beside a predicted one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3sim.calibrate.decode.measured_step import as_if_measured, measured_step
from k3sim.compared_facts import Facts, facts_of_document
from k3sim.errors import UserError
from k3sim.report import check_writable
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json
from k3sim.sim.export.whole_file import whole_folder, write_whole_file
from k3sim.sim.timeline.file import read_document, timeline_of
from k3sim.sim.timeline.timeline import PS_PER_US, Timeline


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Kernels of one stage on each side: how many, and their microseconds together (0 where it does not run).

    ``path_us`` of a side is what the stage holds of the critical path, of a prediction beside a measured step by starts
    and ends as well: a measured kernel that begins on few SMs and waits for more shows as running. Unlike their times,
    in which kernels that run beside each other count twice and early ones wait, those add up to the step.
    """

    stage: str
    before_count: int
    before_us: float
    before_path_us: float
    after_count: int
    after_us: float
    after_path_us: float

    @property
    def delta_us(self) -> float:
        return self.after_us - self.before_us

    @property
    def path_delta_us(self) -> float:
        return self.after_path_us - self.before_path_us


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """``step_us`` are what the files say of the whole step: of a measured one the median without a profiler.

    ``waits_us`` are the parts of each side, None where a file has none; they add up to the step of a predicted one, and
    of a measured one to the step that was profiled. ``start_end_us``: of a predicted side beside a measured one the
    parts by the rule for measured steps, which is how the two compare part by part.
    """

    before: str
    after: str
    before_step_us: float
    after_step_us: float
    rows: tuple[StageRow, ...]
    timelines: Mapping[str, Timeline]
    waits_us: tuple[Mapping[str, float] | None, Mapping[str, float] | None]
    facts: tuple[Facts, Facts]
    start_end_us: tuple[Mapping[str, float] | None, Mapping[str, float] | None] = (None, None)
    notes: tuple[str, ...] = ()

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON document; differences are after minus before."""
        return {
            "schema_version": SCHEMA_VERSION,
            "before": {
                "label": self.before,
                "step_us": self.before_step_us,
                "waits_us": self.waits_us[0],
                "start_end_us": self.start_end_us[0],
            },
            "after": {
                "label": self.after,
                "step_us": self.after_step_us,
                "waits_us": self.waits_us[1],
                "start_end_us": self.start_end_us[1],
            },
            "speedup": self.before_step_us / self.after_step_us,
            "stages": [
                {
                    "stage": row.stage,
                    "before_count": row.before_count,
                    "before_us": row.before_us,
                    "before_path_us": row.before_path_us,
                    "after_count": row.after_count,
                    "after_us": row.after_us,
                    "after_path_us": row.after_path_us,
                    "delta_us": row.delta_us,
                    "path_delta_us": row.path_delta_us,
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
            "files": dict(files or {}),
        }

    def write(self, folder: Path) -> dict[str, str]:
        """Write compare.json and compare.pftrace; returns kind -> path."""
        from k3sim.sim.export.perfetto import write_perfetto_trace

        files = {"json": str(folder / "compare.json"), "perfetto": str(folder / "compare.pftrace")}
        check_writable(files)
        with whole_folder(folder) as inside:
            write_whole_file(inside / "compare.json", dump_json(self.to_dict(files)).encode())
            write_perfetto_trace(dict(self.timelines), inside / "compare.pftrace")
        return files


def compare_files(before: str, after: str) -> StageComparison:
    """Compare what ``k3sim timeline`` or ``k3sim decode`` wrote. Raises UserError for a file that is neither's."""
    labels = (before, after) if before != after else (f"{before} (1)", f"{after} (2)")
    documents = [read_document(path) for path in (before, after)]
    notes: list[str] = []
    sides = [_side(one, path, notes) for one, path in zip(documents, (before, after), strict=True)]
    start_end = _by_starts_and_ends(documents, (before, after), sides, notes)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0, 0.0, 0.0])
    for number, side in enumerate(sides):
        for run in side.timeline.of_rank(side.timeline.critical_rank):
            totals[run.stage][3 * number] += 1
            totals[run.stage][3 * number + 1] += run.duration_ps / PS_PER_US
        for stage, us in side.path_us:
            totals[stage][3 * number + 2] += us
    rows = [
        StageRow(
            stage=stage,
            before_count=int(one[0]),
            before_us=one[1],
            before_path_us=one[2],
            after_count=int(one[3]),
            after_us=one[4],
            after_path_us=one[5],
        )
        for stage, one in totals.items()
    ]
    by_path = all(side.path_us for side in sides)
    return StageComparison(
        before=labels[0],
        after=labels[1],
        before_step_us=float(documents[0]["step_us"]),
        after_step_us=float(documents[1]["step_us"]),
        rows=tuple(
            sorted(rows, key=lambda row: (-abs(row.path_delta_us if by_path else row.delta_us), row.stage))
        ),
        timelines=dict(zip(labels, (side.timeline for side in sides), strict=True)),
        waits_us=(sides[0].waits_us, sides[1].waits_us),
        facts=(facts_of_document(documents[0]), facts_of_document(documents[1])),
        start_end_us=(start_end[0], start_end[1]),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One file: its timeline, its parts (None where it has none), and what stages hold of its critical path."""

    timeline: Timeline
    waits_us: Mapping[str, float] | None = None
    path_us: tuple[tuple[str, float], ...] = ()


def _by_starts_and_ends(
    documents: Sequence[Mapping[str, Any]], names: Sequence[str], sides: list[_Side], notes: list[str]
) -> list[Mapping[str, float] | None]:
    """Of a prediction beside a measured step, its parts by the rule for measured ones; its side gets the path by it."""
    found: list[Mapping[str, float] | None] = [None, None]
    measured = [document.get("measured") is True for document in documents]
    if measured[0] != measured[1] and all(side.waits_us is not None for side in sides):
        predicted = measured.index(False)
        try:
            ruled = as_if_measured(documents[predicted], names[predicted])
        except UserError as error:
            notes.append(f"parts of the two are not by one rule: {error}")
        else:
            found[predicted] = ruled["waits_us"]
            sides[predicted] = replace(sides[predicted], path_us=_path_of(ruled))
    return found


def _side(document: Mapping[str, Any], name: str, notes: list[str]) -> _Side:
    timeline = timeline_of(document)
    if document.get("measured") is True:
        try:
            document, timeline = measured_step(document, name)
        except UserError as error:  # its stages can be compared all the same
            notes.append(f"no parts: {error}")
            return _Side(timeline=timeline)
    elif "waits_us" not in document:
        notes.append(f"no parts: {name} has none")
        return _Side(timeline=timeline)
    return _Side(timeline=timeline, waits_us=document["waits_us"], path_us=_path_of(document))


def _path_of(document: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple((row["stage"], row["us"]) for row in document.get("critical_path", []))
