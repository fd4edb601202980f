"""The command line: what is refused, in one line and without a trace; help; what a run leaves behind."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, run

from k3sim.cli import COMMANDS
from k3sim.errors import UserError
from k3sim.kernels.harness.check import Checked
from k3sim.sim.options import Options, read_side

ROOT = Path(__file__).parents[1]
FILES = {"timeline.json", "timeline.html", "timeline.pftrace", "stages.csv"}



def refusal(capsys: Capture, *arguments: str) -> str:
    """The one line that a refused command prints."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3sim: ") and captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder that does not exist yet, in a working folder that is empty."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work / "out"


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--machine gb30", ["unknown machine 'gb30'", "did you mean gb300", "b200, b300, gb200, gb300, h100, h200"]),
        ("--machine xyzzy", ["unknown machine 'xyzzy'", "ends in .json"]),
        ("--machine ''", ["unknown machine ''"]),
        ("--machine nothing.json", ["nothing.json: cannot be read (No such file", "a machine profile"]),
        ("--path fusd", ["unknown path 'fusd'", "did you mean fused", "stock, fused, megakernel"]),
        (
            "--with allreduce",
            [
                "unknown switch 'allreduce'", "did you mean fused-allreduce",
                "low-batch-kernels, fused-allreduce, sharded-router, l2-prefetch",
            ],
        ),
        ("--without xyzzy", ["unknown switch 'xyzzy'", "accepted: low-batch-kernels"]),
        ("--with fused-allreduce --without fused-allreduce", ["'fused-allreduce' is given to both --with"]),
        ("--with fused-allreduce.tail --without fused-allreduce", ["part 'fused-allreduce.tail' is given to both"]),
        ("--without fused-allreduce.tial", ["unknown part of a switch", "did you mean fused-allreduce.tail"]),
        ("--kernels own --machine h200 --without fused-allreduce.tail", ["take a switch whole", "--kernels public"]),
        ("--path persistent", ["path 'persistent' is called 'megakernel' now"]),
        ("--with welded", ["switch 'welded' is called 'fused-allreduce' now"]),
        ("--without prefetch", ["switch 'prefetch' is called 'l2-prefetch' now"]),
        ("--path stock --with fused-allreduce", ["path 'stock' has no switches"]),
        ("--path megakernel --without fused-allreduce", ["path 'megakernel' has no switches"]),
        ("--tp 3", ["tp=3", "accepted: 1, 2, 4, 8, 16, 32"]),
        ("--tp 64", ["tp=64", "accepted: 1, 2, 4, 8, 16, 32"]),
        ("--tp 0", ["tp=0", "accepted: 1, 2, 4, 8, 16, 32"]),
        ("--tp -8", ["tp=-8"]),
        ("--tp abc", ["'--tp'", "valid integer", "'abc'"]),
        ("--tp 16.5", ["'--tp'", "16.5"]),
        ("--tp", ["'--tp' requires an argument"]),
        ("--ep 3", ["ep=3 at tp=16", "accepted: 1, 2, 4, 8, 16"]),
        ("--ep 32", ["ep=32 at tp=16"]),
        ("--dcp 5", ["dcp=5 at tp=16", "accepted: 1, 2, 4, 8, 16"]),
        ("--dp 0", ["dp=0"]),
        ("--context 0", ["context=0", "from 1 to 1048576"]),
        ("--context -1", ["context=-1", "from 1 to 1048576"]),
        ("--context 1048577", ["context=1048577", "from 1 to 1048576"]),
        ("--concurrency 0", ["concurrency=0", "from 1 to 4096"]),
        ("--concurrency 1e3x", ["--concurrency", "'1e3x'"]),
        ("--kv-dtype int4", ["'int4'", "fp8", "bf16"]),
        ("--seed -1", ["seed is -1", "0 to 2147483647"]),
        ("--routing nan", ["routing is nan distinct experts", "1 or more"]),
        ("--routing even", ["unknown routing 'even'", "uniform, text"]),
        ("--machine gb200 --tp 8", ["9.6 GB more than the 198.7 GB of gb200", "tp=16 or tp=32 would fit"]),
        ("--machine h200 --tp 8", ["57.5 GB more than the 150.8 GB of h200", "tp=16"]),
        ("--tp 8 --concurrency 4096 --context 1048576", ["no tp up to 32 fits", "lower concurrency or context"]),
        ("--model nothing.json", ["nothing.json: cannot be read (No such file"]),
        ("--model /", ["/config.json: cannot be read (No such file"]),
        ("--out ''", ["name of the output folder is empty"]),
        ("--bogus", ["No such option", "--bogus"]),
        ("surplus", ["surplus"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys: Capture, out: Path, options: str, words: list[str]) -> None:
    given = shlex.split(options)
    line = refusal(capsys, "timeline", *([] if "--out" in given else ["--out", str(out)]), *given)
    for word in words:
        assert word in line
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("timelin", ["No such command 'timelin'", "timeline"]),
        ("--bogus", ["No such option"]),
        ("compare", ["Missing argument"]),
        ("compare path=stock", ["Missing argument"]),
        ("compare path=stock nonsense", ["'nonsense'", "not key=value", "machine, tp"]),
        ("compare path=stock tp=x", ["tp in side 'tp=x' is 'x'", "whole number"]),
        ("compare path=stock with=shared-routing", ["switch 'shared-routing' is called 'sharded-router' now"]),
        ("compare path=stock tp=8,tp=8", ["key 'tp' stands twice"]),
        ("compare path=stock skew=maybe", ["skew in side 'skew=maybe' is 'maybe'", "yes or no"]),
        ("compare a.json path=stock", ["a.json: ", "No such file"]),
        ("compare path=stock machine=a.json", ["a.json", "No such file"]),
        ("compare a.json b.json", ["a.json: ", "No such file"]),
        ("paths fusd", ["unknown path 'fusd'", "did you mean fused"]),
        ("paths persistent", ["path 'persistent' is called 'megakernel' now"]),
        ("paths megakernel --kernels own", ["has no kernels of the project's own"]),
        ("paths fused --without fused-allreduce.o_proj", ["did you mean fused-allreduce.o-proj"]),
        ("paths fused --path stock", ["No such option", "--path"]),
        ("compare path=stock speed=1", ["unknown key 'speed'", "accepted: machine"]),
        ("compare path=stock with=allreduce", ["did you mean fused-allreduce"]),
        ("compare path=stock path=stock,with=fused-allreduce", ["has no switches"]),
        ("compare tp=8 machine=gb200,tp=8", ["gb200", "would fit"]),
        ("machines nope", ["unknown machine 'nope'"]),
        ("machines a b", ["a second name: only with 'k3sim machines new NAME"]),
        ("kernels check skiny_gemv", ["unknown operator 'skiny_gemv'", "did you mean skinny_gemv"]),
        ("kernels check --replays -1", ["replays: got -1"]),
        ("kernels check --seed -1", ["'--seed'", "-1"]),
        ("kernels bench router", ["unknown operator 'router'", "did you mean router_topk"]),
        ("kernels bench --replays 1", ["replays: got 1", "2 or more"]),
        ("kernels bench --budget-s 0", ["budget: got 0.0 seconds"]),
        ("kernels bench --out nowhere/x.json", ["the folder nowhere does not exist"]),
    ],
)
def test_bad_commands(capsys: Capture, out: Path, arguments: str, words: list[str]) -> None:
    line = refusal(capsys, *shlex.split(arguments))
    for word in words:
        assert word in line
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/deeper", "/deeper/still"])
def test_a_file_in_the_folders_place_is_kept(capsys: Capture, out: Path, below: str) -> None:
    # Permissions say nothing to the superuser; a path through a regular file is impossible for everybody.
    out.write_text("mine")
    assert "cannot make the output folder" in refusal(capsys, "timeline", "--out", f"{out}{below}")
    assert "cannot make the output folder" in refusal(capsys, "compare", "path=stock", "", "--out", f"{out}{below}")
    assert out.read_text() == "mine"


