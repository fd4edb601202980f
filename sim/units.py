"""Values of a machine, in SI units, as the integers that the simulation counts in: picoseconds, bytes a microsecond."""

from __future__ import annotations

from collections.abc import Iterable


def picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


def bytes_per_us(bytes_per_s: float) -> int:
    """A whole rate, never zero: a transfer that has begun must end."""
    return max(1, round(bytes_per_s / 1e6))


def total(values: Iterable[float]) -> float:
    """The sum from left to right, the same on every Python: ``sum`` of floats is compensated from 3.12 on."""
    found = 0.0
    for value in values:
        found += value
    return found
