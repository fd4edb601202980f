"""What bounded a stream: HBM, bytes in flight, sharing."""

from __future__ import annotations

import pytest
from tiny import call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass, ReadKind
from k3sim.sim.components.memory import StreamLimit
from k3sim.sim.components.stream import Stream
from k3sim.sim.timeline.timeline import Phase

Patch = pytest.MonkeyPatch


def test_too_few_bytes_in_flight_have_their_phase(monkeypatch: Patch) -> None:
    shallow = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=250)
    timeline = simulate(monkeypatch, {"a": shallow}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("bytes in flight", 2100, 5100)]


def test_two_streams_share_hbm_by_bytes_in_flight(monkeypatch: Patch) -> None:
    shallow = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=250)
    works = {"a": stream(3000), "b": shallow}
    timeline = simulate(monkeypatch, works, [call(0, "a"), call(1, "b", stream="aux")], num_ranks=1)
    # a has 10,000 bytes in flight and b 2500: four fifths against one. b alone would draw 0.25.
    assert kernel(timeline, "a").end_ps == 4850
    # b has 250 bytes left and draws 0.25 now.
    assert kernel(timeline, "b").end_ps == 5850
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 4850)]


def test_state_is_told_from_weights(monkeypatch: Patch) -> None:
    mixed = work(Pass(reads=(reads(600), reads(200, kind=ReadKind.KV_STATE)), num_dependent_loads=2))
    timeline = simulate(monkeypatch, {"a": mixed}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [
        ("ramp", 1000, 1100),
        ("weights", 1100, 1700),
        ("kv and state", 1700, 1900),
    ]


def test_bounds_divide_the_time_by_formula() -> None:
    stream = Stream(hbm_bytes=1000, kv_state_bytes=250, hbm_end_ps=9000)
    limit = StreamLimit(hbm_bytes_per_us=250_000, l2_bytes_per_us=10**9)
    # 1000 bytes at 1 byte a picosecond, at a cap of a quarter of that, and 2000 ps longer behind another stream.
    assert stream.bounds(3000, 9500, limit, 10**6) == [
        (Phase.WEIGHTS, 2250), (Phase.KV_STATE, 750), (Phase.IN_FLIGHT, 3000)
    ]  # fmt: skip


def test_a_stream_that_ends_in_time_is_unbound() -> None:
    limit = StreamLimit(hbm_bytes_per_us=10**6, l2_bytes_per_us=10**9)
    stream = Stream(hbm_bytes=1000, hbm_end_ps=2000)
    assert stream.bounds(1000, 2000, limit, 10**6)[0] == (Phase.WEIGHTS, 1000)
    assert stream.bounds(2000, 2000, limit, 10**6) == []  # nothing came after its start


def test_early_reads_are_exposed_by_time() -> None:
    stream, early = Stream(), Stream(hbm_bytes=1000, hbm_end_ps=2000, l2_end_ps=1500)
    stream.expose(early, first_ps=1000, start_ps=1750)
    assert (stream.hbm_bytes, stream.hbm_end_ps, stream.l2_end_ps) == (250, 2000, 1500)
    late = Stream()
    late.expose(early, first_ps=1000, start_ps=2000)
    assert late.hbm_bytes == 0
