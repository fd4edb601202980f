"""The bars of paths and switches: what is long is what took long."""

from __future__ import annotations

import re

import pytest
from synthetic_report import synthetic_report, synthetic_timelines

from k3sim.sim.export.bars import largest_changes, leave_one_out_bars, waits_bars, waterfall_bars

STEPS = [
    {"label": "stock", "kind": "total", "step_us": 100.0, "delta_us": 0.0},
    {
        "label": "fused-allreduce",
        "kind": "relative",
        "step_us": 70.0,
        "delta_us": -30.0,
        "waits_delta_us": {"NVLink flight": -32.0, "weights": 2.0, "L2": 0.01},
    },
    {"label": "fused", "kind": "total", "step_us": 70.0, "delta_us": 0.0},
]


def boxes(html: str) -> list[tuple[str, float, float]]:
    """Class, left edge and width of each box, in percent."""
    found = re.findall(r'<span class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%">', html)
    return [(name, float(left), float(width)) for name, left, width in found]


def test_parts_of_a_path_stack_to_its_step() -> None:
    timelines = synthetic_timelines()
    paths = synthetic_report(timelines)["paths"]

    html = waits_bars({label: row["waits_us"] for label, row in paths.items()})

    longest_us = max(timeline.step_us for timeline in timelines.values())
    for stack, timeline in zip(html.split('class="stack"')[1:], timelines.values(), strict=True):
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", stack)]
        assert sum(widths) == pytest.approx(100 * timeline.step_us / longest_us, abs=0.02)


def test_an_absent_part_has_no_box() -> None:
    html = waits_bars({"stock": {"weights": 5.0, "launch": 2.0}, "megakernel": {"weights": 6.0}})

    assert re.findall(r'title="([^"]+)"', html) == ["weights: 5.0 µs", "launch: 2.0 µs", "weights: 6.0 µs"]


def test_parts_come_in_one_order_on_every_path() -> None:
    """Work before waits, also where the first path lacks a part that the second has."""
    html = waits_bars({"fused": {"launch": 2.0, "weights": 5.0}, "stock": {"host": 1.0, "L2": 3.0, "weights": 6.0}})

    stacks = html.split('class="stack"')[1:]
    order = [re.findall(r'title="([^:]+):', stack) for stack in stacks]
    assert order == [["weights", "launch"], ["weights", "L2", "host"]]


def test_changes_of_a_waterfall_hang_between_totals() -> None:
    html = waterfall_bars(STEPS)

    assert boxes(html) == [("total", 0.0, 100.0), ("faster", 70.0, 30.0), ("total", 0.0, 70.0)]
    assert re.findall(r"<b [^>]+>([^<]+)</b>", html) == ["100 µs", "−30 µs", "70 µs"]
    assert "<small>NVLink flight −32 µs, weights +2 µs</small>" in html


def test_a_change_names_its_largest_parts() -> None:
    assert largest_changes({"launch": -5.0, "weights": 9.0, "L2": 0.4, "host": -1.0, "compute": 2.0}) == (
        "weights +9 µs, launch −5 µs, compute +2 µs"
    )


def test_the_costliest_switch_comes_first() -> None:
    html = leave_one_out_bars(
        [
            {"without": "l2-prefetch", "step_us": 105.0, "cost_us": 5.0},
            {"without": "fused-allreduce", "step_us": 138.0, "cost_us": 38.0},
            {"without": "sharded-router", "step_us": 98.0, "cost_us": -2.0},
        ]
    )

    assert re.findall(r'class="name">without ([^<]+)', html) == ["fused-allreduce", "l2-prefetch", "sharded-router"]
    assert boxes(html) == [("slower", 5.0, 95.0), ("slower", 5.0, 12.5), ("faster", 0.0, 5.0)]
