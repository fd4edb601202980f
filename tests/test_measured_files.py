"""Files of measured steps on the command line: reports, comparisons, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3sim.calibrate.decode.launches import Launch, timeline_from
from k3sim.calibrate.decode.lines import lines_of
from k3sim.calibrate.decode.measured import Measured
from k3sim.calibrate.decode.options import DecodeOptions, case_of
from k3sim.errors import UserError
from k3sim.measured_report import read_measured
from k3sim.sim.export.document import dump_json
from k3sim.stage_comparison import compare_files

STORED = Path(__file__).parents[1] / "calibrate" / "data" / "h200-decode-fused.json"


def measured(**options: Any) -> Measured:
    """A step whose kernels start 4 us apart and take 6, every one launched before the last has ended."""
    case = case_of(DecodeOptions(layers=2, **options))
    launches = [Launch(("k", "", ""), 4.0 * at, 6.0, None) for at in range(len(case.program.calls))]
    return Measured(
        case=case,
        samples_us=(100.0, 101.0, 102.0),
        read_bytes_per_s=4e12,
        moved_bytes=10**8,
        needed_bytes=10**9,
        allocated_bytes=10**9,
        start_s=1.0,
        environment={"gpu": "NVIDIA H200", "num_sms": 132},
        timeline=timeline_from(launches, list(range(len(launches))), case),
        num_launches=len(launches),
    )


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(document: dict[str, Any], name: str = "given.json") -> str:
    Path(name).write_text(dump_json(document))
    return name


def test_a_decode_prints_and_stores_its_parts(work: Path, capsys: Capture) -> None:
    step = measured()
    document = step.to_dict()
    profiled_us = 4.0 * (len(document["stages"]) - 1) + 6.0
    assert sum(document["waits_us"].values()) == pytest.approx(document["profiled_us"]) == pytest.approx(profiled_us)
    lines = lines_of(step)
    for part in ("weights", "kernel", "exchange", f"step {profiled_us:38.1f}"):
        assert any(line.startswith(part) for line in lines), part
    # The file alone gives the same again.
    assert run("report", saved(document), "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["waits_us"] == document["waits_us"] and again["critical_path"] == document["critical_path"]
    assert {path.name for path in Path("k3sim-out").iterdir()} == {"measured.html", "measured.pftrace"}


def test_a_decode_leaves_file_page_and_trace(
    work: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = measured()
    monkeypatch.setattr("k3sim.calibrate.decode.measure.decode", lambda options, on_phase: step)
    assert run("decode", "--layers", "2", "--out", "out") == 0
    text = capsys.readouterr().out
    names = {"measured.json", "measured.html", "measured.pftrace"}
    assert {path.name for path in Path("out").iterdir()} == names
    assert all(f"wrote out/{name}" in text for name in names)
    assert json.loads(Path("out/measured.json").read_text()) == json.loads(dump_json(step.to_dict()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("decode", "--layers", "2", "--out", "bare", "--json") == 0
    assert [path.name for path in Path("bare").iterdir()] == ["measured.json"]


def test_a_report_prints_parts_and_largest_stages(work: Path, capsys: Capture) -> None:
    assert run("report", str(STORED), "--out", "out") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    most = json.loads(STORED.read_text())["critical_path"][0]["stage"]
    facts = ("measured, kimi-k3", "NVIDIA H200, 1 GPU, tp16ep1dcp1, 93 layers")
    for word in (*facts, "where the profiled step goes", "exchange", most, "measured.html"):
        assert word in captured.out


def test_files_without_calls_get_them_from_the_program(work: Path, capsys: Capture) -> None:
    for options in ({}, {"path": "stock"}, {"without": ("fused-allreduce",)}):
        document = measured(**options).to_dict()
        old = {key: value for key, value in document.items() if key not in ("waits_us", "critical_path", "profiled_us")}
        columns = ("rank", "layer", "kind", "stage", "stream", "start_us", "end_us")
        old["stages"] = [{key: row[key] for key in columns} for row in document["stages"]]
        assert run("report", saved(old), "--json") == 0
        assert json.loads(capsys.readouterr().out)["waits_us"] == document["waits_us"]
    del old["stages"][3]
    assert run("report", saved(old)) == 2
    assert "given.json: its kernels are not those that" in capsys.readouterr().err


def test_compared_files_have_parts_by_one_rule(work: Path, capsys: Capture) -> None:
    assert run("timeline", "--machine", "h200", "--kernels", "own", "--no-skew", "--out", "predicted") == 0
    capsys.readouterr()
    assert run("compare", str(STORED), "predicted/timeline.json", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    before, after = document["before"], document["after"]
    assert before["start_end_us"] is None
    assert sum(before["waits_us"].values()) == pytest.approx(json.loads(STORED.read_text())["profiled_us"])
    assert sum(after["waits_us"].values()) == pytest.approx(after["step_us"])
    assert document["notes"] == []
    assert sum(after["start_end_us"].values()) == pytest.approx(after["step_us"])
    assert set(after["start_end_us"]) <= {"weights", "kv_state", "launch", "kernel", "exchange"}
    # Stages hold the whole path of each side.
    for side, total in (("before", sum(before["waits_us"].values())), ("after", after["step_us"])):
        assert sum(row[f"{side}_path_us"] for row in document["stages"]) == pytest.approx(total)
    # By one rule as well: blocks that run while others wait for SMs hide what the experts hold, on both sides.
    path_us = {row["stage"]: (row["before_path_us"], row["after_path_us"]) for row in document["stages"]}
    own = {row["stage"] for row in json.loads(Path("predicted/timeline.json").read_text())["critical_path"]}
    assert "moe.experts" in own and max(path_us["moe.experts"]) < 50 < min(path_us["moe.shared_gate_up"])
    assert run("compare", str(STORED), "predicted/timeline.json") == 0
    text = capsys.readouterr().out
    for word in ("NVLink flight", "exchange", "by starts and ends", "sum of the parts", "on path"):
        assert word in text


def test_a_file_without_parts_says_so(work: Path, capsys: Capture) -> None:
    document = measured().to_dict()
    public = {**document, "measured": False, "command": "k3sim timeline"}
    del public["waits_us"]
    shutil.copy(saved(public), "public.json")
    assert run("compare", saved(document), "public.json") == 0
    assert "no parts: public.json has none" in capsys.readouterr().out


def change(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


def change_stage(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["stages"][5].update({name: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("measured", False), "this is a predicted step of 'k3sim timeline'; 'k3sim compare FILE FILE' takes it"),
        (change("stages", []), "was not profiled"),
        (change("stages", [5]), "stages[0] is 5, accepted: an object"),
        (change("stages", "all"), 'stages is "all", accepted: a list'),
        (change("step_us", -1), "step_us is -1, accepted: 0.001 to 1e+09 us"),
        (change("step_us", True), "step_us is true"),
        (change("step_us", 1e308), "step_us is 1e+308"),
        (change("step_us", 10**400), "step_us is 1000"),
        (change("read_bytes_per_s", 0), "read_bytes_per_s is 0, accepted: 1e+06 to 1e+18 bytes a second"),
        (change("read_bytes_per_s", "fast"), 'read_bytes_per_s is "fast"'),
        (change("floor_us", "low"), 'floor_us is "low"'),
        (change("path", 7), "path is 7, accepted: stock, fused, megakernel"),
        (change("switches", [1]), "switches[0] is 1, accepted: low-batch-kernels"),
        (change("layout", "all"), 'layout is "all", accepted: a layout such as tp16ep1dcp1'),
        (change("notes", 5), "notes is 5, accepted: a list of texts"),
        (change("machine_values", [{"field": "num_sms"}, 16]), "machine_values[1] is 16, accepted: an object"),
        (change("waits_us", {"magic": 1}), 'waits_us has part "magic", accepted: '),
        (change("waits_us", {"reduction_barrier": 1}), "which is called barrier now; predict it again"),
        (change("critical_path", [{"stage": "a", "part": "side_stream", "us": 1}]), "of the kernels that held the SMs"),
        (change_stage("rank", 1), "stages has kernels of 2 ranks"),
        (change_stage("layer", 2**64), "stages[5].layer is 18446744073709551616, accepted"),
        (change_stage("stage", "\ud800"), 'stages[5].stage is "\\ud800", half a surrogate pair'),
        (change_stage("end_us", None), "stages[5].end_us is null"),
        (change_stage("end_us", 0.0), "stages[5] has start_us"),
        (change_stage("waits_for", [5]), "stages[5].waits_for is [5], accepted: earlier calls"),
        (change_stage("waits_for", "embed.push"), 'stages[5].waits_for is "embed.push", accepted: a list'),
        (change_stage("polls", 1), "stages[5].polls is 1, accepted: true or false"),
        (change_stage("weight_bytes", -4), "stages[5].weight_bytes is -4"),
        (change_stage("prefetched", [[1]]), "stages[5].prefetched[0] is [1], accepted: [call, bytes]"),
        (change_stage("call", 9), "call is 9, which another kernel is too"),
    ],
)
def test_bad_files_are_one_line_and_status_2(
    work: Path, capsys: Capture, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = json.loads(dump_json(measured().to_dict()))
    edit(document)
    Path("given.json").write_text(json.dumps(document))
    assert run("report", "given.json", "--out", "out") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("k3sim: given.json: ") and message in captured.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is an empty file"),
        ("[]", "holds [], which is no JSON object"),
        ('{"stages": [', "not valid JSON"),
        ('{"traceEvents": []}', "this is a torch profiler (Chrome) trace; 'k3sim explain' reads it"),
        ("SQLite format 3\0", "this is an SQLite database, as Nsight Systems exports"),
        ('{"values": {}, "name": "x"}', "this is a machine profile; 'k3sim timeline --machine FILE' takes it"),
        ("TIMESTAMP,ContextTokens\n2023-11-16,374\n", "this is a trace of requests over time"),
    ],
)
def test_files_that_are_no_documents(work: Path, capsys: Capture, text: str, message: str) -> None:
    Path("given.json").write_text(text)
    assert run("report", "given.json") == 2
    assert message in capsys.readouterr().err
    assert run("report", "nothing.json") == 2
    assert "nothing.json: cannot be read" in capsys.readouterr().err


def old(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**document, "schema_version": 1, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["schema_version is 1, accepted: 2; measure it again, or correct the file"]),
        ({"switches": ["welded"]}, ["switches[0] is \"welded\", which is called 'fused-allreduce' now"]),
        ({"schema_version": 2, "path": "persistent"}, ["path is \"persistent\", which is called 'megakernel' now"]),
        ({"measured": False}, ["schema_version is 1", "predict it again"]),
    ],
)
def test_files_of_an_earlier_version_are_refused(
    work: Path, capsys: Capture, changes: dict[str, Any], words: list[str]
) -> None:
    document = json.loads(dump_json(measured().to_dict()))
    name = saved(old(document, **changes))
    for arguments in (("report", name), ("compare", str(STORED), name), ("compare", name, str(STORED))):
        if "measured" in changes and arguments[0] == "report":  # which takes no prediction of any version
            continue
        assert run(*arguments, "--out", "out") == 2
        error = capsys.readouterr().err
        assert error.startswith("k3sim: given.json: ") and error.count("\n") == 1
        assert all(word in error for word in words), error
    assert not Path("out").exists()


def test_compare_blames_the_file_at_fault(work: Path, capsys: Capture) -> None:
    good = saved(measured().to_dict(), "good.json")
    document = json.loads(dump_json(measured().to_dict()))
    change("step_us", -1)(document)
    bad = saved(document, "bad.json")
    for arguments in ((good, bad), (bad, good), (bad, bad)):
        assert run("compare", *arguments) == 2
        assert capsys.readouterr().err.startswith("k3sim: bad.json: ")


def test_a_file_is_not_compared_with_a_side(work: Path, capsys: Capture) -> None:
    for arguments in ((str(STORED), "path=stock"), ("path=stock", str(STORED))):
        assert run("compare", *arguments) == 2
        error = capsys.readouterr().err
        assert f"{str(STORED)!r} is a file of a step and 'path=stock' a side to predict" in error
    Path("trace.gz").write_bytes(b"\x1f\x8b no step")
    assert run("compare", "trace.gz", "path=stock") == 2
    assert "trace.gz" in capsys.readouterr().err


def test_all_faults_of_a_step_are_one_line(work: Path, capsys: Capture) -> None:
    document = json.loads(dump_json(measured().to_dict()))
    document |= {"path": "persistent", "schema_version": 1, "step_us": "fast"}
    document["stages"] = document["stages"][:2]
    document["stages"][0] |= {"end_us": None, "polls": 1}
    del document["stages"][1]["stage"]
    document = {name: document[name] for name in ("schema_version", "measured", "step_us", "path", "stages")}
    Path("given.json").write_text(json.dumps(document, indent=1))
    assert run("report", "given.json") == 2
    assert capsys.readouterr().err == (
        "k3sim: given.json: line 1: the file lacks read_bytes_per_s (a number of bytes a second); "
        "line 2: schema_version is 1, accepted: 2; measure it again, or correct the file; "
        'line 4: step_us is "fast", accepted: 0.001 to 1e+09 us; '
        "line 5: path is \"persistent\", which is called 'megakernel' now; "
        "line 14: stages[0].end_us is null, accepted: 0 to 1e+09 us; "
        "line 18: stages[0].polls is 1, accepted: true or false; "
        "line 24: stages[1] lacks stage (a text that is not empty)\n"
    )


@pytest.mark.parametrize("bad", ["trace.json.gz", "step.sqlite", "azure.csv"])
def test_compare_names_a_foreign_file(work: Path, capsys: Capture, bad: str) -> None:
    import gzip

    good = saved(measured().to_dict(), "good.json")
    Path("trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    Path("step.sqlite").write_bytes(b"SQLite format 3\0")
    Path("azure.csv").write_text("TIMESTAMP,ContextTokens\n2023-11-16,374\n")
    for arguments in ((good, bad), (bad, good)):
        assert run("compare", *arguments) == 2
        assert capsys.readouterr().err.startswith(f"k3sim: {bad}: this is a")


# Made anew each time: a list that an example changes must not come back in the next.
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.just(2**64), st.just(10**400), st.floats(), st.just(1e308),
    st.text(max_size=4), st.just("\ud800"), st.builds(list), st.builds(dict), st.builds(lambda: [[1]]),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_steps_are_shown_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    document = json.loads(MEASURED_TEXT)
    for _ in range(data.draw(st.integers(1, 3))):
        inner: Any = document
        while True:
            key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
            if not (isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.integers(0, 3))):
                break
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[key] = data.draw(VALUES)
        else:
            del inner[key]
        if not document:
            break
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    for ask in (lambda: read_measured(str(path)).html_data(), lambda: compare_files(str(path), str(path)).to_dict()):
        try:
            dump_json(ask())
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 900


MEASURED_TEXT = dump_json(measured().to_dict())
