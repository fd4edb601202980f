"""Traces of torch's profiler (Chrome JSON, plain or gzip), streamed.

Only GPU rows, launch calls and annotations are kept; stacks and CPU operators, most of a file, are passed over. ``ts``
and ``dur`` are microseconds with up to three decimals, parsed as text. The arguments that a version lacks stay None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k3sim.calibrate.traces.classes import LONGEST_NAME, KernelNames, clean_text
from k3sim.calibrate.traces.events import MEASURED, Mark, Trace, TraceKernel, TraceRank
from k3sim.calibrate.traces.json_stream import JsonStream
from k3sim.calibrate.traces.launches import Launches
from k3sim.errors import UserError

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
HOST_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
MARK_CATEGORIES = frozenset({"gpu_user_annotation", "user_annotation"})
MOST_KERNELS = 1_000_000  # some 1 GB of memory with all that is computed of them
MOST_MARKS = 200_000
MOST_DEVICES = 1024
_MOST_SIZES = 10_000
_SIZES: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # one object for all kernels with the same grid
LATEST_PS = 1 << 73  # some 300 years; what is beyond is no time


def read_torch(path: str | Path, names: KernelNames, rank: int) -> Trace:
    """The trace in one file; ``rank`` where it does not name its own. Several GPUs in one file are ranks of their own.

    Raises UserError where there is no list of events, or no GPU row in it.
    """
    stream = JsonStream(path, "traceEvents")
    kernels: list[TraceKernel] = []
    gpu_marks: list[Mark] = []
    host_marks: list[Mark] = []
    launches = Launches()
    num_bad = num_events = 0
    for row, event in enumerate(stream.events()):
        num_events = row + 1
        category = event.get("cat")
        if category.__class__ is not str or event.get("ph") != "X":
            continue
        if category in GPU_CATEGORIES:
            kernel = _kernel(event, row, names)
            if kernel is None:
                num_bad += 1
            elif len(kernels) >= MOST_KERNELS:
                stream.notes.append(f"{path}: only its first {MOST_KERNELS:,} kernels were read; cut it to fewer steps")
                break
            else:
                kernels.append(kernel)
        elif category in HOST_CATEGORIES:
            span = _span(event)
            args = event.get("args")
            if span is not None and isinstance(args, dict):
                launches.add(0, as_count(args.get("correlation")), clean_text(event.get("name")), *span)
        elif category in MARK_CATEGORIES and len(gpu_marks) + len(host_marks) < MOST_MARKS:
            span = _span(event)
            if span is not None:
                marks = gpu_marks if category.startswith("gpu") else host_marks
                marks.append(Mark(clean_text(event.get("name")), *span))
    if not stream.found_events and isinstance(stream.header.get("stages"), list):
        return _measured(stream.header, str(path), names)
    if not stream.found_events:
        raise UserError(f"{path}: JSON without a list 'traceEvents'; a trace of torch's profiler is accepted")
    if not kernels:
        why = f"{num_bad} GPU rows without times" if num_bad else "none on a GPU"
        cut = f" ({stream.notes[0]})" if stream.notes else ""
        raise UserError(f"{path}: {num_events:,} events, {why}; profile with ProfilerActivity.CUDA{cut}")
    notes = list(stream.notes)
    if num_bad:
        notes.append(f"{path}: {num_bad} GPU rows without valid times or names were left out")
    launches.join((0, kernel) for kernel in kernels)
    info = stream.header.get("distributedInfo")
    found = as_count(info.get("rank")) if isinstance(info, dict) else None
    return Trace(
        format="torch profiler",
        ranks=ranks_of(kernels, gpu_marks or host_marks, str(path), rank if found is None else found),
        notes=notes,
        gpu=_gpu(stream.header),
    )


def _measured(document: dict[str, Any], path: str, names: KernelNames) -> Trace:
    """A step that ``k3sim decode`` or ``k3sim timeline`` wrote. Raises UserError where it has no kernels."""
    streams: dict[str, int] = {}
    by_rank: dict[int, list[TraceKernel]] = {}
    for row, entry in enumerate(document["stages"]):
        entry = entry if isinstance(entry, dict) else {}
        start_ps, end_ps = as_ps(entry.get("start_us")), as_ps(entry.get("end_us"))
        rank = as_count(entry.get("rank"))
        if start_ps is None or end_ps is None or end_ps < start_ps or rank is None:
            raise UserError(f"{path}: stages[{row}] has no rank, start_us and end_us as 'k3sim decode' writes them")
        name, short, word = names.of(str(entry.get("stage"))[:200])
        stream = streams.setdefault(str(entry.get("stream")), len(streams))
        by_rank.setdefault(rank, []).append(
            TraceKernel(
                rank=rank,
                device=rank,
                stream=stream,
                start_ps=start_ps,
                duration_ps=end_ps - start_ps,
                name=name,
                short_name=short,
                kernel_class=word,
                row=row,
            )
        )
    if not by_rank:
        raise UserError(f"{path}: this step was not profiled, so it has no kernels; measure it without --no-profile")
    for kernels in by_rank.values():
        kernels.sort(key=lambda kernel: (kernel.start_ps, kernel.duration_ps))
    ranks = [TraceRank(rank=rank, source=path, kernels=kernels) for rank, kernels in sorted(by_rank.items())]
    return Trace(format=MEASURED, ranks=ranks)


def ranks_of(kernels: list[TraceKernel], marks: list[Mark], source: str, rank: int) -> list[TraceRank]:
    """One rank for each GPU of a file, counted from ``rank`` on, its kernels by start."""
    devices = sorted({kernel.device for kernel in kernels})
    if len(devices) > MOST_DEVICES:
        raise UserError(f"{source}: {len(devices)} different devices; that is no trace")
    number = {device: rank + index for index, device in enumerate(devices)}
    lists: dict[int, list[TraceKernel]] = {one: [] for one in number.values()}
    for kernel in kernels:
        kernel.rank = number[kernel.device]
        lists[kernel.rank].append(kernel)
    for one in lists.values():
        one.sort(key=lambda kernel: (kernel.start_ps, kernel.duration_ps))
    return [TraceRank(rank=one, source=source, kernels=found, marks=marks) for one, found in lists.items()]


def _kernel(event: dict[str, Any], row: int, names: KernelNames) -> TraceKernel | None:
    span = _span(event)
    if span is None:
        return None
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    name, short, word = names.of(str(event.get("name"))[:LONGEST_NAME])
    device, stream = as_count(args.get("device")), as_count(args.get("stream"))
    return TraceKernel(
        rank=0,
        device=(as_count(event.get("pid")) or 0) if device is None else device,
        stream=(as_count(event.get("tid")) or 0) if stream is None else stream,
        start_ps=span[0],
        duration_ps=span[1] - span[0],
        name=name,
        short_name=short,
        kernel_class=word if event["cat"] in ("kernel", "Kernel") else "copy",
        row=row,
        correlation=as_count(args.get("correlation")),
        graph=as_count(args.get("graph id")) or None,
        graph_node=as_count(args.get("graph node id")) or None,
        grid=as_sizes(args.get("grid")),
        block=as_sizes(args.get("block")),
        registers_per_thread=as_count(args.get("registers per thread")),
        shared_memory_bytes=as_count(args.get("shared memory")),
        num_bytes=as_count(args.get("bytes")),
    )


def _span(event: dict[str, Any]) -> tuple[int, int] | None:
    start_ps, duration_ps = as_ps(event.get("ts")), as_ps(event.get("dur"))
    if start_ps is None or duration_ps is None or duration_ps < 0:
        return None
    return start_ps, start_ps + duration_ps


def as_ps(microseconds: Any) -> int | None:
    """Picoseconds of a number of microseconds, exact to its sixth decimal; None for what is no time."""
    kind = microseconds.__class__
    if kind is int:
        found = microseconds * 1_000_000
    elif kind is str and len(microseconds) < 40:
        whole, _, decimals = microseconds.partition(".")
        try:
            # In a file a decimal number; "1e3" and the like by way of a double.
            if decimals.isdigit() and whole.removeprefix("-").isdigit():
                part = int((decimals + "000000")[:6])
                found = int(whole) * 1_000_000 + (-part if whole.startswith("-") else part)
            else:
                found = round(float(microseconds) * 1e6)
        except (ValueError, OverflowError):
            return None
    else:
        return None
    return found if -LATEST_PS < found < LATEST_PS else None


def as_count(value: Any) -> int | None:
    """A number that may be written as text; None for what is none, or none of 64 bits."""
    if value.__class__ is str and len(value) < 20 and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and value.__class__ is int and 0 <= value < 1 << 64 else None


def as_sizes(value: Any) -> tuple[int, int, int] | None:
    """Three sizes of a grid or block; None for what is none."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    x, y, z = (as_count(one) for one in value)
    if x is None or y is None or z is None:
        return None
    found = (x, y, z)
    return _SIZES.setdefault(found, found) if len(_SIZES) < _MOST_SIZES else found


def _gpu(header: dict[str, Any]) -> str:
    devices = header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return clean_text(name, 80) if isinstance(name, str) else ""
