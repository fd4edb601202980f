"""Two timelines out of files, stage by stage: a measured step beside a predicted one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.report import SCHEMA_VERSION, check_writable, dump_json
from k3sim.sim.timeline import PS_PER_US, Timeline
from k3sim.sim.timeline_file import read_document, timeline_of
from k3sim.sim.whole_file import write_whole_file


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Kernels of one stage on each side: how many, and their microseconds together (0 where it does not run)."""

    stage: str
    before_count: int
    before_us: float
    after_count: int
    after_us: float

    @property
    def delta_us(self) -> float:
        return self.after_us - self.before_us


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """``step_us`` are what the files say of the whole step: of a measured one the median without a profiler."""

    before: str
    after: str
    before_step_us: float
    after_step_us: float
    rows: tuple[StageRow, ...]
    timelines: Mapping[str, Timeline]

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON document; differences are after minus before."""
        return {
            "schema_version": SCHEMA_VERSION,
            "before": {"label": self.before, "step_us": self.before_step_us},
            "after": {"label": self.after, "step_us": self.after_step_us},
            "speedup": self.before_step_us / self.after_step_us,
            "stages": [
                {
                    "stage": row.stage,
                    "before_count": row.before_count,
                    "before_us": row.before_us,
                    "after_count": row.after_count,
                    "after_us": row.after_us,
                    "delta_us": row.delta_us,
                }
                for row in self.rows
            ],
            "files": dict(files or {}),
        }

    def write(self, folder: Path) -> dict[str, str]:
        """Write compare.json and compare.pftrace; returns kind -> path."""
        from k3sim.sim.perfetto_trace import write_perfetto_trace

        files = {"json": str(folder / "compare.json"), "perfetto": str(folder / "compare.pftrace")}
        check_writable(files)
        write_whole_file(Path(files["json"]), dump_json(self.to_dict(files)).encode())
        write_perfetto_trace(dict(self.timelines), Path(files["perfetto"]))
        return files


def compare_files(before: str, after: str) -> StageComparison:
    """Compare what ``k3sim timeline`` or ``k3sim decode`` wrote. Raises UserError for a file that is neither's."""
    labels = (before, after) if before != after else (f"{before} (1)", f"{after} (2)")
    documents = [read_document(path) for path in (before, after)]
    timelines = [timeline_of(one, path) for one, path in zip(documents, (before, after), strict=True)]
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
    for side, timeline in enumerate(timelines):
        for run in timeline.of_rank(timeline.critical_rank):
            totals[run.stage][2 * side] += 1
            totals[run.stage][2 * side + 1] += run.duration_ps / PS_PER_US
    rows = [
        StageRow(stage=stage, before_count=int(one), before_us=us, after_count=int(other), after_us=other_us)
        for stage, (one, us, other, other_us) in totals.items()
    ]
    return StageComparison(
        before=labels[0],
        after=labels[1],
        before_step_us=float(documents[0]["step_us"]),
        after_step_us=float(documents[1]["step_us"]),
        rows=tuple(sorted(rows, key=lambda row: (-abs(row.delta_us), row.stage))),
        timelines=dict(zip(labels, timelines, strict=True)),
    )
