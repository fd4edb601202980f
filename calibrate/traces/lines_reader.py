"""Traces that are neither: JSON lines of ``nsys export``, and JSON of rocprofv3.

Lines of nsys are found by their keys, because the form changed between versions: an event is in ``CudaEvent`` (numeric
``Type``), or the line itself has start, end and a kernel's columns. Names may be numbers into ``data`` of a line of
strings. rocprofv3 counts its grid in work-items, which are divided by the group here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3sim.calibrate.traces.classes import KernelNames
from k3sim.calibrate.traces.events import PS_PER_NS, Trace, TraceKernel
from k3sim.calibrate.traces.json_stream import JsonStream
from k3sim.calibrate.traces.launches import Launches
from k3sim.calibrate.traces.open_file import TextChunks
from k3sim.calibrate.traces.torch_reader import LATEST_PS, MOST_KERNELS, as_count, as_sizes, ranks_of
from k3sim.errors import UserError

_MOST_LINE_BYTES = 64 << 20
_MOST_STRINGS = 2_000_000


def read_nsys_lines(path: str | Path, names: KernelNames, rank: int) -> Trace:
    """JSON lines of ``nsys export``. Raises UserError where no line is a kernel."""
    strings: dict[int, str] = {}
    found: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
    launches = Launches()
    num_lines = num_bad = 0
    for row, line in enumerate(_lines(path)):
        num_lines = row + 1
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            num_bad += 1
            continue
        if not isinstance(value, dict):
            continue
        table = value.get("data")
        if isinstance(table, list) and len(strings) + len(table) < _MOST_STRINGS and not strings:
            strings.update({index: text for index, text in enumerate(table) if isinstance(text, str)})
        elif "value" in value and isinstance(value.get("id"), int) and len(strings) < _MOST_STRINGS:
            strings[value["id"]] = str(value["value"])
        event = value.get("CudaEvent")
        event = event if isinstance(event, dict) else value
        kernel = event.get("kernel")
        kernel = kernel if isinstance(kernel, dict) else event if "gridX" in event else None
        if kernel is not None:
            if len(found) >= MOST_KERNELS:
                raise UserError(f"{path}: more than {MOST_KERNELS:,} kernels; export fewer steps")
            found.append((row, event, kernel))
        call = value.get("TraceProcessEvent")
        if isinstance(call, dict):
            start_ps, end_ps = _first_ps(call, "startNs", "start"), _first_ps(call, "endNs", "end")
            if start_ps is not None and end_ps is not None and end_ps >= start_ps:
                name = _text(call.get("name"), strings)
                launches.add(0, _first_count(call, "correlationId"), name, start_ps, end_ps)
    kernels = [one for one in (_nsys_kernel(*entry, names, strings) for entry in found) if one is not None]
    if not kernels:
        raise UserError(
            f"{path}: {num_lines:,} lines, none a kernel with times ({num_bad:,} no JSON); 'nsys export --type "
            "sqlite' gives a form that every version has"
        )
    launches.join((0, kernel) for kernel in kernels)
    left_out = len(found) - len(kernels) + num_bad
    notes = [f"{path}: {left_out} lines that are no JSON or have no times were left out"] if left_out else []
    return Trace(format="Nsight Systems JSON lines", ranks=ranks_of(kernels, [], str(path), rank), notes=notes)


def read_rocprof(path: str | Path, names: KernelNames, rank: int) -> Trace:
    """JSON of rocprofv3. Raises UserError where there is no kernel dispatch with times."""
    stream = JsonStream(path, "rocprofiler-sdk-tool")
    kernels: list[TraceKernel] = []
    num_rows = 0
    for process in stream.events():
        records = process.get("buffer_records")
        dispatches = records.get("kernel_dispatch") if isinstance(records, dict) else None
        symbols = process.get("kernel_symbols")
        texts = {
            one["kernel_id"]: str(
                one.get("demangled_kernel_name") or one.get("formatted_kernel_name") or one.get("kernel_name")
            )
            for one in (symbols if isinstance(symbols, list) else ())
            if isinstance(one, dict) and isinstance(one.get("kernel_id"), int)
        }
        for entry in dispatches if isinstance(dispatches, list) else ():
            kernel = _dispatch(entry, num_rows, texts, names) if isinstance(entry, dict) else None
            num_rows += 1
            if kernel is not None:
                kernels.append(kernel)
    if not kernels:
        raise UserError(
            f"{path}: no kernel dispatch with times; run rocprofv3 with --kernel-trace --output-format json"
        )
    notes = list(stream.notes)
    if num_rows > len(kernels):
        notes.append(f"{path}: {num_rows - len(kernels)} dispatches without valid times were left out")
    return Trace(format="rocprofv3 JSON", ranks=ranks_of(kernels, [], str(path), rank), notes=notes)


def _lines(path: str | Path) -> Iterator[bytes]:
    rest = b""
    for chunk in TextChunks(path):
        pieces = (rest + chunk).split(b"\n")
        rest = pieces.pop()
        if len(rest) > _MOST_LINE_BYTES:
            raise UserError(f"{path}: a line of more than {_MOST_LINE_BYTES >> 20} MB")
        yield from (piece for piece in pieces if piece.strip())
    if rest.strip():
        yield rest


def _nsys_kernel(
    row: int, event: dict[str, Any], kernel: dict[str, Any], names: KernelNames, strings: dict[int, str]
) -> TraceKernel | None:
    start_ps, end_ps = _first_ps(event, "startNs", "start"), _first_ps(event, "endNs", "end")
    if start_ps is None or end_ps is None or end_ps < start_ps:
        return None
    first = next((kernel[key] for key in ("demangledName", "shortName", "name") if key in kernel), None)
    name, short, word = names.of(_text(first, strings))
    static, dynamic = (_first_count(kernel, f"{kind}SharedMemory") for kind in ("static", "dynamic"))
    return TraceKernel(
        rank=0,
        device=_first_count(event, "deviceId") or 0,
        stream=_first_count(event, "streamId") or 0,
        start_ps=start_ps,
        duration_ps=end_ps - start_ps,
        name=name,
        short_name=short,
        kernel_class=word,
        row=row,
        correlation=_first_count(event, "correlationId"),
        graph_node=_first_count(kernel, "graphNodeId") or _first_count(event, "graphNodeId") or None,
        grid=as_sizes([kernel.get(f"grid{axis}") for axis in "XYZ"]),
        block=as_sizes([kernel.get(f"block{axis}") for axis in "XYZ"]),
        registers_per_thread=_first_count(kernel, "registersPerThread"),
        shared_memory_bytes=None if static is None and dynamic is None else (static or 0) + (dynamic or 0),
    )


def _dispatch(entry: dict[str, Any], row: int, texts: dict[int, str], names: KernelNames) -> TraceKernel | None:
    start_ps, end_ps = _first_ps(entry, "start_timestamp"), _first_ps(entry, "end_timestamp")
    info = entry.get("dispatch_info")
    if start_ps is None or end_ps is None or end_ps < start_ps or not isinstance(info, dict):
        return None
    number = _first_count(info, "kernel_id")
    name, short, word = names.of(texts.get(number, "unknown").removesuffix(".kd") if number is not None else "unknown")
    block, items = _xyz(info.get("workgroup_size")), _xyz(info.get("grid_size"))
    correlation = entry.get("correlation_id")
    correlation = correlation.get("internal") if isinstance(correlation, dict) else correlation
    return TraceKernel(
        rank=0,
        device=_handle(info.get("agent_id")),
        stream=_handle(entry.get("stream_id")) or _handle(info.get("queue_id")),
        start_ps=start_ps,
        duration_ps=end_ps - start_ps,
        name=name,
        short_name=short,
        kernel_class=word,
        row=row,
        correlation=as_count(correlation),
        grid=tuple(-(-many // max(1, few)) for many, few in zip(items, block, strict=True))
        if items and block
        else None,  # type: ignore[arg-type]
        block=block,
    )


def _groups(items: tuple[int, int, int] | None, block: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    """Blocks of a grid that is counted in work-items."""
    if items is None or block is None:
        return None
    x, y, z = (-(-many // max(1, few)) for many, few in zip(items, block, strict=True))
    return x, y, z


def _xyz(value: Any) -> tuple[int, int, int] | None:
    return as_sizes([value.get(axis) for axis in "xyz"]) if isinstance(value, dict) else None


def _handle(value: Any) -> int:
    return as_count(value.get("handle") if isinstance(value, dict) else value) or 0


def _first_ps(value: dict[str, Any], *keys: str) -> int | None:
    """Picoseconds of the first key that is there, whose nanoseconds may be text."""
    found = next((value[key] for key in keys if key in value), None)
    count = as_count(found)
    return None if count is None or count * PS_PER_NS >= LATEST_PS else count * PS_PER_NS


def _first_count(value: dict[str, Any], key: str) -> int | None:
    return as_count(value.get(key))


def _text(value: Any, strings: dict[int, str]) -> str:
    number = as_count(value)
    return (strings.get(number, "unknown") if number is not None else str(value or "unknown"))[:4000]
