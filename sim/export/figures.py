"""The charts of the HTML report as plotly figures, which are plain dictionaries of data and layout.

They are built by hand: importing plotly's figure classes takes longer than writing the whole report.

Colours come in five families: blue for work, gold for launching, green for memory below its speed, orange
for latency on the chip, purple for the network; grey is the host. A search chose them to keep every two apart
for readers with and without a colour-vision deficiency. A word has one colour in every chart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import Any

from k3sim.sim.export.lanes import assign_lanes
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Timeline

Figure = dict[str, Any]

INK, MUTED, RULE, ACCENT = "#1c232b", "#5b6672", "#dfe4ea", "#1f5fa8"
TOTAL, SLOWER, FASTER = "#3b4450", "#b0605a", "#6f9fb3"  # muted: no part of the time has these
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK}

PART_COLOURS = {
    "weights": "#0253a2",
    "kv and state": "#6595ff",
    "l2": "#57c2fc",
    "compute": "#011d33",
    "release": "#f8f4a3",
    "launch": "#fdcf03",
    "sm slots": "#f0b35c",
    "ramp": "#acf4cb",
    "bytes in flight": "#4a9083",
    "starved": "#19854a",
    "dependency": "#fb9c87",
    "drain": "#815602",
    "latency": "#e76e03",
    "reduce": "#741717",
    "send": "#fed6ff",
    "peers": "#d46dc1",
    "nvlink flight": "#d46dc1",  # the waits split waiting for peers in two
    "slower peer": "#380161",
    "poll": "#6e4477",
    "host": "#525252",
    "run": "#b1b7bd",
    "exchange": "#963cf0",
    # Parts of the waits that gather several phases, or name one by what it means.
    "ramp and drain": "#acf4cb",
    "dependency latency": "#e76e03",
    "reduction and barrier": "#741717",
    "side stream": "#19854a",
    "kernel": "#b1b7bd",
}
# Groups of stages are places, not parts of time: paler colours of their own (Paul Tol's light scheme).
GROUP_COLOURS = {
    "host": "#bbbbbb",
    "embed": "#aaaa00",
    "attn_res": "#eedd88",
    "kda": "#77aadd",
    "mla": "#ee8866",
    "dense": "#bbcc33",
    "moe": "#44bb99",
    "head": "#ffaabb",
    "prefetch": "#99ddff",
}
OTHER_COLOURS = ("#6c8ebf", "#d79b00", "#9673a6", "#82b366", "#b85450")

LABEL_ROOM = 76  # pixels right of the axis for the text beyond the longest bar
MEAN_BINS = 300  # of the smoothed HBM rate over a whole step


def part_colour(part: str) -> str:
    """The colour of a phase, a part of the waits or a group of stages; by its letters for an unknown word."""
    word = part.lower()
    return (
        PART_COLOURS.get(word)
        or GROUP_COLOURS.get(word)
        or OTHER_COLOURS[sum(word.encode()) % len(OTHER_COLOURS)]
    )


def stage_group(stage: str) -> str:
    """The part of a stage's name before the dot, such as ``kda`` of ``kda.in_proj``."""
    return stage.partition(".")[0]


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
                "x": _rounded(values),
                "marker": {"color": colour, "line": {"color": "#ffffff", "width": 1}},
                "text": [f"{value:,.0f}" for value in values],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "insidetextfont": {"color": _ink_on(colour)},
                "textangle": 0,
                "hovertemplate": "%{y}<br>%{fullData.name}: %{x:,.1f} µs<extra></extra>",
            }
        )
    layout = _layout(height=90 + 62 * len(labels), barmode="stack", bargap=0.32)
    layout["uniformtext"] = {"mode": "hide", "minsize": 10}
    layout["xaxis"]["title"]["text"] = "time of the step (µs)"
    layout["yaxis"] |= {"autorange": "reversed"}
    return {"data": data, "layout": layout}


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
    layout = _layout(height=90 + 38 * len(steps), bargap=0.35)
    layout["margin"]["r"] = LABEL_ROOM
    layout["xaxis"]["title"]["text"] = "step time (µs)"
    layout["xaxis"]["rangemode"] = "tozero"
    layout["yaxis"] |= _named_rows([step["label"] for step in steps])
    return {"data": [data], "layout": layout}


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
    layout = _layout(height=90 + 38 * len(ordered), bargap=0.35)
    layout["margin"]["r"] = LABEL_ROOM
    layout["xaxis"]["title"]["text"] = "added to the step (µs)"
    layout["yaxis"] |= _named_rows([f"without {switch['without']}" for switch in ordered])
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
    return {"data": [data, labels], "layout": layout}


