"""What bounded a stream: HBM, bytes in flight, sharing."""

from __future__ import annotations

import pytest
from tiny import call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass, ReadKind

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
