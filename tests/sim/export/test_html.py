"""The HTML report: what its file holds, and what a browser without a network makes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from browser import open_in_browser
from plotly.offline import get_plotlyjs
from synthetic_report import synthetic_report, synthetic_timelines

from k3sim.errors import UserError
from k3sim.sim.export.html import write_html_report
from k3sim.sim.timeline.timeline import Timeline

HOSTILE = "</script><img src=x onerror=\"document.body.dataset.hostile='yes'\">&lt;b&gt;"


def page_of(report: Mapping[str, Any], timelines: Mapping[str, Timeline], path: Path) -> str:
    """The page without the charting library, which is not ours to check."""
    write_html_report(report, timelines, path)
    page = path.read_text()
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


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
    # waits, waterfall, leave one out, two layers, the step
    assert len(re.findall(r'<div class="chart[^"]*js-plotly-plot', document)) == 6
    assert len(re.findall(r'<svg class="main-svg"', document)) >= 6
    assert len(re.findall(r'<g class="trace bars"', document)) > 40


def test_another_path_can_be_chosen(tmp_path: Path) -> None:
    timelines = synthetic_timelines()
    path = tmp_path / "report.html"
    write_html_report(synthetic_report(timelines), timelines, path)
    choice = """<script>
    const chooser = document.getElementById("path");
    const step = document.querySelector("[data-timeline=step]");
    document.body.dataset.before = chooser.value + " " + step.layout.xaxis.range[1];
    chooser.value = "stock";
    chooser.dispatchEvent(new Event("change"));
    document.body.dataset.after = chooser.value + " " + step.layout.xaxis.range[1];
    </script></body>"""
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
        "critical_path": [{"stage": HOSTILE, "part": HOSTILE, "us": 1.0}],
        "command": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "machine_values": [{name: HOSTILE for name in ("field", "value", "unit", "kind", "source")}],
        "not_modelled": [HOSTILE],
        "glossary": {HOSTILE: HOSTILE},
    }
    path = tmp_path / "report.html"

    page = page_of(report, timelines, path)

    assert "<img" not in page
    assert page.count("</script>") == 4, "only the page's own scripts end"
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
        "speedup": 1.6834,
        "floor_us": 1508.0,
        "floor_fraction": 0.6378,
        "hbm_busy_fraction": 0.712,
    }

    page = page_of(report, timelines, tmp_path / "report.html")

    (card,) = [card for card in page.split('<section class="card">') if card.startswith("<h2>fused")]
    shown = re.sub(r"<[^>]+>", " ", card.split("</section>")[0]).split()
    assert " ".join(shown) == (
        "fused 2,364 µs a step 90 % interval 2,210 to 2,511 µs tok/s/user 422.9 speed-up over stock 1.68 × "
        "floor 1,508 µs floor / step 64 % HBM busy 71 %"
    )
    assert "gb300 · tp16ep1dcp1 · concurrency 1 · context 8,192 tokens" in page


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    page = page_of({"paths": {"measured": {"step_us": 10.0, "waits_us": {}}}}, {}, tmp_path / "report.html")

    assert re.findall(r"<h2>(.*?)</h2>", page) == ["measured", "Where the time goes"]
    document, console = open_in_browser(tmp_path / "report.html", tmp_path)
    assert console == []
    assert 'data-drawn="yes"' in document


def test_numbers_of_the_machine_are_not_rounded_away(tmp_path: Path) -> None:
    timelines = synthetic_timelines()

    page = page_of(synthetic_report(timelines), timelines, tmp_path / "report.html")

    assert ">7,100,000,000,000<" in page
    assert ">0.87<" in page


def test_the_page_of_a_whole_step_stays_small(tmp_path: Path) -> None:
    timelines = synthetic_timelines(num_layers=93)
    report = synthetic_report(timelines)
    path = tmp_path / "report.html"

    write_html_report(report, timelines, path)

    assert path.stat().st_size < 8e6


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
