"""One measured step: its samples, its document, and sums over its kernels.

The document is what ``measured.json`` holds; nothing here needs a GPU.
"""

from __future__ import annotations

import bisect
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3sim.calibrate.decode.options import Case
from k3sim.kernels.costs import work_of
from k3sim.kernels.device.timestamps import RecordedLaunch
from k3sim.kernels.harness.bench import percentile
from k3sim.model.program import Program
from k3sim.sim.export.document import SCHEMA_VERSION
from k3sim.sim.timeline.file import stage_rows, waits_document
from k3sim.sim.timeline.measured import divide, facts_of
from k3sim.sim.timeline.timeline import PS_PER_US, Timeline


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured step: every sample, what it is held against, and where each kernel lay."""

    case: Case
    samples_us: tuple[float, ...]
    read_bytes_per_s: float
    moved_bytes: int  # HBM bytes of the step's Works when L2 holds nothing
    needed_bytes: int
    allocated_bytes: int
    start_s: float  # from the beginning to the first step's end
    environment: Mapping[str, Any]
    timeline: Timeline | None = None
    num_launches: int = 0
    notes: tuple[str, ...] = field(default=())
    num_gpus: int = 1  # that exchange with one another; with fewer than ranks, each stands for several
    timestamped: tuple[RecordedLaunch, ...] = ()  # of one replay, where kernels recorded their blocks

    @property
    def step_us(self) -> float:
        """Median."""
        return statistics.median(self.samples_us)

    def percentile_us(self, percent: int) -> float:
        """Nearest-rank percentile."""
        return percentile(self.samples_us, percent)

    @property
    def floor_us(self) -> float:
        """Time of the step's bytes at the read bandwidth that this GPU reached in the same run."""
        return self.moved_bytes / self.read_bytes_per_s * 1e6

    def to_dict(self) -> dict[str, Any]:
        """The JSON document; ``docs/rank.md`` describes it."""
        case = self.case
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "measured": True,
            "model": case.architecture.name,
            "machine": str(self.environment.get("gpu", "")),
            "layout": case.layout.tag,
            "gpus": self.num_gpus,
            "path": case.path.name,
            "kernels": case.path.kernel_set,
            "switches": list(case.path.switch_names),
            "layers": case.architecture.num_layers,
            "concurrency": case.workload.concurrency,
            "context": case.workload.context,
            "kv_dtype": case.workload.kv_dtype,
            "step_us": self.step_us,
            "p10_us": self.percentile_us(10),
            "p90_us": self.percentile_us(90),
            "samples_us": [round(one, 3) for one in self.samples_us],
            "read_bytes_per_s": self.read_bytes_per_s,
            "moved_bytes": self.moved_bytes,
            "floor_us": self.floor_us,
            "floor_fraction": self.floor_us / self.step_us,
            "needed_bytes": self.needed_bytes,
            "allocated_bytes": self.allocated_bytes,
            "start_s": self.start_s,
            "num_launches": self.num_launches,
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "command": case.options.command(),
        }
        if self.timeline is not None:
            facts = facts_of(case.program, int(self.environment["num_sms"]))
            document["profiled_us"] = self.timeline.step_us
            document |= waits_document(divide(self.timeline, facts, self.read_bytes_per_s))
            document["stages"] = stage_rows(self.timeline, facts)
            document["by_stage"] = by_stage(self.timeline)
            document["idle_us"] = idle_us(self.timeline)
        if self.timestamped:
            document["timestamps"] = [asdict(one) for one in self.timestamped]
        return document


def moved_bytes(program: Program) -> int:
    """HBM bytes of a step when L2 holds nothing; a prefetch moves those of the kernels that use them."""
    works = [work_of(call.operator, call.weights, call.shape) for call in program.calls]
    return sum(work.moved_bytes() for work in works if not work.prefetches)


def by_stage(timeline: Timeline) -> list[dict[str, Any]]:
    """Kernels of a stage together: how many, their time, and the part of it in which no other kernel ran; longest
    first.
    """
    edges = sorted({time_ps for run in timeline.kernels for time_ps in (run.start_ps, run.end_ps)})
    running: list[int] = [0] * len(edges)
    for run in timeline.kernels:
        for index in range(bisect.bisect_left(edges, run.start_ps), bisect.bisect_left(edges, run.end_ps)):
            running[index] += 1
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for run in timeline.kernels:
        total = totals[run.stage]
        total[0] += 1
        total[1] += run.duration_ps / PS_PER_US
        for index in range(bisect.bisect_left(edges, run.start_ps), bisect.bisect_left(edges, run.end_ps)):
            if running[index] == 1:
                total[2] += (edges[index + 1] - edges[index]) / PS_PER_US
    rows = [
        {"stage": stage, "count": int(count), "total_us": total, "alone_us": alone}
        for stage, (count, total, alone) in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_us"], row["stage"]))


def idle_us(timeline: Timeline) -> float:
    """Time of the profiled step in which no kernel ran."""
    busy_ps = end_ps = 0
    for run in sorted(timeline.kernels, key=lambda one: one.start_ps):
        busy_ps += max(0, run.end_ps - max(run.start_ps, end_ps))
        end_ps = max(end_ps, run.end_ps)
    return (timeline.step_ps - busy_ps) / PS_PER_US


def write(measured: Measured, folder: Path) -> Path:
    """Write ``measured.json`` whole or not at all; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "measured.json"
    partial = folder / ".measured.json.partial"
    partial.write_text(json.dumps(measured.to_dict(), separators=(",", ":")) + "\n")
    partial.replace(file)
    return file
