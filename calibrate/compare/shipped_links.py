"""Predictions beside what was measured between GPUs of one host over NVLink: exchanges, and decode steps.

``data/h200-links.json`` holds the samples of ``probes/links.py``: its primitives give the NVLink values of the h200
profile (``link_fit.py``), its times of kernels are shown beside predictions. ``data/h200-link-steps.json`` holds steps
of one TP8 rank group that two GPUs stand for, and the same looped back on one of them. No time of a kernel or of a
step in either enters a value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.shipped_chains import all_reduce, fused_allreduce
from k3sim.calibrate.compare.shipped_kernels import MeasuredChain, compare_chains
from k3sim.calibrate.compare.shipped_steps import LabelledStep, compare_steps, label_of, predict_measured
from k3sim.calibrate.samples import SampleFile, read_samples
from k3sim.model.program import build_program
from k3sim.sim.predict import Prediction
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress

LINKS = Path(__file__).parents[1] / "data" / "h200-links.json"
STEPS = Path(__file__).parents[1] / "data" / "h200-link-steps.json"
ALL_REDUCES = {  # bytes of one call of the one-shot kernel: rows, hidden
    8192: (1, 4096), 14336: (1, 7168), 28672: (2, 7168), 65536: (4, 8192), 131072: (8, 8192), 262144: (16, 8192),
}  # fmt: skip


@cache
def link_samples() -> SampleFile:
    return read_samples(LINKS)


def link_chains() -> list[MeasuredChain]:
    """The project's kernels over the link; NCCL and cuBLAS in the same file have no cost here."""
    found = []
    for sample in link_samples().samples:
        have = sample.parameters
        rows: int
        if sample.case == "all_reduce" and have["by"] == "one-shot" and have["calls"] == 1:
            rows, hidden = ALL_REDUCES[have["bytes"]]
            label, kernels = f"all_reduce of {have['bytes']} B", all_reduce(have["ranks"], rows, hidden)
        elif sample.case == "projection" and have["by"] == "fused-allreduce":
            rows = have["rows"]
            label = f"proj_allreduce 7168x{have['depth']}, {rows} row{'s' * (rows > 1)}"
            kernels = fused_allreduce(have["ranks"], have["depth"], rows)
        else:
            continue
        gpus, ranks = have["gpus"], have["ranks"]
        found.append(
            MeasuredChain(
                label=f"{label}, {gpus} GPUs for {ranks} ranks",
                measured_us=sample.value,
                kernels=kernels,
                source=f"calibrate/data/{LINKS.name}, {link_samples().date}",
                gpus=gpus,
                ranks=ranks,
            )
        )
    return found


def link_kernel_cases(*, jobs: int | None = None, on_done: OnDone = ignore_progress) -> list[ComparedCase]:
    """Chains of exchanges over the link, in microseconds a round."""
    return compare_chains(link_chains(), jobs=jobs, on_done=on_done)


def measured_link_steps() -> list[dict[str, Any]]:
    """The stored steps between GPUs, and those of the same rank looped back, by path, GPUs and rows."""
    steps: list[dict[str, Any]] = json.loads(STEPS.read_text(encoding="utf-8"))["steps"]
    return sorted(steps, key=lambda one: (one["path"] == "fused", -one.get("gpus", 1), one["concurrency"]))


def link_label(step: dict[str, Any]) -> str:
    where = "looped back" if step["gpus"] == 1 else f"{step['gpus']} GPUs over NVLink"
    return f"{label_of(step)}, {step['layers']} layers, TP8, {where}"


def labelled_link_steps() -> list[LabelledStep]:
    """Steps of one TP8 rank group over the link and looped back, each with its label and source."""
    return [
        (link_label(step), f"calibrate/data/{STEPS.name}, {step['environment']['date'][:10]}", step)
        for step in measured_link_steps()
    ]


def link_step_cases(*, jobs: int | None = None, on_done: OnDone = ignore_progress) -> list[ComparedCase]:
    """The same in milliseconds, beside their predictions."""
    machines = [load_machine("h200")]
    return [one.in_ms() for one in compare_steps(labelled_link_steps(), machines, jobs=jobs, on_done=on_done)]


@dataclass(frozen=True, kw_only=True)
class LinkDifference:
    """What the link adds to a step: the same kernels over NVLink less looped back. The label is the path."""

    num_exchanges: int  # of the step: calls that poll
    case: ComparedCase


def link_differences() -> list[LinkDifference]:
    """Of every case that was measured both ways. What a prediction leaves out of kernels is on both sides."""
    by_case: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for step in measured_link_steps():
        case = tuple(step[name] for name in ("path", "layers", "concurrency", "context", "kv_dtype"))
        by_case.setdefault(case, {})[step["gpus"] > 1] = step
    found = []
    for case, sides in by_case.items():
        if len(sides) == 2:
            over, back = (predict_measured(sides[linked]) for linked in (True, False))
            difference = ComparedCase(
                kind="step",
                label=case[0],
                measured=sides[True]["step_us"] - sides[False]["step_us"],
                predicted=over.step_us - back.step_us,
                unit="us",
                source=f"calibrate/data/{STEPS.name}",
            )
            found.append(LinkDifference(num_exchanges=num_exchanges(over), case=difference))
    return found


def num_exchanges(prediction: Prediction) -> int:
    """Calls of a whole step that poll what peers sent."""
    asked = prediction.question
    program = build_program(asked.architecture, asked.layout, asked.workload, prediction.path)
    return sum(bool(call.receives) for call in program.calls)
