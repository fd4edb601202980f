"""Steps, waits, classes, comparison and alignment on small traces whose figures can be counted by hand."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from k3sim.calibrate.traces.classes import KernelNames, read_patterns, short_name
from k3sim.calibrate.traces.comparison import compare
from k3sim.calibrate.traces.events import PS_PER_US, Trace
from k3sim.calibrate.traces.explained import document_of, explain_trace
from k3sim.calibrate.traces.json_stream import JsonStream
from k3sim.calibrate.traces.reader import read_trace
from k3sim.calibrate.traces.timeline import timeline_of_trace
from k3sim.calibrate.traces.torch_reader import as_ps
from k3sim.calibrate.traces.waits import length, overlap, union
from k3sim.errors import UserError
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps


def kernel(name: str, start: float, us: float, stream: int = 7, correlation: int = 1, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": correlation, **more}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": us, "args": args}


def call(name: str, start: float, us: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": us, "args": args}


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def saved(events: list[dict[str, Any]], name: str = "trace.json", **header: Any) -> str:
        (tmp_path / name).write_text(json.dumps({"traceEvents": events, **header}))
        return str(tmp_path / name)

    return saved


def test_times_keep_their_nanoseconds() -> None:
    assert as_ps("1712345678901234.567") == 1712345678901234567000
    assert as_ps("-0.001") == -1000
    assert as_ps(12) == 12 * PS_PER_US
    assert as_ps("1e3") == 1000 * PS_PER_US
    assert as_ps("1e400") is None and as_ps(True) is None and as_ps("x") is None and as_ps(10**40) is None


def test_overlaps_count_once() -> None:
    intervals = [(0, 10), (8, 12), (5, 6)]
    assert union(intervals) == [(0, 12)]
    assert length(union([*intervals, (1, 2)])) == 12
    assert overlap([(0, 10), (20, 30)], [(5, 25)]) == 10


def test_parts_and_idle_sum_to_the_step(save: Any) -> None:
    path = save(
        [
            kernel("gemm", 0, 10),
            kernel("gemm", 8, 4),
            kernel("ncclDevKernel_AllReduce", 11, 5, stream=8),
            kernel("Memcpy DtoD", 18, 2),
            kernel("gemm", 25, 1),
        ]
    )
    explained = explain_trace(read_trace([path]))
    waits = explained.slowest.median_waits
    assert (waits.span_ps, waits.busy_ps, waits.idle_ps) == tuple(us * PS_PER_US for us in (26, 19, 7))
    assert waits.hidden_communication_ps == 1 * PS_PER_US
    assert waits.exposed_communication_ps == 4 * PS_PER_US
    assert waits.overlap_ps == 2 * PS_PER_US
    parts = waits.compute_ps + waits.exposed_communication_ps + waits.exposed_copy_ps + waits.idle_ps
    assert parts == waits.span_ps
    assert sum(waits.gaps_ps.values()) == waits.idle_ps
    segments = critical_path(timeline_of_trace(explained)[0])
    assert sum(waits_ps(segments).values()) == waits.span_ps


def test_host_and_launch_gaps_are_told_apart(save: Any) -> None:
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        kernel("gemm", 5, 10, correlation=1),
        call("cudaLaunchKernel", 20, 2, 2),
        kernel("gemm", 26, 4, correlation=2),
        call("cudaGraphLaunch", 10, 3, 3),
        kernel("a", 33, 1, correlation=3, **{"graph node id": 1}),
        kernel("b", 36, 1, correlation=3, **{"graph node id": 2}),
    ]
    waits = explain_trace(read_trace([save(events)])).slowest.median_waits
    assert waits.gaps_ps == {
        "host": 5 * PS_PER_US,
        "eager launch": 6 * PS_PER_US,
        "graph launch": 5 * PS_PER_US,
    }


def repeated(count: int, slow: int = -1, names: tuple[str, ...] = ("a_gemm", "rms_norm", "a_gemm", "head")) -> Any:
    events, now = [], 0.0
    for number in range(count):
        for place, name in enumerate(names):
            us = 4.0 + (0.5 if number % 2 else 0.0) + (100.0 if number == slow and not place else 0.0)
            events.append(kernel(name, now, us, correlation=0))
            now += us + 1.0
        now += 30.0
    return events


def test_steps_begin_behind_the_longest_gap(save: Any) -> None:
    steps = explain_trace(read_trace([save(repeated(8, slow=4))])).slowest
    assert [len(step.kernels) for step in steps.steps.steps] == [4] * 8
    assert [step.kernels[0].name for step in steps.steps.steps] == ["a_gemm"] * 8
    assert "repetition" in steps.steps.how
    assert [number for number, _ in steps.outliers] == [4]


def test_steps_of_equal_layers_are_found(save: Any) -> None:
    steps = explain_trace(read_trace([save(repeated(5, names=("a_gemm", "rms_norm") * 4))])).slowest.steps
    assert [len(step.kernels) for step in steps.steps] == [8] * 5


def test_replays_of_a_graph_are_steps(save: Any) -> None:
    events = [kernel("warm_up", 0, 1, correlation=9)]
    for number in range(3):
        begin = 100.0 * (number + 1)
        events.append(call("cudaGraphLaunch", begin - 20, 5, 20 + number))
        events += [kernel(f"k{place}", begin + 5 * place, 4, correlation=20 + number) for place in range(5)]
        events.append(kernel("sample", begin + 40, 2, correlation=40 + number))
    steps = explain_trace(read_trace([save(events)])).slowest.steps
    assert [len(step.kernels) for step in steps.steps] == [6, 6, 6]


def test_a_named_kernel_or_range_begins_steps(save: Any) -> None:
    path = save([*repeated(3), {**kernel("mine", 0, 46), "cat": "gpu_user_annotation"}])
    trace = read_trace([path])
    assert len(explain_trace(trace, step_kernel=re.compile("head")).slowest.steps.steps) >= 2
    steps = explain_trace(trace, nvtx=re.compile("^mine$")).slowest.steps.steps
    assert [len(step.kernels) for step in steps] == [4]
    for given in ({"step_kernel": re.compile("nothing")}, {"nvtx": re.compile("nothing")}):
        with pytest.raises(UserError, match="matches 'nothing'"):
            explain_trace(trace, **given)


def test_nested_ranges_are_one_step(save: Any) -> None:
    marks = [{**kernel("mine", 0, 100 - number), "cat": "user_annotation"} for number in range(3)]
    path = save([*repeated(2), *marks])
    steps = explain_trace(read_trace([path]), nvtx=re.compile("mine")).slowest.steps
    assert len(steps.steps) + len(steps.others) == 1


def test_as_many_steps_as_kernels_stay_cheap(save: Any) -> None:
    path = save([kernel("k", 2.0 * number, 1.0, correlation=0) for number in range(20_000)])
    explained = explain_trace(read_trace([path]))
    assert document_of(explained)["ranks"][0]["steps"] == 20_000
    different = save([kernel(f"k{number}", 2.0 * number, 1.0, correlation=0) for number in range(20_000)], "b.json")
    assert explain_trace(read_trace([different]), step_kernel=re.compile("k")).slowest.steps.others


def two_ranks(save: Any, shift: float) -> Trace:
    paths = []
    for rank in range(2):
        events, now = [], 0.0
        for number in range(5):
            late = 3.0 if (number + rank) % 2 else 0.0
            own = late + 2.0
            events += [kernel("gemm", now, own), kernel("ncclAllReduce", now + own, 10.0 - own)]
            now += 12.0
        moved = [{**event, "ts": event["ts"] + shift * rank} for event in events]
        paths.append(save(moved, f"rank{rank}.json", distributedInfo={"rank": rank}))
    return read_trace(paths)


@pytest.mark.parametrize("shift", [0.0, 5000.0])
def test_slower_peers_are_seen_across_ranks(save: Any, shift: float) -> None:
    trace = two_ranks(save, shift)
    assert trace.ranks[1].clock_shift_ps == -shift * PS_PER_US
    explained = explain_trace(trace, step_kernel=re.compile("gemm"))
    late = [waits.slower_peer_ps for waits in explained.ranks[0].waits]
    assert late == [3 * PS_PER_US, 0, 3 * PS_PER_US, 0, 3 * PS_PER_US]
    whole = explain_trace(trace, step_kernel=re.compile("^gemm$"))
    assert document_of(whole)["ranks"][0]["slower_peer"]["us"] is not None


def test_a_slower_peer_is_on_the_critical_path(save: Any) -> None:
    explained = explain_trace(two_ranks(save, 0.0))
    found = waits_ps(critical_path(timeline_of_trace(explained)[0]))
    assert found[Part.SLOWER_PEER] > 0


def test_a_rank_is_given_once(save: Any) -> None:
    path = save(repeated(3), distributedInfo={"rank": 2})
    with pytest.raises(UserError, match="rank 2"):
        read_trace([path, path])


def test_changes_within_noise_are_told(save: Any) -> None:
    before = explain_trace(read_trace([save(repeated(9), "a.json")]))
    faster = [{**event, "dur": event["dur"] / 2} if event["name"] == "head" else event for event in repeated(9)]
    after = explain_trace(read_trace([save(faster, "b.json")]))
    rows = {row["what"]: row for row in compare(before, after)["classes"]}
    assert rows["other"]["change_us"] == pytest.approx(-2.0, abs=0.3)
    assert rows["other"]["beyond_noise"] is True
    assert rows["GEMM"]["change_us"] == 0 and rows["GEMM"]["beyond_noise"] is False


@pytest.mark.parametrize(
    ("name", "short", "word"),
    [
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(int*)", "cross_device_reduce_1stage", "collective"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "GEMM"),
        ("_ZN4vllm15rms_norm_kernelIfEEvPT_", "rms_norm_kernel", "norm"),
        ("void flash::flash_fwd_splitkv_kernel<F<1>>(P)", "flash_fwd_splitkv_kernel", "attention"),
        ("moe::dev::routing::routingMainKernel", "routingMainKernel", "MoE"),
        ("triton_poi_fused__to_copy_3", "triton_poi_fused__to_copy_3", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)", "copy"),
    ],
)
def test_names_are_shortened_and_classed(name: str, short: str, word: str) -> None:
    assert short_name(name) == short
    assert KernelNames().of(name)[2] == word


def test_patterns_of_the_user_come_first(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"gemm": "mine"}')
    assert KernelNames(read_patterns(tmp_path / "mine.json")).of("gemm_1")[2] == "mine"
    (tmp_path / "bad.json").write_text('{"(": "mine", "a": 3}')
    with pytest.raises(UserError, match=r"regular expression.*no class"):
        read_patterns(tmp_path / "bad.json")


def test_a_cut_file_gives_what_it_holds(save: Any, tmp_path: Path) -> None:
    whole = Path(save(repeated(4))).read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) * 3 // 4])
    trace = read_trace([str(tmp_path / "cut.json")])
    assert 8 <= trace.num_kernels < 16
    assert "cut off" in trace.notes[0]


def test_events_come_whole_over_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3sim.calibrate.traces.open_file.CHUNK_BYTES", 7)
    events = [{"name": "é" * number, "n": number, "x": 0.25} for number in range(50)]
    (tmp_path / "small.json").write_text(json.dumps({"a": {"b": [1, 2]}, "traceEvents": events, "z": 1234567}))
    stream = JsonStream(tmp_path / "small.json", "traceEvents")
    assert list(stream.events()) == [{**event, "x": "0.25"} for event in events]
    assert stream.header == {"a": {"b": [1, 2]}, "z": 1234567} and stream.notes == []


def test_an_nsys_export_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "step.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table StringIds(id integer, value text)")
        database.execute(
            "create table CUPTI_ACTIVITY_KIND_KERNEL(start integer, end integer, deviceId integer, streamId integer,"
            " correlationId integer, shortName integer, graphNodeId integer)"
        )
        for number, (start, us) in enumerate([(0, 12), (13, 4), (18, 6), (25, 16)], 1):
            database.execute("insert into StringIds values(?,?)", (number, f"k{number}"))
            row = (start * 1000, (start + us) * 1000, 0, 7, 7, number, number)
            database.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values(?,?,?,?,?,?,?)", row)
    database.close()
    waits = explain_trace(read_trace([str(path)])).slowest.median_waits
    assert (waits.busy_ps, waits.idle_ps) == (38 * PS_PER_US, 3 * PS_PER_US)
    with sqlite3.connect(path) as database:
        database.execute("alter table CUPTI_ACTIVITY_KIND_KERNEL rename to hidden")
        database.execute("create view CUPTI_ACTIVITY_KIND_KERNEL as select * from hidden")
    database.close()
    with pytest.raises(UserError, match="no plain table"):
        read_trace([str(path)])


def test_rocprof_grids_are_in_blocks(tmp_path: Path) -> None:
    info = {"kernel_id": 5, "agent_id": {"handle": 2}, "queue_id": {"handle": 3}}
    info |= {"workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 1024, "y": 2, "z": 1}}
    rows = [{"start_timestamp": 1000 * n, "end_timestamp": 1000 * n + 500, "dispatch_info": info} for n in range(3)]
    process = {
        "kernel_symbols": [{"kernel_id": 5, "formatted_kernel_name": "Cijk_Alik.kd"}],
        "buffer_records": {"kernel_dispatch": rows},
    }
    (tmp_path / "roc.json").write_text(json.dumps({"rocprofiler-sdk-tool": [process]}))
    found = read_trace([str(tmp_path / "roc.json")]).ranks[0].kernels
    assert [one.grid for one in found] == [(4, 2, 1)] * 3
    assert found[0].kernel_class == "GEMM" and found[1].start_ps == PS_PER_US


def test_lines_of_nsys_are_found_by_keys(tmp_path: Path) -> None:
    kernel_row = {"shortName": "1", "gridX": 4, "gridY": 1, "gridZ": 1, "graphNodeId": "12"}
    lines = [
        {"data": ["zero", "gemm_kernel"]},
        {"Type": 79, "CudaEvent": {"startNs": "1000", "endNs": "3000", "streamId": "7", "kernel": kernel_row}},
        {"Type": 79, "CudaEvent": {"startNs": "4000", "endNs": "5000", "streamId": "7", "kernel": kernel_row}},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    found = read_trace([str(tmp_path / "trace.jsonl")]).ranks[0].kernels
    assert [one.name for one in found] == ["gemm_kernel"] * 2
    assert found[1].start_ps == 4 * PS_PER_US and found[0].graph_node == 12
