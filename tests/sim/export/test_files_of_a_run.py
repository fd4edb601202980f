"""The files of a real prediction: a browser opens the page, and the trace says what the JSON says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_in_browser
from trace_slices import read_slices

import k3sim
from k3sim.commands.timeline import print_report
from k3sim.sim.export import sections
from k3sim.sim.timeline.critical_path import Part
from k3sim.sim.timeline.timeline import PS_PER_US


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    yield k3sim.predict().write(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def document(files: dict[str, str]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(files["json"]).read_text())
    return loaded


def test_a_browser_draws_the_page_silently(files: dict[str, str], tmp_path: Path) -> None:
    page, console = open_in_browser(Path(files["html"]), tmp_path)
    assert console == []
    assert 'data-errors="0"' in page and 'data-drawn="yes"' in page
    for label in ("fused", "stock", "megakernel"):
        assert label in page


def test_the_trace_has_the_documents_stages(files: dict[str, str], document: dict[str, Any]) -> None:
    slices = [one for one in read_slices(Path(files["perfetto"]).read_bytes()) if "start_ps" in one.annotations]
    fused = [one for one in slices if one.process == "fused rank 0"]
    assert len(fused) == len(document["stages"])
    traced: dict[str, int] = defaultdict(int)
    for one in fused:
        traced[one.name.split(" ")[0]] += one.annotations["end_ps"] - one.annotations["start_ps"]
    listed: dict[str, float] = defaultdict(float)
    for stage in document["stages"]:
        listed[stage["stage"]] += stage["end_us"] - stage["start_us"]
    assert {stage: ps / PS_PER_US for stage, ps in traced.items()} == pytest.approx(dict(listed), rel=1e-9)
    assert max(one.annotations["end_ps"] for one in fused) / PS_PER_US == pytest.approx(document["step_us"], rel=1e-9)


def test_every_switch_is_told_by_what_it_changed(document: dict[str, Any]) -> None:
    before = document["stock"]["step_us"]
    for entry in document["switches_added"]:
        assert sum(entry["waits_delta_us"].values()) == pytest.approx(entry["step_us"] - before, abs=1e-6)
        before = entry["step_us"]
    for entry in document["switches_removed"]:
        assert sum(entry["waits_delta_us"].values()) == pytest.approx(entry["cost_us"], abs=1e-6)


def test_page_and_table_divide_the_step_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Latency inside kernels stands by its causes, and each column adds up, on the page and in the terminal."""
    report = k3sim.predict(machine="h200", kernels="own", concurrency=2)
    waits_us = report.to_dict()["waits_us"]
    causes = {"instruction_issue", "l2_round_trips", "block_reduction", "selection_rounds", "barrier"}
    assert causes <= set(waits_us) and sum(waits_us.values()) == pytest.approx(report.main.step_us)
    shown = {part.word: f"{waits_us[part.value]:,.1f}" for part in Part if part.value in waits_us}

    rows = re.findall(r"<tr>(.*?)</tr>", sections.waits(report.html_data()))
    cells = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows]
    page = {row[0]: row[1] for row in cells if row}
    assert {word: us for word, us in page.items() if us != "–"} == shown

    print_report(report, {})
    lines = capsys.readouterr().out.split("where the step goes (us)")[1].split("\n\n")[0].splitlines()[1:]
    told = {re.split(r"  +", line)[0].removeprefix("wait: "): re.split(r"  +", line)[1] for line in lines}
    assert told.pop("step") == f"{report.main.step_us:,.1f}"
    assert {word: us for word, us in told.items() if us != "0.0"} == shown
    assert sum(float(us.replace(",", "")) for us in told.values()) == pytest.approx(report.main.step_us, abs=1)
