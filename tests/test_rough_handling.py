"""Rough handling: full disks, closed streams, signals, files that are no files, and what each leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_line import Capture, run

from k3sim.cli import MOST_SAID, one_line
from k3sim.errors import UserError
from k3sim.sim.export.whole_file import check_folder, whole_file, whole_folder, write_whole_file

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_folder_appears_with_all_its_files(work: Path) -> None:
    with whole_folder(work / "a" / "b") as inside:
        (inside / "one.json").write_text("1")
        assert not (work / "a" / "b").exists()
        (inside / "two.html").write_text("2")
    assert left(work) == ["a", "a/b", "a/b/one.json", "a/b/two.html"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), SystemExit(143)]
)
def test_an_interrupted_folder_leaves_what_was_there(work: Path, error: BaseException) -> None:
    (work / "old").mkdir()
    (work / "old" / "one.json").write_text("old")
    for folder in ("old", "new/deep"):
        with (
            pytest.raises(UserError if isinstance(error, OSError) else type(error)),
            whole_folder(Path(folder)) as inside,
        ):
            (inside / "one.json").write_text("half")
            raise error
    assert left(work) == ["old", "old/one.json"]
    assert (work / "old" / "one.json").read_text() == "old"


def test_a_second_run_keeps_other_files(work: Path) -> None:
    for text in ("first", "second"):
        with whole_folder(work / "out") as inside:
            (inside / "one.json").write_text(text)
        (work / "out" / "mine.txt").write_text("mine")
    assert left(work) == ["out", "out/mine.txt", "out/one.json"]
    assert (work / "out" / "one.json").read_text() == "second"


def test_a_full_disk_keeps_the_old_file(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole_file(work / "one.json", b"old")

    def full(path: Path, content: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot write .*one\.json: No space left on device; make room$"):
        write_whole_file(work / "one.json", b"new")
    assert (work / "one.json").read_bytes() == b"old" and left(work) == ["one.json"]


def test_a_pipe_or_folder_is_not_replaced(work: Path) -> None:
    os.mkfifo(work / "fifo")
    (work / "folder").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(UserError, match="something that is no file stands there"), whole_file(work / name):
            raise AssertionError("nothing is begun")
    assert left(work) == ["fifo", "folder"]


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("file", "cannot make the output folder file: Not a directory"),
        ("file/below", "cannot make the output folder file/below: Not a directory"),
        ("link", "link is a link to nothing"),
        ("n" * 300, "File name too long"),
        ("loop/below", "Too many levels of symbolic links"),
        ("a\0b", "null"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(work: Path, folder: str, says: str) -> None:
    (work / "file").write_text("mine")
    (work / "link").symlink_to("nothing")
    (work / "loop").symlink_to("loop")
    before = left(work)
    with pytest.raises(UserError, match=says):
        check_folder(Path(folder))
    assert left(work) == before


def test_a_refused_calibration_leaves_nothing(work: Path, capsys: Capture) -> None:
    (work / "s.json").write_text('{"cases": [], "gpu": "NVIDIA H200"}')
    assert run("calibrate", "--from", "s.json", "--out", "deep/out", "--machine-out", "m.json") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert left(work) == ["s.json"]


@pytest.mark.skipif(find_spec("cutlass") is not None, reason="nvidia-cutlass-dsl is installed")
def test_a_refused_build_leaves_nothing(work: Path, capsys: Capture) -> None:
    assert run("kernels", "build", "router_topk", "--arch", "sm_90a") == 2
    assert "nvidia-cutlass-dsl is not installed" in capsys.readouterr().err
    assert left(work) == []


def test_a_profile_never_lacks_its_page(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import k3sim.calibrate.compare.calibration_page as page
    from k3sim.calibrate.fit import calibration

    def interrupted(*given: Any, **named: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "fitted", lambda *given, **named: ({}, b"a profile"))
    monkeypatch.setattr(page, "write_calibration_page", interrupted)
    assert run("calibrate", "--from", "h200", "--machine-out", "m.json") == 130
    assert left(work) == []


# -- what is said -----------------------------------------------------------------------------------------------------


def test_a_line_keeps_both_of_its_ends() -> None:
    assert one_line("a\n b") == "a b"
    said = one_line("unknown 'begin" + "x" * 5000 + "end'; accepted: y")
    assert len(said) < 200 and said.startswith("unknown 'begin") and said.endswith("end'; accepted: y")
    said = one_line("first " + "word " * 5000 + "accepted: y")
    assert len(said) == MOST_SAID and said.endswith("accepted: y") and "..." in said


@pytest.mark.parametrize(
    "arguments", [("timeline", "--out", "\udcff"), ("compare", "a", "b\0"), ("machines", "\ud800.json")]
)
def test_an_argument_that_is_no_text_is_refused(work: Path, capsys: Capture, arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert "is no text of the locale's encoding" in captured.err and captured.err.count("\n") == 1
    assert left(work) == []


def test_an_interrupt_while_importing_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *given: Any) -> None:
            if name == "k3sim.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "k3sim.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert run("machines") == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "k3sim: interrupted\n")


def test_nothing_large_is_imported_before_main() -> None:
    asked = "import sys, k3sim.cli; print(*(one for one in sys.modules if one.startswith(('k3sim', 'typer', 'click'))))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"k3sim", "k3sim.errors", "k3sim.version", "k3sim.cli", "k3sim.streams"}


COMMAND = f"{sys.executable} -m k3sim"


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (f"{COMMAND} machines --json > /dev/full", 2, "cannot write to standard output (No space left on device)"),
        (f"{COMMAND} machines >&-", 2, "cannot write to standard output (Bad file descriptor)"),
        (f"{COMMAND} machines nope 2>&-", 2, ""),
        (f"{COMMAND} machines nope 2>/dev/full", 2, ""),
        (f"{COMMAND} paths 2>&- >/dev/null", 0, ""),
        (
            f"bash -o pipefail -c '{COMMAND} machines gb300 | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}'",
            (0, 141),
            "",
        ),
        (f"PYTHONIOENCODING=ascii PYTHONUTF8=0 {COMMAND} machines gb300 > /dev/null", 0, ""),
    ],
)
def test_streams_that_take_nothing(command: str, status: int | tuple[int, ...], says: str) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode in (status if isinstance(status, tuple) else (status,)), done.stderr
    assert done.stderr == (f"k3sim: {says}\n" if says else "")


def test_a_refusal_outlives_lost_output() -> None:
    script = """
