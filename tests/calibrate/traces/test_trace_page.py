"""What ``explain`` leaves: page, Perfetto trace and JSON of a step, and the parts of a step of ``k3sim decode``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import open_in_browser

from k3sim.cli import main
from k3sim.measured_report import read_measured
from k3sim.trace_report import explain_files

STORED = Path(__file__).parents[3] / "calibrate" / "data" / "h200-decode-fused.json"
REPLAY = [("gemv", 150, 12), ("kda_decode", 163, 4), ("allreduce", 168, 6), ("moe_experts", 175, 16)]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 120, "args": {"correlation": 7}}
    ]
    for node, (name, start, us) in enumerate(REPLAY, 1):
        args = {"stream": 7, "device": 0, "correlation": 7, "graph node id": node, "grid": [132, 1, 1]}
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "args": args})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return str(tmp_path / "trace.json")


def test_files_lead_back_to_the_trace(trace: str, tmp_path: Path) -> None:
    files = explain_files([trace]).write(tmp_path / "out")
    document = json.loads(Path(files["json"]).read_text())
    assert [row["graph_node"] for row in document["kernel_rows"]] == [1, 2, 3, 4]
    assert [row["row"] for row in document["kernel_rows"]] == [1, 2, 3, 4]
    assert document["kernel_rows"][0]["grid"] == [132, 1, 1]
    assert document["step_us"] == 41 and document["ranks"][0]["busy"] == {"us": 38, "label": "derived"}
    assert sum(document["waits_us"].values()) == 41
    assert Path(files["perfetto"]).stat().st_size > 0


def test_the_page_draws_without_errors(trace: str, tmp_path: Path) -> None:
    files = explain_files([trace]).write(tmp_path / "out")
    document, console = open_in_browser(Path(files["html"]), tmp_path)
    assert "moe_experts" in document
    assert [line for line in console if "CONSOLE" in line and "rror" in line] == []


def test_decode_steps_have_the_parts_of_report() -> None:
    report, measured = explain_files([str(STORED)]), read_measured(str(STORED))
    assert report.document["waits_us"] == measured.document["waits_us"]
    assert report.document["step_us"] == pytest.approx(measured.document["profiled_us"])


def test_tables_show_the_change(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", trace, "--against", trace, "--out", str(tmp_path / "out")])
    assert not end.value.code
    text = capsys.readouterr().out
    for word in ("gap: graph launch", "critical path", "against the other trace", "moe_experts", "explain.html"):
        assert word in text
