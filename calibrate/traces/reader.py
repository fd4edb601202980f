"""Files of one run, whatever profiler wrote them, as one trace with its clocks aligned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from k3sim.calibrate.traces.align import align
from k3sim.calibrate.traces.classes import KernelNames, Patterns
from k3sim.calibrate.traces.events import Trace
from k3sim.calibrate.traces.lines_reader import read_nsys_lines, read_rocprof
from k3sim.calibrate.traces.nsys_reader import read_nsys
from k3sim.calibrate.traces.open_file import SQLITE_MAGIC, TextChunks, first_bytes
from k3sim.calibrate.traces.torch_reader import read_torch
from k3sim.errors import UserError

MOST_RANKS = 1024
PS_PER_DAY = 86_400 * 10**12
LONGEST_PS = 30 * PS_PER_DAY


def read_trace(paths: Sequence[str], patterns: Patterns | None = None) -> Trace:
    """One trace of one file a rank. Raises UserError for a file that is no trace, and for two of one rank."""
    names = KernelNames(patterns)
    traces: list[Trace] = []
    for path in paths:
        traces.append(_read(path, names, sum(len(one.ranks) for one in traces)))
    ranks = sorted((rank for one in traces for rank in one.ranks), key=lambda rank: rank.rank)
    if len(ranks) > MOST_RANKS:
        raise UserError(f"{len(ranks)} ranks; at most {MOST_RANKS} are accepted")
    for one, other in pairwise(ranks):
        if one.rank == other.rank:
            raise UserError(f"{other.source}: rank {other.rank}, as {one.source} says of itself; give each rank once")
    for one in ranks:
        span_ps = max(kernel.end_ps for kernel in one.kernels) - one.kernels[0].start_ps
        if span_ps > LONGEST_PS:
            raise UserError(f"{one.source}: its kernels span {span_ps / PS_PER_DAY:,.0f} days; no trace does")
    formats = dict.fromkeys(one.format for one in traces)
    notes = [note for one in traces for note in one.notes]
    trace = Trace(format=", ".join(formats), ranks=ranks, notes=notes, gpu=traces[0].gpu)
    trace.notes += align(trace)
    return trace


def _read(path: str, names: KernelNames, rank: int) -> Trace:
    start = first_bytes(path)
    if start.startswith(SQLITE_MAGIC):
        return read_nsys(path, names, rank)
    if not start:
        raise UserError(f"{path}: the file is empty")
    text = b"".join(_beginning(path)).lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] not in (b"{", b"["):
        raise UserError(
            f"{path}: neither JSON nor SQLite; traces of torch's profiler (JSON, JSON.gz), exports of Nsight Systems "
            "(SQLite, JSON lines) and JSON of rocprofv3 are accepted"
        )
    if b'"rocprofiler-sdk-tool"' in text[:4096]:
        return read_rocprof(path, names, rank)
    line, _, rest = text.partition(b"\n")
    # A whole object on the first line, and another on the second.
    if rest.lstrip()[:1] == b"{" and line.rstrip().endswith(b"}") and b'"traceEvents"' not in line:
        return read_nsys_lines(path, names, rank)
    return read_torch(path, names, rank)


def _beginning(path: str) -> list[bytes]:
    for chunk in TextChunks(path):
        return [chunk]
    return []
