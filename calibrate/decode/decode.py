"""A decode step of the project's own kernels, measured: ``k3sim decode``, or ``python -m k3sim.calibrate.decode.decode``.

The second form needs torch and the kernels alone, for machines on which the rest of the package is not installed. One
rank runs on one GPU, in loop-back where its layout has peers; under ``torchrun --nproc-per-node 8 -m
k3sim.calibrate.decode.decode --tp 8 --layers 40`` each GPU of a host runs one, and they exchange over NVLink. With fewer
processes than ranks, if they divide them, each GPU stands for several ranks (``kernels/multi_gpu/symmetric.py``); the output says
so.

What is measured, in this order: memory, the read bandwidth of the same GPU, replays of the captured step between
events, and one profiled replay for start and end of every kernel (CUPTI, through torch's profiler).
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.costs import work_of
from k3sim.kernels.device.timestamps import StampBuffer, StampedLaunch, collect
from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, check_layout, check_workload
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.paths.own import check_own
from k3sim.model.program import Program, build_program
from k3sim.model.step import Path as ExecutionPath
from k3sim.sim.timeline.critical_path import WORK_PARTS, Part
from k3sim.sim.timeline.file import stage_rows, waits_document
from k3sim.sim.timeline.measured import divide, facts_of
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

if TYPE_CHECKING:
    from k3sim.kernels.rank.state import Rank
    from k3sim.kernels.rank.step import Step
    from k3sim.kernels.rank.weights import RankWeights

SCHEMA_VERSION = 1
MIN_REPLAYS = 20
WARM_UP_REPLAYS = 20


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is run; the names are those of the command line."""

    path: str = "fused"
    with_switches: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    tp: int = 16
    layers: int | None = None
    concurrency: int = 1
    context: int = 8192
    kv_dtype: str = "fp8"
    replays: int = 200
    seed: int = 0
    profile: bool = True
    loop_back: bool = False  # under torchrun, too, each rank by itself
    timestamps: bool = False  # kernels record when their blocks ran, which makes the step some per cent longer
    timestamps_of: tuple[str, ...] = ()  # only those of these families

    def command(self) -> str:
        """The command line that repeats it."""
        defaults, words = DecodeOptions(), ["k3sim", "decode"]
        for name in ("path", "tp", "layers", "concurrency", "context", "replays", "seed"):
            if getattr(self, name) != getattr(defaults, name):
                words += [f"--{name}", str(getattr(self, name))]
        if self.kv_dtype != defaults.kv_dtype:
            words += ["--kv-dtype", self.kv_dtype]
        words += [word for switch in self.with_switches for word in ("--with", switch)]
        words += [word for switch in self.without for word in ("--without", switch)]
        words += ["--loop-back"] * self.loop_back + ["--timestamps"] * self.timestamps
        for family in self.timestamps_of:
            words += ["--timestamps-of", family]
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checked question: what ``DecodeOptions`` stand for."""

    options: DecodeOptions
    architecture: Architecture
    layout: Layout
    workload: Workload
    path: ExecutionPath
    program: Program

    @property
    def max_tokens(self) -> int:
        """Rows of the cache: the replays grow the context around the one asked for."""
        return self.options.context + self.options.replays + 2 * WARM_UP_REPLAYS + 64

    @property
    def first_length(self) -> int:
        """Cached rows of the first timed replay, so that the mean over all of them is the context asked for."""
        return max(1, self.options.context - self.options.replays // 2)


def case_of(options: DecodeOptions) -> Case:
    """Check everything that needs no GPU. Raises UserError."""
    from k3sim.kernels.device.timestamps import checked
    from k3sim.kernels.multi_gpu.symmetric import check_standing
    from k3sim.kernels.rank.weights import subset

    checked(options.timestamps_of)
    architecture = load_architecture()
    architecture = subset(architecture, architecture.num_layers if options.layers is None else options.layers)
    path = find_path(
        options.path, with_switches=options.with_switches, without=options.without, kernel_set="own"
    )
    layout = Layout(tp=options.tp)
    check_layout(architecture, layout)
    check_own(architecture, layout, options.concurrency)
    check_standing(options.tp, exchanging_gpus(options))
    if options.kv_dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {options.kv_dtype!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    workload = Workload(concurrency=options.concurrency, context=options.context, kv_dtype=options.kv_dtype)  # type: ignore[arg-type]
    check_workload(architecture, workload)
    if not MIN_REPLAYS <= options.replays <= 100_000:
        raise UserError(f"replays={options.replays}; {MIN_REPLAYS} to 100000 are accepted")
    if not 0 <= options.seed < 2**31:
        raise UserError(f"seed is {options.seed}; accepted: 0 to {2**31 - 1}")
    return Case(
        options=options,
        architecture=architecture,
        layout=layout,
        workload=workload,
        path=path,
        program=build_program(architecture, layout, workload, path),
    )


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
    timestamped: tuple[StampedLaunch, ...] = ()  # of one replay, where kernels recorded their blocks

    @property
    def step_us(self) -> float:
        """Median."""
        return statistics.median(self.samples_us)

    def percentile_us(self, percent: int) -> float:
        """Nearest-rank percentile."""
        ordered = sorted(self.samples_us)
        return ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]

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


# ---- on the GPU ---------------------------------------------------------------------------------------------------


def require_gpu() -> None:
    """UserError in one line where there is none."""
    try:
        import torch
    except ImportError:
        raise UserError("k3sim decode runs on a GPU and needs torch; install the gpu extra") from None
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU is visible: k3sim decode measures on one; 'k3sim timeline' predicts without")


def decode(options: DecodeOptions) -> Measured:
    """Build one rank, run its step, measure it. Raises UserError for what cannot be honoured, before allocation."""
    case = case_of(options)
    require_gpu()
    import torch

    from k3sim.kernels.harness.read_rate import read_rate
    from k3sim.kernels.rank.memory import check_memory
    from k3sim.kernels.rank.weights import random_weights

    index = join_processes()
    free_bytes, _ = torch.cuda.mem_get_info()
    check_memory(
        case.architecture, case.layout, case.workload, case.path, max_tokens=case.max_tokens, free_bytes=free_bytes
    )
    # Before the first kernel is compiled.
    timestamps = None
    if options.timestamps or options.timestamps_of:
        timestamps = collect(f"cuda:{torch.cuda.current_device()}", options.timestamps_of)
    rate, _ = read_rate()
    torch.cuda.empty_cache()
    started = time.perf_counter()
    weights = random_weights(
        case.program, case.architecture, case.layout, seed=options.seed, index=index, device=f"cuda:{index}"
    )
    return measure(case, weights, rate, started=started, timestamps=timestamps)


def num_processes() -> int:
    """Processes that run together, one a GPU: what torchrun sets, else 1. Raises UserError for what is no number."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdigit() or int(given) < 1:
        raise UserError(f"WORLD_SIZE is {given!r}; accepted is a number of processes above 0")
    return int(given)


