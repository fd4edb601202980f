"""The launch queue: graph edges, PDL triggers, tasks, the host and side streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, TINY, call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps

Patch = pytest.MonkeyPatch


def test_a_graph_edge_is_completion_and_launch(monkeypatch: Patch) -> None:
    timeline = simulate(monkeypatch, {"a": stream(1000), "b": stream(2000)}, [call(0, "a"), call(1, "b")], num_ranks=1)
    assert spans(kernel(timeline, "a")) == [("launch", 0, 1000), ("ramp", 1000, 1100), ("weights", 1100, 2100)]
    assert spans(kernel(timeline, "b")) == [
        ("release", 2100, 2600),
        ("launch", 2600, 3600),
        ("ramp", 3600, 3700),
        ("weights", 3700, 5700),
    ]
    assert timeline.step_ps == 5700
    assert waits_ps(critical_path(timeline)) == {
        Part.WEIGHTS: 3000,
        Part.LAUNCH: 2000,
        Part.RAMP_DRAIN: 700,
    }


def test_dispatching_the_first_wave_lengthens_the_launch(monkeypatch: Patch) -> None:
    machine = replace(TINY, block_dispatch_s=2 * PS)
    # 200 blocks, of which ten on each of the ten SMs fit at once: 100 are dispatched before the first wave runs.
    grid = work(Pass(reads=(reads(1000),)), num_blocks=200, max_blocks_per_sm=32)
    timeline = simulate(monkeypatch, {"a": grid}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a"))[0] == ("launch", 0, 1200)


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        # The producer runs from 1000, streams from 1100 to 4100 and reduces until 4107.
        ("start", [("launch", 1000, 2000), ("dependency", 2000, 4107), ("release", 4107, 4607)]),
        ("stream", [("launch", 4100, 5100)]),  # the producer's flush is over at 4607, behind the launch
        ("end", [("launch", 4107, 5107)]),
    ],
)
def test_a_pdl_kernel_starts_at_its_producers_trigger(
    monkeypatch: Patch, trigger: str, expected: list[tuple[str, int, int]]
) -> None:
    works = {"a": stream(3000, num_block_reductions=1), "b": stream(100)}
    timeline = simulate(monkeypatch, works, [call(0, "a", trigger=trigger), call(1, "b", launch="pdl")], num_ranks=1)
    assert kernel(timeline, "a").end_ps == 4107
    begun_ps = expected[-1][2]
    assert spans(kernel(timeline, "b")) == [
        *expected,
        ("ramp", begun_ps, begun_ps + 100),
        ("weights", begun_ps + 100, begun_ps + 200),
    ]


def test_a_pdl_kernel_waits_for_sms(monkeypatch: Patch) -> None:
    large = work(Pass(reads=(reads(500, early=True),)), smem_bytes_per_block=600)
    works = {"a": work(Pass(reads=(reads(3000),)), smem_bytes_per_block=600), "b": large}
    timeline = simulate(monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], num_ranks=1)
    assert spans(kernel(timeline, "b")) == [
        ("sm slots", 1000, 4100),
        ("launch", 4100, 5100),
        ("ramp", 5100, 5200),
        ("weights", 5200, 5700),
    ]


def test_a_task_is_handed_over_by_a_counter(monkeypatch: Patch) -> None:
    works = {"a": stream(1000), "b": work(Pass(reads=(reads(300, early=True),), num_block_reductions=1))}
    calls = [call(0, "a", launch="task", trigger="start"), call(1, "b", launch="task", trigger="start")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    # Both stream from 100 at half speed: b is through at 700, a, with 700 left then, at 1400.
    assert spans(kernel(timeline, "a")) == [("ramp", 0, 100), ("weights", 100, 1400)]
    assert spans(kernel(timeline, "b")) == [
        ("dependency", 0, 1400), ("barrier", 1400, 1440), ("block reduction", 1440, 1447)
    ]  # fmt: skip


def test_the_hosts_graph_needs_no_completion(monkeypatch: Patch) -> None:
    host = {"num_launches": 2, "num_graph_launches": 1}
    calls = [call(0, "host", stream="host", launch="host", shape=host), call(1, "a", after=(0,))]
    timeline = simulate(monkeypatch, {"a": stream(1000)}, calls, num_ranks=1)
    assert spans(kernel(timeline, "host")) == [("host", 0, 10_300)]
    assert spans(kernel(timeline, "a"))[0] == ("launch", 10_300, 11_300)
    assert waits_ps(critical_path(timeline))[Part.HOST] == 10_300


def test_a_task_behind_the_host_needs_no_counter(monkeypatch: Patch) -> None:
    host = {"num_launches": 1, "num_graph_launches": 0}
    calls = [
        call(0, "host", stream="host", launch="host", shape=host),
        call(1, "a", launch="task", trigger="start", after=(0,)),
    ]
    timeline = simulate(monkeypatch, {"a": stream(1000)}, calls, num_ranks=1)
    assert spans(kernel(timeline, "a")) == [("ramp", 5000, 5100), ("weights", 5100, 6100)]


def test_a_side_stream_joins_at_its_end(monkeypatch: Patch) -> None:
    works = {"a": stream(100), "side": stream(3000), "b": stream(100), "c": stream(100)}
    calls = [
        call(0, "a"),
        call(1, "side", stream="aux", after=(0,)),
        call(2, "b"),
        call(3, "c", launch="pdl", after=(1,)),
    ]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    # a ends at 1200; both others stream from 2800, b to 3000 and side, which lost 100, to 5900.
    assert kernel(timeline, "b").end_ps == 3000
    side = kernel(timeline, "side")
    assert spans(side)[-1:] == [("weights", 2800, 5900)]
    joined = kernel(timeline, "c")
    # Its edge is programmatic: the end of side lets it in, and side's stores are there before its first instruction.
    assert spans(joined)[0] == ("launch", 5900, 6900)
    assert joined.launched_by == side.index
    assert waits_ps(critical_path(timeline))[Part.WEIGHTS] == 100 + 3100 + 100


def test_a_launch_that_waited_starts_a_refill_later(monkeypatch: Patch) -> None:
    machine = replace(TINY, pdl_trigger_to_launch_s=800 * PS, block_refill_s=300 * PS, kernel_prologue_s=50 * PS)
    large = work(Pass(reads=(reads(3000),)), smem_bytes_per_block=600)
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    timeline = simulate(monkeypatch, {"a": large, "b": large}, calls, machine, num_ranks=1)
    assert kernel(timeline, "a").end_ps == 4150
    # Launched long ago: a block starts 300 after its SM is free, and its producer's flush of 500 is over at 4650.
    assert spans(kernel(timeline, "b"))[:3] == [
        ("sm slots", 1050, 4150),
        ("launch", 4150, 4500),
        ("release", 4500, 4650),
    ]


def test_a_trigger_takes_its_own_time_to_launch(monkeypatch: Patch) -> None:
    machine = replace(TINY, pdl_trigger_to_launch_s=1700 * PS)
    works = {"a": stream(3000), "b": stream(100)}
    timeline = simulate(
        monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], machine, num_ranks=1
    )
    assert spans(kernel(timeline, "b"))[0] == ("launch", 1000, 2700)


def test_the_second_node_behind_one_starts_later(monkeypatch: Patch) -> None:
    machine = replace(TINY, fork_s=70 * PS)
    works = {name: stream(100) for name in "abc"}
    calls = [call(0, "a"), call(1, "b"), call(2, "c", stream="aux", after=(0,))]
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1)
    begun = {stage: spans(kernel(timeline, stage))[1][1] for stage in "bc"}
    assert sorted(begun.values()) == [1200 + 500, 1200 + 570]
