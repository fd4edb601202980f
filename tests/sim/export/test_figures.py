"""The numbers that the charts of the report are drawn from."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import pytest
from synthetic_report import synthetic_report, synthetic_timelines
from synthetic_timeline import synthetic_timeline

from k3sim.sim.export.figures import (
    GROUP_COLOURS,
    PART_COLOURS,
    layer_figure,
    leave_one_out_figure,
    part_colour,
    step_figure,
    waits_figure,
    waterfall_figure,
)
from k3sim.sim.timeline.timeline import PS_PER_US, Counter, KernelRun, Phase, Span, Timeline


def one_layer() -> Timeline:
    """Layer 1 from 2 to 10 us between two other layers; the last kernel of layer 0 reaches into it."""
    kernels = [
        KernelRun(0, 0, "main", 0, "kda+moe", "moe.gather", 0, 3 * PS_PER_US),
        KernelRun(1, 0, "main", 1, "kda+moe", "kda.in_proj", 2 * PS_PER_US, 6 * PS_PER_US),
        KernelRun(2, 0, "main", 1, "kda+moe", "kda.o_proj", 6 * PS_PER_US, 10 * PS_PER_US),
        KernelRun(3, 0, "prefetch", 1, "kda+moe", "prefetch.next", 0, 1 * PS_PER_US),  # before the layer runs
        KernelRun(4, 0, "main", 2, "kda+moe", "attn_res", 10 * PS_PER_US, 11 * PS_PER_US),
    ]
    kernels[1].spans = [
        Span(Phase.LAUNCH, 2 * PS_PER_US, 3 * PS_PER_US),
        Span(Phase.RAMP, 3 * PS_PER_US, 3 * PS_PER_US),  # empty
        Span(Phase.WEIGHTS, 3 * PS_PER_US, 6 * PS_PER_US),
    ]
    hbm = Counter(0, "hbm", 8_000_000, ((0, 1_000_000), (3 * PS_PER_US, 4_000_000), (6 * PS_PER_US, 0)))
    return Timeline("h200", 1, (0,), 3, kernels, [hbm], 11 * PS_PER_US)


def traces(figure: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    assert figure is not None
    return {trace["name"]: trace for trace in figure["data"]}


def test_a_layer_shows_what_runs_meanwhile() -> None:
    figure = layer_figure(one_layer(), 1)

    drawn = traces(figure)
    names = drawn["kernel"]
    assert names["text"] == ["gather", "o_proj", "in_proj"]  # lane by lane: in_proj overlaps gather
    assert names["base"] == [-2.0, 4.0, 0.0]
    assert names["x"] == [3.0, 4.0, 4.0]
    assert names["y"] == pytest.approx([-0.22, -0.22, 0.78])
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"] == ["main", "main (overlap 1)"]
    assert figure["layout"]["xaxis"]["range"] == [0, 8.0]


def test_a_layer_shows_phases_that_last() -> None:
    drawn = traces(layer_figure(one_layer(), 1))

    assert (drawn["launch"]["base"], drawn["launch"]["x"]) == ([0.0], [1.0])
    assert (drawn["weights"]["base"], drawn["weights"]["x"]) == ([1.0], [3.0])
    assert drawn["weights"]["hovertext"] == ["<b>kda.in_proj</b> layer 1<br>weights"]
    assert "ramp" not in drawn


def test_a_layer_shows_its_hbm_rate() -> None:
    drawn = traces(layer_figure(one_layer(), 1))

    assert drawn["HBM rate"]["x"] == [0.0, 1.0, 4.0, 8.0]
    assert drawn["HBM rate"]["y"] == [1.0, 4.0, 0.0, 0.0]
    assert drawn["HBM capacity"]["y"] == [8.0, 8.0]


def test_an_absent_layer_has_no_chart() -> None:
    assert layer_figure(one_layer(), 7) is None


def test_the_whole_step_has_every_kernel_once() -> None:
    timeline = synthetic_timeline(num_layers=8)

    drawn = traces(step_figure(timeline))

    bars = {name: trace for name, trace in drawn.items() if trace["type"] == "bar"}
    assert set(bars) == {"attn_res", "kda", "mla", "moe", "prefetch"}
    assert sum(len(trace["x"]) for trace in bars.values()) == len(timeline.kernels)
    total_us = sum(sum(trace["x"]) for trace in bars.values())
    assert total_us == pytest.approx(sum(k.duration_ps for k in timeline.kernels) / PS_PER_US, abs=0.2)


def test_the_mean_hbm_rate_keeps_the_bytes() -> None:
    timeline = synthetic_timeline(num_layers=8)

    mean = traces(step_figure(timeline))["HBM rate, mean"]

    widths_us = [right - left for left, right in pairwise(mean["x"])]
    read_bytes = sum(rate * 1e6 * width for rate, width in zip(mean["y"], widths_us, strict=False))
    assert read_bytes == pytest.approx(sum(kernel.hbm_bytes for kernel in timeline.kernels), rel=2e-3)


def test_a_measured_timeline_without_counters_is_drawn() -> None:
    timeline = one_layer()
    timeline.counters = []

    assert set(traces(step_figure(timeline))) == {"moe", "kda", "prefetch", "attn_res"}


def test_parts_of_a_path_stack_to_its_step() -> None:
    timelines = synthetic_timelines()
    paths = synthetic_report(timelines)["paths"]

    figure = waits_figure({label: row["waits_us"] for label, row in paths.items()})

    for position, timeline in enumerate(timelines.values()):
        assert sum(trace["x"][position] for trace in figure["data"]) == pytest.approx(
            timeline.step_us, abs=0.02
        )
    assert [trace["name"] for trace in figure["data"]][:4] == ["weights", "kv and state", "l2", "compute"]


def test_an_absent_part_is_zero() -> None:
    figure = waits_figure({"stock": {"weights": 5.0, "launch": 2.0}, "megakernel": {"weights": 6.0}})

    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [
        ("weights", [5.0, 6.0]),
        ("launch", [2.0, 0.0]),
    ]


def test_the_waterfall_starts_totals_anew_and_adds_changes() -> None:
    figure = waterfall_figure(
        [
            {"label": "stock", "kind": "total", "step_us": 100.0, "delta_us": 0.0},
            {
                "label": "fused-allreduce",
                "kind": "relative",
                "step_us": 70.0,
                "delta_us": -30.0,
                "waits_delta_us": {"peers": -32.0, "weights": 2.0, "l2": 0.01},
            },
            {"label": "fused", "kind": "total", "step_us": 70.0, "delta_us": 0.0},
        ]
    )

    (bars,) = figure["data"]
    assert bars["measure"] == ["absolute", "relative", "absolute"]
    assert bars["x"] == [100.0, -30.0, 70.0]
    assert bars["text"] == ["100 µs", "−30 µs", "70 µs"]
    assert bars["customdata"][1] == (
        "<b>fused-allreduce</b><br>step 70.0 µs<br>change -30.0 µs<br>peers -32.0 µs<br>weights +2.0 µs"
    )


def test_the_costliest_switch_comes_first() -> None:
    figure = leave_one_out_figure(
        [
            {"without": "prefetch", "step_us": 105.0, "cost_us": 5.0},
            {"without": "fused-allreduce", "step_us": 140.0, "cost_us": 40.0},
            {"without": "shared routing", "step_us": 98.0, "cost_us": -2.0},
        ]
    )

    bars, labels = figure["data"]
    assert figure["layout"]["yaxis"]["ticktext"] == [
        "without fused-allreduce",
        "without prefetch",
        "without shared routing",
    ]
    assert bars["x"] == [40.0, 5.0, -2.0]
    assert labels["x"] == [40.0, 5.0, 0.0], "the label of a gain stands right of the axis"


# What a colour becomes for a reader without green or red cones, on linear RGB. Source: Machado, Oliveira and
# Fernandes, "A physiologically-based model for simulation of color vision deficiency", IEEE TVCG 15(6), 2009.
VISIONS = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
}


def linear_rgb(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(rgb: list[float]) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def cielab(rgb: list[float]) -> tuple[float, float, float]:
    red, green, blue = (min(1.0, max(0.0, channel)) for channel in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, luminance([red, green, blue]), z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_phases_look_alike(vision: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        rgb = linear_rgb(colour)
        return cielab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in VISIONS[vision]])

    phases = {phase.value: seen(PART_COLOURS[phase.value]) for phase in Phase}
    distance, *pair = min((math.dist(phases[a], phases[b]), a, b) for a, b in combinations(phases, 2))
    assert distance > 18, pair  # CIELAB; 2 is just noticeable side by side


def test_a_word_has_one_colour() -> None:
    assert part_colour("Weights") == PART_COLOURS["weights"]
    assert part_colour("something new") == part_colour("something new")
    assert set(PART_COLOURS.values()).isdisjoint(GROUP_COLOURS.values())


def test_text_on_a_bar_is_legible() -> None:
    for part in PART_COLOURS:
        (trace,) = waits_figure({"fused": {part: 1.0}})["data"]
        colours = (trace["marker"]["color"], trace["insidetextfont"]["color"])
        dark, light = sorted(luminance(linear_rgb(colour)) for colour in colours)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, part  # WCAG 2, level AA
