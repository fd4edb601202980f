"""Traces that are damaged or hostile: an answer or one line and status 2, bounded memory, no file outside ``--out``."""

from __future__ import annotations

import gzip
import json
import os
import random
import sqlite3
import sys
from pathlib import Path

import pytest

from k3sim.calibrate.traces import json_stream, open_file
from k3sim.calibrate.traces.reader import read_trace
from k3sim.cli import main
from k3sim.errors import UserError

SEED = 20261201
MUTATIONS = int(os.environ.get("K3SIM_TRACE_MUTATIONS", "150"))  # of each form
Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main returns by SystemExit")


def torch_bytes() -> bytes:
    args = {"device": 0, "stream": 7, "correlation": 7, "graph node id": 1, "grid": [1, 2, 3], "block": [4, 5, 6]}
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9.5, "args": {"correlation": 7}}
    ]
    events += [
        {"ph": "X", "cat": "kernel", "name": f"k{number % 3}", "ts": 10 + 5 * number, "dur": 4.125, "args": args}
        for number in range(12)
    ]
    events.append({"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 30, "tid": "Spans"})
    header = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "deviceProperties": [{"id": 0, "name": "GPU"}]}
    return json.dumps({**header, "traceEvents": events}).encode()


def rocprof_bytes() -> bytes:
    size = {"x": 64, "y": 1, "z": 1}
    info = {"kernel_id": 1, "agent_id": {"handle": 1}, "workgroup_size": size, "grid_size": size}
    rows = [{"start_timestamp": n * 1000, "end_timestamp": n * 1000 + 9, "dispatch_info": info} for n in range(9)]
    process = {"kernel_symbols": [{"kernel_id": 1, "kernel_name": "k"}], "buffer_records": {"kernel_dispatch": rows}}
    return json.dumps({"rocprofiler-sdk-tool": [process]}).encode()


def lines_bytes() -> bytes:
    kernel = {"shortName": "1", "gridX": 4, "gridY": 1, "gridZ": 1}
    events = [{"startNs": str(n * 1000), "endNs": str(n * 1000 + 5), "kernel": kernel} for n in range(9)]
    lines = [{"data": ["a", "b"]}, *({"Type": 79, "CudaEvent": event} for event in events)]
    return "\n".join(json.dumps(line) for line in lines).encode()


def sqlite_bytes(tmp_path: Path) -> bytes:
    path = tmp_path / "whole.sqlite"
    database = sqlite3.connect(path)
    database.execute("create table StringIds(id integer, value text)")
    database.execute("insert into StringIds values(1, 'gemm')")
    columns = "start integer, end integer, deviceId integer, streamId integer, correlationId integer, shortName integer"
    database.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL({columns})")
    for number in range(9):
        row = (number * 1000, number * 1000 + 500, 0, 7, 7, 1)
        database.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values(?,?,?,?,?,?)", row)
    database.commit()
    database.close()
    return path.read_bytes()


STRANGE = (b"NaN", b"-1", b"1e999", b"9" * 400, b"null", b"[]", b"{}", b'"', b"\\", b"\x00", b"\xff", b"\xed\xa0\x80",
           b"18446744073709551616", b'"\\ud800"', b"[" * 2000, b"1e-999", b"true", b"0.00001", b"}", b",")  # fmt: skip


def mutated(whole: bytes, random_: random.Random) -> bytes:
    found = bytearray(whole)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(found) + 1)
        end = min(len(found), at + random_.randint(0, 12))
        match random_.randrange(5):
            case 0:
                found[at:end] = random_.choice(STRANGE)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at : at + random_.randint(0, 200)]
            case 3:
                del found[at:]
            case _:
                found[at:end] = bytes(random_.randrange(256) for _ in range(end - at))
        if not found:
            break
    return bytes(found)


@pytest.mark.parametrize("form", ["torch", "gzip", "rocprof", "lines", "sqlite"])
def test_mutated_traces_are_answered_or_refused(form: str, tmp_path: Path, capsys: Capture) -> None:
    whole = {
        "torch": torch_bytes,
        "gzip": lambda: gzip.compress(torch_bytes()),
        "rocprof": rocprof_bytes,
        "lines": lines_bytes,
        "sqlite": lambda: sqlite_bytes(tmp_path),
    }[form]()
    random_ = random.Random(f"{SEED} {form}")
    given = tmp_path / "given"
    given.mkdir()
    statuses = set()
    for number in range(MUTATIONS):
        content = mutated(whole, random_) if number else whole
        (given / "trace").write_bytes(content)
        status = run("explain", str(given / "trace"), "--out", str(tmp_path / "out"), "--json")
        captured = capsys.readouterr()
        assert status in (0, 2), (number, content[:200])
        assert "Traceback" not in captured.err
        if status == 0:
            json.loads(captured.out)
        else:
            assert captured.out == "" and captured.err.count("\n") == 1 and len(captured.err) < 1000
        statuses.add(status)
    assert [path.name for path in given.iterdir()] == ["trace"]
    assert statuses == {0, 2}


def test_names_that_cannot_be_written_are_cleaned(tmp_path: Path, capsys: Capture) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "k\ud800\n\x1b[31m<q1>", "ts": 5 * number, "dur": 4} for number in range(4)
    ]
    document = {"deviceProperties": [{"name": "G\udfff"}], "traceEvents": events}
    (tmp_path / "trace.json").write_text(json.dumps(document))
    assert run("explain", str(tmp_path / "trace.json"), "--out", str(tmp_path / "out")) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "<q1>" not in (tmp_path / "out" / "explain.html").read_text()


def test_times_beyond_any_trace_are_refused(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": number * 10**15, "dur": 1} for number in range(4)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(UserError, match="days"):
        read_trace([str(tmp_path / "trace.json")])


def test_a_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "RATIO_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(open_file, "CHUNK_BYTES", 1 << 18)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20)))
    with pytest.raises(UserError, match="100 times its size"):
        read_trace([str(path)])


def test_kernels_beyond_the_limit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3sim.calibrate.traces.torch_reader.MOST_KERNELS", 5)
    (tmp_path / "trace.json").write_bytes(torch_bytes())
    trace = read_trace([str(tmp_path / "trace.json")])
    assert trace.num_kernels == 5 and "first 5 kernels" in trace.notes[0]


def test_an_endless_value_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MOST_VALUE_CHARACTERS", 1 << 16)
    monkeypatch.setattr(open_file, "CHUNK_BYTES", 1 << 14)
    for start in (b'{"traceEvents": [{"name": "', b'{"traceEvents": ['):
        path = tmp_path / "long.json"
        path.write_bytes(start + b"9" * (1 << 18))
        with pytest.raises(UserError, match=r"longer than|4300 digits"):
            read_trace([str(path)])


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs there")
def test_what_is_no_file_is_refused(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cpu.json").write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1}]}')
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name in ("fifo", "empty", "text", "cpu.json", "other.json", "absent", ""):
        assert run("explain", str(tmp_path / name), "--out", str(tmp_path / "out")) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
    assert run("explain", "/dev/zero") == 2
    assert not (tmp_path / "out").exists()


def test_a_graph_trace_without_nodes_says_so(tmp_path: Path) -> None:
    path = tmp_path / "graph.sqlite"
    database = sqlite3.connect(path)
    database.execute("create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE(start integer, end integer)")
    database.execute("insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values(1, 2)")
    database.commit()
    database.close()
    with pytest.raises(UserError, match="--cuda-graph-trace=node"):
        read_trace([str(path)])
