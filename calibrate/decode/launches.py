"""Launches as the profiler saw them, assigned to the calls of the program: the timeline of a measured step.

The profiler names kernels and not calls. An eager step whose calls are marked says which launches each call makes, and
the replay of the graph is matched with those.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3sim.calibrate.decode.options import Case
from k3sim.model.program import Program
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

if TYPE_CHECKING:
    from k3sim.kernels.rank.state import Rank
    from k3sim.kernels.rank.step import Step



class ProfileError(Exception):
    """The profiler's records do not fit the program."""


@dataclass(frozen=True)
class Launch:
    """A kernel as the profiler saw it. ``form`` tells launches apart: name, grid and block."""

    form: tuple[str, str, str]
    start_us: float
    duration_us: float
    node: int | None  # of the graph, in the order of capture, where the profiler says


def profile(step: Step, rank: Rank, case: Case) -> tuple[Timeline, int]:
    """Timeline of one replay. An eager step first tells which launches each call makes."""
    import tempfile

    import torch

    def traced(run: Any) -> list[dict[str, Any]]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            run()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            return list(json.loads(file.read_text())["traceEvents"])

    def eager() -> None:
        step.run(marked=True)

    forms = launches_by_call(traced(eager), len(case.program.calls))

    def replays() -> None:
        for _ in range(3):
            step.replay()
            torch.cuda.synchronize()

    launches = kernels_of(traced(replays))
    count = sum(len(one) for one in forms)
    if len(launches) != 3 * count:
        raise ProfileError(f"three replays made {len(launches)} launches, an eager step {count}")
    last = launches[-count:]
    owner = assign(last, forms, case.program)
    return timeline_from(last, owner, case), count


def kernels_of(events: Sequence[Mapping[str, Any]]) -> list[Launch]:
    """The kernels of a trace by start."""
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            arguments = event.get("args", {})
            form = (str(event["name"]), str(arguments.get("grid")), str(arguments.get("block")))
            node = arguments.get("graph node id")
            found.append(Launch(form, float(event["ts"]), float(event["dur"]), node if node else None))
    return sorted(found, key=lambda launch: launch.start_us)


def launches_by_call(events: Sequence[Mapping[str, Any]], num_calls: int) -> list[list[tuple[str, str, str]]]:
    """Forms of the launches that each call made in an eager step whose calls were marked ``k3sim call N``."""
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(event["name"].rsplit(" ", 1)[1]))
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith("k3sim call ")
    )
    starts = [start for start, _, _ in ranges]
    launched: dict[int, tuple[float, int]] = {}
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and correlation is not None:
            position = bisect.bisect_right(starts, float(event["ts"])) - 1
            if position >= 0 and float(event["ts"]) <= ranges[position][1]:
                launched[int(correlation)] = (float(event["ts"]), ranges[position][2])
    found: list[list[tuple[float, tuple[str, str, str]]]] = [[] for _ in range(num_calls)]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            arguments = event.get("args", {})
            at = launched.get(int(arguments.get("correlation", -1)))
            if at is None:
                raise ProfileError(f"{event['name']} was launched by no call")
            form = (str(event["name"]), str(arguments.get("grid")), str(arguments.get("block")))
            found[at[1]].append((at[0], form))
    return [[form for _, form in sorted(one)] for one in found]


def assign(launches: Sequence[Launch], forms: Sequence[Sequence[tuple[str, str, str]]], program: Program) -> list[int]:
    """The call of each launch of one replay, given by start.

    By graph node where the profiler names it: nodes are numbered in the order of capture, which is the program's. Else
    each launch goes to the stream whose next expected one has its form, the earliest call first where several have.
    """
    expected = [(index, form) for index, one in enumerate(forms) for form in one]
    if all(launch.node is not None for launch in launches):
        order = sorted(range(len(launches)), key=lambda at: launches[at].node or 0)
        owner = [0] * len(launches)
        for at, (index, form) in zip(order, expected, strict=True):
            if launches[at].form != form:
                break
            owner[at] = index
        else:
            return owner
    queues: dict[str, list[tuple[int, tuple[str, str, str]]]] = defaultdict(list)
    for index, form in expected:
        queues[program.calls[index].stream].append((index, form))
    heads = Counter[str]()
    owner = []
    for launch in launches:
        fitting = [
            (queue[heads[stream]][0], stream)
            for stream, queue in queues.items()
            if heads[stream] < len(queue) and queue[heads[stream]][1] == launch.form
        ]
        if not fitting:
            raise ProfileError(f"{launch.form[0]} at {launch.start_us:.1f} us is what no stream runs next")
        index, stream = min(fitting)
        heads[stream] += 1
        owner.append(index)
    return owner


def timeline_from(launches: Sequence[Launch], owner: Sequence[int], case: Case) -> Timeline:
    """One run a call, from its first launch's start to its last one's end; times count from the first start."""
    origin = min(launch.start_us for launch in launches)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for launch, index in zip(launches, owner, strict=True):
        start_ps = round((launch.start_us - origin) * PS_PER_US)
        spans[index].append((start_ps, start_ps + round(launch.duration_us * PS_PER_US)))
    runs: dict[int, KernelRun] = {}
    previous: dict[str, int] = {}
    for call in case.program.calls:
        if call.index not in spans:
            continue
        causes = [index for index in (*call.after, previous.get(call.stream, -1)) if index in runs]
        start_ps = min(start for start, _ in spans[call.index])
        end_ps = max(end for _, end in spans[call.index])
        runs[call.index] = KernelRun(
            index=call.index,
            rank=0,
            stream=call.stream,
            layer=call.layer,
            kind=call.kind,
            stage=call.stage,
            start_ps=start_ps,
            end_ps=end_ps,
            spans=[Span(Phase.RUN, start_ps, end_ps)],
            launched_by=max(causes, key=lambda index: runs[index].end_ps, default=-1),
            causes=tuple(causes),
        )
        previous[call.stream] = call.index
    return Timeline(
        machine="measured",
        num_ranks=case.layout.tp,
        ranks=(0,),
        num_layers=case.architecture.num_layers,
        kernels=list(runs.values()),
        counters=[],
        step_ps=max(run.end_ps for run in runs.values()),
    )