def exchanging_gpus(options: DecodeOptions) -> int:
    """GPUs whose ranks exchange with one another."""
    return 1 if options.loop_back else num_processes()


def join_processes() -> int:
    """This process's rank: 0 where it is alone; under torchrun, one process a GPU of one host, joined to the others.

    Raises UserError where there are more processes than GPUs.
    """
    import torch

    count, index = num_processes(), int(os.environ.get("LOCAL_RANK", "0"))
    if count > 1:
        num_gpus = torch.cuda.device_count()
        if count > num_gpus:
            raise UserError(f"{count} processes on {num_gpus} GPUs; start one a GPU of one host")
        torch.cuda.set_device(index)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", index))
    return index


def measure(
    case: Case,
    weights: RankWeights,
    read_bytes_per_s: float,
    *,
    started: float | None = None,
    timestamps: StampBuffer | None = None,
) -> Measured:
    """Measure a case on weights that are there.

    ``started``: when their making began. ``timestamps``: where kernels record their blocks.
    """
    import torch

    from k3sim.kernels.harness.bench import environment
    from k3sim.kernels.rank.memory import needed_bytes
    from k3sim.kernels.rank.state import clear

    started = time.perf_counter() if started is None else started
    rank, step = build(case, weights)
    step.run()
    torch.cuda.synchronize()
    start_s = time.perf_counter() - started
    allocated_bytes = torch.cuda.memory_allocated()
    needed = needed_bytes(
        case.program, case.architecture, case.layout, case.workload, max_tokens=case.max_tokens
    )
    step.capture()
    clear(rank, case.first_length)
    samples = time_replays(step, rank, case)
    timeline, num_launches, notes = None, 0, []
    timestamped: tuple[StampedLaunch, ...] = ()
    if timestamps is not None:
        clear(rank, case.options.context)
        timestamps.clear()
        step.replay()
        timestamped = tuple(timestamps.launches())
        notes.append("kernels that record timestamps: the step is longer than without")
    if case.options.profile:
        clear(rank, case.options.context)
        try:
            timeline, num_launches = profile(step, rank, case)
        except ProfileError as error:
            notes.append(f"no kernel table: {error}")
    where = environment()
    where["clocks_after"] = clocks()
    return Measured(
        case=case,
        samples_us=samples,
        read_bytes_per_s=read_bytes_per_s,
        moved_bytes=moved_bytes(case.program),
        needed_bytes=needed.total - needed.runtime,
        allocated_bytes=allocated_bytes,
        start_s=start_s,
        environment=where,
        timeline=timeline,
        num_launches=num_launches,
        notes=tuple(notes),
        timestamped=timestamped,
        num_gpus=exchanging_gpus(case.options),
    )


