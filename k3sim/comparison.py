"""Two predictions side by side: what the second waits for less, or more."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.charts import bar, card
from k3sim.report import check_writable, summary
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json
from k3sim.sim.export.whole_file import whole_folder, write_whole_file
from k3sim.sim.machine_share import described_shares
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, difference_us, predict
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.question import ask
from k3sim.version import VERSION


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison."""

    label: str
    options: Options
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Before and after."""

    before: Side
    after: Side

    @property
    def speedup(self) -> float:
        return self.before.prediction.step_us / self.after.prediction.step_us

    @property
    def command(self) -> str:
        """The command line that asks for the same comparison."""
        return shlex.join(["k3sim", "compare", self.before.options.side(), self.after.options.side()])

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON document; differences are after minus before, so waiting eliminated is negative."""
        return {
            "schema_version": SCHEMA_VERSION,
            "before": _side(self.before),
            "after": _side(self.after),
            "speedup": self.speedup,
            "waits_delta_us": difference_us(self.before.prediction, self.after.prediction),
            "files": dict(files or {}),
        }

    def write(self, folder: Path) -> dict[str, str]:
        """Write compare.json, compare.html and compare.pftrace; returns kind -> path."""
        from k3sim.sim.export.html import write_html_report
        from k3sim.sim.export.perfetto import write_perfetto_trace

        files = {
            "json": str(folder / "compare.json"),
            "html": str(folder / "compare.html"),
            "perfetto": str(folder / "compare.pftrace"),
        }
        check_writable(files)
        timelines = {side.label: side.prediction.full for side in (self.before, self.after)}
        with whole_folder(folder) as inside:
            write_whole_file(inside / "compare.json", dump_json(self.to_dict(files)).encode())
            write_html_report(self.html_data(), timelines, inside / "compare.html")
            write_perfetto_trace(timelines, inside / "compare.pftrace")
        return files

    def html_data(self) -> dict[str, Any]:
        """What ``write_html_report`` draws."""
        before, after = self.before.prediction, self.after.prediction
        question = after.question
        gpus = {one.question.layout.num_gpus for one in (before, after)}
        return {
            "model": question.architecture.name,
            "machine": " against ".join(dict.fromkeys(one.question.machine.title for one in (before, after))),
            **({"num_gpus": gpus.pop()} if len(gpus) == 1 else {}),
            "layout": " against ".join(dict.fromkeys(one.question.layout.tag for one in (before, after))),
            "concurrency": question.workload.concurrency,
            "context": question.workload.context,
            "main_path": self.after.label,
            "compared_with": self.before.label,
            "paths": {side.label: card(side.prediction, before) for side in (self.before, self.after)},
            "waterfall": [
                bar(self.before.label, "total", before, None),
                bar("difference", "relative", after, before),
                bar(self.after.label, "total", after, None),
            ],
            "critical_path": [
                {"stage": stage, "part": part.word, "us": duration_us}
                for stage, part, duration_us in after.contributions()[:20]
            ],
            "command": self.command,
            "versions": {"k3sim": VERSION},
            "machine_values": described_shares(after),
            "not_modelled": [*dict.fromkeys(one for side in (before, after) for one in side.question.warnings)],
        }


def _side(side: Side) -> dict[str, Any]:
    question = side.prediction.question
    return {
        "label": side.label,
        "machine": question.machine.name,
        "layout": question.layout.tag,
        "num_gpus": question.layout.num_gpus,
        "path": side.prediction.path.name,
        "switches": sorted(side.prediction.path.switches),
        "concurrency": question.workload.concurrency,
        "context": question.workload.context,
        **summary(side.prediction),
        "warnings": question.warnings,
        "command": side.options.command(),
    }


def compare_options(
    before: Options, after: Options, *, labels: tuple[str, str], on_done: OnDone = ignore_progress
) -> Comparison:
    """Predict both sides. Equal labels are told apart by a number. ``on_done`` is told how many are predicted."""
    first, second = labels
    if first == second:
        first, second = f"{first} (1)", f"{second} (2)"
    sides: list[Side] = []
    for label, options in ((first or "defaults", before), (second or "defaults (2)", after)):
        on_done(len(sides), 2)
        sides.append(Side(label=label, options=options, prediction=predict(ask(options))))
    on_done(2, 2)
    return Comparison(before=sides[0], after=sides[1])
