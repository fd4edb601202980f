"""The charts of paths and switches in the HTML report, as plotly figures: plain dictionaries of data and layout.

They are built by hand: importing plotly's figure classes takes longer than writing the whole report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from k3sim.sim.export.colours import FASTER, SLOWER, TOTAL, ink_on, part_colour
from k3sim.sim.export.layout import Figure, layout, named_rows, rounded

LABEL_ROOM = 76  # pixels right of the axis for the text beyond the longest bar


def waits_figure(waits_us: Mapping[str, Mapping[str, float]]) -> Figure:
    """Stacked bars, one a path: microseconds of each part, in the order in which the parts first appear."""
    labels = list(waits_us)
    data = []
    for part in dict.fromkeys(part for parts in waits_us.values() for part in parts):
        values = [waits_us[label].get(part, 0.0) for label in labels]
        colour = part_colour(part)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape(part, quote=False),
                "y": [escape(label, quote=False) for label in labels],
                "x": rounded(values),
                "marker": {"color": colour, "line": {"color": "#ffffff", "width": 1}},
                "text": [f"{value:,.0f}" for value in values],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "insidetextfont": {"color": ink_on(colour)},
                "textangle": 0,
                "hovertemplate": "%{y}<br>%{fullData.name}: %{x:,.1f} µs<extra></extra>",
            }
        )
    chart = layout(height=90 + 62 * len(labels), barmode="stack", bargap=0.32)
    chart["uniformtext"] = {"mode": "hide", "minsize": 10}
    chart["xaxis"]["title"]["text"] = "time of the step (µs)"
    chart["yaxis"] |= {"autorange": "reversed"}
    return {"data": data, "layout": chart}


def waterfall_figure(steps: Sequence[Mapping[str, Any]]) -> Figure:
    """Step time from path to path. ``steps`` as ``report["waterfall"]``; hover names what changed."""
    is_total = [step["kind"] == "total" for step in steps]
    data = {
        "type": "waterfall",
        "orientation": "h",
        "y": list(range(len(steps))),
        "x": [
            round(step["step_us"] if total else step["delta_us"], 3)
            for step, total in zip(steps, is_total, strict=True)
        ],
        "measure": ["absolute" if total else "relative" for total in is_total],
        "text": [
            f"{step['step_us']:,.0f} µs" if total else f"{step['delta_us']:+,.0f} µs".replace("-", "−")
            for step, total in zip(steps, is_total, strict=True)
        ],
        "textposition": "outside",
        "cliponaxis": False,
        "connector": {"line": {"color": "#9aa4af", "width": 1}},
        "totals": {"marker": {"color": TOTAL}},
        "increasing": {"marker": {"color": SLOWER}},
        "decreasing": {"marker": {"color": FASTER}},
        "customdata": [_waterfall_hover(step) for step in steps],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    chart = layout(height=90 + 38 * len(steps), bargap=0.35)
    chart["margin"]["r"] = LABEL_ROOM
    chart["xaxis"]["title"]["text"] = "step time (µs)"
    chart["xaxis"]["rangemode"] = "tozero"
    chart["yaxis"] |= named_rows([step["label"] for step in steps])
    return {"data": [data], "layout": chart}


def _waterfall_hover(step: Mapping[str, Any]) -> str:
    lines = [f"<b>{escape(step['label'], quote=False)}</b>", f"step {step['step_us']:,.1f} µs"]
    if step["kind"] != "total":
        lines.append(f"change {step['delta_us']:+,.1f} µs")
    changes = sorted(step.get("waits_delta_us", {}).items(), key=lambda item: -abs(item[1]))
    lines += [f"{escape(part, quote=False)} {us:+,.1f} µs" for part, us in changes if round(us, 1) != 0]
    return "<br>".join(lines)


def leave_one_out_figure(switches: Sequence[Mapping[str, Any]]) -> Figure:
    """What the step would lose without each switch. ``switches`` as ``report["leave_one_out"]``."""
    ordered = sorted(switches, key=lambda switch: -switch["cost_us"])
    data = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(ordered))),
        "x": [round(switch["cost_us"], 3) for switch in ordered],
        "marker": {"color": [SLOWER if switch["cost_us"] >= 0 else FASTER for switch in ordered]},
        "customdata": [round(switch["step_us"], 3) for switch in ordered],
        "hovertemplate": "step %{customdata:,.1f} µs (%{x:+,.1f})<extra></extra>",
    }
    chart = layout(height=90 + 38 * len(ordered), bargap=0.35)
    chart["margin"]["r"] = LABEL_ROOM
    chart["xaxis"]["title"]["text"] = "added to the step (µs)"
    chart["yaxis"] |= named_rows([f"without {switch['without']}" for switch in ordered])
    # A label to the left of a negative bar would run into the names of the rows.
    labels = {
        "type": "scatter",
        "mode": "text",
        "y": data["y"],
        "x": [max(0.0, cost_us) for cost_us in data["x"]],
        "text": [f" {switch['cost_us']:+,.0f} µs".replace("-", "−") for switch in ordered],
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
    }
    return {"data": [data, labels], "layout": chart}
