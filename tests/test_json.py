"""The JSON document and the DataFrame: every key that programs rely on, and that the numbers agree."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import k3sim
from k3sim.errors import UserError
from k3sim.report import Report
from k3sim.sim.export.document import dump_json
from k3sim.sim.timeline.critical_path import Part

SUMMARY = {"step_us", "tokens_per_second_per_user", "floor_us", "hbm_busy_fraction", "waits_us"}
KEYS = SUMMARY | {
    "schema_version", "model", "machine", "layout", "path", "switches", "concurrency", "context", "kv_dtype", "seed",
    "skew", "routing", "stock", "fused", "megakernel", "speedup_over_stock", "switches_added", "switches_removed",
    "critical_path", "stages", "command", "machine_values", "not_modelled", "files",
}  # fmt: skip
STAGE = ["rank", "layer", "kind", "stage", "stream", "start_us", "end_us"]


@pytest.fixture(scope="module")
def report() -> Report:
    return k3sim.predict(concurrency=2, context=1000)


@pytest.fixture(scope="module")
def document(report: Report) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(dump_json(report.to_dict({"json": "a.json"})))
    return loaded


def test_every_promised_key_is_there(document: dict[str, Any]) -> None:
    assert set(document) >= KEYS
    assert document["schema_version"] == 2
    assert (document["model"], document["machine"], document["layout"]) == ("kimi-k3", "gb300", "tp16ep1dcp1")
    assert (document["path"], document["concurrency"], document["context"], document["seed"]) == ("fused", 2, 1000, 0)
    assert document["switches"] == ["low-batch-kernels", "fused-allreduce", "sharded-router", "l2-prefetch"]
    assert document["skew"] == "expected"
    assert document["files"] == {"json": "a.json"}


def test_each_path_has_the_same_summary(document: dict[str, Any]) -> None:
    for name in ("stock", "fused", "megakernel"):
        assert set(document[name]) == SUMMARY
    assert document["fused"] == {key: document[key] for key in SUMMARY}


def test_intervals_are_added_where_they_are_asked_for(report: Report) -> None:
    asked = report.with_intervals(2)
    document = json.loads(dump_json(asked.to_dict()))
    assert set(document) == set(report.to_dict()) | {"step_us_interval"}
    for one in (document, document["stock"], document["fused"], document["megakernel"]):
        low, high = one["step_us_interval"]
        assert low <= one["step_us"] <= high
        assert low < high
    assert document["command"] == f"{report.command} --intervals --draws 2"
    assert report.with_intervals(2).to_dict()["stock"] == document["stock"]
    assert asked.html_data()["paths"]["stock"]["step_us_interval"] == document["stock"]["step_us_interval"]
    with pytest.raises(UserError, match="draws is 1; accepted: 2 to 1000"):
        report.with_intervals(1)


def test_waits_sum_to_the_step(document: dict[str, Any]) -> None:
    for one in (document, document["stock"], document["megakernel"]):
        assert sum(one["waits_us"].values()) == pytest.approx(one["step_us"], rel=1e-12)
        assert set(one["waits_us"]) <= {part.value for part in Part}
        assert one["tokens_per_second_per_user"] == pytest.approx(1e6 / one["step_us"])
        assert 0 < one["floor_us"] < one["step_us"]
        assert 0 < one["hbm_busy_fraction"] < 1


def test_derived_numbers_agree(document: dict[str, Any]) -> None:
    assert document["speedup_over_stock"] == pytest.approx(document["stock"]["step_us"] / document["step_us"])
    assert document["switches_added"][0]["step_us"] == document["stock"]["step_us"]
    assert document["switches_added"][-1]["step_us"] == document["fused"]["step_us"]
    assert [one["without"] for one in document["switches_removed"]] == document["switches"]
    for one in document["switches_removed"]:
        assert one["cost_us"] == pytest.approx(one["step_us"] - document["fused"]["step_us"])
        assert sum(one["waits_delta_us"].values()) == pytest.approx(one["cost_us"])
    assert sum(one["us"] for one in document["critical_path"]) == pytest.approx(document["step_us"])


def test_stages_are_all_layers_kernels_by_start(document: dict[str, Any]) -> None:
    stages = document["stages"]
    assert all(list(one) == STAGE for one in stages)
    assert {one["layer"] for one in stages} == set(range(-1, 94))
    assert all(0 <= one["start_us"] <= one["end_us"] <= document["step_us"] * (1 + 1e-12) for one in stages)
    assert [one["start_us"] for one in stages] == sorted(one["start_us"] for one in stages)
    assert max(one["end_us"] for one in stages) == pytest.approx(document["step_us"])
    assert {one["kind"] for one in stages} == {"start", "kda+dense", "kda+moe", "mla+moe", "head"}
    assert {one["rank"] for one in stages} == {0}


def test_the_frame_has_one_row_a_kernel(report: Report, document: dict[str, Any]) -> None:
    frame = report.frame()
    assert list(frame.columns) == [*STAGE, "duration_us"]
    assert len(frame) == len(document["stages"]) == len(report.main.full.kernels)
    assert frame[STAGE].to_dict("records") == document["stages"]
    assert (frame["duration_us"] == frame["end_us"] - frame["start_us"]).all()
    waits = report.waits_frame()
    assert waits.sum()["fused"] == pytest.approx(document["step_us"])


def test_timeline_is_the_frame_with_its_summary() -> None:
    frame = k3sim.timeline(path="stock", machine="b300", tp=8)
    assert list(frame.columns) == [*STAGE, "duration_us"]
    assert set(frame.attrs) >= SUMMARY
    assert frame["end_us"].max() == pytest.approx(frame.attrs["step_us"])
    assert not frame.duplicated(["rank", "layer", "stage"]).any()


def test_frames_without_pandas_name_the_extra(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for frame in (report.frame, report.waits_frame, k3sim.timeline):
        with pytest.raises(UserError, match=re.escape("pip install 'k3sim[notebooks]'")):
            frame()


def test_sampled_skew_has_all_ranks(tmp_path: Path) -> None:
    config = json.loads((Path(__file__).parents[1] / "model" / "data" / "kimi-k3.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = 6  # all ranks of 93 layers would take seconds
    for name in ("kda_layers", "full_attn_layers"):
        text["linear_attn_config"][name] = [layer for layer in text["linear_attn_config"][name] if layer <= 6]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = k3sim.predict(model=str(tmp_path), tp=4, path="megakernel", skew=True, seed=2)
    frame = report.frame()
    assert sorted(frame["rank"].unique()) == list(range(4))
    assert len(set(frame.groupby("rank").size())) == 1
    document = report.to_dict()
    assert (document["skew"], document["seed"]) == ("sampled", 2)
    assert sum(document["waits_us"].values()) == pytest.approx(document["step_us"])


def test_unknown_options_of_the_api() -> None:
    with pytest.raises(TypeError, match="concurency"):
        k3sim.predict(concurency=1)
    with pytest.raises(k3sim.UserError, match="tp=3"):
        k3sim.predict(tp=3)


def test_what_is_no_number_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json({"step_us": float("nan")})


def test_files_hold_the_same_document(report: Report, tmp_path: Path) -> None:
    files = report.write(tmp_path)
    assert set(files) == {"json", "html", "perfetto", "stages"}
    assert json.loads(Path(files["json"]).read_text()) == json.loads(dump_json(report.to_dict(files)))
    lines = Path(files["stages"]).read_text().splitlines()
    assert lines[0] == ",".join(STAGE)
    assert len(lines) == 1 + len(report.main.full.kernels)
