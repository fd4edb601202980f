"""The page of a curve: gain and step over users or context, with intervals and published gains."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from k3sim.calibrate.compare import page_parts
from k3sim.calibrate.compare.known_bias import published_steps
from k3sim.calibrate.evidence.claim_texts import step_us
from k3sim.curve_report import Curve, Place, PublishedGain
from k3sim.sim.options import Options
from k3sim.sim.question import ask, question_of

COLOURS = {"stock": "#5d6b78", "fused": "#2f7fd0", "megakernel": "#c2571a"}


def page_of(curve: Curve) -> str:
    """The page of a curve: gain and step, sudden changes, every point."""
    question = ask(curve.options)
    figures = {"gain": _figure(curve, "gain"), "step": _figure(curve, "step")}
    facts = " · ".join(
        (question.machine.title, question.layout.tag, f"{question.layout.num_gpus} GPUs")
    )
    columns = list(curve.rows()[0])[:-3]
    table = page_parts.html_table(
        ("path", *columns[1:]),
        [[_cell(row[name]) for name in columns] for row in curve.rows()],
        numbers=range(1, len(columns) - 1),
    )
    cliffs = "".join(f"<li>{escape(str(one))}</li>" for one in curve.cliffs) or "<li>none</li>"
    sections = [
        f"<p>{escape(question.architecture.name)} · {escape(facts)}</p>",
        "<section><h2>Gain over stock</h2><div class='chart' id='gain'></div></section>",
        "<section><h2>Step</h2><div class='chart' id='step'></div></section>",
        "<section><h2>Where a step jumps by more than 5 %, or falls, from one user to the next</h2>"
        f"<ul>{cliffs}</ul></section>",
        f"<section><h2>Every point</h2>{page_parts.filtered(table, 'points', 'points')}</section>",
    ]
    return page_parts.page_of(f"Steps over {curve.over}", sections, figures)


def _figure(curve: Curve, what: str) -> dict[str, Any]:
    traces = []
    lines = [(path, other) for path in curve.by_place for other in _lines(curve)]
    for path, other in lines:
        line = [place for place in curve.places if _line_of(curve, place) == other]
        places = [place for place in line if _value(curve, what, path, place) is not None]
        if not places or (what == "gain" and path == "stock"):
            continue
        traces.append(_trace(curve, what, path, other, places))
    if what == "gain" and curve.published:
        shown = [(one.concurrency if curve.over == "concurrency" else one.context, one) for one in curve.published]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "published, fused",
                "marker": {"symbol": "diamond-open", "size": 11, "color": COLOURS["fused"]},
                "x": [x for x, _ in shown], "y": [one.gain for _, one in shown],
                "text": [one.source for _, one in shown], "hovertemplate": "%{text}<br>%{y:.2f}x<extra></extra>",
            }
        )  # fmt: skip
    ticks = sorted({users if curve.over == "concurrency" else context for users, context in curve.places})
    title = "gain over stock" if what == "gain" else "step, ms"
    return {
        "data": traces,
        "layout": {
            **page_parts.LAYOUT,
            "height": 420,
            "xaxis": {**page_parts.GRID, "title": {"text": curve.over}, "type": "log", "tickvals": ticks,
                      "ticktext": [f"{one:,}" for one in ticks]},
            "yaxis": {**page_parts.GRID, "title": {"text": title}, "type": "log" if what == "step" else "linear"},
        },
    }


def _trace(curve: Curve, what: str, path: str, other: int, places: Sequence[Place]) -> dict[str, Any]:
    label = f"{path}, context {other:,}" if curve.over == "concurrency" and len(_lines(curve)) > 1 else path
    values = [_value(curve, what, path, place) for place in places]
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "lines+markers", "name": label,
        "line": {"color": COLOURS.get(path, "#7a4fa3")},
        "x": [place[0] if curve.over == "concurrency" else place[1] for place in places], "y": values,
        "hovertemplate": f"{label}<br>%{{x}}: %{{y:,.3f}}<extra></extra>",
    }  # fmt: skip
    bounds = [_bounds(curve, what, path, place) for place in places]
    if all(bounds):
        ends = [(value or 0.0, *(bound or (0.0, 0.0))) for value, bound in zip(values, bounds, strict=True)]
        trace["error_y"] = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [high - value for value, _, high in ends],
            "arrayminus": [value - low for value, low, _ in ends],
        }  # fmt: skip
    return trace


def _lines(curve: Curve) -> tuple[int, ...]:
    """Values of what does not vary along the curve."""
    return tuple(dict.fromkeys(_line_of(curve, place) for place in curve.places))


def _line_of(curve: Curve, place: Place) -> int:
    return place[1] if curve.over == "concurrency" else place[0]


def _value(curve: Curve, what: str, path: str, place: Place) -> float | None:
    if what == "gain":
        return curve.gain(path, place)
    one = curve.by_place[path].get(place)
    return None if one is None or one.step_us is None else one.step_us / 1e3


def _bounds(curve: Curve, what: str, path: str, place: Place) -> tuple[float, float] | None:
    if what == "gain":
        return curve.gain_bounds(path, place)
    one = curve.by_place[path].get(place)
    found = None if one is None else one.interval_us
    return None if found is None else (found[0] / 1e3, found[1] / 1e3)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def published_gains(options: Options) -> tuple[PublishedGain, ...]:
    """Published gains of the fused path on the machine and layout of a question."""
    asked, found = ask(options), []
    for after, before in published_steps():
        of = question_of(after.command)
        if before is None or (of.machine.name, of.layout) != (asked.machine.name, asked.layout):
            continue
        if of.architecture == asked.architecture:
            found.append(
                PublishedGain(
                    concurrency=of.workload.concurrency, context=of.workload.context,
                    gain=step_us(before) / step_us(after), source=f"{after.engine}, {after.date}",
                )
            )  # fmt: skip
    return tuple(found)
