"""Reference of the bulk L2 prefetch: which byte ranges a launch asks for. It changes no value, so this is all of it."""

from __future__ import annotations

from collections.abc import Sequence

GRANULE = 16  # bytes; the copy engine's unit


def prefetched_ranges(regions: Sequence[tuple[int, int]], budget_bytes: int) -> list[tuple[int, int]]:
    """(address, bytes) in list order, cut where ``budget_bytes`` is spent, rounded down to whole 16-byte units."""
    ranges = []
    left = budget_bytes
    for address, num_bytes in regions:
        taken = max(0, min(num_bytes, left)) // GRANULE * GRANULE
        if taken:
            ranges.append((address, taken))
        left -= num_bytes
    return ranges
