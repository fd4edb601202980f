"""The numbers that the charts of a timeline are drawn from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from synthetic_timeline import synthetic_timeline

from k3sim.sim.export.timeline_figures import layer_figure, step_figure
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
