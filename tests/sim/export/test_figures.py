"""The numbers that the charts of paths and switches are drawn from."""

from __future__ import annotations

import pytest
from synthetic_report import synthetic_report, synthetic_timelines

from k3sim.sim.export.figures import leave_one_out_figure, waits_figure, waterfall_figure


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
