"""Values with their unit as a reader of the field writes them: 343 ns, 7 TB/s, 2.07 GHz, 228 KiB.

Profiles and JSON hold SI units. Everything that is shown to people goes through here: tables, pages, refusals.
"""

from __future__ import annotations

from collections.abc import Sequence

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": _TIMES,
    "B": _BINARY,
    **{unit: tuple((size, prefix + unit) for size, prefix in _DECIMAL) for unit in ("Hz", "B/s", "FLOP/s")},
}
_COUNTED = ("SM", "GPU", "thread")
_BARE = ("1", "bool")  # a share or a factor, and what is there or not


def quantity(value: float, unit: str, like: float | None = None) -> str:
    """A value of an SI unit in the unit that the field uses for one of its size, in four digits.

    ``like``: in the unit of that value instead, for figures that stand beside each other.
    """
    number, shown = scaled(value, unit, value if like is None else like)
    return f"{number} {shown}".rstrip()


def quantity_range(low: float, high: float, unit: str, like: float | None = None) -> str:
    """``388 to 442 ns``: both ends in the unit of the upper one, or of ``like``."""
    like = high if like is None else like
    number, shown = scaled(high, unit, like)
    return f"{scaled(low, unit, like)[0]} to {number} {shown}".rstrip()


def in_one_unit(values: Sequence[float | None], unit: str) -> list[str]:
    """Numbers for the cells of a row, nothing for None, and last the unit that all have: that of the first one."""
    like = next((one for one in values if one), 0.0)
    numbers = ["" if one is None else scaled(one, unit, like)[0] for one in values]
    return [*numbers, scaled(like, unit, like)[1]]


def scaled(value: float, unit: str, like: float) -> tuple[str, str]:
    """The number and the unit that ``quantity`` joins."""
    if isinstance(value, bool):
        return ("yes" if value else "no"), ""
    size, shown = 1.0, "" if unit in _BARE else f"{unit}s" if unit in _COUNTED and value != 1 else unit
    if unit in _SCALES and like:
        steps = _SCALES[unit]
        size, shown = next((one for one in steps if abs(like) >= one[0]), steps[-1])
    number = value / size
    return (f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"), shown
