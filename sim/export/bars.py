"""The bars of paths and switches in the page: boxes of a percentage of the width, which need no script to draw.

They keep their proportions in a window of any width, and their text is text: it can be selected and searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from k3sim.sim.export.colours import in_order, word_class

MAX_NAMED_CHANGES = 3  # parts that a change of the waterfall names


def waits_bars(waits_us: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked bars, one a path: microseconds of each part, in the order of the table of words."""
    parts = in_order(part for row in waits_us.values() for part in row)
    longest_us = max((sum(row.values()) for row in waits_us.values()), default=0.0) or 1.0
    rows = []
    for label, row in waits_us.items():
        boxes = "".join(
            f'<span class="{word_class(part)}" style="width:{100 * row[part] / longest_us:.3f}%" '
            f'title="{_text(part)}: {row[part]:,.1f} µs"><b>{row[part]:,.0f}</b></span>'
            for part in parts
            if row.get(part, 0.0) > 0
        )
        rows.append(f'<div class="name">{_text(label)}</div><div class="stack">{boxes}</div>')
    return f'<div class="bars" id="waits">{"".join(rows)}</div>'


def waterfall_bars(steps: Sequence[Mapping[str, Any]]) -> str:
    """Step time from path to path. ``steps`` as ``report["waterfall"]``; each change names its largest parts."""
    longest_us = max(max(step["step_us"], step["step_us"] - step["delta_us"]) for step in steps) or 1.0
    rows = []
    for step in steps:
        end_us = step["step_us"]
        if step["kind"] == "total":
            box = _box(0.0, end_us, longest_us, "total", f"{end_us:,.0f} µs")
        else:
            box = _box(end_us - step["delta_us"], end_us, longest_us, _way(step["delta_us"]), signed(step["delta_us"]))
        rows.append(_row(step["label"], box, largest_changes(step.get("waits_delta_us", {}))))
    return f'<div class="bars" id="waterfall">{"".join(rows)}</div>'


def leave_one_out_bars(switches: Sequence[Mapping[str, Any]]) -> str:
    """What the step would lose without each switch, the costliest first: ``report["leave_one_out"]``."""
    ordered = sorted(switches, key=lambda switch: -switch["cost_us"])
    least_us = min(0.0, *(switch["cost_us"] for switch in ordered))
    most_us = max(0.0, *(switch["cost_us"] for switch in ordered))
    length_us = most_us - least_us or 1.0
    rows = []
    for switch in ordered:
        cost_us = switch["cost_us"]
        box = _box(-least_us, cost_us - least_us, length_us, _way(cost_us), signed(cost_us))
        rows.append(_row(f"without {switch['without']}", box, ""))
    return f'<div class="bars" id="leave_one_out">{"".join(rows)}</div>'


def largest_changes(changes_us: Mapping[str, float]) -> str:
    """``launch −577 µs, L2 round trips −210 µs``: the parts that change most; nothing below a microsecond."""
    ordered = sorted(changes_us.items(), key=lambda item: -abs(item[1]))
    return ", ".join(f"{part} {signed(us)}" for part, us in ordered[:MAX_NAMED_CHANGES] if abs(us) >= 1)


def signed(us: float) -> str:
    return f"{us:+,.0f} µs".replace("-", "−")


def _way(delta_us: float) -> str:
    return "slower" if delta_us >= 0 else "faster"


def _row(name: str, box: str, below: str) -> str:
    small = f"<small>{_text(below)}</small>" if below else ""
    return f'<div class="name">{_text(name)}{small}</div><div class="track">{box}</div>'


def _box(from_us: float, to_us: float, length_us: float, name: str, label: str) -> str:
    """A box between two values, and behind the right one its label."""
    left, right = (100 * value / length_us for value in sorted((from_us, to_us)))
    return (
        f'<span class="{name}" style="left:{left:.3f}%;width:{right - left:.3f}%"></span>'
        f'<b style="left:{right:.3f}%">{label}</b>'
    )


def _text(value: object) -> str:
    return escape(str(value))
