"""The load pipeline: early reads, bytes in flight, loads into registers, triggers behind loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, TINY, call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass
from k3sim.sim.components.load_pipeline import late_reads
from k3sim.sim.components.stream import Stream

Patch = pytest.MonkeyPatch

# 256 KB of an SM are L1 and shared memory: all that a kernel may have shared leaves 250 bytes of L1.
L1_OF_250 = replace(TINY, smem_bytes_per_sm=256 * 1024 - 250)


def test_input_is_asked_for_behind_register_loads(monkeypatch: Patch) -> None:
    one = work(Pass(reads=(reads(4000, early=True),), num_dependent_loads=1), bytes_in_flight_per_block=400)
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.05e12, l2_far_latency_s=300 * PS)
    ends = [
        kernel(simulate(monkeypatch, {"a": replace(one, register_loads=how)}, [call(0, "a")], machine, num_ranks=1),
               "a").end_ps
        for how in (False, True)
    ]  # fmt: skip
    # Launch, latency, 4000 bytes at 0.4 B/ps by those in flight; the input beside them, and after them.
    assert ends == [1000 + 100 + 10000, 1000 + 100 + 10000 + 300]


def test_l1_bounds_register_loads_in_flight(monkeypatch: Patch) -> None:
    one = work(Pass(reads=(reads(4000, early=True),)), bytes_in_flight_per_block=400, register_loads=True)
    timeline = simulate(monkeypatch, {"a": one}, [call(0, "a")], L1_OF_250, num_ranks=1)
    assert kernel(timeline, "a").end_ps == 1000 + 100 + 16000  # ten SMs with 250 each


def test_a_trigger_behind_loads_waits_for_their_issue(monkeypatch: Patch) -> None:
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.05e12)
    one = work(Pass(reads=(reads(4000, early=True),)), bytes_in_flight_per_block=400, register_loads=True)
    works = {"a": replace(one, triggers_after_loads=True), "b": stream(100)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    # One block an SM: 400 bytes at 0.05 a picosecond, when L1 holds all of them.
    assert kernel(simulate(monkeypatch, works, calls, machine, num_ranks=1), "b").start_ps == 1000 + 8000
    # When it holds 250 of them, the last are asked for when 150 of each block have come, at 0.25 by those in flight.
    late = simulate(monkeypatch, works, calls, L1_OF_250, num_ranks=1)
    assert kernel(late, "b").start_ps == 1000 + 100 + 6000


def test_pending_blocks_ask_before_their_kernel_triggers(monkeypatch: Patch) -> None:
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8}
    one = work(Pass(reads=(reads(1000, early=True),)), bytes_in_flight_per_block=100, register_loads=True, **whole)
    works = {
        "long": replace(stream(5000), num_blocks=3, **whole),
        "a": replace(one, triggers_after_loads=True),
        "b": work(Pass(num_dependent_loads=1)),
    }
    calls = [call(0, "long", stream="aux"), call(1, "a", trigger="start"), call(2, "b", launch="pdl")]
    timeline = simulate(monkeypatch, works, calls, replace(TINY, hbm_bytes_per_s_per_sm=0.5e12), num_ranks=1)
    # Seven blocks read their 700 bytes at 0.07; in their place the other three begin a refill later, and ask for 100
    # bytes each at 0.5 a picosecond.
    assert kernel(timeline, "b").start_ps == 1000 + 100 + 10000 + 1000 + 200


def test_a_full_ring_refills_behind_a_stage(monkeypatch: Patch) -> None:
    machine = replace(TINY, instruction_s=3 * PS)

    def ramp_ps(**of_pass: int) -> int:
        ring = work(Pass(reads=(reads(4000, early=True),), **of_pass), bytes_in_flight_per_block=100)
        works = {"a": work(Pass(num_dependent_loads=1200)), "b": ring}
        calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
        found = spans(kernel(simulate(monkeypatch, works, calls, machine, num_ranks=1), "b"))
        released = next(end for phase, _, end in found if phase == "release")
        return next(end for phase, _, end in found if phase == "ramp") - released

    assert ramp_ps() == 100
    # 50 instructions, 200 bytes of a stage at 128 a clock of 2 ps (0.0064 of them), and the sums over a warp.
    assert ramp_ps(num_stages=2, stage_instructions=50) == 150 + round(200 / 128 * 2) + 3 + 100


def test_a_ring_filled_in_turns_triggers_last(monkeypatch: Patch) -> None:
    first = work(
        Pass(reads=(reads(9000, early=True),)), bytes_in_flight_per_block=500, early_bytes_in_flight_per_block=200
    )
    works = {"a": first, "b": stream(100)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    # Ten blocks ask for 500 bytes each, all but the last 200 in turn: 3000 bytes after launch and latency.
    rate = TINY.hbm_rate_for(10 * 200) * 1e-12
    assert kernel(timeline, "b").start_ps == pytest.approx(1000 + 100 + 3000 / rate, abs=2)
    at_once = {**works, "a": replace(first, early_bytes_in_flight_per_block=0)}
    assert kernel(simulate(monkeypatch, at_once, calls, num_ranks=1), "b").start_ps == 1000


def test_early_reads_share_hbm_while_the_kernel_waits(monkeypatch: Patch) -> None:
    consumer = work(Pass(num_dependent_loads=1, reads=(reads(500, early=True),)))
    works = {"a": stream(3000), "b": consumer}
    timeline = simulate(monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], num_ranks=1)
    # a alone moves 1000 by 2100, and has 2000 left against b's 10,000 in flight: b's 500 are in at 2700, a's in 4600.
    assert kernel(timeline, "a").end_ps == 4601  # a sixth of what is there, rounded down to a byte per microsecond
    assert kernel(timeline, "b").hbm_bytes == 500
    assert spans(kernel(timeline, "b")) == [
        ("launch", 1000, 2000),
        ("dependency", 2000, 4601),
        ("release", 4601, 5101),
        ("dependent loads", 5101, 5111),
    ]


def test_early_reads_end_where_the_pipeline_is_full(monkeypatch: Patch) -> None:
    shallow = work(Pass(reads=(reads(6000, early=True),)), bytes_in_flight_per_block=500)
    works = {"a": stream(20_000), "b": shallow}
    # With 5000 bytes in flight b draws 0.5 bytes a picosecond, and 5000 of its 6000 bytes come ahead.
    timeline = simulate(monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], num_ranks=1)
    # a: 1000 bytes by 2100, 5000 more beside b's 5000 by 12100, and the 14000 that are left by 26100.
    assert kernel(timeline, "a").end_ps == 26_101  # half of what is there, rounded down to a byte per microsecond
    # Its ring has stood full since then, so the rest waits for its first bytes.
    assert spans(kernel(timeline, "b"))[-3:] == [
        ("ramp", 26_601, 26_701),
        ("weights", 26_701, 27_701),
        ("bytes in flight", 27_701, 28_701),
    ]


def test_fewer_early_bytes_in_flight_are_slower(monkeypatch: Patch) -> None:
    def behind_ps(**kept: int) -> int:
        """From the end of a kernel that reads nothing to that of one which reads ahead beside it."""
        eager = work(Pass(reads=(reads(6000, early=True),)), bytes_in_flight_per_block=1000, **kept)
        works = {"a": work(Pass(num_dependent_loads=80)), "b": eager}
        calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
        timeline = simulate(monkeypatch, works, calls, num_ranks=1)
        return kernel(timeline, "b").end_ps - kernel(timeline, "a").end_ps

    # Of what comes ahead there is less, by what a fiftieth of the bytes in flight takes longer.
    assert behind_ps(early_bytes_in_flight_per_block=20) > behind_ps() + 3000


def test_a_narrow_pass_draws_by_its_sms(monkeypatch: Patch) -> None:
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.2e12)
    narrow = work(Pass(reads=(reads(1000),), num_blocks=2))
    timeline = simulate(monkeypatch, {"a": narrow}, [call(0, "a")], machine, num_ranks=1)
    # Bytes in flight of two blocks allow 0.2 bytes a picosecond; two SMs would allow 0.4.
    assert kernel(timeline, "a").end_ps == 1100 + 5000


@pytest.mark.parametrize(("num_bytes", "late_bytes"), [(9999, 0), (10_000, 0), (10_001, 1)])
def test_early_reads_are_all_that_is_in_flight(num_bytes: int, late_bytes: int) -> None:
    one = Pass(reads=(reads(num_bytes, early=True),))
    late = late_reads(one, Stream(budget_bytes=10_000))
    assert sum(left for _, left in late) == late_bytes


def test_what_is_not_early_stays_late() -> None:
    one = Pass(reads=(reads(300), reads(500, early=True)))
    assert [left for _, left in late_reads(one, Stream(budget_bytes=200))] == [300, 300]
    assert [left for _, left in late_reads(one, Stream(budget_bytes=200, later=Stream(budget_bytes=300)))] == [300]
    assert [left for _, left in late_reads(one, None)] == [300, 500]
