"""Values of a machine, in SI units, as the integers that the simulation counts in: picoseconds, bytes a microsecond."""

from __future__ import annotations


def picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


def bytes_per_us(bytes_per_s: float) -> int:
    """A whole rate, never zero: a transfer that has begun must end."""
    return max(1, round(bytes_per_s / 1e6))
