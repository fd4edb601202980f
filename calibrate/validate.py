"""Predictions beside published readings: whole steps, the stages of one layer, single kernels.

``data/published.json`` holds the readings with their sources; ``own_kernels`` and ``own_steps`` have those of the
project's own kernels. They are compared, never used: no machine value, no
Work and no path depends on a step time in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.model.architecture import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.model.program import Call, Program, Weight
from k3sim.sim.engine import simulate
from k3sim.sim.machine import load_machine
from k3sim.sim.predict import Prediction, Question, predict
from k3sim.sim.timeline import PS_PER_US

PUBLISHED = Path(__file__).parent / "data" / "published.json"
LOOPS = 12  # calls of a kernel back to back; the first ones are not counted
WARM_UP = 3
REAL_TEXT_SKEW = 0.784


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reading and its prediction, in the unit of the table."""

    label: str
    measured: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """Relative error; positive when the prediction is slower."""
        return self.predicted / self.measured - 1.0


def published() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return document


def predict_published(options: Mapping[str, Any]) -> Prediction:
    """Prediction for the options of a published step."""
    architecture = load_architecture()
    question = Question(
        architecture=architecture,
        layout=Layout(tp=options["tp"]),
        workload=Workload(concurrency=options["concurrency"], context=options["context"]),
        machine=load_machine(options["machine"]),
        routing_skew=options.get("routing_skew", 0.0),
    )
    return predict(question, find_path(options["path"]))


def step_rows() -> list[Row]:
    """Whole decode steps, in milliseconds."""
    return [
        Row(
            label=step["label"],
            measured=step["measured_ms"],
            predicted=predict_published(step["options"]).step_us / 1e3,
            source=step["source"],
        )
        for step in published()["steps"]
    ]


def skewed_routing_rows() -> list[Row]:
    """The steps of 16 users again, with the expert popularity of real text.

    The skew is the one with which 24 rows touch 230 of 896 experts, as counted on real text
    (xiaguan/kern-k3-pp-prefill notes, 2026-10); it is not fitted to a time.
    """
    rows = []
    for step in published()["steps"]:
        if step["options"]["concurrency"] == 16:
            prediction = predict_published({**step["options"], "routing_skew": REAL_TEXT_SKEW})
            rows.append(
                Row(
                    label=step["label"],
                    measured=step["measured_ms"],
                    predicted=prediction.step_us / 1e3,
                    source=step["source"],
                )
            )
    return rows


def layer_rows() -> list[Row]:
    """Ends of the stages of one KDA layer, in microseconds from the end of the tail of the layer before."""
    reading = published()["layer_timeline"]
    timeline = predict_published(reading["options"]).full
    layer = 41  # a KDA layer after a KDA layer, in the middle of the step
    ends = {
        which: {run.stage: run.end_ps for run in timeline.kernels if run.layer == number}
        for which, number in (("previous", layer - 1), ("this", layer))
    }
    origin_ps = ends["previous"]["moe.tail_reduce"]
    return [
        Row(
            label=stage,
            measured=measured_us,
            predicted=(ends[which][stage] - origin_ps) / PS_PER_US,
            source=reading["source"],
        )
        for stage, which, measured_us in reading["stages"]
    ]


def kernel_rows() -> list[Row]:
    """Public kernels in a graph of repeated calls, in microseconds a call."""
    return published_rows("kernels")


def published_rows(name: str) -> list[Row]:
    """Readings of one list of ``published.json`` that are loops of kernels."""
    return [
        Row(
            label=f"{reading['machine']}: {reading['label']}",
            measured=reading["measured_us"],
            predicted=loop_us(
                reading["machine"], reading["launch"], reading["calls"], reading.get("trigger", "stream")
            ),
            source=reading["source"],
        )
        for reading in published()[name]
    ]


def loop_us(machine: str, launch: str, kernels: Sequence[Mapping[str, Any]], trigger: str) -> float:
    """Time of one round of ``kernels`` in a long graph in which every round reads its own weights (cold L2)."""
    calls: list[Call] = []
    for loop in range(LOOPS):
        for position, kernel in enumerate(kernels):
            weights = tuple(
                Weight(region=f"{loop}/{position}/{number}", num_outputs=outputs, depth=depth, num_bytes=num_bytes)
                for number, (outputs, depth, num_bytes) in enumerate(kernel["weights"])
            )
            calls.append(
                Call(
                    index=len(calls),
                    layer=loop,
                    kind="loop",
                    stage=kernel["operator"],
                    operator=kernel["operator"],
                    weights=weights,
                    shape=kernel["shape"],
                    stream="main",
                    launch=launch,
                    trigger=trigger,
                    after=(),
                    sends="",
                    transport="push",
                    group_size=1,
                    receives=(),
                )
            )
    program = Program(path=find_path("stock"), num_ranks=1, layers=tuple(range(LOOPS)), calls=tuple(calls))
    timeline = simulate(program, load_machine(machine))
    ends = [max(run.end_ps for run in timeline.kernels if run.layer == loop) for loop in range(LOOPS)]
    return (ends[-1] - ends[WARM_UP - 1]) / (LOOPS - WARM_UP) / PS_PER_US
