"""A trace of a profiler as the forms in which a prediction comes: HTML page, Perfetto trace, JSON.

The critical path is walked on the median step of the slowest rank. ``kernels`` of the JSON document has that step's
kernels with the row of the source and the graph node of each, so that a line of any table leads back to the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from re import Pattern
from typing import Any

from k3sim.calibrate.traces.classes import read_patterns
from k3sim.calibrate.traces.comparison import compare
from k3sim.calibrate.traces.events import MEASURED, PS_PER_US, TraceKernel
from k3sim.calibrate.traces.explained import Explained, document_of, explain_trace
from k3sim.calibrate.traces.reader import read_trace
from k3sim.calibrate.traces.timeline import timeline_of_trace
from k3sim.errors import UserError
from k3sim.report import check_writable
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json
from k3sim.sim.export.whole_file import whole_folder
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.timeline import Timeline
from k3sim.version import VERSION

LIMITS = (
    "start and end of a kernel are the profiler's (observed); nothing inside it was measured",
    "what a kernel waited for is derived: the kernel before it on its stream, or the last to end on another",
    "launch: from the end of what a kernel waited for to its start, whether GPU or host was late; the table of gaps "
    "tells them apart",
    "slower peer: a collective ran before that of the last rank began; clocks are aligned by the ends of collectives",
)
MOST_DRAWN = 20_000  # kernels on a page


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """One trace explained, and the one it is compared with, which is the earlier state."""

    explained: Explained
    timeline: Timeline
    kernels: dict[int, TraceKernel]
    against: Explained | None

    @cached_property
    def document(self) -> dict[str, Any]:
        """Figures without the rows of kernels."""
        segments = critical_path(self.timeline)
        stages = {run.index: run.stage for run in self.timeline.kernels}
        totals: dict[tuple[str, str], int] = defaultdict(int)
        for one in segments:
            totals[stages.get(one.kernel, "host"), one.part.value] += one.end_ps - one.start_ps
        ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        found = {
            "schema_version": SCHEMA_VERSION,
            **document_of(self.explained),
            "waits_us": {part.value: total_ps / PS_PER_US for part, total_ps in waits_ps(segments).items()},
            "critical_path": [
                {"stage": stage, "part": part, "us": total_ps / PS_PER_US} for (stage, part), total_ps in ordered[:100]
            ],
        }
        if self.against is not None:
            found["against"] = document_of(self.against)
            found["comparison"] = compare(self.against, self.explained)
        return found

    def write(self, folder: Path) -> dict[str, str]:
        """Write explain.html, explain.pftrace and explain.json; returns kind -> path. A huge step gets no page."""
        from k3sim.sim.export.html import write_html_report
        from k3sim.sim.export.perfetto import write_perfetto_trace

        names = {"html": "explain.html", "perfetto": "explain.pftrace", "json": "explain.json"}
        if len(self.kernels) > MOST_DRAWN:
            names.pop("html")
        files = {kind: str(folder / name) for kind, name in names.items()}
        check_writable(files)
        timelines = {"trace": self.timeline}
        with whole_folder(folder) as inside:
            if "html" in names:
                write_html_report(self.html_data(), timelines, inside / names["html"])
            write_perfetto_trace(timelines, inside / names["perfetto"])
            document = {**self.document, "files": files, "kernel_rows": self._kernel_rows()}
            (inside / names["json"]).write_text(dump_json(document), encoding="utf-8")
        return files

    def html_data(self) -> dict[str, Any]:
        """What ``write_html_report`` draws."""
        document, words = self.document, {part.value: part.word for part in Part}
        step_us = max(document["step_us"], 1e-6)
        return {
            "model": ", ".join(Path(one.source).name for one in self.explained.trace.ranks[:4]),
            "machine": self.timeline.machine,
            "main_path": "trace",
            "paths": {
                "trace": {
                    "step_us": step_us,
                    "tokens_per_s_per_user": 1e6 / step_us,
                    "floor_us": None,
                    "floor_fraction": None,
                    "waits_us": {words[part]: us for part, us in document["waits_us"].items()},
                }
            },
            "example_layers": {},
            "critical_path": [{**row, "part": words[row["part"]]} for row in document["critical_path"][:20]],
            "glossary": {part.word: part.meaning for part in Part},
            "versions": {"k3sim": VERSION},
            "limits": [*LIMITS, *document["notes"]],
        }

    def _kernel_rows(self) -> list[dict[str, Any]]:
        origin = self.explained.slowest.median_step.start_ps
        return [_kernel_row(kernel, origin) for kernel in self.kernels.values()]


def explain_files(
    paths: Sequence[str],
    against: Sequence[str] = (),
    classes: str | None = None,
    step_kernel: Pattern[str] | None = None,
    nvtx: Pattern[str] | None = None,
) -> TraceReport:
    """The report of one run, a file a rank. Raises UserError for files that are no traces."""
    patterns = None if classes is None else read_patterns(classes)
    explained = explain_trace(read_trace(paths, patterns), step_kernel, nvtx)
    other = explain_trace(read_trace(against, patterns), step_kernel, nvtx) if against else None
    timeline, kernels = timeline_of_trace(explained)
    if explained.trace.format == MEASURED and len(paths) == 1:
        timeline = _divided(paths[0]) or timeline
    return TraceReport(explained=explained, timeline=timeline, kernels=kernels, against=other)


def _divided(path: str) -> Timeline | None:
    """The timeline that ``k3sim report`` has of a step of ``k3sim decode``; None for a prediction."""
    from k3sim.measured_report import read_measured

    try:
        return read_measured(path).timeline
    except UserError:
        return None


def _kernel_row(kernel: TraceKernel, origin_ps: int) -> dict[str, Any]:
    return {
        "row": kernel.row,
        "name": kernel.short_name,
        "class": kernel.kernel_class,
        "stream": kernel.stream,
        "start_us": (kernel.start_ps - origin_ps) / PS_PER_US,
        "end_us": (kernel.end_ps - origin_ps) / PS_PER_US,
        "graph": kernel.graph,
        "graph_node": kernel.graph_node,
        "correlation": kernel.correlation,
        "grid": kernel.grid,
        "block": kernel.block,
        "cluster": kernel.cluster,
        "registers_per_thread": kernel.registers_per_thread,
        "shared_memory_bytes": kernel.shared_memory_bytes,
        "bytes": kernel.num_bytes,
    }