def build(case: Case, weights: RankWeights) -> tuple[Rank, Step]:
    """A rank on the current GPU and its step, which has not run yet.

    Alone it is in loop-back; under torchrun it is connected to the ranks of the other processes, unless loop-back is
    asked for.
    """
    import torch

    from k3sim.kernels.rank.exchange import connect_kernels, connect_symmetric
    from k3sim.kernels.rank.kernel_calls import KERNEL_CALLS
    from k3sim.kernels.rank.state import build_rank, clear
    from k3sim.kernels.rank.step import Step

    parts = (case.architecture, case.layout, case.workload, case.program)
    index = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    device = f"cuda:{torch.cuda.current_device()}"
    rank = build_rank(
        *parts, weights, index=index, max_tokens=case.max_tokens, seed=case.options.seed, device=device
    )
    tokens = rank.sequence.tokens.clone()
    connect_kernels([rank], loop_back=True)
    rank.sequence.tokens.add_(rank.first_token)  # of its own share: nobody else embeds it
    if exchanging_gpus(case.options) > 1:
        # A first step by itself compiles everything: a peer that waits for a push would lose patience meanwhile.
        Step([rank], KERNEL_CALLS).run()
        torch.cuda.synchronize()
        clear(rank, case.first_length, tokens)
        connect_symmetric(rank, torch.distributed.group.WORLD)
    return rank, Step([rank], KERNEL_CALLS)


def time_replays(step: Step, rank: Rank, case: Case) -> tuple[float, ...]:
    """Microseconds of each replay, between two events around it; the context grows by one a replay.

    Of several processes' ranks the slowest of each replay counts.
    """
    import torch

    for _ in range(WARM_UP_REPLAYS):
        step.replay()
    rank.sequence.place(case.first_length)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(case.options.replays)]
    for start, end in pairs:
        start.record()
        step.replay()
        end.record()
    torch.cuda.synchronize()
    mine = tuple(start.elapsed_time(end) * 1e3 for start, end in pairs)
    if exchanging_gpus(case.options) == 1:
        return mine
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return tuple(max(samples) for samples in zip(*every, strict=True))


def clocks() -> str:
    """SM and memory clock as the driver gives them."""
    import subprocess

    asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


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


# ---- several cases --------------------------------------------------------------------------------------------------


def table_cases(options: DecodeOptions) -> list[DecodeOptions]:
    """Both paths at every concurrency and context of the table, and each switch alone and left out at one row."""
    found = [
        replace(options, path=path, concurrency=rows, context=context, profile=False)
        for context in (8192, 1024, 131_072)
        for rows in (1, 2, 4, 8, 16)
        for path in ("stock", "fused")
    ]
    one = replace(options, path="fused", concurrency=1, context=8192, profile=False)
    found[2:2] = [
        *(replace(one, without=(switch,)) for switch in SWITCHES),
        *(replace(one, with_switches=(switch,)) for switch in SWITCHES),
    ]
    return found


def link_cases(options: DecodeOptions) -> list[DecodeOptions]:
    """For several GPUs: both paths by the number of rows, over the link, and at one row looped back as well."""
    found = [
        replace(options, path=path, concurrency=rows, profile=False, loop_back=False)
        for rows in (1, 8, 16, 2, 4)
        for path in ("stock", "fused")
    ]
    found[2:2] = [replace(one, loop_back=True) for one in found[:2]]
    return found


