"""Predictions beside what was measured between GPUs of one host over NVLink: exchanges, and decode steps.

``data/h200-links.json`` holds the samples of ``probes/links.py``: its primitives give the NVLink values of the h200
profile (``link_fit.py``), its times of kernels are shown beside predictions. ``data/h200-link-steps.json`` holds steps
of one TP8 rank group that two GPUs stand for, and the same looped back on one of them. No time of a kernel or of a
step in either enters a value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import own_kernels, own_steps
from k3sim.calibrate.compare.validate import Row
from k3sim.calibrate.samples import Sample, SampleFile, read_samples
from k3sim.model.program import build_program
from k3sim.sim.components.skew import Skew
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction
from k3sim.sim.profile import load_machine
from k3sim.sim.whatif import emulated_ranks

LINKS = Path(__file__).parents[1] / "data" / "h200-links.json"
STEPS = Path(__file__).parents[1] / "data" / "h200-link-steps.json"
ALL_REDUCES = {  # bytes of one call of the one-shot kernel: rows, hidden
    8192: (1, 4096), 14336: (1, 7168), 28672: (2, 7168), 65536: (4, 8192), 131072: (8, 8192), 262144: (16, 8192),
}  # fmt: skip


@cache
def link_samples() -> SampleFile:
    return read_samples(LINKS)


@dataclass(frozen=True, kw_only=True)
class LinkChain:
    """A chain of exchanges between GPUs, each of which stands for as many ranks as the others."""

    label: str
    sample: Sample
    links: Sequence[own_kernels.Link]
    gpus: int
    ranks: int

    def predicted_us(self, machine: Machine) -> float:
        """On the link as it is, both GPUs late by chance as in a step."""
        over = emulated_ranks(machine, self.gpus, self.ranks)
        return own_kernels.chain_us(self.links, over, group_size=self.ranks, skew=Skew.EXPECTED)


def link_chains() -> list[LinkChain]:
    """The project's kernels over the link; NCCL and cuBLAS in the same file have no cost here."""
    found = []
    for sample in link_samples().samples:
        have = sample.parameters
        rows: int
        if sample.case == "all_reduce" and have["by"] == "one-shot" and have["calls"] == 1:
            rows, hidden = ALL_REDUCES[have["bytes"]]
            label, links = f"all_reduce of {have['bytes']} B", own_kernels.all_reduce(have["ranks"], rows, hidden)
        elif sample.case == "projection" and have["by"] == "fused-allreduce":
            rows = have["rows"]
            label = f"proj_allreduce 7168x{have['depth']}, {rows} row{'s' * (rows > 1)}"
            links = own_kernels.fused_allreduce(have["ranks"], have["depth"], rows)
        else:
            continue
        gpus, ranks = have["gpus"], have["ranks"]
        found.append(
            LinkChain(label=f"{label}, {gpus} GPUs for {ranks} ranks", sample=sample, links=links, gpus=gpus,
                      ranks=ranks)
        )  # fmt: skip
    return found


def link_kernel_rows() -> list[Row]:
    """Chains of exchanges over the link, in microseconds a round."""
    machine, source = load_machine("h200"), f"calibrate/data/{LINKS.name}, {link_samples().date}"
    return [
        Row(label=f"h200: {one.label}", measured=one.sample.value, predicted=one.predicted_us(machine), source=source)
        for one in link_chains()
    ]


def measured_link_steps() -> list[dict[str, Any]]:
    """The stored steps between GPUs, and those of the same rank looped back, by path, GPUs and rows."""
    steps: list[dict[str, Any]] = json.loads(STEPS.read_text(encoding="utf-8"))["steps"]
    return sorted(steps, key=lambda one: (one["path"] == "fused", -one.get("gpus", 1), one["concurrency"]))


def link_label(step: dict[str, Any]) -> str:
    where = "looped back" if step["gpus"] == 1 else f"{step['gpus']} GPUs over NVLink"
    return f"{own_steps.label_of(step)}, {step['layers']} layers, TP8, {where}"


def link_step_rows() -> list[Row]:
    """Steps of one TP8 rank group over the link and looped back, in milliseconds."""
    return [
        Row(
            label=f"h200: {link_label(step)}",
            measured=step["step_us"] / 1e3,
            predicted=own_steps.predict_measured(step).step_us / 1e3,
            source=f"calibrate/data/{STEPS.name}, {step['environment']['date'][:10]}",
        )
        for step in measured_link_steps()
    ]


@dataclass(frozen=True, kw_only=True)
class LinkDifference:
    """What the link adds to a step: the same kernels over NVLink less looped back, in microseconds."""

    path: str
    num_exchanges: int  # of the step: calls that poll
    measured_us: float
    predicted_us: float


def link_differences() -> list[LinkDifference]:
    """Of every case that was measured both ways. What a prediction leaves out of kernels is on both sides."""
    by_case: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for step in measured_link_steps():
        case = tuple(step[name] for name in ("path", "layers", "concurrency", "context", "kv_dtype"))
        by_case.setdefault(case, {})[step["gpus"] > 1] = step
    found = []
    for case, sides in by_case.items():
        if len(sides) == 2:
            over, back = (own_steps.predict_measured(sides[linked]) for linked in (True, False))
            found.append(
                LinkDifference(
                    path=case[0],
                    num_exchanges=num_exchanges(over),
                    measured_us=sides[True]["step_us"] - sides[False]["step_us"],
                    predicted_us=over.step_us - back.step_us,
                )
            )
    return found


def num_exchanges(prediction: Prediction) -> int:
    """Calls of a whole step that poll what peers sent."""
    asked = prediction.question
    program = build_program(asked.architecture, asked.layout, asked.workload, prediction.path)
    return sum(bool(call.receives) for call in program.calls)
