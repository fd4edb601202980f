"""Sweeps: grids, their points, and files that an interrupted run goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3sim.errors import UserError
from k3sim.sim.options import Options
from k3sim.sim.predict import predict
from k3sim.sim.question import ask
from k3sim.sim.sweep import Store, answer, grid_of, read_grid

SMALL = {"path": ["stock", "fused"], "concurrency": "1:4:x2", "tp": 16}


def swept(folder: Path, *words: str, wait: bool = True) -> subprocess.Popen[bytes]:
    done = subprocess.Popen(
        [sys.executable, "-m", "k3sim", "sweep", *words, "--out", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    if wait:
        _, said = done.communicate()
        assert done.returncode == 0, said
    return done


# -- grids ------------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination() -> None:
    grid = grid_of(SMALL)
    assert (grid.words, grid.num_points) == (("path", "concurrency", "tp"), 6)
    assert list(grid.texts())[:4] == [
        ("stock", "1", "16"), ("stock", "2", "16"), ("stock", "4", "16"), ("fused", "1", "16"),
    ]  # fmt: skip
    assert grid.options(("fused", "2", "8")) == Options(path="fused", concurrency=2, tp=8)
    several = grid_of({"with": ["l2-prefetch+fused-allreduce"], "skew": [True, False], "memory": 200.5})
    options = several.options(next(several.texts()))
    assert (options.with_switches, options.skew, options.memory) == (("l2-prefetch", "fused-allreduce"), True, 200.5)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "names no option"),
        ({"colour": 1, "tp": []}, "unknown option 'colour'"),
        ({"colour": 1, "tp": []}, "tp has no value"),
        ({"tp": {"a": 1}}, "accepted: a value, a list of values, or a range"),
        ({"tp": [[1]]}, "accepted: a value"),
        ({"concurrency": "1:0"}, "--concurrency"),
        ({"concurrency": "1:4096", "context": "1:4096"}, "points; accepted: up to 1,000,000"),
    ],
)
def test_a_grid_that_says_nothing_is_refused(given: dict[str, object], shown: str) -> None:
    with pytest.raises(UserError) as caught:
        grid_of(given)
    assert shown in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tp: [8, 16", "is no YAML"), ("- tp", "is no mapping"), ("", "is no mapping"), ("tp: 8\ncolour: 1", "colour"),
        ("a: &a [x, x]\ntp: *a", "unknown option 'a'"), ("\x00", "is no YAML"), ("!!python/object:os.system x", "YAML"),
    ],
)  # fmt: skip
def test_what_is_no_grid_file_is_one_line(text: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_grid(str(tmp_path / "grid.yaml"))
    assert shown in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        read_grid(str(tmp_path / "absent.yaml"))


def test_yaml_and_json_are_the_same_grid(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("path: [stock, fused]\nconcurrency: 1:4:x2\ntp: 16\n")
    (tmp_path / "a.json").write_text(json.dumps(SMALL))
    assert read_grid(str(tmp_path / "a.yaml")) == read_grid(str(tmp_path / "a.json")) == grid_of(SMALL)


def test_a_point_is_the_plain_timeline() -> None:
    grid = grid_of({"path": "stock", "concurrency": 4})
    row = answer(grid, 0, ("stock", "4"))
    assert row["step_us"] == predict(ask(Options(path="stock", concurrency=4))).step_us
    assert (row["point"], row["concurrency"], row["num_gpus"], row["refused"]) == (0, 4, 16, "")
    refused = answer(grid_of({"tp": [16, 12]}), 1, ("12",))
    assert "tp=12" in refused["refused"] and refused["step_us"] is None
    assert "a number" in answer(grid_of({"memory": "x"}), 0, ("x",))["refused"]


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_cut_and_answered_again(tmp_path: Path) -> None:
    grid = grid_of(SMALL)
    store = Store(tmp_path, grid)
    for index, texts in store.missing()[:3]:
        store.add({"point": index, "path": texts[0]})
    store.close()
    with open(tmp_path / "points.jsonl", "ab") as file:
        file.write(b'{"point":3,"pa')
    again = Store(tmp_path, grid)
    assert sorted(again.rows) == [0, 1, 2] and [index for index, _ in again.missing()] == [3, 4, 5]
    again.add({"point": 3})
    again.close()
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert [json.loads(line).get("point") for line in lines] == [None, 0, 1, 2, 3]


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, grid_of(SMALL)).close()
    with pytest.raises(UserError, match="is of another grid, version, machine or model"):
        Store(tmp_path, grid_of({"tp": 8}))
    first = Store(tmp_path, grid_of(SMALL))
    with pytest.raises(UserError, match="another sweep writes"):
        Store(tmp_path, grid_of(SMALL))
    first.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        Store(tmp_path / "file", grid_of(SMALL))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    store = Store(tmp_path, grid_of(SMALL))
    store.add({"point": 0})
    full, kept = open("/dev/full", "wb"), store._file  # noqa: SIM115
    store._file = full  # type: ignore[assignment]
    with pytest.raises(UserError, match="No space left"):
        store.add({"point": 1, "text": "x" * 100_000})
    store._file = kept
    store.close()
    assert sorted(Store(tmp_path, grid_of(SMALL)).rows) == [0]


@pytest.mark.slow
def test_a_killed_sweep_ends_the_same(tmp_path: Path) -> None:
    words = ("--grid", "path=stock,fused", "--grid", "concurrency=1:12", "--grid", "context=1024,8192", "--jobs", "2")
    swept(tmp_path / "whole", *words)
    points, kills = tmp_path / "killed" / "points.jsonl", 0
    for _ in range(20):
        before = points.stat().st_size if points.exists() else 0
        running = swept(tmp_path / "killed", *words, wait=False)
        while running.poll() is None and (not points.exists() or points.stat().st_size <= before + 200):
            time.sleep(0.01)
        if running.poll() is not None:
            break
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        kills += 1
    swept(tmp_path / "killed", *words)
    assert kills >= 3
    for name in ("sweep.csv", "sweep.parquet"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
