"""Numbers in the texts of a claim: what stands in braces is filled in from the numbers that the text stands beside.

| In braces | Becomes |
| --- | --- |
| label of a figure, of a point of a series, or of an alternative | its predicted value |
| ``where it holds`` | labels of the alternatives on which the first figure's claim holds |
| ``published ID`` | the value of that record of ``calibrate/evidence``, in its unit |
| ``published ID over ID`` | the time of the first record over that of the second: a gain |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from k3sim.calibrate.evidence import Evidence, load_evidence

HELD = "where it holds"
_BRACES = re.compile(r"\{([^{}]*)\}")
_PUBLISHED = "published "


def names_in(text: str) -> list[str]:
    """What stands in braces."""
    return _BRACES.findall(text)


def filled(text: str, numbers: Mapping[str, str]) -> str:
    """``text`` with ``numbers`` and published values in place of what stands in braces; unpredicted ones stay."""
    return _BRACES.sub(lambda found: _published(found[1]) or numbers.get(found[1], "not predicted"), text)


def unknown_names(text: str, labels: Iterable[str]) -> list[str]:
    """Names in braces that are neither a label nor published."""
    known = {*labels, HELD}
    return [name for name in names_in(text) if name not in known and _published(name) is None]


def _published(name: str) -> str | None:
    """A published value, or the gain from one to another; None where the name is of something else."""
    if not name.startswith(_PUBLISHED):
        return None
    records = {one.id: one for one in load_evidence()}
    found = [records.get(identity) for identity in name.removeprefix(_PUBLISHED).split(" over ")]
    if len(found) == 1 and found[0] is not None:
        return f"{found[0].value:g}"
    if len(found) == 2 and found[0] is not None and found[1] is not None:
        return f"{step_us(found[0]) / step_us(found[1]):.2f}"
    return None


def step_us(one: Evidence) -> float:
    """A published step, or a rate that follows from one, in microseconds."""
    return one.value * {"us": 1.0, "ms": 1e3}[one.unit] if one.unit in ("us", "ms") else one.tokens * 1e6 / one.value
