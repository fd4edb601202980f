"""A step of one rank, built and measured on the GPU at hand.

In this order: memory, the read bandwidth of the same GPU, replays of the captured step between events, and one profiled
replay for start and end of every kernel (CUPTI, through torch's profiler).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from k3sim.calibrate.decode.launches import ProfileError, profile
from k3sim.calibrate.decode.measured import Measured, moved_bytes
from k3sim.calibrate.decode.options import WARM_UP_REPLAYS, Case, DecodeOptions, case_of, exchanging_gpus, num_processes
from k3sim.errors import UserError
from k3sim.kernels.device.timestamps import RecordedLaunch, TimestampBuffer, collect

if TYPE_CHECKING:
    from k3sim.kernels.rank.state import Rank
    from k3sim.kernels.rank.step import Step
    from k3sim.kernels.rank.weights import RankWeights

OnPhase = Callable[[str], None]


def require_gpu() -> None:
    """UserError in one line where there is none."""
    try:
        import torch
    except ImportError:
        raise UserError("k3sim decode runs on a GPU and needs torch; install the gpu extra") from None
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU is visible: k3sim decode measures on one; 'k3sim timeline' predicts without")


def decode(options: DecodeOptions, on_phase: OnPhase = lambda _: None) -> Measured:
    """Build one rank, run its step, measure it; ``on_phase`` is told what comes next, which may take a minute.

    Raises UserError for what cannot be honoured, before allocation.
    """
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
    on_phase("read bandwidth")
    rate, _ = read_rate()
    torch.cuda.empty_cache()
    started = time.perf_counter()
    on_phase("random weights")
    weights = random_weights(
        case.program, case.architecture, case.layout, seed=options.seed, index=index, device=f"cuda:{index}"
    )
    return measure(case, weights, rate, started=started, timestamps=timestamps, on_phase=on_phase)


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
    timestamps: TimestampBuffer | None = None,
    on_phase: OnPhase = lambda _: None,
) -> Measured:
    """Measure a case on weights that are there.

    ``started``: when their making began. ``timestamps``: where kernels record their blocks. ``on_phase`` is told what
    comes next.
    """
    import torch

    from k3sim.kernels.harness.bench import environment
    from k3sim.kernels.rank.memory import needed_bytes
    from k3sim.kernels.rank.state import clear

    started = time.perf_counter() if started is None else started
    on_phase("compiling kernels, first step")
    rank, step = build(case, weights)
    step.run()
    torch.cuda.synchronize()
    start_s = time.perf_counter() - started
    allocated_bytes = torch.cuda.memory_allocated()
    needed = needed_bytes(
        case.program, case.architecture, case.layout, case.workload, max_tokens=case.max_tokens
    )
    on_phase(f"capture, {case.options.replays} replays")
    step.capture()
    clear(rank, case.first_length)
    samples = time_replays(step, rank, case)
    timeline, num_launches, notes = None, 0, []
    timestamped: tuple[RecordedLaunch, ...] = ()
    if timestamps is not None:
        clear(rank, case.options.context)
        timestamps.clear()
        step.replay()
        timestamped = tuple(timestamps.launches())
        notes.append("kernels that record timestamps: the step is longer than without")
    if case.options.profile:
        on_phase("a profiled step")
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

    from k3sim.kernels.rank.call_table import KERNEL_CALLS
    from k3sim.kernels.rank.exchange import connect_kernels, connect_symmetric
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
