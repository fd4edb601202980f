"""The HTML report: what its file holds, and what a browser without a network makes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from browser import open_in_browser
from synthetic_report import synthetic_report, synthetic_timelines

from k3sim.errors import UserError
from k3sim.sim.export.html import write_html_report
from k3sim.sim.export.sections import number
from k3sim.sim.timeline.timeline import Timeline

HOSTILE = "</script><img src=x onerror=\"document.body.dataset.hostile='yes'\">&lt;b&gt;"


def page_of(report: Mapping[str, Any], timelines: Mapping[str, Timeline], path: Path) -> str:
    """The page of a report."""
    write_html_report(report, timelines, path)
    return path.read_text()


def test_a_browser_without_a_network_draws_every_chart(tmp_path: Path) -> None:
    timelines = synthetic_timelines(num_layers=93)
    path = tmp_path / "report.html"
    write_html_report(synthetic_report(timelines), timelines, path)

    document, console = open_in_browser(path, tmp_path)

    assert console == []
    body = re.search(r"<body[^>]*>", document)
    assert body is not None
    assert 'data-errors="0"' in body.group()
    assert 'data-drawn="yes"' in body.group()
    charts = document.split('<div class="chart timeline"')[1:]
    assert [re.findall(r'data-timeline="(\w+)"', chart)[0] for chart in charts] == ["kda", "mla", "step"]
    assert all(chart.count("<rect") > 40 and chart.count("<text") > 15 for chart in charts)


def test_another_path_can_be_chosen(tmp_path: Path) -> None:
    timelines = synthetic_timelines()
    path = tmp_path / "report.html"
    write_html_report(synthetic_report(timelines), timelines, path)
    choice = """<script>{
    const chooser = document.getElementById("path");
    const step = document.querySelector("[data-timeline=step]");
    document.body.dataset.before = chooser.value + " " + step.chart.to / 1e6;
    chooser.value = "stock";
    chooser.dispatchEvent(new Event("change"));
    document.body.dataset.after = chooser.value + " " + step.chart.to / 1e6;
    }</script></body>"""
    path.write_text(path.read_text().replace("</body>", choice))

    document, console = open_in_browser(path, tmp_path)

    assert console == []
    assert f'data-before="fused {timelines["fused"].step_us}"' in document
    assert f'data-after="stock {timelines["stock"].step_us}"' in document
    assert 'data-errors="0"' in document


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    timelines = {HOSTILE: synthetic_timelines()["fused"]}
    for kernel in timelines[HOSTILE].kernels:
        kernel.stage = HOSTILE + kernel.stage
    report = {
        "model": HOSTILE,
        "machine": HOSTILE,
        "layout": HOSTILE,
        "concurrency": 1,
        "context": 8192,
        "main_path": HOSTILE,
        "paths": {HOSTILE: {"step_us": 10.0, "waits_us": {HOSTILE: 10.0}}},
        "waterfall": [
            {
                "label": HOSTILE,
                "kind": "relative",
                "step_us": 10.0,
                "delta_us": 1.0,
                "waits_delta_us": {HOSTILE: 1.0},
            }
        ],
        "leave_one_out": [{"without": HOSTILE, "step_us": 10.0, "cost_us": 1.0}],
        "example_layers": {"kda": 5},
        "num_gpus": 16,
        "critical_path": [{"stage": HOSTILE, "part": HOSTILE, "us": 1.0}],
        "command": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "machine_values": [{**{name: HOSTILE for name in ("field", "value", "unit", "kind", "source")}, "us": 1.0}],
        "not_modelled": [HOSTILE],
        "glossary": {HOSTILE: HOSTILE},
    }
    path = tmp_path / "report.html"

    page = page_of(report, timelines, path)

    assert "<img" not in page
    assert page.count("</script>") == 3, "only the page's own scripts end"
    document, console = open_in_browser(path, tmp_path)
    assert console == []
    assert "data-hostile" not in document
    assert 'data-errors="0"' in document


def test_the_file_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    timelines = synthetic_timelines()

    page = page_of(synthetic_report(timelines), timelines, tmp_path / "report.html")

    references = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", page)
    assert references == ["data:,"]  # an empty icon, or the browser would ask for one
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    assert "default-src 'none'" in page
    assert "https://example.org/stream-on-gb300, read of 1 GiB" in page, "a citation stays, as text"


def test_the_headline_has_the_numbers_of_each_path(tmp_path: Path) -> None:
    timelines = synthetic_timelines()
    report = synthetic_report(timelines)
    report["paths"]["fused"] |= {
        "step_us": 2364.4,
        "step_us_interval": [2210.0, 2511.0],
        "tokens_per_s_per_user": 422.94,
        "tokens_per_s_per_gpu": 26.43,
        "speedup": 1.6834,
        "floor_us": 1508.0,
        "floor_fraction": 0.6378,
        "hbm_busy_fraction": 0.712,
    }

    page = page_of(report, timelines, tmp_path / "report.html")

    row = next(row for row in page.split("<tr>") if row.startswith("<td >fused<"))
    cells = re.findall(r"<td [^>]*>([^<]*)", row)
    assert cells == ["fused", "2,364", "2,210 to 2,511", "422.9", "26.4", "1.68 ×", "1,508", "64 %"]
    assert "gb300 · tp16ep1dcp1 · concurrency 1 · context 8,192 tokens" in page


def test_the_top_line_says_the_answer(tmp_path: Path) -> None:
    report = synthetic_report(synthetic_timelines())
    report |= {"num_gpus": 16, "can_draw": True}
    report["paths"]["fused"] = {
        "step_us": 4793.9,
        "tokens_per_s_per_user": 208.6,
        "tokens_per_s_per_gpu": 13.04,
        "speedup": 1.7435,
        "waits_us": {"weights": 2000.0, "launch": 100.0, "NVLink flight": 787.0, "host": 99.7, "ramp and drain": 707.4},
    }

    def top_line() -> str:
        page = page_of(report, {}, tmp_path / "report.html")
        return re.sub(r"<[^>]+>", "", page.split('<p class="answer">')[1].split("</p>")[0])

    waits = "Its largest waits are NVLink flight 787 µs (16 %), ramp and drain 707 µs (15 %), launch 100 µs (2 %)."
    rates = "208.6 tok/s/user and 13.0 tok/s/GPU on 16 GPUs"
    assert top_line() == (
        f"A step of fused takes 4,794 µs: {rates}, 1.74× stock (no interval; --intervals adds it). {waits}"
    )
    report["paths"]["fused"]["speedup_interval"] = [1.601, 1.82]
    assert "1.74× stock (90 % of draws: 1.60 to 1.82×)" in top_line()


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    page = page_of({"paths": {"measured": {"step_us": 10.0, "waits_us": {}}}}, {}, tmp_path / "report.html")

    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Where the time goes"]
    document, console = open_in_browser(tmp_path / "report.html", tmp_path)
    assert console == []
    assert 'data-drawn="yes"' in document


def test_machine_values_have_the_units_of_the_field(tmp_path: Path) -> None:
    timelines = synthetic_timelines()
    fused_us = timelines["fused"].step_us

    page = page_of(synthetic_report(timelines), timelines, tmp_path / "report.html")

    body = page.split("Machine values")[1].replace("<wbr>", "")
    rows = [re.findall(r"<td [^>]*>([^<]*)", row) for row in body.split("<tr>")[2:]]
    assert [row[:5] for row in rows] == [
        ["hbm_bandwidth_bytes_per_s", "7.1 TB/s", number(0.3 * fused_us), "30 %", "measured"],
        ["launch_latency_s", "870 ns", number(0.1 * fused_us), "10 %", "fitted"],
    ]


def test_at_most_twelve_machine_values_are_shown(tmp_path: Path) -> None:
    report = synthetic_report(synthetic_timelines())
    report["machine_values"] = [{**report["machine_values"][0], "us": 20.0 - one} for one in range(15)]

    page = page_of(report, {}, tmp_path / "report.html")

    assert page.count(">7.1 TB/s<") == 12
    assert "3 further values price 21 µs together" in page


def test_the_page_of_a_whole_step_stays_small(tmp_path: Path) -> None:
    timelines = synthetic_timelines(num_layers=93)
    report = synthetic_report(timelines)
    path = tmp_path / "report.html"

    write_html_report(report, timelines, path)

    assert path.stat().st_size < 3e6


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    timelines = synthetic_timelines()
    for name in ("a.html", "b.html"):
        write_html_report(synthetic_report(timelines), timelines, tmp_path / name)

    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    timelines = synthetic_timelines()
    with pytest.raises(UserError, match=r"cannot write .*report\.html: No space left on device"):
        write_html_report(synthetic_report(timelines), timelines, path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"