def layer_figure(timeline: Timeline, layer: int) -> Figure | None:
    """One layer on the critical rank: phases by lane, the names of kernels above them, the HBM rate below.

    Time counts from the layer's first kernel. Kernels of other layers that run meanwhile are shown too. None
    when the timeline has no kernel of that layer.
    """
    kernels = list(timeline.of_rank(timeline.critical_rank))
    of_layer = [kernel for kernel in kernels if kernel.layer == layer]
    # A prefetch runs in an earlier layer; the main stream says when this one happens.
    extent = [kernel for kernel in of_layer if kernel.stream == "main"] or of_layer
    if not extent:
        return None
    start_ps, end_ps = min(k.start_ps for k in extent), max(k.end_ps for k in extent)
    lanes = assign_lanes(k for k in kernels if k.end_ps > start_ps and k.start_ps < end_ps)

    names = _BarTrace("kernel", width=0.3, line=MUTED)
    phases = {phase: _BarTrace(phase.value, width=0.42, line="#ffffff") for phase in Phase}
    for row, lane in enumerate(lanes.values()):
        for kernel in lane:
            times_us = _times_us(kernel.start_ps, kernel.end_ps, start_ps)
            title = _kernel_title(kernel)
            group, _, operator = kernel.stage.partition(".")
            names.add(row - 0.22, times_us, part_colour(group), title, escape(operator or group, quote=False))
            for span in kernel.spans:
                if span.end_ps > span.start_ps:
                    times_us = _times_us(span.start_ps, span.end_ps, start_ps)
                    phase = span.phase.value
                    phases[span.phase].add(row + 0.16, times_us, part_colour(phase), f"{title}<br>{phase}")
    data = [trace.as_dict() for trace in (names, *phases.values()) if trace.rows]
    data += _hbm_traces(timeline, start_ps, end_ps)
    window_us = (end_ps - start_ps) / PS_PER_US
    return {
        "data": data,
        "layout": _timeline_layout(
            list(lanes), window_us, f"time from the start of layer {layer} (µs)", 66, with_rate=bool(timeline.counters)
        ),
    }


def step_figure(timeline: Timeline) -> Figure:
    """The whole step on the critical rank: a bar a kernel coloured by group of stages, the HBM rate below."""
    lanes = assign_lanes(timeline.of_rank(timeline.critical_rank))
    groups: dict[str, _BarTrace] = {}
    for row, lane in enumerate(lanes.values()):
        for kernel in lane:
            group = stage_group(kernel.stage)
            trace = groups.setdefault(group, _BarTrace(group, width=0.7))
            times_us = _times_us(kernel.start_ps, kernel.end_ps, 0)
            trace.add(row, times_us, part_colour(group), _kernel_title(kernel))
    data = [trace.as_dict() for trace in groups.values()]
    data += _hbm_traces(timeline, 0, timeline.step_ps, mean_bins=MEAN_BINS)
    return {
        "data": data,
        "layout": _timeline_layout(
            list(lanes), timeline.step_us, "time from the start of the step (µs)", 34, with_rate=bool(timeline.counters)
        ),
    }


