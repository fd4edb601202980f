"""Clocks of ranks aligned by their collectives: a collective ends on all ranks nearly at once.

Ranks of one host often share a clock, those of several do not. The shift of a rank is the median difference of the ends
of collectives with the same name and the same position in the order of that name.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from k3sim.calibrate.traces.events import COLLECTIVE, LaunchCall, Mark, Trace, TraceKernel, TraceRank

FEWEST = 3  # collectives that ranks must share
_MOST = 20_000  # that a median is taken of


def align(trace: Trace) -> list[str]:
    """Shift the times of every rank but the first in place; returns notes on ranks that could not be aligned."""
    notes: list[str] = []
    if len(trace.ranks) < 2:
        return notes
    first = trace.ranks[0]
    ends = {key: kernel.end_ps for key, kernel in collectives(first).items()}
    for rank in trace.ranks[1:]:
        shifts = [ends[key] - kernel.end_ps for key, kernel in list(collectives(rank).items())[:_MOST] if key in ends]
        if len(shifts) < FEWEST:
            notes.append(
                f"rank {rank.rank}: {len(shifts)} collectives in common with rank {first.rank}, so its clock was not "
                "aligned"
            )
            continue
        _shift(rank, round(statistics.median(shifts)))
    return notes


def _shift(rank: TraceRank, shift_ps: int) -> None:
    """Move kernels, the calls that launched them, and marks."""
    moved: dict[int, LaunchCall] = {}
    rank.clock_shift_ps = shift_ps
    for kernel in rank.kernels:
        kernel.start_ps += shift_ps
        call = kernel.launch
        if call is not None:
            if id(call) not in moved:
                moved[id(call)] = LaunchCall(call.name, call.start_ps + shift_ps, call.end_ps + shift_ps)
            kernel.launch = moved[id(call)]
    rank.marks = [Mark(one.name, one.start_ps + shift_ps, one.end_ps + shift_ps) for one in rank.marks]


def collectives(rank: TraceRank) -> dict[tuple[str, int], TraceKernel]:
    """Collectives of a rank by name and by which of that name it is."""
    seen: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], TraceKernel] = {}
    for kernel in rank.kernels:
        if kernel.kernel_class == COLLECTIVE:
            found[kernel.name, seen[kernel.name]] = kernel
            seen[kernel.name] += 1
    return found
