"""Records of a profiler's trace: what every reader gives, and all that the other files of this room know of a trace.

Times are integer picoseconds of the clock of the file; a step's kernels keep them, so that a row can be found again in
the trace. Formats differ in what they hold: a fact that a file lacks is None (or empty), never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PS_PER_NS = 1_000
PS_PER_US = 1_000_000

GEMM, ATTENTION, MOE, NORM, COLLECTIVE, COPY, OTHER = "GEMM", "attention", "MoE", "norm", "collective", "copy", "other"
MEASURED = "k3sim decode"  # format of a step that this program wrote
CLASSES = (GEMM, ATTENTION, MOE, NORM, COLLECTIVE, COPY, OTHER)


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """The call of the host that launched kernels: one for a kernel of an eager run, one for all of a graph replay."""

    name: str
    start_ps: int
    end_ps: int

    @property
    def is_graph(self) -> bool:
        """Whether it replays a graph (cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch)."""
        return "GraphLaunch" in self.name


@dataclass(slots=True, kw_only=True)
class TraceKernel:
    """One kernel, copy or fill on a GPU.

    ``row`` counts the events, lines or table rows of the source from 0. ``shared_memory_bytes`` is static and dynamic
    together. ``num_bytes`` is known for copies and fills only; no format holds what a kernel moved.
    """

    rank: int
    device: int
    stream: int
    start_ps: int
    duration_ps: int
    name: str
    short_name: str
    kernel_class: str
    row: int
    correlation: int | None = None
    launch: LaunchCall | None = None
    graph: int | None = None
    graph_node: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None
    num_bytes: int | None = None

    @property
    def end_ps(self) -> int:
        return self.start_ps + self.duration_ps

    @property
    def in_graph(self) -> bool:
        """Whether a graph replay ran it, by its node or by its launch."""
        return bool(self.graph_node) or (self.launch is not None and self.launch.is_graph)


@dataclass(frozen=True, slots=True)
class Mark:
    """A named range: NVTX, or a user annotation of torch's profiler."""

    name: str
    start_ps: int
    end_ps: int


@dataclass(kw_only=True)
class TraceRank:
    """Kernels of one rank by start, then end. ``clock_shift_ps`` is what ``align`` added to its times."""

    rank: int
    source: str
    kernels: list[TraceKernel]
    marks: list[Mark] = field(default_factory=list)
    clock_shift_ps: int = 0


@dataclass(kw_only=True)
class Trace:
    """All ranks of one run. ``notes`` are what a reader of its figures must know: lost rows, truncated files."""

    format: str
    ranks: list[TraceRank]
    notes: list[str] = field(default_factory=list)
    gpu: str = ""

    @property
    def num_kernels(self) -> int:
        return sum(len(rank.kernels) for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """Kernels of one step of one rank, by start."""

    rank: int
    number: int
    kernels: Sequence[TraceKernel]

    @property
    def start_ps(self) -> int:
        return self.kernels[0].start_ps

    @property
    def end_ps(self) -> int:
        return max(kernel.end_ps for kernel in self.kernels)

    @property
    def span_ps(self) -> int:
        """From the start of the first kernel to the last end of any."""
        return self.end_ps - self.start_ps