class _BarTrace:
    """Horizontal bars, each from a start to an end, drawn as one trace."""

    def __init__(self, name: str, *, width: float, line: str | None = None) -> None:
        self.name, self.width, self.line = name, width, line
        self.rows: list[float] = []
        self.times_us: list[tuple[float, float, float]] = []  # start, end, duration
        self.colours: list[str] = []
        self.titles: list[str] = []
        self.texts: list[str] = []

    def add(
        self, row: float, times_us: tuple[float, float, float], colour: str, title: str, text: str = ""
    ) -> None:
        """``title`` heads what shows when pointed at, ``text`` stands in the bar where it fits."""
        self.rows.append(row)
        self.times_us.append(times_us)
        self.colours.append(colour)
        self.titles.append(title)
        self.texts.append(text)

    def as_dict(self) -> Figure:
        one_colour = len(set(self.colours)) == 1
        return {
            "type": "bar",
            "orientation": "h",
            "name": escape(self.name, quote=False),
            "y": self.rows,
            "base": [start_us for start_us, _, _ in self.times_us],
            "x": [duration_us for _, _, duration_us in self.times_us],
            "width": self.width,
            "marker": {
                "color": self.colours[0] if one_colour else self.colours,
                "line": {"color": self.line, "width": 0.5 if self.line else 0},
            },
            "text": self.texts if any(self.texts) else "",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "insidetextfont": {"color": INK, "size": 10},
            "textangle": 0,
            "constraintext": "inside",
            "hovertext": self.titles,
            "customdata": self.times_us,
            "hovertemplate": "%{hovertext}<br>%{customdata[0]:,.3f} to %{customdata[1]:,.3f} µs"
            "<br>%{customdata[2]:,.3f} µs long<extra></extra>",
        }


