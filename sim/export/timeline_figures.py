"""The charts of a timeline in the HTML report: one layer with its phases, and the whole step, above the HBM rate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from k3sim.sim.export.colours import ACCENT, INK, MUTED, part_colour, stage_group
from k3sim.sim.export.lanes import assign_lanes
from k3sim.sim.export.layout import Figure, axis, layout, named_rows, rounded
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Timeline

MEAN_BINS = 300  # of the smoothed HBM rate over a whole step


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
            "x": rounded((time_ps - start_ps) / PS_PER_US for time_ps, _ in steps),
            "y": rounded(_tb_per_s(rate) for _, rate in steps),
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
                "x": rounded((edge - start_ps) / PS_PER_US for edge in edges_ps),
                "y": rounded(map(_tb_per_s, _mean_rates(steps, edges_ps))),
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
    chart = layout(height=inner_height + 80, barmode="overlay")
    chart["margin"] |= {"t": 30}  # the zoom buttons stand there
    chart["uniformtext"] = {"mode": "hide", "minsize": 9}
    chart["hovermode"] = "closest"
    chart["dragmode"] = "zoom"
    chart["xaxis"] |= {"anchor": "y2" if with_rate else "y", "range": [0, length_us]}
    chart["xaxis"]["title"]["text"] = x_title
    chart["yaxis"] |= {
        **named_rows(lanes),
        "domain": [1 - rows_height / inner_height, 1],
        "fixedrange": True,
    }
    if not with_rate:
        return chart
    chart["yaxis2"] = axis() | {
        "title": {"text": "HBM (TB/s)", "font": {"size": 12, "color": MUTED}},
        "domain": [0, rate_height / inner_height],
        "rangemode": "tozero",
        "fixedrange": True,
        "nticks": 4,
    }
    return chart


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
