"""What L2 holds: regions, one matrix of one layer each, by bytes.

L2 replaces the least recently used lines. Measured on H200 (calibrate/probes, 2026-11): of a region of ``X`` bytes,
what survives other traffic ``t`` falls linearly, ``(C - t) / X``, with an effective capacity ``C`` of 39 of the 60 MB;
random replacement would keep ``exp(-t / C)``, 66 % in a case where 98 % stayed. The 43 % that survived 60 MB on GB200
(k3opt design plan, 2026-09) fit the same rule.

| Constraint | |
| --- | --- |
| bytes of all regions | at most ``l2_effective_bytes`` |
| a line that is read again | becomes the most recent |
| weights, which are read once a step | keep their lines after use, and nobody looks for them again (``SPENT``) |
"""

from __future__ import annotations

from collections import deque
from typing import Any

SPENT = ""  # lines in L2 whose data no later read wants


class L2Residency:
    """Bytes of each region in L2, the least recently used first. ``SPENT`` lines keep their room until replaced."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lines: deque[list[Any]] = deque()  # [region, bytes], oldest first
        self._resident: dict[str, int] = {}
        self.used_bytes = 0

    def resident(self, region: str) -> int:
        return 0 if region == SPENT else self._resident.get(region, 0)

    def insert(self, region: str, num_bytes: int) -> None:
        """Bring ``num_bytes`` of a region in as the most recent lines, in place of the oldest."""
        num_bytes = min(num_bytes, self.capacity_bytes)
        if num_bytes <= 0:
            return
        overflow = self.used_bytes + num_bytes - self.capacity_bytes
        while overflow > 0:
            oldest = self._lines[0]
            gone = min(overflow, oldest[1])
            self._take(oldest, gone)
            if not oldest[1]:
                self._lines.popleft()
            overflow -= gone
        if self._lines and self._lines[-1][0] == region:
            self._lines[-1][1] += num_bytes
        else:
            self._lines.append([region, num_bytes])
        self._resident[region] = self._resident.get(region, 0) + num_bytes
        self.used_bytes += num_bytes

    def touch(self, region: str, num_bytes: int, *, spent: bool) -> None:
        """Lines that were hit become the most recent; ``spent`` ones will not be asked for again."""
        if not num_bytes:
            return
        left = min(num_bytes, self.resident(region))
        moved = left
        for line in self._lines:
            if left and line[0] == region:
                taken = min(left, line[1])
                self._take(line, taken)
                left -= taken
        self._lines = deque([line for line in self._lines if line[1]])
        self.insert(SPENT if spent else region, moved)

    def _take(self, line: list[Any], num_bytes: int) -> None:
        line[1] -= num_bytes
        self._resident[line[0]] -= num_bytes
        self.used_bytes -= num_bytes