import sys
from k3sim import cli
def refuse(given):
    sys.stdout.write("half of a table")
    raise cli.UserError("no")
cli._run = refuse
cli.main()
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "k3sim: no\n")


def test_a_request_to_end_leaves_nothing(work: Path) -> None:
    """Termination in the midst of writing: the hidden folder goes, and no worker and no traceback stay."""
    script = """
import sys, time
import k3sim.commands.machines as machines
from k3sim.sim.export.whole_file import whole_folder
from pathlib import Path
def waiting(*given, **named):
    with whole_folder(Path("out/deep")) as inside:
        (inside / "half.html").write_text("half")
        print("begun", file=sys.stderr, flush=True)
        time.sleep(60)
machines.print_machines = waiting
from k3sim.cli import main
sys.argv = ["k3sim", "machines"]
main()
"""
    for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
        running = subprocess.Popen(
            [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGHUP, signal.SIGTERM)]
            and signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        assert running.stderr is not None
        assert running.stderr.readline() == "begun\n"
        time.sleep(0.05)
        running.send_signal(number)
        said = running.stderr.read()
        assert running.wait(60) == status
        assert said == ("k3sim: interrupted\n" if number == signal.SIGINT else "")
        assert left(work) == []


# -- what is read -----------------------------------------------------------------------------------------------------

READERS = (
    "report", "compare x.json", "timeline --machine", "timeline --model", "machines", "claims", "validate --evidence",
    "calibrate --tables", "calibrate --machine-out m.json --from", "calibrate --check --machine",
)  # fmt: skip


@pytest.mark.parametrize("command", READERS)
def test_every_reader_refuses_pipes_and_devices(work: Path, capsys: Capture, command: str) -> None:
    os.mkfifo(work / "x.json")
    (work / "zero.json").symlink_to("/dev/zero")
    (work / "folder.json").mkdir()
    before = left(work)
    for name in ("x.json", "zero.json", "folder.json"):
        if command == "timeline --model" and name == "folder.json":
            continue  # a folder that holds a config.json
        assert run(*command.split(), name) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert "not a regular file" in captured.err or "is a folder" in captured.err, captured.err
        assert left(work) == before


def test_numbers_beyond_reason_are_one_line(work: Path, capsys: Capture) -> None:
    """Kinds 1 to 3 of what a step's file may hold, and 6 of samples: each was a traceback once."""
    step = json.loads((ROOT / "calibrate" / "data" / "h200-decode-fused.json").read_text())
    step["stages"] = sorted(step["stages"], key=lambda row: row["call"])[:20]
    (work / "good.json").write_text(json.dumps(step))
    stage = step["stages"][3]
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({"step_us": one}, {}) for one in (float("nan"), float("inf"), 1e308, 10**400)),
        ({"path": 7}, {}),
        ({"switches": [7]}, {}),
        ({"machine_values": [16]}, {}),
        ({}, {"layer": 2**64}),
        ({}, {"stage": "\ud800"}),
    ]
    for top, inner in changes:
        stages = [*step["stages"][:3], {**stage, **inner}, *step["stages"][4:]]
        (work / "bad.json").write_text(json.dumps({**step, "stages": stages, **top}))
        for command in (
            ["report", "bad.json"],
            ["compare", "bad.json", "good.json"],
            ["compare", "good.json", "bad.json"],
        ):
            assert run(*command) == 2, (top, inner)
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.count("\n") == 1
            assert "bad.json: line 1: " in captured.err
            assert len(captured.err) < 500
    assert left(work) == ["bad.json", "good.json"]


def test_profiles_off_by_a_power_are_refused(work: Path, capsys: Capture) -> None:
    profile = json.loads((ROOT / "sim" / "machines" / "gb300.json").read_text())
    for field, factor in (("nvlink_egress_bytes_per_s", 1e-6), ("sm_clock_hz", 1e-12), ("hbm_latency_s", 1e9)):
        entry = profile["values"][field]
        scaled = {name: entry[name] * factor for name in ("value", "low", "high")}
        (work / "p.json").write_text(
            json.dumps({**profile, "values": {**profile["values"], field: {**entry, **scaled}}})
        )
        assert run("timeline", "--machine", "p.json") == 2
        said = capsys.readouterr().err
        assert f"{field}.value is " in said and "accepted: " in said and said.count("\n") == 1
    assert left(work) == ["p.json"]
