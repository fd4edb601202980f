"""The charts of a real page in a browser: names in bars at three zooms, keys, search, dimming, and room for tables."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_in_browser

import k3sim
from k3sim.sim.export.html import write_html_report

pytestmark = pytest.mark.slow

# Bars of kernels in the chart of the whole step, with their names as the browser drew them. Ends of boxes are pixels in
# the window; "needs" is how long the shortest name of the bar's stage is.
BARS = """
function bars() {
  const svg = step_chart.element.querySelector("svg");
  const ruler = document.createElementNS("http://www.w3.org/2000/svg", "text");
  ruler.setAttribute("class", "name stage");
  svg.append(ruler);
  const names = new Map([...svg.querySelectorAll("text.stage[data-kernel]")].map(one => [one.dataset.kernel, one]));
  const ends = one => { const box = one.getBoundingClientRect(); return [box.left, box.right]; };
  const found = [...svg.querySelectorAll("rect.kernel[data-kernel]")].map(bar => {
    const stage = step_chart.timeline.kernels[bar.dataset.kernel].stage;
    ruler.textContent = stage.slice(stage.indexOf(".") + 1);
    const name = names.get(bar.dataset.kernel);
    return {bar: ends(bar), name: name ? ends(name) : null, text: name ? name.textContent : "", stage,
            needs: ruler.getComputedTextLength()};
  });
  ruler.remove();
  return found;
}
const press = key => dispatchEvent.call(document.body, new KeyboardEvent("keydown", {key, bubbles: true}));
const view = chart => [chart.from, chart.to];
function type(text) {
  state.search.value = text;
  state.search.dispatchEvent(new Event("input"));
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    report = k3sim.predict()
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    write_html_report(report.html_data(), {label: one.full for label, one in report.labelled.items()}, path)
    yield path.read_text()


def ask(page: str, tmp_path: Path, script: str, width: int = 1400) -> Any:
    """What a script that runs in the page puts into ``result``."""
    end = page.rindex("</body>")
    path = tmp_path / "asked.html"
    asking = f"<script>{{{BARS}\nconst result = {{}};\n{script}\n"
    asking += "document.body.dataset.result = JSON.stringify(result); }</script>"
    path.write_text(page[:end] + asking + page[end:])
    document, console = open_in_browser(path, tmp_path, width=width)
    assert console == []
    found = re.search(r'data-result="([^"]*)"', document)
    assert found is not None
    return json.loads(html.unescape(found.group(1)))


@pytest.mark.parametrize("width", [1400, 700])
def test_kernels_wider_than_their_name_show_it(page: str, tmp_path: Path, width: int) -> None:
    zooms = ask(
        page,
        tmp_path,
        """
        const middle = step_chart.timeline.step / 2;
        for (const us of [1e9, 200, 40, 9]) {
          step_chart.zoom_to(middle - us * 5e5, middle + us * 5e5);
          step_chart.draw();
          result[us] = bars();
        }""",
        width,
    )

    assert [len(bars) > 0 for bars in zooms.values()] == [True] * 4
    for bars in zooms.values():
        for one in bars:
            (left, right), room = one["bar"], one["bar"][1] - one["bar"][0]
            if room >= one["needs"] + 8:
                assert one["name"], one
            if one["name"]:
                assert one["stage"].endswith(one["text"]), one
                assert left <= one["name"][0] and one["name"][1] <= right, one
    assert sum(bool(one["name"]) for one in zooms["200"]) > 10
    assert all(one["name"] for one in zooms["9"] if one["bar"][1] - one["bar"][0] > 150)


def test_keys_zoom_and_pan(page: str, tmp_path: Path) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        step_chart.pointer = null;
        result.before = view(step_chart);
        press("w"); press("w"); result.zoomed = view(step_chart);
        press("d"); result.right = view(step_chart);
        press("a"); press("a"); result.left = view(step_chart);
        press("s"); result.out = view(step_chart);
        press("0"); result.after = view(step_chart);
        state.search.focus();
        state.search.dispatchEvent(new KeyboardEvent("keydown", {key: "w", bubbles: true}));
        result.typed = view(step_chart);
        charts[0].element.focus();
        press("W"); result.layer = view(charts[0]); result.whole = charts[0].whole;""",
    )

    length = {name: to - since for name, (since, to) in seen.items()}
    assert length["zoomed"] == pytest.approx(0.64 * length["before"])
    assert length["right"] == pytest.approx(length["zoomed"])
    assert length["left"] == pytest.approx(length["zoomed"])
    assert seen["right"][0] > seen["zoomed"][0] > seen["left"][0] > 0
    assert length["out"] == pytest.approx(0.8 * length["before"])
    assert seen["after"] == seen["before"] == seen["typed"]
    assert length["layer"] == pytest.approx(0.8 * length["whole"])


def test_search_finds_stages_and_goes_to_them(page: str, tmp_path: Path) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        const told = () => document.getElementById("found").textContent;
        type("MOE.Experts");
        result.told = told();
        result.hits = step_chart.timeline.kernels.filter(state.found).map(one => one.stage);
        result.count = step_chart.timeline.kernels.length;
        document.getElementById("next").click();
        result.first = told();
        result.drawn = [...step_chart.element.querySelectorAll("rect.hit")].map(
          one => step_chart.timeline.kernels[one.dataset.kernel].stage);
        result.dimmed = step_chart.element.querySelectorAll("rect.kernel.off").length;
        document.getElementById("previous").click(); result.last = told();
        type("no such stage"); result.none = told();
        type(""); result.cleared = [told(), step_chart.element.querySelectorAll(".off").length];""",
    )

    assert set(seen["hits"]) == {"moe.experts"}
    assert seen["told"].startswith(f"{len(seen['hits'])} kernels, ")
    assert seen["first"].startswith(f"1 of {len(seen['hits'])}: moe.experts, layer 1, ")
    assert seen["last"].startswith(f"{len(seen['hits'])} of {len(seen['hits'])}: ")
    assert "moe.experts" in seen["drawn"] and set(seen["drawn"]) == {"moe.experts"}
    assert seen["dimmed"] > 0
    assert seen["none"] == "no stage has that in its name"
    assert seen["cleared"] == ["", 0]


