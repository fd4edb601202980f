"""The Perfetto trace, read back the way its viewer reads it: by time, one stack of open slices a track."""

from __future__ import annotations

import os
from collections import Counter as Tally
from itertools import pairwise
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from synthetic_timeline import synthetic_timeline
from trace_slices import Slice, kernel_slices, read_slices

from k3sim.errors import UserError
from k3sim.sim.export.lanes import assign_lanes
from k3sim.sim.export.nesting import sublayers
from k3sim.sim.export.perfetto import perfetto_bytes, write_perfetto_trace
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.timeline import Counter, KernelRun, Phase, Span, Timeline


def timeline_of(kernels: list[KernelRun], counters: list[Counter] | None = None) -> Timeline:
    ranks = tuple(sorted({kernel.rank for kernel in kernels}))
    step_ps = max(kernel.end_ps for kernel in kernels)
    return Timeline("h200", len(ranks), ranks, 2, kernels, counters or [], step_ps)


def kernel_of(
    index: int, start_ps: int, end_ps: int, *, stream: str = "main", causes: tuple[int, ...] = ()
) -> KernelRun:
    return KernelRun(index, 0, stream, 0, "kda+moe", f"stage{index}", start_ps, end_ps, causes=causes)


def test_a_kernel_slice_holds_its_phases() -> None:
    kernel = kernel_of(0, 1_999, 9_000)
    kernel.spans = [Span(Phase.LAUNCH, 1_999, 4_000), Span(Phase.WEIGHTS, 4_000, 9_000)]
    kernel.hbm_bytes, kernel.sent_bytes, kernel.layer = 70, 5, 1

    outer, launch, weights = kernel_slices(perfetto_bytes({"fused": timeline_of([kernel])}))

    assert (outer.process, outer.thread, outer.name) == ("fused rank 0", "main", "stage0 L1")
    assert (outer.start_ns, outer.end_ns, outer.depth) == (1, 9, 0)
    assert outer.categories == ["kda+moe", "stage0"]
    assert outer.annotations == {
        "kernel": 0,
        "layer": 1,
        "start_ps": 1_999,
        "end_ps": 9_000,
        "hbm_bytes": 70,
        "l2_bytes": 0,
        "sent_bytes": 5,
    }
    assert (launch.name, launch.start_ns, launch.end_ns, launch.depth) == ("launch", 1, 4, 1)
    assert (weights.name, weights.start_ns, weights.end_ns, weights.depth) == ("weights", 4, 9, 1)


def test_kernels_outside_the_layers_carry_no_layer_number() -> None:
    embedding, head = kernel_of(0, 0, 10), kernel_of(1, 10, 20)
    embedding.layer, head.layer = -1, 2

    slices = kernel_slices(perfetto_bytes({"a": timeline_of([embedding, head])}))

    assert [s.name for s in slices] == ["stage0", "stage1"]


def test_a_measured_kernel_has_no_phases() -> None:
    kernel = kernel_of(0, 0, 9_000)
    kernel.spans = [Span(Phase.RUN, 0, 9_000)]

    assert [s.name for s in kernel_slices(perfetto_bytes({"measured": timeline_of([kernel])}))] == ["stage0 L0"]


def test_overlapping_kernels_take_separate_lanes() -> None:
    kernels = [
        kernel_of(0, 0, 100),
        kernel_of(1, 90, 150),  # overlaps 0
        kernel_of(2, 95, 160),  # overlaps 0 and 1
        kernel_of(3, 100, 200),  # starts as 0 ends: the first lane is free again
        kernel_of(4, 90, 95, stream="side"),
        kernel_of(5, 0, 95, stream="host"),
        kernel_of(6, 0, 95, stream="aux"),
    ]

    lanes = {lane: [kernel.index for kernel in members] for lane, members in assign_lanes(kernels).items()}

    assert lanes == {
        "main": [0, 3],
        "main (overlap 1)": [1],
        "main (overlap 2)": [2],
        "aux": [6],
        "host": [5],
        "side": [4],
    }
    assert list(lanes) == ["main", "main (overlap 1)", "main (overlap 2)", "aux", "host", "side"]
    slices = kernel_slices(perfetto_bytes({"a": timeline_of(kernels)}))
    assert {s.annotations["kernel"]: s.thread for s in slices} == {
        index: lane for lane, members in lanes.items() for index in members
    }


