"""Waves: blocks that become resident in the place of others, and those that wait for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY, call, kernel, reads, simulate, spans, stream, wave_of, work

from k3sim.kernels.work import Pass
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.timeline import Phase

Patch = pytest.MonkeyPatch


def test_co_resident_blocks_draw_for_the_whole_wave(monkeypatch: Patch) -> None:
    """Nine of ten SMs are taken: a kernel of ten blocks that start together reads as ten when they have left."""
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8}
    works = {
        "a": replace(stream(9000), num_blocks=9, **whole),
        "b": replace(stream(1000), num_blocks=10, co_resident=True, bytes_in_flight_per_block=100, **whole),
    }
    machine = replace(TINY, hbm_in_flight_curve=((100.0, 1e12),))
    timeline = simulate(monkeypatch, works, [call(0, "a", stream="aux"), call(1, "b")], machine, num_ranks=1)
    phases = {phase: end - start for phase, start, end in spans(kernel(timeline, "b"))}
    assert phases["weights"] == 1000 and "bytes in flight" not in phases


def test_later_waves_take_the_place_of_ended_blocks(monkeypatch: Patch) -> None:
    """Six of ten SMs are taken for long: ten blocks go through the other four, four, four and two at a time."""
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8}
    works = {
        "a": replace(stream(9000), num_blocks=6, **whole),
        "b": replace(stream(1000), num_blocks=10, **whole),
    }
    calls = [call(0, "a", stream="aux"), call(1, "b")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    long, short = kernel(timeline, "a"), kernel(timeline, "b")
    # A tenth of the bytes a block, 0.1 B/ps a block: 1000 ps behind launch and latency, then twice as much again
    # behind the start of a block in the place of another (1000).
    assert spans(short) == [
        ("launch", 0, 1000), ("ramp", 1000, 1100), ("weights", 1100, 1500), ("bytes in flight", 1500, 2100),
        ("launch", 2100, 3100), ("ramp", 3100, 3200), ("weights", 3200, 3600), ("bytes in flight", 3600, 4200),
        ("launch", 4200, 5200), ("ramp", 5200, 5300), ("weights", 5300, 5500), ("bytes in flight", 5500, 6300),
    ]  # fmt: skip
    assert [(one.start_ps, one.end_ps, one.launched_by) for one in short.waves] == [
        (2100, 4200, short.index), (4200, 6300, short.index)
    ]  # fmt: skip
    assert short.hbm_bytes == 1000 and long.end_ps > short.end_ps
    # Blocks that wait for one another do nothing before all have started, which is when the first kernel has gone.
    works["b"] = replace(works["b"], co_resident=True)
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    assert spans(kernel(timeline, "b"))[1] == ("sm slots", 1000, kernel(timeline, "a").end_ps)


def test_a_pending_kernel_learns_who_made_room(monkeypatch: Patch) -> None:
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8, "co_resident": True}
    works = {"a": replace(stream(4000), **whole), "b": replace(stream(1000), **whole)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    first, second = kernel(timeline, "a"), kernel(timeline, "b")
    waits = [span for span in second.spans if span.phase is Phase.SM_SLOTS]
    assert [(one.cause, one.end_ps) for one in waits] == [(first.index, first.end_ps)]
    # The wait is what the first kernel did.
    assert waits_ps(critical_path(timeline))[Part.WEIGHTS] == 5000


@pytest.mark.parametrize(("taken", "blocks"), [(3, 10), (6, 9), (9, 7), (9, 25), (1, 31)])
@pytest.mark.parametrize("early", [False, True])
def test_every_byte_is_read_once_in_any_waves(
    monkeypatch: Patch, taken: int, blocks: int, early: bool
) -> None:
    """Two kernels in the way, one of which ends before the third may go on."""
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8}
    works = {
        "short": replace(stream(300), num_blocks=1, **whole),
        "long": replace(stream(5000), num_blocks=taken, **whole),
        "first": work(Pass(reads=(reads(1500),)), num_blocks=1),
        "all": replace(work(Pass(reads=(reads(1000, early=early),)), bytes_in_flight_per_block=20), **whole),
    }
    works["all"] = replace(works["all"], num_blocks=blocks)
    calls = [
        call(0, "short", stream="aux"), call(1, "long", stream="prefetch"), call(2, "first", trigger="start"),
        call(3, "all", launch="pdl"),
    ]  # fmt: skip
    run = kernel(simulate(monkeypatch, works, calls, num_ranks=1), "all")
    assert run.hbm_bytes == pytest.approx(1000, abs=2) and run.end_ps > 0


def test_pending_blocks_draw_by_their_own_bytes(monkeypatch: Patch) -> None:
    machine = replace(TINY, hbm_in_flight_curve=((100.0, 1e12),))
    # Nine SMs have no room left beside a; of b one block starts, and the other nine when a has gone.
    first = work(Pass(reads=(reads(3000),)), num_blocks=9, threads_per_block=300, registers_per_thread=104,
                 bytes_in_flight_per_block=1000, max_blocks_per_sm=1)  # fmt: skip
    second = work(Pass(reads=(reads(1000, early=True),)), num_blocks=10, threads_per_block=300,
                  registers_per_thread=104, bytes_in_flight_per_block=100, max_blocks_per_sm=1)  # fmt: skip
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    timeline = simulate(monkeypatch, {"a": first, "b": second}, calls, machine, num_ranks=1)
    # 900 bytes are asked for at the end of a, come from 100 later on, and nine blocks draw 0.9 a picosecond.
    assert kernel(timeline, "b").end_ps == kernel(timeline, "a").end_ps + 100 + 1000


def test_waves_share_every_pass() -> None:
    one = work(Pass(reads=(reads(1000),), written_bytes=100, flops=50.0), num_blocks=10)
    parts = [
        wave_of(one, blocks, is_part=True).passes()[0] for blocks in (4, 4, 2)
    ]
    assert [part.reads[0].num_bytes for part in parts] == [400, 400, 200]
    assert [(part.written_bytes, part.flops, part.num_blocks) for part in parts] == [
        (40, 20.0, 4), (40, 20.0, 4), (20, 10.0, 2)
    ]  # fmt: skip
