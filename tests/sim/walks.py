"""Segments of a critical path as tests state them."""

from __future__ import annotations

from k3sim.sim.timeline.critical_path import Part, Segment


def tiles(*ends: tuple[int, Part, int], start_ps: int = 0) -> list[Segment]:
    """Segments (end, part, kernel) that tile a path: each begins where the one before it ends."""
    segments = []
    for end_ps, part, kernel in ends:
        segments.append(Segment(start_ps, end_ps, part, kernel))
        start_ps = end_ps
    return segments