def _hbm_traces(timeline: Timeline, start_ps: int, end_ps: int, mean_bins: int = 0) -> list[Figure]:
    """The HBM rate between two times as a filled step line, its mean over bins if asked, its capacity."""
    rank = timeline.critical_rank
    counter = next((c for c in timeline.counters if c.rank == rank and c.resource == "hbm"), None)
    if counter is None:
        return []
    times_ps = [time_ps for time_ps, _ in counter.steps]
    rates = [rate for _, rate in counter.steps]
    first = bisect_right(times_ps, start_ps) - 1  # the rate already under way at the start
    inside = range(first + 1, bisect_right(times_ps, end_ps))
    steps = [(start_ps, rates[first] if first >= 0 else 0), *((times_ps[i], rates[i]) for i in inside)]
    steps.append((end_ps, steps[-1][1]))
    common = {"type": "scatter", "mode": "lines", "yaxis": "y2"}
    traces: list[Figure] = [
        common
        | {
            "name": "HBM rate",
            "x": _rounded((time_ps - start_ps) / PS_PER_US for time_ps, _ in steps),
            "y": _rounded(_tb_per_s(rate) for _, rate in steps),
            "line": {"shape": "hv", "color": ACCENT, "width": 0 if mean_bins else 1},
            "fill": "tozeroy",
            "fillcolor": "rgba(31,95,168,0.22)",
            "hovertemplate": "HBM %{y:.2f} TB/s<extra></extra>",
        }
    ]
    if mean_bins:
        edges_ps = [start_ps + (end_ps - start_ps) * i // mean_bins for i in range(mean_bins + 1)]
        traces.append(
            common
            | {
                "name": "HBM rate, mean",
                "x": _rounded((edge - start_ps) / PS_PER_US for edge in edges_ps),
                "y": _rounded(map(_tb_per_s, _mean_rates(steps, edges_ps))),
                "line": {"shape": "hv", "color": ACCENT, "width": 1.5},
                "hovertemplate": "HBM %{y:.2f} TB/s, mean<extra></extra>",
            }
        )
    traces.append(
        common
        | {
            "name": "HBM capacity",
            "x": [0, (end_ps - start_ps) / PS_PER_US],
            "y": [_tb_per_s(counter.capacity_bytes_per_us)] * 2,
            "line": {"color": INK, "width": 1, "dash": "dot"},
            "hovertemplate": "HBM capacity %{y:.2f} TB/s<extra></extra>",
        }
    )
    return traces


def _mean_rates(steps: Sequence[tuple[int, int]], edges_ps: Sequence[int]) -> list[float]:
    """Mean rate between neighbouring edges, and the last of them again to close a step line."""
    areas = [0] * (len(edges_ps) - 1)
    bin_index = 0
    for (from_ps, rate), (until_ps, _) in pairwise(steps):
        while from_ps < until_ps:
            if from_ps >= edges_ps[bin_index + 1]:
                bin_index += 1
                continue
            part_end_ps = min(until_ps, edges_ps[bin_index + 1])
            areas[bin_index] += rate * (part_end_ps - from_ps)
            from_ps = part_end_ps
    means = [
        area / max(1, right - left) for area, (left, right) in zip(areas, pairwise(edges_ps), strict=True)
    ]
    return [*means, means[-1]]


def _timeline_layout(
    lanes: Sequence[str], length_us: float, x_title: str, row_height: int, *, with_rate: bool
) -> Figure:
    """Rows of lanes, and below them the HBM rate where there is one: a measured timeline has none."""
    rows_height, rate_height, gap = row_height * len(lanes), 90 if with_rate else 0, 24 if with_rate else 0
    inner_height = rows_height + gap + rate_height
    layout = _layout(height=inner_height + 80, barmode="overlay")
    layout["margin"] |= {"t": 30}  # the zoom buttons stand there
    layout["uniformtext"] = {"mode": "hide", "minsize": 9}
    layout["hovermode"] = "closest"
    layout["dragmode"] = "zoom"
    layout["xaxis"] |= {"anchor": "y2" if with_rate else "y", "range": [0, length_us]}
    layout["xaxis"]["title"]["text"] = x_title
    layout["yaxis"] |= {
        **_named_rows(lanes),
        "domain": [1 - rows_height / inner_height, 1],
        "fixedrange": True,
    }
    if not with_rate:
        return layout
    layout["yaxis2"] = _axis() | {
        "title": {"text": "HBM (TB/s)", "font": {"size": 12, "color": MUTED}},
        "domain": [0, rate_height / inner_height],
        "rangemode": "tozero",
        "fixedrange": True,
        "nticks": 4,
    }
    return layout


def _layout(*, height: int, **more: Any) -> Figure:
    return {
        "height": height,
        "margin": {"l": 10, "r": 24, "t": 10, "b": 50},
        "font": FONT,
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "showlegend": False,  # the page has its own, which wraps in a narrow window
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#9aa4af", "font": FONT, "align": "left"},
        "xaxis": _axis(),
        "yaxis": _axis() | {"showgrid": False},
        **more,
    }


def _axis() -> Figure:
    return {
        "automargin": True,
        "gridcolor": RULE,
        "zerolinecolor": "#9aa4af",
        "linecolor": RULE,
        "tickfont": {"color": INK},
        "title": {"font": {"size": 13, "color": MUTED}},
        "separatethousands": True,
        "exponentformat": "none",
    }


def _named_rows(names: Sequence[str]) -> Figure:
    """A vertical axis with a name for each whole number, the first at the top."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": ["<br>".join(escape(line, quote=False) for line in wrap(name, 26)) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def _kernel_title(kernel: KernelRun) -> str:
    return f"<b>{escape(kernel.stage, quote=False)}</b> layer {kernel.layer}"


def _times_us(start_ps: int, end_ps: int, origin_ps: int) -> tuple[float, float, float]:
    """Start and end from the origin, and the duration."""
    return (
        round((start_ps - origin_ps) / PS_PER_US, 3),
        round((end_ps - origin_ps) / PS_PER_US, 3),
        round((end_ps - start_ps) / PS_PER_US, 3),
    )


def _tb_per_s(bytes_per_us: float) -> float:
    return bytes_per_us / 1e6


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _ink_on(background: str) -> str:
    """Black or white, whichever reads better on the background (relative luminance, WCAG 2)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
