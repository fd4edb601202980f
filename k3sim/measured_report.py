"""A measured step as the forms in which a prediction comes: HTML page and Perfetto trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.calibrate.decode.measured_step import measured_step
from k3sim.report import check_writable
from k3sim.sim.export.whole_file import whole_folder
from k3sim.sim.timeline.critical_path import Part
from k3sim.sim.timeline.file import read_document
from k3sim.sim.timeline.timeline import Timeline
from k3sim.version import VERSION

LIMITS = (
    "start and end of a kernel are the profiler's; nothing inside it was measured",
    "an early launch runs from its launch on: until all that it waits for has ended, its time is theirs",
    "weights, KV and state: counted bytes at the read bandwidth of the same run, less those that may have come before; "
    "the least that reading took, and drawn first in a kernel, though when it was is not known",
    "kernel, exchange: all else of a kernel, from the first bytes to the last store, and HBM that another stream took",
    "launch: from the end of what a kernel waited for to its start",
    "there is no link: peers are looped back, unless several processes ran",
    "the parts are of one profiled step; the step time is the median of steps that were not",
)


@dataclass(frozen=True, kw_only=True)
class MeasuredReport:
    """``document`` is a measured step with its parts, ``timeline`` the same with divided kernels."""

    document: Mapping[str, Any]
    timeline: Timeline

    @property
    def label(self) -> str:
        return f"{self.document.get('path', 'step')}, measured"

    def write(self, folder: Path) -> dict[str, str]:
        """Write measured.html and measured.pftrace; returns kind -> path."""
        from k3sim.sim.export.html import write_html_report
        from k3sim.sim.export.perfetto import write_perfetto_trace

        files = {"html": str(folder / "measured.html"), "perfetto": str(folder / "measured.pftrace")}
        check_writable(files)
        timelines = {self.label: self.timeline}
        with whole_folder(folder) as inside:
            write_html_report(self.html_data(), timelines, inside / "measured.html")
            write_perfetto_trace(timelines, inside / "measured.pftrace")
        return files

    def html_data(self) -> dict[str, Any]:
        """What ``write_html_report`` draws."""
        document, step_us = self.document, float(self.document["step_us"])
        words = {part.value: part.word for part in Part}
        layers = {run.layer: run.kind.partition("+")[0] for run in self.timeline.kernels}
        middle = sorted(layers)[len(layers) // 2]
        floor_us = document.get("floor_us")
        return {
            "model": document.get("model"),
            "machine": document.get("machine"),
            "layout": document.get("layout"),
            "concurrency": document.get("concurrency"),
            "context": document.get("context"),
            "main_path": self.label,
            "paths": {
                self.label: {
                    "step_us": step_us,
                    "tokens_per_s_per_user": 1e6 / step_us,
                    "floor_us": floor_us,
                    "floor_fraction": None if floor_us is None else floor_us / step_us,
                    "waits_us": {words[part]: us for part, us in document["waits_us"].items()},
                }
            },
            "example_layers": {
                mixer: min((layer for layer in layers if layers[layer] == mixer), key=lambda layer: abs(layer - middle))
                for mixer in ("kda", "mla")
                if mixer in layers.values()
            },
            "critical_path": [{**row, "part": words[row["part"]]} for row in document["critical_path"][:20]],
            "glossary": {part.word: part.meaning for part in Part},
            "command": document.get("command"),
            "versions": {"k3sim": VERSION, **_versions(document)},
            "limits": [*LIMITS, *(str(note) for note in document.get("notes") or ())],
        }


def measured_report(document: Mapping[str, Any], name: str) -> MeasuredReport:
    """The report of a document of ``k3sim decode``, which errors call ``name``. Raises UserError for another one."""
    found, timeline = measured_step(document, name)
    return MeasuredReport(document=found, timeline=timeline)


def read_measured(path: str) -> MeasuredReport:
    """The report of a file of ``k3sim decode``."""
    return measured_report(read_document(path, measured=True), path)


def _versions(document: Mapping[str, Any]) -> dict[str, str]:
    environment = document.get("environment")
    versions = environment.get("versions") if isinstance(environment, dict) else None
    return {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
