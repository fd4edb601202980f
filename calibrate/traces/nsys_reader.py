"""SQLite exports of Nsight Systems, opened read-only.

A database can carry code: views, triggers, virtual tables, functions in expressions. None of it runs here. The file is
opened immutable, an authorizer allows reads of the tables below and nothing else, tables that are no plain ones are
refused, and a counter stops a query that takes far more than its rows. Tables and columns vary by version, so what is
there is asked first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from k3sim.calibrate.traces.classes import KernelNames, clean_text
from k3sim.calibrate.traces.events import PS_PER_NS, Mark, Trace, TraceKernel
from k3sim.calibrate.traces.launches import Launches
from k3sim.calibrate.traces.torch_reader import MOST_KERNELS, MOST_MARKS, as_count, ranks_of
from k3sim.errors import UserError

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"
GPU_INFO = "TARGET_INFO_GPU"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}
READ = frozenset({KERNELS, RUNTIME, GRAPHS, NVTX, STRINGS, GPU_INFO, *COPIES})
_LATEST_NS = 1 << 62
_MOST_STRINGS = 2_000_000
_MOST_STEPS = 40_000  # in units of 100,000 instructions of SQLite's machine
_NVTX_RANGES = (59, 60, 70, 71)


def read_nsys(path: str | Path, names: KernelNames, rank: int) -> Trace:
    """The trace in an SQLite export. Raises UserError for one without kernels, with the reason."""
    try:
        found = _Export(str(path))
        try:
            return found.trace(names, rank)
        finally:
            found.close()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no readable SQLite export of Nsight Systems ({error})") from None


class _Export:
    def __init__(self, path: str) -> None:
        self.path = path
        self.notes: list[str] = []
        absolute = quote(str(Path(path).absolute()))
        self._database = sqlite3.connect(f"file:{absolute}?mode=ro&immutable=1", uri=True)
        self._database.text_factory = lambda text: text.decode("utf-8", "replace")
        self._steps = 0
        self._database.execute("PRAGMA query_only=ON")
        self._database.execute("PRAGMA trusted_schema=OFF")
        self._tables = self._plain_tables()
        self._columns = {name: [row[1] for row in self._rows(f"PRAGMA table_info({name})")] for name in self._tables}
        self._database.set_authorizer(_only_reads)
        self._database.set_progress_handler(self._count_steps, 100_000)
        self._strings: dict[int, str] = {}

    def close(self) -> None:
        self._database.close()

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        yield from self._database.execute(query)

    def _count_steps(self) -> int:
        self._steps += 1
        return int(self._steps > _MOST_STEPS)

    def _plain_tables(self) -> set[str]:
        found = set()
        for kind, name, sql in self._rows("SELECT type, name, sql FROM sqlite_master"):
            if name not in READ:
                continue
            text = str(sql).upper()
            # What is computed as it is read is no table of a profiler.
            if kind != "table" or "VIRTUAL" in text or "GENERATED" in text or " AS (" in text:
                raise UserError(f"{self.path}: {name} is no plain table, as an export of Nsight Systems has")
            found.add(name)
        return found

    def table(self, name: str, wanted: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        """Rows of the wanted columns, None where this version lacks one."""
        there = self._columns.get(name, [])
        if there:
            chosen = ", ".join(f'"{column}"' if column in there else "NULL" for column in wanted)
            yield from self._database.execute(f'SELECT {chosen} FROM "{name}"')

    def trace(self, names: KernelNames, rank: int) -> Trace:
        for number, text in self.table(STRINGS, ("id", "value")):
            if len(self._strings) >= _MOST_STRINGS:
                raise UserError(f"{self.path}: more than {_MOST_STRINGS:,} strings")
            if isinstance(number, int):
                self._strings[number] = str(text)[:4000]
        kernels = [*self._kernels(names), *self._copies(names)]
        if not kernels:
            self._refuse_empty()
        launches = Launches()
        columns = ("correlationId", "nameId", "start", "end", "globalTid")
        for correlation, name, start_ns, end_ns, thread in self.table(RUNTIME, columns):
            span = _span_ps(start_ns, end_ns)
            if span:
                launches.add(_process(thread), as_count(correlation), self._strings.get(name, ""), *span)
        launches.join(kernels)
        gpu = next((clean_text(name, 80) for (name,) in self.table(GPU_INFO, ("name",)) if name), "")
        runs = [kernel for _, kernel in kernels]
        return Trace(
            format="Nsight Systems SQLite",
            ranks=ranks_of(runs, self._marks(), self.path, rank),
            notes=self.notes,
            gpu=gpu,
        )

    def _kernels(self, names: KernelNames) -> Iterator[tuple[int, TraceKernel]]:
        columns = (
            "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName",
            "mangledName", "registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "graphId", "graphNodeId",
            "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "clusterX", "clusterY", "clusterZ",
        )  # fmt: skip
        num_bad = 0
        for row, cells in enumerate(self.table(KERNELS, columns)):
            if row >= MOST_KERNELS:
                raise UserError(f"{self.path}: more than {MOST_KERNELS:,} kernels; export fewer steps")
            span = _span_ps(cells[0], cells[1])
            if span is None:
                num_bad += 1
                continue
            text = next((self._strings[one] for one in cells[6:9] if one in self._strings), "unknown")
            name, short, word = names.of(text)
            static, dynamic = as_count(cells[10]), as_count(cells[11])
            yield (
                _process(cells[5]),
                TraceKernel(
                    rank=0,
                    device=as_count(cells[2]) or 0,
                    stream=as_count(cells[3]) or 0,
                    start_ps=span[0],
                    duration_ps=span[1] - span[0],
                    name=name,
                    short_name=short,
                    kernel_class=word,
                    row=row,
                    correlation=as_count(cells[4]),
                    graph=as_count(cells[12]) or None,
                    graph_node=as_count(cells[13]) or None,
                    grid=_sizes(cells[14:17]),
                    block=_sizes(cells[17:20]),
                    cluster=_sizes(cells[20:23]),
                    registers_per_thread=as_count(cells[9]),
                    shared_memory_bytes=None if static is None and dynamic is None else (static or 0) + (dynamic or 0),
                ),
            )
        if num_bad:
            self.notes.append(f"{self.path}: {num_bad} kernels without valid times were left out")

    def _copies(self, names: KernelNames) -> Iterator[tuple[int, TraceKernel]]:
        for table, word in COPIES.items():
            columns = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "graphNodeId")
            for row, cells in enumerate(self.table(table, columns)):
                if row >= MOST_KERNELS:
                    raise UserError(f"{self.path}: more than {MOST_KERNELS:,} copies; export fewer steps")
                span = _span_ps(cells[0], cells[1])
                if span is not None:
                    name, short, kernel_class = names.of(word)
                    yield (
                        _process(cells[5]),
                        TraceKernel(
                            rank=0,
                            device=as_count(cells[2]) or 0,
                            stream=as_count(cells[3]) or 0,
                            start_ps=span[0],
                            duration_ps=span[1] - span[0],
                            name=name,
                            short_name=short,
                            kernel_class=kernel_class,
                            row=row,
                            correlation=as_count(cells[4]),
                            graph_node=as_count(cells[7]) or None,
                            num_bytes=as_count(cells[6]),
                        ),
                    )

    def _marks(self) -> list[Mark]:
        found: list[Mark] = []
        for start_ns, end_ns, text, number, kind in self.table(NVTX, ("start", "end", "text", "textId", "eventType")):
            span = _span_ps(start_ns, end_ns)
            if span and (kind is None or kind in _NVTX_RANGES) and len(found) < MOST_MARKS:
                found.append(Mark(clean_text(text or self._strings.get(number, "")), *span))
        return found

    def _refuse_empty(self) -> None:
        num_graphs = sum(1 for _ in self.table(GRAPHS, ("start",)))
        if num_graphs:
            raise UserError(
                f"{self.path}: {num_graphs} graph replays and no kernels in them, as nsys records graphs by default; "
                "profile with --cuda-graph-trace=node"
            )
        raise UserError(
            f"{self.path}: SQLite without rows in {KERNELS}; a trace that 'nsys export --type sqlite' wrote is accepted"
        )


def _only_reads(action: int, name: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and name in READ):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _span_ps(start_ns: Any, end_ns: Any) -> tuple[int, int] | None:
    """Picoseconds; None for a record that was not collected (0 to 0) or whose times make no span."""
    if start_ns.__class__ is not int or end_ns.__class__ is not int:
        return None
    if end_ns < start_ns or start_ns == end_ns == 0 or not -_LATEST_NS < start_ns <= end_ns < _LATEST_NS:
        return None
    return start_ns * PS_PER_NS, end_ns * PS_PER_NS


def _process(identity: Any) -> int:
    """Process of a globalTid or globalPid: bits 24 to 47; correlation ids count within it."""
    return (identity >> 24) & 0xFFFFFF if identity.__class__ is int else 0


def _sizes(cells: tuple[Any, ...]) -> tuple[int, int, int] | None:
    x, y, z = (as_count(one) for one in cells)
    return None if x is None or y is None or z is None else (x, y, z)
