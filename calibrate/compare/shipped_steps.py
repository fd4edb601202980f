"""Predictions beside the decode steps of the shipped kernels as measured on one GPU (``k3sim decode``).

``data/h200-decode-steps.json`` holds the steps, ``data/h200-decode-fused.json`` one step kernel by kernel. They are
compared, never used: no machine value, no Work and no path depends on a time in either.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase, with_bounds
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.fit.profile_text import PROFILES
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.subset import subset
from k3sim.sim.components.skew import Skew
from k3sim.sim.intervals import with_errors_of_step
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.question import Question
from k3sim.sim.timeline.timeline import PS_PER_US
from k3sim.sim.whatif import emulated_ranks, loopback_fabric, of_card

STEPS = Path(__file__).parents[1] / "data" / "h200-decode-steps.json"
TIMELINE = Path(__file__).parents[1] / "data" / "h200-decode-fused.json"
ALL_LAYERS, ALL_RANKS = 93, 16  # of the whole model, and of the group whose rank the stored steps are of


def question_of_measured(step: Mapping[str, Any], machine: Machine) -> Question:
    """What a measured step says of itself, asked of ``machine``: its layers, and who its ranks' peers were.

    One GPU's are looped back, and nobody is late; several exchange over NVLink, a rank each or standing for all ranks.
    """
    switches = tuple(step["switches"])
    none_on = step["path"] == "fused" and not switches
    return Question(
        architecture=subset(load_architecture(), step["layers"]),
        layout=Layout(tp=ranks_of(step)),
        workload=Workload(concurrency=step["concurrency"], context=step["context"], kv_dtype=step["kv_dtype"]),
        machine=machine_for(step, machine),
        path=find_path(
            step["path"], with_switches=switches, without=SWITCHES if none_on else (), kernel_set="own"
        ),
        skew=Skew.OFF if step.get("gpus", 1) == 1 else Skew.EXPECTED,
    )


def predict_measured(step: Mapping[str, Any]) -> Prediction:
    """Prediction for a measured step by the shipped profile of its GPU."""
    return predict(question_of_measured(step, load_machine(PROFILES[step["machine"]])))


def machine_for(step: Mapping[str, Any], machine: Machine) -> Machine:
    """``machine`` with the read rate of the card and the peers that the ranks of a measured step had."""
    num_gpus, machine = step.get("gpus", 1), of_card(machine, step["read_bytes_per_s"])
    return loopback_fabric(machine) if num_gpus == 1 else emulated_ranks(machine, num_gpus, ranks_of(step))


def ranks_of(step: Mapping[str, Any]) -> int:
    """Ranks of the tensor-parallel group of a measured step."""
    return int(step["layout"].removeprefix("tp").partition("ep")[0])


def measured_steps() -> list[dict[str, Any]]:
    """The stored steps of all layers, in the order of measuring."""
    return [step for step in json.loads(STEPS.read_text(encoding="utf-8"))["steps"] if step["layers"] == ALL_LAYERS]


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


def step_case(
    step: Mapping[str, Any], label: str, source: str, machines: Sequence[Machine], seed: int = 0
) -> ComparedCase:
    """A measured step in microseconds, on a profile's machine, followed by machines drawn from it or by none.

    ``seed``: of the errors of kernels that go with drawn machines.
    """
    asked = question_of_measured(step, machines[0])
    predictions = [predict(replace(asked, machine=machine_for(step, one))) for one in machines]
    predicted, low, high = with_bounds(with_errors_of_step(predictions, seed))
    return ComparedCase(
        kind="step",
        label=label,
        measured=step["step_us"],
        predicted=predicted,
        low=low,
        high=high,
        unit="us",
        source=source,
        hardware=PROFILES.get(step["machine"], machines[0].name),
    )


LabelledStep = tuple[str, str, dict[str, Any]]  # label, source, step


def labelled_steps() -> list[LabelledStep]:
    """The stored steps of a whole rank, each with its label and source."""
    return [
        (label_of(step), f"calibrate/data/{STEPS.name}, {step['environment']['date'][:10]}", step)
        for step in measured_steps()
    ]


def compare_steps(
    steps: Sequence[LabelledStep],
    machines: Sequence[Machine],
    *,
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
) -> Iterator[ComparedCase]:
    """``step_case`` of each, in several processes."""
    tasks = [partial(step_case, step, label, source, tuple(machines)) for label, source, step in steps]
    return run_jobs(tasks, jobs=jobs, on_done=on_done)


def shipped_step_cases(*, jobs: int | None = None, on_done: OnDone = ignore_progress) -> list[ComparedCase]:
    """Every measured step of a whole rank, in milliseconds."""
    machines = [load_machine("h200")]
    return [one.in_ms() for one in compare_steps(labelled_steps(), machines, jobs=jobs, on_done=on_done)]


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """Kernels of one stage, measured and predicted, in microseconds a kernel.

    ``duration`` is from start to end; a kernel that is launched early waits within it. ``increment`` is what the
    stage adds to the step: from the latest end on the main stream before it to its own end, and 0 elsewhere.
    """

    stream: str
    count: int
    duration: ComparedCase
    increment: ComparedCase

    @property
    def stage(self) -> str:
        return self.duration.label

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        return {
            "stage": self.stage,
            "stream": self.stream,
            "count": self.count,
            "measured_duration_us": self.duration.measured,
            "predicted_duration_us": self.duration.predicted,
            "measured_increment_us": self.increment.measured,
            "predicted_increment_us": self.increment.predicted,
        }


Kernel = tuple[str, str, float, float]  # stage, stream, start and end in microseconds


def shipped_stage_cases() -> list[StageCase]:
    """The stored step kernel by kernel, in the order of the stages. Only stages that both sides have."""
    document = json.loads(TIMELINE.read_text(encoding="utf-8"))
    measured = [(one["stage"], one["stream"], one["start_us"], one["end_us"]) for one in document["stages"]]
    full = predict_measured(document).full
    predicted = [
        (run.stage, run.stream, run.start_ps / PS_PER_US, run.end_ps / PS_PER_US)
        for run in full.of_rank(full.critical_rank)
    ]
    before, after = _means(measured), _means(predicted)

    def case(key: tuple[str, str], at: int) -> ComparedCase:
        return ComparedCase(
            kind="stage",
            label=key[0],
            measured=before[key][at],
            predicted=after[key][at],
            unit="us",
            source=f"calibrate/data/{TIMELINE.name}",
        )

    return [
        StageCase(stream=key[1], count=before[key][0], duration=case(key, 1), increment=case(key, 2))
        for key in before
        if key in after
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