def test_times_below_a_nanosecond_keep_slices_nested() -> None:
    kernels = []
    for index in range(40):  # each lasts 700 ps, so most begin and end within one nanosecond
        kernel = kernel_of(index, 700 * index, 700 * (index + 1))
        kernel.spans = [
            Span(Phase.LAUNCH, kernel.start_ps, kernel.start_ps + 300),
            Span(Phase.WEIGHTS, kernel.start_ps + 300, kernel.end_ps),
        ]
        kernels.append(kernel)

    slices = kernel_slices(perfetto_bytes({"a": timeline_of(kernels)}))

    assert [s.annotations["kernel"] for s in slices if s.depth == 0] == list(range(40))
    # Each phase that reaches into another nanosecond is there, and no other.
    spans = [(span.start_ps // 1000, span.end_ps // 1000) for kernel in kernels for span in kernel.spans]
    assert [(s.start_ns, s.end_ns) for s in slices if s.depth == 1] == [one for one in spans if one[0] < one[1]]


def test_durations_of_a_whole_step_add_up() -> None:
    timeline = synthetic_timeline(num_layers=8)

    slices = kernel_slices(perfetto_bytes({"fused": timeline}))

    kernels = [s for s in slices if s.depth == 0]
    shown = [one for run in timeline.kernels for one in run.spans if one.start_ps // 1000 < one.end_ps // 1000]
    assert len(slices) - len(kernels) == len(shown)
    exact_ps = sum(s.annotations["end_ps"] - s.annotations["start_ps"] for s in kernels)
    assert exact_ps == sum(kernel.duration_ps for kernel in timeline.kernels)
    for lane in {s.thread for s in kernels}:
        on_lane = [s for s in kernels if s.thread == lane]
        assert all(left.end_ns <= right.start_ns for left, right in pairwise(on_lane))


def on_thread(timeline: Timeline, thread: str) -> list[Slice]:
    return [one for one in read_slices(perfetto_bytes({"fused": timeline})) if one.thread == thread]


def test_step_layers_and_sublayers_stand_above_kernels() -> None:
    timeline = synthetic_timeline(num_layers=4)
    slices = on_thread(timeline, "step")
    step, *inner = slices
    assert (step.name, step.depth, step.start_ns) == ("fused step", 0, 0)
    assert step.end_ns == timeline.step_ps // 1000
    leaves = [one for one, after in zip(slices, [*slices[1:], step], strict=True) if after.depth <= one.depth]
    assert all(left.end_ns == right.start_ns for left, right in pairwise(leaves))  # they tile the step
    assert (leaves[0].start_ns, leaves[-1].end_ns) == (0, step.end_ns)
    layers = [one for one in inner if one.name.startswith("layer ")]
    assert [one.name.split()[1] for one in layers] == ["0", "1", "2", "3"]
    assert {one.depth for one in layers} == {1}
    assert {one.name for one in leaves} <= {"kda", "mla", "moe", "dense", "start", "head"}


def test_the_last_main_kernel_ends_a_sublayer() -> None:
    ends = {"attn_res.mixer": 100, "kda.o_proj": 250, "attn_res.ffn": 300, "moe.experts": 900}
    kernels = [kernel_of(number, 0, 1000 * end) for number, end in enumerate(ends.values())]
    for kernel, stage in zip(kernels, ends, strict=True):
        kernel.stage = stage
    late = kernel_of(4, 0, 400_000, stream="aux")
    late.stage = "attn_res.mixer"
    found = sublayers([*kernels, late], 1, 950_000)
    assert [(one.layer, one.name, one.start_ps, one.end_ps) for one in found] == [
        (0, "kda", 0, 250_000),
        (0, "moe", 250_000, 950_000),
    ]


def test_the_critical_path_has_its_own_track() -> None:
    timeline = synthetic_timeline(num_ranks=2, num_layers=4)
    slices = on_thread(timeline, "critical path")
    kernels, parts = ([one for one in slices if one.depth == depth] for depth in (0, 1))
    assert {one.process for one in slices} == {f"fused rank {timeline.critical_rank}"}
    assert sum(one.end_ns - one.start_ns for one in kernels) == timeline.step_ps // 1000
    assert {one.name for one in parts} <= {part.word for part in Part}
    waits = waits_ps(critical_path(timeline))
    for part, total_ps in waits.items():
        shown_ns = sum(one.end_ns - one.start_ns for one in parts if one.name == part.word)
        assert shown_ns == pytest.approx(total_ps / 1000, abs=len(parts))


def test_each_cause_is_one_arrow() -> None:
    # Kernel 1 starts first and waits for kernel 0 of another stream; kernel 2 waits for both.
    kernels = [
        kernel_of(0, 5_000, 9_000, stream="aux"),
        kernel_of(1, 0, 20_000, causes=(0,)),
        kernel_of(2, 20_000, 30_000, causes=(0, 1, 2)),  # 2: it polls for its own data too
    ]

    slices = {s.annotations["kernel"]: s for s in kernel_slices(perfetto_bytes({"a": timeline_of(kernels)}))}

    source = {flow: index for index, s in slices.items() for flow in s.flows_out}
    target = {flow: index for index, s in slices.items() for flow in s.flows_in}
    assert sorted((source[flow], target[flow]) for flow in source) == [(0, 1), (0, 2), (1, 2)]


def test_arrows_cross_ranks_and_never_join_two_timelines() -> None:
    def two_ranks() -> Timeline:
        sender, receiver = kernel_of(0, 0, 10_000), kernel_of(1, 0, 12_000, causes=(0,))
        receiver.rank = 1
        return timeline_of([sender, receiver])

    slices = kernel_slices(perfetto_bytes({"stock": two_ranks(), "fused": two_ranks()}))

    assert [s.process for s in slices] == ["stock rank 0", "stock rank 1", "fused rank 0", "fused rank 1"]
    senders, receivers = slices[::2], slices[1::2]
    assert [s.flows_out for s in senders] == [s.flows_in for s in receivers]
    assert senders[0].flows_out != senders[1].flows_out


def test_processes_and_threads_have_distinct_ids() -> None:
    timeline = synthetic_timeline(num_ranks=3, num_layers=2)
    trace = Trace.FromString(perfetto_bytes({"stock": timeline, "fused": timeline}))
    tracks = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]

    pids = [track.process.pid for track in tracks if track.HasField("process")]
    tids = [track.thread.tid for track in tracks if track.HasField("thread")]
    assert len(pids) == len(set(pids)) == 6
    assert len(tids) == len(set(tids))
    assert len({track.uuid for track in tracks}) == len(tracks)
    assert Tally(track.thread.pid for track in tracks if track.HasField("thread")).keys() == set(pids)


def test_counters_integrate_to_the_bytes_read() -> None:
    hbm = Counter(0, "hbm", 8_000_000, ((2_000_000, 4_000_000), (5_000_000, 1_500_500), (9_000_000, 0)))
    egress = Counter(0, "nvlink egress", 900_000, ((0, 900_000),))  # still sending when the step ends
    timeline = timeline_of([kernel_of(0, 0, 10_000_000)], [hbm, egress])

    trace = Trace.FromString(perfetto_bytes({"fused": timeline}))

    assert _integrated_bytes(trace) == {"HBM rate (GB/s)": 18_002_000, "NVLink egress rate (GB/s)": 9_000_000}
    assert hbm.bytes_until(10_000_000) == 18_002_000


def test_counters_of_a_step_match_its_kernels() -> None:
    timeline = synthetic_timeline(num_layers=8)

    (read_bytes,) = _integrated_bytes(Trace.FromString(perfetto_bytes({"fused": timeline}))).values()

    assert read_bytes == pytest.approx(sum(kernel.hbm_bytes for kernel in timeline.kernels), rel=1e-4)


def _integrated_bytes(trace: Trace) -> dict[str, float]:
    names = {
        packet.track_descriptor.uuid: packet.track_descriptor.name
        for packet in trace.packet
        if packet.track_descriptor.HasField("counter")
    }
    samples: dict[str, list[tuple[int, float]]] = {name: [] for name in names.values()}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == TrackEvent.TYPE_COUNTER:
            samples[names[event.track_uuid]].append((packet.timestamp, event.double_counter_value))
    totals = {}
    for name, steps in samples.items():
        assert steps[0] == (0, steps[0][1])
        assert steps[-1][1] == 0, "the rate must fall to zero at the end of the step"
        # GB/s is bytes per nanosecond
        totals[name] = sum(rate * (until_ns - from_ns) for (from_ns, rate), (until_ns, _) in pairwise(steps))
    return totals


def test_the_same_timelines_give_the_same_bytes() -> None:
    def bytes_of_fresh_timelines() -> bytes:
        return perfetto_bytes({label: synthetic_timeline(num_layers=4) for label in ("stock", "fused")})

    assert bytes_of_fresh_timelines() == bytes_of_fresh_timelines()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.pftrace"
    path.write_bytes(b"old")

    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"cannot write .*step\.pftrace: Permission denied"):
        write_perfetto_trace({"fused": synthetic_timeline(num_layers=1)}, path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["step.pftrace"]
    assert path.read_bytes() == b"old"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "step.pftrace"
    with pytest.raises(UserError, match=r"cannot write .*: No such file or directory"):
        write_perfetto_trace({"fused": synthetic_timeline(num_layers=1)}, path)


def test_a_trace_of_sixteen_ranks_stays_small(tmp_path: Path) -> None:
    timeline = synthetic_timeline(num_ranks=16)  # 28,640 kernels, 238,048 phases

    write_perfetto_trace({"fused": timeline}, tmp_path / "step.pftrace")

    assert (tmp_path / "step.pftrace").stat().st_size < 20e6