def run_table(options: DecodeOptions, file: Path, *, budget_s: float) -> int:
    """Measure what ``file`` does not hold yet, one set of weights for all, and write it after every case.

    Under torchrun the cases are those of ``link_cases``; the first process writes. No case begins once ``budget_s``
    have passed. Returns how many are left. Raises UserError as ``decode`` does.
    """
    if options.timestamps or options.timestamps_of:
        raise UserError("--timestamps makes steps longer, and a table holds times; measure one step with it")
    require_gpu()
    import torch

    from k3sim.kernels.harness.read_rate import read_rate
    from k3sim.kernels.rank.memory import check_memory
    from k3sim.kernels.rank.weights import random_weights

    began = time.perf_counter()
    rows: list[dict[str, Any]] = json.loads(file.read_text())["steps"] if file.exists() else []
    done = {row["command"] for row in rows}
    wanted = table_cases(options) if num_processes() == 1 else link_cases(options)
    cases = [case_of(one) for one in wanted if one.command() not in done]
    if not cases:
        return 0
    index = join_processes()
    free_bytes, _ = torch.cuda.mem_get_info()
    largest = max(
        cases, key=lambda case: (case.workload.concurrency * case.workload.context, case.path.name == "stock")
    )
    check_memory(
        largest.architecture,
        largest.layout,
        largest.workload,
        largest.path,
        max_tokens=largest.max_tokens,
        free_bytes=free_bytes,
        also=tuple({case.path.switches: case.path for case in cases}.values()),
    )
    rate, _ = read_rate()
    torch.cuda.empty_cache()
    programs = [case.program for case in cases]
    weights = random_weights(
        programs, cases[0].architecture, cases[0].layout, seed=options.seed, index=index, device=f"cuda:{index}"
    )
    left = len(cases)
    for case in cases:
        if largest_of_all(time.perf_counter() - began) > budget_s:
            break
        measured = measure(case, weights, rate)
        row = measured.to_dict()
        for name in ("needed_bytes", "allocated_bytes", "start_s", "num_launches"):
            del row[name]  # of a rank that holds the weights of every path, and is not profiled
        left -= 1
        if index:
            del measured
            torch.cuda.empty_cache()
            continue
        rows.append(row)
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text('{"steps": [\n' + ",\n".join(json.dumps(one) for one in rows) + "\n]}\n")
        partial.replace(file)
        sys.stdout.write(f"{measured.step_us:10.1f} us  {case.options.command()}\n")
        sys.stdout.flush()
        del measured
        torch.cuda.empty_cache()
    return left


def largest_of_all(value: float) -> float:
    """The largest of all processes' values, so that they decide alike."""
    import torch

    if not torch.distributed.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return float(found)


# ---- what is printed ------------------------------------------------------------------------------------------------


def lines_of(measured: Measured) -> list[str]:
    """The result as text, without a table library."""
    case = measured.case
    lines = [
        f"{case.options.command()}",
        f"{measured.environment.get('gpu', 'GPU')}, {case.architecture.num_layers} layers, {case.layout.tag}, "
        f"concurrency {case.workload.concurrency}, context {case.workload.context}",
        *standing_lines(case.layout.tp, measured.num_gpus),
        f"step {measured.step_us:.1f} us (p10 {measured.percentile_us(10):.1f}, p90 {measured.percentile_us(90):.1f}, "
        f"{len(measured.samples_us)} replays), {1e6 / measured.step_us:.1f} tok/s/user",
        f"floor {measured.floor_us:.1f} us: {measured.moved_bytes / 1e9:.2f} GB at "
        f"{measured.read_bytes_per_s / 1e12:.2f} TB/s, which is {100 * measured.floor_us / measured.step_us:.1f} % of "
        "the step",
        f"memory {measured.allocated_bytes / 1e9:.2f} GB allocated, {measured.needed_bytes / 1e9:.2f} GB predicted; "
        f"first step after {measured.start_s:.1f} s; clocks {measured.environment.get('clocks_after', '')}",
    ]
    if measured.timeline is not None:
        lines.append(
            f"{measured.num_launches} launches a step, {idle_us(measured.timeline):.1f} us of the profiled one with no "
            "kernel running; kernels by stage:"
        )
        lines.append(f"{'stage':24}{'count':>7}{'total us':>11}{'each us':>9}{'alone us':>11}")
        lines += [
            f"{row['stage']:24}{row['count']:7}{row['total_us']:11.1f}{row['total_us'] / row['count']:9.2f}"
            f"{row['alone_us']:11.1f}"
            for row in by_stage(measured.timeline)
        ]
        lines += part_lines(measured.to_dict())
    if measured.timestamped:
        lines += timestamp_lines(measured.timestamped)
    return [*lines, *measured.notes]


