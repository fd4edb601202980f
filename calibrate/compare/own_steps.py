"""Predictions beside the decode steps of the project's own kernels as measured on one GPU (``k3sim decode``).

``data/h200-decode-steps.json`` holds the steps, ``data/h200-decode-fused.json`` one step kernel by kernel. They are
compared, never used: no machine value, no Work and no path depends on a time in either.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.validate import Row
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.subset import subset
from k3sim.sim.components.skew import Skew
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import Question
from k3sim.sim.timeline.timeline import PS_PER_US
from k3sim.sim.whatif import emulated_ranks, loopback_fabric, of_card

STEPS = Path(__file__).parents[1] / "data" / "h200-decode-steps.json"
TIMELINE = Path(__file__).parents[1] / "data" / "h200-decode-fused.json"
PROFILES = {"NVIDIA H200": "h200"}


def predict_measured(step: Mapping[str, Any]) -> Prediction:
    """Prediction for what a measured step says of itself: its layers, and who its ranks' peers were.

    One GPU's are looped back, and nobody is late; several exchange over NVLink, a rank each or standing for all ranks.
    """
    num_gpus = step.get("gpus", 1)
    question = Question(
        architecture=subset(load_architecture(), step["layers"]),
        layout=Layout(tp=_tp_of(step)),
        workload=Workload(concurrency=step["concurrency"], context=step["context"], kv_dtype=step["kv_dtype"]),
        machine=machine_for(step, load_machine(PROFILES[step["machine"]])),
        path=find_path(step["path"], with_switches=tuple(step["switches"]), kernel_set="own"),
        skew=Skew.OFF if num_gpus == 1 else Skew.EXPECTED,
    )
    return predict(question)


def machine_for(step: Mapping[str, Any], machine: Machine) -> Machine:
    """``machine`` with the read rate of the card and the peers that the ranks of a measured step had."""
    num_gpus, machine = step.get("gpus", 1), of_card(machine, step["read_bytes_per_s"])
    return loopback_fabric(machine) if num_gpus == 1 else emulated_ranks(machine, num_gpus, _tp_of(step))


def _tp_of(step: Mapping[str, Any]) -> int:
    return int(step["layout"].removeprefix("tp").partition("ep")[0])


def measured_steps() -> list[dict[str, Any]]:
    """The stored steps of all layers, in the order of measuring."""
    return [step for step in json.loads(STEPS.read_text(encoding="utf-8"))["steps"] if step["layers"] == 93]


def label_of(step: Mapping[str, Any]) -> str:
    switches = tuple(step["switches"])
    if step["path"] == "stock" or switches == SWITCHES:
        path = step["path"]
    elif len(switches) == len(SWITCHES) - 1:
        path = f"fused without {next(one for one in SWITCHES if one not in switches)}"
    else:
        path = f"fused with {' and '.join(switches)} alone"
    rows = "1 row" if step["concurrency"] == 1 else f"{step['concurrency']} rows"
    return f"{path}, {rows}, {step['context'] // 1024}k"


def own_step_rows() -> list[Row]:
    """Every measured step of a whole rank, in milliseconds."""
    return [
        Row(
            label=f"h200: {label_of(step)}",
            measured=step["step_us"] / 1e3,
            predicted=predict_measured(step).step_us / 1e3,
            source=f"calibrate/data/{STEPS.name}, {step['environment']['date'][:10]}",
        )
        for step in measured_steps()
    ]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Kernels of one stage, measured and predicted, in microseconds a kernel.

    ``duration`` is from start to end; a kernel that is launched early waits within it. ``increment`` is what the
    stage adds to the step: from the latest end on the main stream before it to its own end, and 0 elsewhere.
    """

    stage: str
    stream: str
    count: int
    measured_duration_us: float
    predicted_duration_us: float
    measured_increment_us: float
    predicted_increment_us: float


Kernel = tuple[str, str, float, float]  # stage, stream, start and end in microseconds


def own_stage_rows() -> list[StageRow]:
    """The stored step kernel by kernel, in the order of the stages. Only stages that both sides have."""
    document = json.loads(TIMELINE.read_text(encoding="utf-8"))
    measured = [(one["stage"], one["stream"], one["start_us"], one["end_us"]) for one in document["stages"]]
    full = predict_measured(document).full
    predicted = [
        (run.stage, run.stream, run.start_ps / PS_PER_US, run.end_ps / PS_PER_US)
        for run in full.of_rank(full.critical_rank)
    ]
    sides = (_means(measured), _means(predicted))
    return [
        StageRow(
            stage=stage,
            stream=stream,
            count=count,
            measured_duration_us=duration_us,
            predicted_duration_us=sides[1][stage, stream][1],
            measured_increment_us=increment_us,
            predicted_increment_us=sides[1][stage, stream][2],
        )
        for (stage, stream), (count, duration_us, increment_us) in sides[0].items()
        if (stage, stream) in sides[1]
    ]


def _means(kernels: Sequence[Kernel]) -> dict[tuple[str, str], tuple[int, float, float]]:
    """By stage and stream: kernels, mean duration, mean increment along the main stream."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    latest_us = 0.0
    for stage, stream, start_us, end_us in sorted(kernels, key=lambda one: one[3]):
        total = sums[stage, stream]
        total[0] += 1
        total[1] += end_us - start_us
        if stream == "main":
            total[2] += end_us - latest_us
            latest_us = end_us
    return {key: (int(count), duration / count, step / count) for key, (count, duration, step) in sums.items()}
