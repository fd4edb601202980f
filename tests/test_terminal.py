"""What a terminal and a pipe show: tables that lose nothing, and how far long work is."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import Capture, run

from k3sim.commands import progress as progress_module
from k3sim.commands import terminal
from k3sim.commands.progress import progress

K3SIM = [sys.executable, "-m", "k3sim"]


PIPE = [
    "path                                            step us  removed from all four us  speed-up  what it is",
    "fused (fused-allreduce + [low-batch-kernels])   7,000.8                     -12.0     1.51x  some words",
    "stock                                          10,575.2                      +3.0     1.00x",
]
WRAPPED = [
    "                                    removed from all four",
    "path                       step us                     us  speed-up  what it is",
    "fused (fused-allreduce +   7,000.8                  -12.0     1.51x  some words",
    "[low-batch-kernels])",
    "stock                     10,575.2                   +3.0     1.00x",
]
BELOW = [
    "                                      removed from",
    "path                       step us     all four us",
    "fused (fused-allreduce +   7,000.8           -12.0",
    "[low-batch-kernels])",
    "stock                     10,575.2            +3.0",
    "",
    "path                          speed-up  what it is",
    "fused (fused-allreduce +         1.51x  some words",
    "[low-batch-kernels])",
    "stock                            1.00x",
]


def some_table() -> terminal.Table:
    table = terminal.table("path", "step us", "removed from all four us", "speed-up", "what it is", folded=(0, 4))
    table.add_row("fused (fused-allreduce + [low-batch-kernels])", "7,000.8", "-12.0", "1.51x", "some words")
    table.add_row("stock", "10,575.2", "+3.0", "1.00x", "")
    return table


def shown(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setattr(terminal, "terminal_columns", lambda: columns)
    terminal.print_table(some_table())
    return capsys.readouterr().out


def test_a_pipe_gets_one_line_a_row(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys, monkeypatch, columns=0).splitlines() == PIPE


def test_heads_wrap_before_columns_move_below(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys, monkeypatch, columns=79).splitlines() == WRAPPED
    assert shown(capsys, monkeypatch, columns=50).splitlines() == BELOW


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 80, 100, 200])
def test_no_width_loses_a_word(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = shown(capsys, monkeypatch, columns)
    table = some_table()
    words = {word for row in (table.heads, *table.rows) for cell in row for word in cell.split()}
    assert "…" not in text
    assert words <= set(text.split())
    if columns >= 60:
        assert max(map(len, text.splitlines())) <= columns
    assert all(line == line.rstrip() for line in text.splitlines())


def in_terminal(columns: int, *arguments: str, cwd: Path) -> tuple[int, str]:
    """Status and output of a command whose standard streams are a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(
        [*K3SIM, *arguments], cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                some = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not some:
                break
            said += some
        os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).replace("\r\n", "\n")


def test_a_terminal_shows_a_bar_and_uncut_tables(tmp_path: Path) -> None:
    status, said = in_terminal(64, "timeline", "--without", "l2-prefetch", "--without", "sharded-router", cwd=tmp_path)
    assert status == 0
    assert "predicting" in said and re.search(r" (\d+)/\1 ", said)
    results = said[said.index("kimi-k3 on 16 GPUs") :]
    assert "…" not in results
    assert max(map(len, results.splitlines())) <= 64
    for word in ("tok/s/GPU", "speed-up", "megakernel", "timeline.pftrace"):
        assert word in results


# -- progress ---------------------------------------------------------------------------------------------------------


def test_a_log_gets_lines_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    log, line_written = io.StringIO(), threading.Event()
    write = log.write

    def tell(text: str) -> int:
        line_written.set()
        return write(text)

    monkeypatch.setattr(log, "write", tell)
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.01)
    with progress("predicting") as told:
        assert line_written.wait(30)
        told(3, 11)
        told.doing("stock")
        line_written.clear()
        assert line_written.wait(30)
    lines = log.getvalue().splitlines()
    assert lines[0] == "predicting: 0 s"
    assert re.fullmatch(r"predicting: 3 of 11, \d+ s, stock", lines[-1])


def test_work_outlives_who_reads_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.set()
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.01)
    with progress("predicting") as told:
        assert tried.wait(30)
        told(1, 2)


def test_short_work_writes_nothing(capsys: Capture) -> None:
    with progress("predicting") as told:
        told(1, 1)
        told.say("a result")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("options", ["", "--path stock", "--without l2-prefetch", "--path megakernel"])
def test_every_prediction_of_a_report_is_counted(options: str) -> None:
    from k3sim.report import report_of
    from k3sim.sim.options import read_command

    told: list[tuple[int, int]] = []
    report_of(read_command(f"k3sim timeline {options}"), on_done=lambda done, of: told.append((done, of)))
    total = 10 if "without" in options else 9
    assert told == [(done, total) for done in range(total + 1)]


# -- limits -----------------------------------------------------------------------------------------------------------


def test_more_draws_than_help_are_refused(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("timeline", "--intervals", "--draws", "100000"),
        ("validate", "--draws", "1001"),
        ("claims", "--draws", "1001"),
        ("sensitivity", "--draws", "1001"),
        ("calibrate", "--check", "--draws", "1001"),
    ):
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert "accepted: 2 to 1000; with more the interval moves by less than 1 % of the step" in captured.err
    assert run("timeline", "--draws", "5") == 2
    assert capsys.readouterr().err == "k3sim: --draws: only with --intervals\n"


def test_help_states_the_compared_range(capsys: Capture) -> None:
    from k3sim.sim.compared_range import COMPARED_TEXT

    assert run("timeline", "--help") == 0
    assert COMPARED_TEXT in " ".join(capsys.readouterr().out.split())


def test_a_warning_reaches_log_document_and_page(capsys: Capture, tmp_path: Path) -> None:
    warning = "63 of 64 replicas have no request at concurrency 1"
    assert run("timeline", "--dp", "64", "--json", "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"k3sim: warning: {warning}")
    assert warning in captured.out and warning in (tmp_path / "out" / "timeline.html").read_text()
    assert run("compare", "dp=64", "dp=1", "--json", "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert warning in captured.err and warning in captured.out
    assert warning in (tmp_path / "out" / "compare.html").read_text()