def test_the_switch_dims_what_is_off_the_path(page: str, tmp_path: Path) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        step_chart.zoom_to(1.0e9, 1.06e9);
        step_chart.draw();
        const off = () => [...step_chart.element.querySelectorAll("rect.kernel[data-kernel]")].map(
          one => [one.classList.contains("off"), step_chart.timeline.kernels[one.dataset.kernel].on_path_ps > 0]);
        result.before = off();
        document.getElementById("dim").click(); result.dimmed = off();
        const opacity = one => getComputedStyle(one).opacity;
        result.opacity = [...step_chart.element.querySelectorAll("rect.off")].map(opacity);
        const lit = new Map();
        for (const one of step_chart.element.querySelectorAll('rect[class^="w"]:not(.off):not([data-path])')) {
          const from = +one.getAttribute("x"), to = from + +one.getAttribute("width");
          for (let x = Math.ceil(from); x < to; x++) lit.set(x, (lit.get(x) || 0) + 1);
        }
        result.lit = [...lit.values()];
        result.route = step_chart.element.querySelectorAll("path.route").length;
        document.getElementById("dim").click(); result.after = off();""",
    )

    assert not any(dimmed for dimmed, _ in seen["before"])
    assert {dimmed for dimmed, _ in seen["dimmed"]} == {True, False}
    assert all(dimmed != on_path for dimmed, on_path in seen["dimmed"])
    assert {float(opacity) < 0.5 for opacity in seen["opacity"]} == {True}
    assert sum(count == 1 for count in seen["lit"]) > 0.9 * len(seen["lit"]), "one kernel at a time is on the path"
    assert seen["route"] == 1
    assert seen["after"] == seen["before"]


def test_what_is_pointed_at_is_told(page: str, tmp_path: Path) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        step_chart.zoom_to(1.0e9, 1.05e9);
        step_chart.draw();
        const point = (x, y) => {
          const box = step_chart.element.getBoundingClientRect();
          step_chart.element.dispatchEvent(
            new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
          const tip = document.getElementById("tip");
          return tip.hidden ? "" : [...tip.children].map(one => one.textContent);
        };
        const inside = rect => [+rect.getAttribute("x") + rect.getAttribute("width") / 2,
                                +rect.getAttribute("y") + rect.getAttribute("height") / 2];
        const first = selector => step_chart.element.querySelector(selector);
        const kernel = first("rect.kernel[data-kernel]");
        result.stage = step_chart.timeline.kernels[kernel.dataset.kernel].stage;
        result.kernel = point(...inside(kernel));
        const phases = [...step_chart.element.querySelectorAll('rect[class^="w"][data-kernel]')];
        result.phases = phases.map(one => [one.getAttribute("class"), point(...inside(one))]);
        result.path = point(...inside(first("rect[data-path]")));
        const rate = step_chart.rows.find(one => one.kind === "rate");
        result.rate = point(step_chart.left + 40, rate.y + 10);
        result.outside = point(2, 2);
        result.numbers = Object.fromEntries(Object.entries(data.words).map(([word, one]) => ["w" + one.number, word]));
        """,
    )

    assert seen["kernel"][0].startswith(f"{seen['stage']}, layer ")
    assert re.match(r"[\d.]+ (µs|ns), from [\d.,]+ µs to [\d.,]+ µs", seen["kernel"][1])
    assert len(seen["phases"]) > 20
    for drawn, told in seen["phases"]:
        word = seen["numbers"][drawn]
        assert told[0].split(" (")[0] == word
        assert told[2].startswith("in ")
    assert seen["path"][0] in seen["numbers"].values()
    assert seen["rate"][0].startswith("HBM: ")
    assert seen["outside"] == ""