def test_a_folder_in_a_files_place_is_refused(capsys: Capture, out: Path) -> None:
    (out / "timeline.html").mkdir(parents=True)
    assert "stands where a file of the report goes" in refusal(capsys, "timeline", "--out", str(out))
    assert [path.name for path in out.rglob("*")] == ["timeline.html"]


def model(change: Callable[[dict[str, Any]], object]) -> str:
    config = json.loads((ROOT / "model" / "data" / "kimi-k3.json").read_text())
    change(config["text_config"])
    return json.dumps(config)


def profile(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads((ROOT / "sim" / "machines" / "gb300.json").read_text())
    change(values["values"])
    return json.dumps(values)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--model", "{", ["not valid JSON"]),
        ("--model", model(lambda text: None)[:900], ["not valid JSON", "cut short?"]),
        ("--model", "[]", ["holds [], which is no JSON object"]),
        ("--model", "{}", ["lacks model_type"]),
        ("--model", model(lambda text: text.pop("hidden_size")), ["text_config lacks hidden_size"]),
        ("--model", model(lambda text: text.update(hidden_size=float("nan"))), ["text_config.hidden_size is NaN"]),
        ("--model", model(lambda text: text.update(vocab_size="many")), ['text_config.vocab_size is "many"']),
        ("--machine", "{", ["not valid JSON"]),
        ("--machine", profile(lambda values: None)[:900], ["not valid JSON"]),
        ("--machine", profile(lambda values: values.pop("num_sms")), ["values lacks num_sms"]),
        ("--machine", profile(lambda values: values["num_sms"].update(value=-1)), ["num_sms", "-1"]),
        (
            "--machine",
            profile(lambda values: values["hbm_latency_s"].update(value=float("nan"))),
            ["hbm_latency_s.value is NaN", "0 or 1e-15 to 1 s"],
        ),
        ("--machine", profile(lambda values: values["hbm_latency_s"].pop("source")), ["hbm_latency_s lacks source"]),
        (
            "--machine",
            profile(
                lambda values: [
                    values[name].update(value=20_000, low=20_000, high=20_000)
                    for name in ("smem_bytes_per_sm", "max_smem_bytes_per_block")
                ]
            ),
            ["bytes of shared memory", "20000"],
        ),
    ],
)
def test_files_that_cannot_be_honoured(
    capsys: Capture, out: Path, tmp_path: Path, option: str, text: str, words: list[str]
) -> None:
    given = tmp_path / "given.json"
    given.write_text(text)
    line = refusal(capsys, "timeline", "--out", str(out), option, str(given))
    for word in words:
        assert word in line
    assert not out.exists() or list(out.iterdir()) == []