def standing_lines(num_ranks: int, num_gpus: int) -> list[str]:
    """Who the ranks' peers are."""
    if num_gpus == num_ranks > 1:
        return [f"{num_gpus} GPUs, a rank each, exchange over NVLink"]
    if num_gpus > 1:
        return [
            f"{num_gpus} GPUs stand for {num_ranks} ranks, each for {num_ranks // num_gpus}: of a rank's {num_ranks} "
            f"pushes {num_ranks - num_ranks // num_gpus} cross NVLink and the others land in its own memory"
        ]
    return ["one GPU, its peers looped back: no push crosses a link"] if num_ranks > 1 else []


def timestamp_lines(timestamped: Sequence[StampedLaunch]) -> list[str]:
    """By kernel: from the first block's beginning to the last one's, from the last release to the last end, in all."""
    of_kernel: dict[str, list[StampedLaunch]] = defaultdict(list)
    for one in timestamped:
        of_kernel[one.kernel].append(one)
    head = ("count", 7), ("blocks", 8), ("begin in", 10), ("released to end", 17), ("whole", 8)
    lines = [f"{'timestamps of blocks, medians in us':34}" + "".join(f"{word:>{width}}" for word, width in head)]
    for kernel, launches in of_kernel.items():
        begin_us = statistics.median(one.began_us[1] - one.began_us[0] for one in launches)
        whole_us = statistics.median(one.ended_us[1] - one.began_us[0] for one in launches)
        tails = [one.ended_us[1] - one.released_us[1] for one in launches if one.released_us is not None]
        tail = f"{statistics.median(tails):.2f}" if tails else ""
        lines.append(
            f"{kernel:34}{len(launches):7}{launches[0].num_blocks:8}{begin_us:10.2f}{tail:>17}{whole_us:8.2f}"
        )
    return lines


def part_lines(document: Mapping[str, Any]) -> list[str]:
    """Where the profiled step goes, of a document that has its parts."""
    step_us = document["profiled_us"]
    lines = [f"{'where the profiled step goes':34}{'us':>9}{'of it':>8}"]
    for part in Part:
        if part.value in document["waits_us"]:
            us = document["waits_us"][part.value]
            label = part.word if part in (*WORK_PARTS, Part.UNKNOWN, Part.EXCHANGE) else f"wait: {part.word}"
            lines.append(f"{label:34}{us:9.1f}{100 * us / step_us:6.1f} %")
    return [*lines, f"{'step':34}{step_us:9.1f}"]


def write(measured: Measured, folder: Path) -> Path:
    """Write ``measured.json`` whole or not at all; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "measured.json"
    partial = folder / ".measured.json.partial"
    partial.write_text(json.dumps(measured.to_dict(), separators=(",", ":")) + "\n")
    partial.replace(file)
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without the package's command-line library; exit status."""
    defaults = DecodeOptions()
    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.decode.decode", description=__doc__)
    parser.add_argument("--path", default=defaults.path)
    parser.add_argument("--with", dest="with_switches", action="append", default=[], metavar="SWITCH")
    parser.add_argument("--without", action="append", default=[], metavar="SWITCH")
    for name in ("tp", "concurrency", "context", "replays", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--kv-dtype", default=defaults.kv_dtype)
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--loop-back", action="store_true", help="under torchrun, too, each rank by itself")
    parser.add_argument("--timestamps", action="store_true", help="kernels record when each of their blocks ran")
    parser.add_argument("--timestamps-of", action="append", default=[], metavar="FAMILY", help="only this family's")
    parser.add_argument("--table", default="", metavar="FILE", help="measure every case of the table into FILE")
    parser.add_argument("--budget-s", type=float, default=480.0, help="begin no case of the table after these seconds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", default="")
    given = vars(parser.parse_args(arguments))
    as_json, out = given.pop("json"), given.pop("out")
    table, budget_s = given.pop("table"), given.pop("budget_s")
    for name in ("with_switches", "without", "timestamps_of"):
        given[name] = tuple(given[name])
    try:
        if table:
            left = run_table(DecodeOptions(**given), Path(table), budget_s=budget_s)
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(f"{left} cases left\n")
            return 0
        measured = decode(DecodeOptions(**given))
    except UserError as error:
        sys.stderr.write(f"k3sim: {error}\n")
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first of several processes reports for all
    if out:
        write(measured, Path(out))
    text = json.dumps(measured.to_dict()) if as_json else "\n".join(lines_of(measured))
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