def test_rates_are_binned_anew_on_zoom(page: str, tmp_path: Path) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        const rate = step_chart.timeline.rates[0];
        const bins = () => +step_chart.element.querySelector("path.rate").dataset.bin;
        const mean = () => {
          const row = step_chart.rows.find(one => one.kind === "rate");
          const num_bins = Math.round((step_chart.to - step_chart.from) / row.bin);
          let sum = 0;
          for (let i = 0; i < num_bins; i++) sum += row.mean(i);
          return sum / num_bins;
        };
        const truth = () => (moved_until(rate, step_chart.to) - moved_until(rate, step_chart.from)) /
                            (step_chart.to - step_chart.from);
        result.names = step_chart.timeline.rates.map(one => one.name);
        result.wide = [bins(), mean(), truth()];
        step_chart.zoom_to(1.0e9, 1.02e9); step_chart.draw();
        result.near = [bins(), mean(), truth()];""",
    )

    assert seen["names"] == ["HBM", "NVLink out"]
    assert seen["near"][0] < seen["wide"][0] / 100
    for _, mean, truth in (seen["wide"], seen["near"]):
        assert mean == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("width", [1400, 700])
def test_nothing_runs_off_the_right_edge(page: str, tmp_path: Path, width: int) -> None:
    seen = ask(
        page,
        tmp_path,
        """
        for (const one of document.querySelectorAll("details")) one.open = true;
        result.page = [document.documentElement.scrollWidth, innerWidth];
        result.tables = [...document.querySelectorAll("table")].map(
          one => [one.getBoundingClientRect().right, one.parentElement.getBoundingClientRect().right]);
        result.charts = charts.map(one => [one.element.querySelector("svg").getBoundingClientRect().right, innerWidth]);
        result.bars = [...document.querySelectorAll(".track b")].map(
          one => [one.getBoundingClientRect().right, innerWidth]);""",
        width,
    )

    assert len(seen["tables"]) >= 3
    for right, limit in (seen["page"], *seen["tables"], *seen["charts"], *seen["bars"]):
        assert right <= limit + 0.5