def test_refusals_of_a_fresh_process(tmp_path: Path) -> None:
    for options, word in (
        ("--tp 3", "tp=3"),
        ("--tp abc", "abc"),
        ("--machine gb30", "gb300"),
        ("--out f/g", "folder"),
    ):
        (tmp_path / "f").write_text("")
        done = subprocess.run(
            [sys.executable, "-m", "k3sim", "timeline", *options.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("k3sim: ") and done.stderr.count("\n") == 1
        assert word in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["f"]


# -- help -----------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_uncut(capsys: Capture) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for word in (*COMMANDS, "Example: k3sim timeline --concurrency 1"):
        assert word in text
    assert "..." not in text.partition("Commands:")[2]
    assert run() == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_commands_help_has_an_example(capsys: Capture, command: str) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"Example: k3sim {command}" in text
    assert "--json" in text or command == "kernels"


@pytest.mark.parametrize("arguments", ["--help", "machines", "paths"])
def test_light_commands_import_nothing_heavy(arguments: str, tmp_path: Path) -> None:
    script = f"""
import sys
from k3sim.cli import main
try:
    main({arguments.split()!r})
except SystemExit as end:
    assert end.code == 0
heavy = ("simpy", "numpy", "pandas", "plotly", "perfetto", "scipy", "torch", "k3sim.calibrate")
sys.stderr.write(" ".join(name for name in heavy if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# -- what a run leaves ----------------------------------------------------------------------------------------------


def test_a_run_prints_tables_and_writes_four_files(capsys: Capture, out: Path) -> None:
    assert run("timeline", "--concurrency", "1", "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for word in ("tp16ep1dcp1", "tok/s/user", "fused", "stock", "megakernel", str(out / "timeline.html")):
        assert word in captured.out
    assert {path.name for path in out.iterdir()} == FILES
    assert all(path.stat().st_size > 0 for path in out.iterdir())
    assert len((out / "stages.csv").read_text().splitlines()) == 1 + len(
        json.loads((out / "timeline.json").read_text())["stages"]
    )


def test_a_second_run_replaces_the_files(capsys: Capture, out: Path) -> None:
    for context in ("1", "65536"):
        assert run("timeline", "--context", context, "--out", str(out)) == 0
        assert json.loads((out / "timeline.json").read_text())["context"] == int(context)
        assert {path.name for path in out.iterdir()} == FILES


def test_json_is_the_only_thing_on_standard_output(capsys: Capture, out: Path) -> None:
    assert run("timeline", "--json", "--path", "stock", "--machine", "GB200", "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["path"] == "stock" and document["machine"] == "gb200"
    assert captured.out == (out / "timeline.json").read_text()


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "options",
    [
        "--concurrency 4 --context 100 --kv-dtype bf16 --without l2-prefetch --routing text --no-skew",
        "--machine b300 --tp 8 --ep 2 --dcp 4 --dp 2 --with fused-allreduce --with l2-prefetch --pad-experts --seed 3",
        "--path megakernel",
        "--without fused-allreduce.o-proj --without l2-prefetch",
        "--with sharded-router.logits --context 512",
    ],
)
def test_the_command_in_the_document_reproduces_it(capsys: Capture, out: Path, options: str) -> None:
    assert run("timeline", "--json", "--out", str(out), *options.split()) == 0
    first = capsys.readouterr().out
    words = shlex.split(json.loads(first)["command"])
    assert words[0] == "k3sim"
    assert run(*words[1:], "--json", "--out", str(out)) == 0
    assert capsys.readouterr().out == first


def test_the_command_of_a_comparison_reproduces_it(capsys: Capture, out: Path) -> None:
    arguments = [
        "path=stock,tp=8",
        "with=fused-allreduce+l2-prefetch",
        "--machine",
        "b300",
        "--tp",
        "4",
        "--no-skew",
        "--out",
        str(out),
    ]
    assert run("compare", *arguments) == 2  # does not fit on four
    capsys.readouterr()
    arguments[arguments.index("4")] = "8"
    assert run("compare", *arguments, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert {path.name for path in out.iterdir()} == {"compare.json", "compare.html", "compare.pftrace"}
    assert first["before"]["path"] == "stock" and first["after"]["switches"] == ["fused-allreduce", "l2-prefetch"]
    assert first["speedup"] == pytest.approx(first["before"]["step_us"] / first["after"]["step_us"])
    assert sum(first["waits_delta_us"].values()) == pytest.approx(
        first["after"]["step_us"] - first["before"]["step_us"]
    )

    base = Options(machine="b300", tp=8, skew=False)
    from k3sim.comparison import compare_options

    sides = [read_side(text, base) for text in arguments[:2]]
    words = shlex.split(compare_options(*sides, labels=("a", "b")).command)
    assert run(*words[1:], "--json", "--out", str(out)) == 0
    second = json.loads(capsys.readouterr().out)
    for document in (first, second):
        for side in ("before", "after"):
            del document[side]["label"]
    assert second == first


def test_a_side_states_what_it_changes() -> None:
    options = Options(machine="h200", kv_dtype="bf16", with_switches=("fused-allreduce", "l2-prefetch"), context=5)
    assert options.side() == "machine=h200,with=fused-allreduce+l2-prefetch,context=5,kv-dtype=bf16"
    assert read_side(options.side(), Options()) == options
    assert Options().side() == ""
    with pytest.raises(UserError, match="not key=value"):
        read_side("tp", Options())


def test_machines_are_listed_and_shown_with_their_sources(capsys: Capture) -> None:
    assert run("machines") == 0
    assert "gb300" in capsys.readouterr().out
    assert run("machines", "gb300", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "hbm_read_bytes_per_s" in json.dumps(document)


def test_a_reader_that_goes_away_leaves_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "k3sim", "machines", "--json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(timeout=60)


# -- kernels on a GPU, with what the GPU would answer given ----------------------------------------------------------


def _sees_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@pytest.mark.parametrize("command", ["check", "bench"])
def test_without_a_gpu_kernels_name_the_extra(capsys: Capture, out: Path, command: str) -> None:
    if _sees_a_gpu():
        pytest.skip("a GPU is present")
    assert "pip install 'k3sim[gpu]'" in refusal(capsys, "kernels", command)
    assert list(out.parent.iterdir()) == []


CHECKED = (
    Checked(operator="lm_head", case="a", error=1e-6, bound=1e-5, replays=1000, ok=True, reason=""),
    Checked(operator="lm_head", case="b", error=math.nan, bound=math.nan, replays=0, ok=False, reason="MemoryError: x"),
)


@pytest.mark.parametrize(("number", "status"), [(1, 0), (2, 1)])
def test_check_fails_with_one_of_its_cases(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    asked: dict[str, Any] = {}

    def check(operators: Sequence[str], *, on_case: Callable[[Checked], None], **options: Any) -> list[Checked]:
        asked.update(options, operators=list(operators))
        for one in CHECKED[:number]:
            on_case(one)
        return list(CHECKED[:number])

    monkeypatch.setattr("k3sim.kernels.harness.check.check", check)
    assert run("kernels", "check", "lm_head", "--replays", "7", "--seed", "3") == status
    assert asked == {"operators": ["lm_head"], "num_replays": 7, "seed": 3}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lm_head  a  1.00e-06  1e-05  1000 replays  ok"
    if number == 2:
        assert lines[1].endswith("FAILED: MemoryError: x")
    assert lines[-1] == f"{number} cases, {status} failed"
    assert run("kernels", "check", "--json") == status
    document = json.loads(capsys.readouterr().out)
    assert [one["ok"] for one in document["cases"]] == [True, False][:number]
    assert document["cases"][-1]["error"] == (1e-6 if number == 1 else None)


ROW = {
    "operator": "skinny_gemv",
    "case": "6288x7168, 1 row",
    "rows": 1,
    "name": "skinny_gemv 6288x7168, 1 row",
    "num_calls_per_replay": 104,
    "samples_us": [20.29, 20.3, 20.31],
    "median_us": 20.3,
    "p10_us": 20.29,
    "p90_us": 20.31,
    "second_median_us": 20.34,
    "moved_bytes": 90144768,
    "tb_per_s": 4.4406,
    "floor_us": 19.3444,
    "of_floor": 0.9529,
    "date": "2026-11-29T20:00:00+00:00",
    "peers": [
        {"name": "cuBLAS", "median_us": 24.36, "ratio": 1.2},
        {"name": "slower", "median_us": 30.0, "ratio": 1.4778},
        {"name": "FlashInfer tinygemm", "error": "flashinfer is not installed"},
    ],
}


def test_bench_prints_recorded_times_as_a_table(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "environment": {"gpu": "NVIDIA H200", "read_bytes_per_s": 4_660_000_000_000},
        "timings": [ROW, {**ROW, "operator": "router_topk", "case": "8 shards, 1 row", "moved_bytes": 0, "peers": []}],
        "file": "h200-kernels.json",
        "left": 3,
    }

    def measure(operators: Sequence[str], *, on_row: Callable[[Any], None], **options: Any) -> dict[str, Any]:
        assert options["budget_s"] == 60.0 and options["resume"] and options["out"] == Path("x.json")
        on_row(ROW)
        return document

    monkeypatch.setattr("k3sim.kernels.harness.measure.measure", measure)
    arguments = ("kernels", "bench", "--budget-s", "60", "--resume", "--out", "x.json")
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert "skinny_gemv  6288x7168, 1 row  20.30 us" in captured.err
    assert "cuBLAS: 24.36 us, 1.20 x ours" in captured.err
    assert "flashinfer is not installed" in captured.err
    table = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert table[0] == "NVIDIA H200, read bandwidth 4.66 TB/s = 100 %"
    assert "skinny_gemv 6288x7168, 1 row 20.30 20.29 20.31 20.34 90.1 4.44 95 % 24.36 1.20" in table
    assert "router_topk 8 shards, 1 row 20.30 20.29 20.31 20.34" in table
    assert captured.out.endswith("samples  h200-kernels.json; 3 cases left, for --resume\n")
    assert run(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 2, **document}


@pytest.mark.parametrize(("command", "collects"), [("timeline", False), ("claims", True), ("calibrate", True)])
def test_only_what_keeps_all_collects_no_garbage(command: str, collects: bool) -> None:
    script = (
        "import gc, sys\n"
        "from k3sim import app, cli\n"
        "app.build_app = lambda names: lambda args, standalone_mode: print(gc.isenabled()) or 0\n"
        f"sys.argv = ['k3sim', '{command}']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{collects}\n"), done.stderr
