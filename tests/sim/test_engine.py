"""The engine, picosecond by picosecond, on a machine of round numbers.

Every expectation was worked out on paper from ``tiny.TINY``; the comments show the sum.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, TINY, call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import ActivationForm, Barrier, Pass, ReadKind, Unit
from k3sim.model.program import Weight
from k3sim.sim import engine
from k3sim.sim.components import occupancy as sm_slots
from k3sim.sim.components.skew import Paces, Skew
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.timeline import Phase, Timeline
from k3sim.sim.whatif import loopback_fabric

Patch = pytest.MonkeyPatch


def counter_bytes(timeline: Timeline, resource: str, rank: int = 0) -> float:
    (one,) = (one for one in timeline.counters if (one.rank, one.resource) == (rank, resource))
    return one.bytes_until(timeline.step_ps)


# -- launch -------------------------------------------------------------------------------------------------------


def test_a_graph_boundary_is_a_completion_flush_and_a_launch(monkeypatch: Patch) -> None:
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


def test_straight_code_runs_at_the_pace_of_what_is_held_or_fetched(monkeypatch: Patch) -> None:
    machine = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS)
    sizes = {"a": 20_000, "b": 30_000, "c": 50_000}
    works = {name: stream(1000) for name in sizes}
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {"a": 100, "b": 200, "c": 400})
    monkeypatch.setattr(engine, "ICACHE_MISS_INSTRUCTIONS", {})

    def code_ps(*names: str) -> list[int]:
        calls = [replace(call(index, name), stage=f"{index}") for index, name in enumerate(names)]
        timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1, code_bytes=sizes)
        runs = sorted(timeline.kernels, key=lambda run: run.index)
        return [sum(end - start for phase, start, end in spans(run) if phase == "compute") for run in runs]

    # Everything is fetched at first; then 20 and 30 KB are held together, and 50 KB with none of them.
    assert code_ps("a", "a", "b", "a", "b") == [500, 200, 1000, 200, 400]
    assert code_ps("a", "c", "a", "b", "c") == [500, 2000, 500, 1000, 2000]
    # Priced elsewhere while it is held: only the difference counts.
    monkeypatch.setattr(engine, "ICACHE_MISS_INSTRUCTIONS", {"a": 100})
    assert code_ps("a", "a", "b") == [300, 0, 1000]
    # Where a drawn machine fetches as fast as it runs, fetching costs nothing.
    machine = replace(machine, cold_instruction_s=1 * PS)
    assert code_ps("a", "a") == [0, 0]


def test_products_of_other_shapes_have_code_of_their_own(monkeypatch: Patch) -> None:
    machine = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS)
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {"a": 100})
    monkeypatch.setattr(engine, "ICACHE_MISS_INSTRUCTIONS", {})
    shapes = ((64, 32), (64, 32), (32, 64), (64, 32))
    calls = [
        call(index, "a", stage=f"{index}", weights=(Weight(region="", num_outputs=n, depth=k, num_bytes=1),))
        for index, (n, k) in enumerate(shapes)
    ]
    timeline = simulate(monkeypatch, {"a": stream(1000)}, calls, machine, num_ranks=1, code_bytes={"a": 1000})
    runs = sorted(timeline.kernels, key=lambda run: run.index)
    codes = [sum(end - start for phase, start, end in spans(run) if phase == "compute") for run in runs]
    assert codes == [500, 200, 500, 200]


def test_a_kernel_whose_code_is_held_ends_sooner_and_its_exit_is_not_waited_for(monkeypatch: Patch) -> None:
    machine = replace(TINY, kernel_exit_cold_s=300 * PS, kernel_exit_warm_s=80 * PS)
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {})
    works = {"a": stream(1000)}
    calls = [call(0, "a", stage="0"), call(1, "a", stage="1")]
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1, code_bytes={"a": 1000})
    drains = [spans(kernel(timeline, f"{index}"))[-1] for index in (0, 1)]
    assert [end - start for _, start, end in drains] == [300, 80]
    # Of one that pushes, the exit comes behind the push.
    works = {"a": replace(stream(1000), sent_bytes_per_peer=100), "b": work(Pass())}
    calls = [call(0, "a", sends="x"), call(1, "b", receives=(0,))]
    pushing = kernel(simulate(monkeypatch, works, calls, machine, code_bytes={"a": 1000}), "a")
    phases = [(phase, end - start) for phase, start, end in spans(pushing)][-3:]
    assert phases == [("drain", 220), ("send", 100), ("drain", 80)]


def test_a_poller_that_waits_for_one_slot_sees_it_sooner(monkeypatch: Patch) -> None:
    machine = replace(TINY, slot_visibility_s=5 * PS)

    def end_ps(polled_slots: int) -> int:
        works = {
            "a": replace(stream(1000), sent_bytes_per_peer=100),
            "b": replace(work(Pass()), polled_slots=polled_slots),
        }
        calls = [
            call(0, "a", sends="x", group_size=8, trigger="start"), call(1, "b", launch="pdl", receives=(0,))
        ]
        return kernel(simulate(monkeypatch, works, calls, machine, num_ranks=8), "b").end_ps

    assert end_ps(0) - end_ps(1) == 7 * 5


def test_blocks_that_waited_for_the_whole_wave_draw_for_all_of_it(monkeypatch: Patch) -> None:
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


def test_many_warps_of_an_sm_share_its_issue(monkeypatch: Patch) -> None:
    """Ten blocks of 320 threads on ten SMs: ten warps each, of which four issue in a clock of 10 ps."""
    machine = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS, sm_clock_hz=1e11)
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {"a": 100})
    timeline = simulate(
        monkeypatch, {"a": replace(stream(1000), threads_per_block=320)}, [call(0, "a")], machine, num_ranks=1,
        code_bytes={"a": 1000},
    )  # fmt: skip
    assert [end - start for phase, start, end in spans(kernel(timeline, "a")) if phase == "compute"] == [2500]


def test_blocks_take_the_place_of_others_of_their_kernel(monkeypatch: Patch) -> None:
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
        ("sm slots", 2100, 2100 + 2 * (1000 + 100 + 1000)),
    ]  # fmt: skip
    assert short.hbm_bytes == 1000 and long.end_ps > short.end_ps
    # Blocks that wait for one another do nothing before all have started, which is when the first kernel has gone.
    works["b"] = replace(works["b"], co_resident=True)
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    assert spans(kernel(timeline, "b"))[1] == ("sm slots", 1000, kernel(timeline, "a").end_ps)


def test_a_kernel_that_is_placed_learns_who_made_room(monkeypatch: Patch) -> None:
    whole = {"smem_bytes_per_block": 1000, "max_blocks_per_sm": 1, "registers_per_thread": 8, "co_resident": True}
    works = {"a": replace(stream(4000), **whole), "b": replace(stream(1000), **whole)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    first, second = kernel(timeline, "a"), kernel(timeline, "b")
    waits = [span for span in second.spans if span.phase is Phase.SM_SLOTS]
    assert [(one.cause, one.end_ps) for one in waits] == [(first.index, first.end_ps)]
    # The wait is what the first kernel did.
    assert Part.SIDE_STREAM not in waits_ps(critical_path(timeline))


@pytest.mark.parametrize(("taken", "blocks"), [(3, 10), (6, 9), (9, 7), (9, 25), (1, 31)])
@pytest.mark.parametrize("early", [False, True])
def test_every_byte_is_read_once_however_blocks_find_room(
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


def test_what_follows_loads_into_registers_is_asked_for_behind_them(monkeypatch: Patch) -> None:
    one = work(Pass(reads=(reads(4000, early=True),), num_dependent_loads=1), bytes_in_flight_per_block=400)
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.05e12, l2_far_latency_s=300 * PS)
    ends = [
        kernel(simulate(monkeypatch, {"a": replace(one, register_loads=how)}, [call(0, "a")], machine, num_ranks=1),
               "a").end_ps
        for how in (False, True)
    ]  # fmt: skip
    # Launch, latency, 4000 bytes at 0.4 B/ps by those in flight; the input beside them, and after them.
    assert ends == [1000 + 100 + 10000, 1000 + 100 + 10000 + 300]


def test_loads_into_registers_have_no_more_on_their_way_than_l1_holds(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sm_slots, "L1_AND_SHARED_BYTES", TINY.smem_bytes_per_sm + 250)  # of which 1000 are shared
    one = work(Pass(reads=(reads(4000, early=True),)), bytes_in_flight_per_block=400, register_loads=True)
    timeline = simulate(monkeypatch, {"a": one}, [call(0, "a")], num_ranks=1)
    assert kernel(timeline, "a").end_ps == 1000 + 100 + 16000  # ten SMs with 250 each


def test_a_kernel_that_triggers_behind_its_loads_takes_what_an_sm_takes_to_ask_for_them(monkeypatch: Patch) -> None:
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.05e12)
    one = work(Pass(reads=(reads(4000, early=True),)), bytes_in_flight_per_block=400, register_loads=True)
    works = {"a": replace(one, triggers_after_loads=True), "b": stream(100)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
    # One block an SM: 400 bytes at 0.05 a picosecond, when L1 holds all of them.
    assert kernel(simulate(monkeypatch, works, calls, machine, num_ranks=1), "b").start_ps == 1000 + 8000
    # When it holds 250 of them, the last are asked for when 150 of each block have come, at 0.25 by those in flight.
    monkeypatch.setattr(sm_slots, "L1_AND_SHARED_BYTES", TINY.smem_bytes_per_sm + 250)
    late = simulate(monkeypatch, works, calls, replace(TINY, hbm_bytes_per_s_per_sm=1e12), num_ranks=1)
    assert kernel(late, "b").start_ps == 1000 + 100 + 6000


def test_blocks_that_find_room_later_ask_before_their_kernel_triggers(monkeypatch: Patch) -> None:
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


def test_a_ring_that_stood_full_asks_for_more_when_a_stage_of_it_is_done(monkeypatch: Patch) -> None:
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


def test_what_an_input_takes_is_by_how_blocks_ask_for_it(monkeypatch: Patch) -> None:
    def latency_ps(form: ActivationForm, machine: Machine = TINY, **footprint: int) -> int:
        one = work(Pass(num_dependent_loads=1, activation_bytes_per_block=40, activation_form=form), **footprint)
        run = kernel(simulate(monkeypatch, {"a": one}, [call(0, "a")], machine, num_ranks=1), "a")
        return sum(end - start for phase, start, end in spans(run) if phase == "latency")

    assert latency_ps(ActivationForm.COALESCED) == 10 + 100  # 40 bytes at 0.4
    assert latency_ps(ActivationForm.COALESCED, num_blocks=30) == 10 + 300  # three blocks an SM
    slow_l2 = replace(TINY, l2_read_bytes_per_s=1e12)
    assert latency_ps(ActivationForm.COALESCED, slow_l2) == 10 + 100
    assert latency_ps(ActivationForm.CP_ASYNC, slow_l2) == 10 + 400  # 400 bytes of ten blocks at 1
    assert latency_ps(ActivationForm.MMA_FRAGMENTS) == 10 + 500  # 400 bytes at 0.8
    assert latency_ps(ActivationForm.MMA_FRAGMENTS, num_blocks=2) == 10 + 400  # 40 bytes at 0.1


def test_input_that_comes_slot_by_slot_bounds_the_stream(monkeypatch: Patch) -> None:
    def end_ps(later_bytes: int) -> int:
        one = work(Pass(reads=(reads(1000),), streamed_activation_bytes_per_block=later_bytes))
        return kernel(simulate(monkeypatch, {"a": one}, [call(0, "a")], num_ranks=1), "a").end_ps

    streamed = end_ps(0)
    assert end_ps(400) == streamed  # 400 bytes at 0.4 are there with the stream
    assert end_ps(800) == streamed + 1000


def test_the_last_slot_of_a_tensor_core_ring_passes_shared_memory_before_it_is_multiplied(monkeypatch: Patch) -> None:
    one = Pass(reads=(reads(2560),), unit=Unit.BF16)
    ends = [
        kernel(
            simulate(
                monkeypatch, {"a": work(one, bytes_in_flight_per_block=512, ring_slots=slots)}, [call(0, "a")],
                num_ranks=1,
            ), "a",
        ).end_ps
        for slots in (0, 2)
    ]  # fmt: skip
    assert ends[1] - ends[0] == 4  # 256 bytes, two clocks of 2 ps


def test_a_work_may_count_its_own_straight_code(monkeypatch: Patch) -> None:
    machine = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS)
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {"a": 100})
    monkeypatch.setattr(engine, "ICACHE_MISS_INSTRUCTIONS", {})
    one = replace(stream(1000), serial_instructions=300)
    run = kernel(simulate(monkeypatch, {"a": one}, [call(0, "a")], machine, num_ranks=1, code_bytes={"a": 1000}), "a")
    assert sum(end - start for phase, start, end in spans(run) if phase == "compute") == 1500


def test_products_in_series_end_no_sooner_than_their_chain(monkeypatch: Patch) -> None:
    """Behind the first bytes they run beside the stream, and what is longer shows."""
    machine = replace(TINY, dependent_mma_s=20 * PS)
    for num_products, compute_ps in ((0, 0), (10, 0), (100, 1000)):
        chain = work(Pass(reads=(reads(1000),), num_dependent_mmas=num_products))
        run = kernel(simulate(monkeypatch, {"a": chain}, [call(0, "a")], machine, num_ranks=1), "a")
        assert sum(end - start for phase, start, end in spans(run) if phase == "compute") == compute_ps, num_products


def test_code_of_public_kernels_does_not_count(monkeypatch: Patch) -> None:
    machine = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS)
    monkeypatch.setattr(engine, "SERIAL_INSTRUCTIONS", {"a": 100})
    timeline = simulate(monkeypatch, {"a": stream(1000)}, [call(0, "a")], machine, num_ranks=1)
    assert [phase for phase, _, _ in spans(kernel(timeline, "a"))] == ["launch", "ramp", "weights"]


def test_a_ring_that_is_filled_in_turns_triggers_when_its_last_turn_is_under_way(monkeypatch: Patch) -> None:
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


def test_early_reads_pass_while_the_pdl_kernel_waits_and_share_hbm(monkeypatch: Patch) -> None:
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
        ("latency", 5101, 5111),
    ]


def test_early_reads_go_no_further_than_the_pipeline_is_deep(monkeypatch: Patch) -> None:
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


def test_early_reads_are_slower_where_a_kernel_keeps_less_on_its_way_before_its_wait(monkeypatch: Patch) -> None:
    def behind_ps(**kept: int) -> int:
        """From the end of a kernel that reads nothing to that of one which reads ahead beside it."""
        eager = work(Pass(reads=(reads(6000, early=True),)), bytes_in_flight_per_block=1000, **kept)
        works = {"a": work(Pass(num_dependent_loads=80)), "b": eager}
        calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl")]
        timeline = simulate(monkeypatch, works, calls, num_ranks=1)
        return kernel(timeline, "b").end_ps - kernel(timeline, "a").end_ps

    # Of what comes ahead there is less, by what a fiftieth of the bytes in flight takes longer.
    assert behind_ps(early_bytes_in_flight_per_block=20) > behind_ps() + 3000


def test_a_pdl_kernel_that_does_not_fit_beside_its_producer_starts_after_it(monkeypatch: Patch) -> None:
    large = work(Pass(reads=(reads(500, early=True),)), smem_bytes_per_block=600)
    works = {"a": work(Pass(reads=(reads(3000),)), smem_bytes_per_block=600), "b": large}
    timeline = simulate(monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], num_ranks=1)
    assert spans(kernel(timeline, "b")) == [
        ("sm slots", 1000, 4100),
        ("launch", 4100, 5100),
        ("ramp", 5100, 5200),
        ("weights", 5200, 5700),
    ]


def test_a_task_has_no_launch_and_is_handed_over_by_a_counter(monkeypatch: Patch) -> None:
    works = {"a": stream(1000), "b": work(Pass(reads=(reads(300, early=True),), num_block_reductions=1))}
    calls = [call(0, "a", launch="task", trigger="start"), call(1, "b", launch="task", trigger="start")]
    timeline = simulate(monkeypatch, works, calls, num_ranks=1)
    # Both stream from 100 at half speed: b is through at 700, a, with 700 left then, at 1400.
    assert spans(kernel(timeline, "a")) == [("ramp", 0, 100), ("weights", 100, 1400)]
    assert spans(kernel(timeline, "b")) == [("dependency", 0, 1400), ("reduce", 1400, 1440), ("latency", 1440, 1447)]


def test_the_host_launches_one_by_one_and_its_graph_needs_no_flush(monkeypatch: Patch) -> None:
    host = {"num_launches": 2, "num_graph_launches": 1}
    calls = [call(0, "host", stream="host", launch="host", shape=host), call(1, "a", after=(0,))]
    timeline = simulate(monkeypatch, {"a": stream(1000)}, calls, num_ranks=1)
    assert spans(kernel(timeline, "host")) == [("host", 0, 10_300)]
    assert spans(kernel(timeline, "a"))[0] == ("launch", 10_300, 11_300)
    assert waits_ps(critical_path(timeline))[Part.HOST] == 10_300


def test_a_task_that_the_host_started_needs_no_counter(monkeypatch: Patch) -> None:
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
    assert spans(side)[-2:] == [("weights", 2800, 5800), ("starved", 5800, 5900)]
    joined = kernel(timeline, "c")
    # Its edge is programmatic: the end of side lets it in, and side's stores are there before its first instruction.
    assert spans(joined)[0] == ("launch", 5900, 6900)
    assert joined.launched_by == side.index
    assert waits_ps(critical_path(timeline))[Part.SIDE_STREAM] == 100


def test_a_program_that_waits_for_itself_is_reported(monkeypatch: Patch) -> None:
    calls = [call(0, "a", after=(1,)), call(1, "b", after=(0,))]
    with pytest.raises(AssertionError, match=r"never finished.*'a', 'b'"):
        simulate(monkeypatch, {"a": stream(1), "b": stream(1)}, calls, num_ranks=1)


# -- streams ------------------------------------------------------------------------------------------------------


def test_too_few_bytes_in_flight_are_told_from_hbm_speed(monkeypatch: Patch) -> None:
    shallow = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=250)
    timeline = simulate(monkeypatch, {"a": shallow}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("bytes in flight", 2100, 5100)]


def test_a_pass_of_few_blocks_draws_what_its_own_sms_can(monkeypatch: Patch) -> None:
    machine = replace(TINY, hbm_bytes_per_s_per_sm=0.2e12)
    narrow = work(Pass(reads=(reads(1000),), num_blocks=2))
    timeline = simulate(monkeypatch, {"a": narrow}, [call(0, "a")], machine, num_ranks=1)
    # Bytes in flight of two blocks allow 0.2 bytes a picosecond; two SMs would allow 0.4.
    assert kernel(timeline, "a").end_ps == 1100 + 5000


def test_two_streams_share_hbm_by_their_bytes_in_flight(monkeypatch: Patch) -> None:
    shallow = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=250)
    works = {"a": stream(3000), "b": shallow}
    timeline = simulate(monkeypatch, works, [call(0, "a"), call(1, "b", stream="aux")], num_ranks=1)
    # a has 10,000 bytes in flight and b 2500: four fifths against one. b alone would draw 0.25.
    assert kernel(timeline, "a").end_ps == 4850
    # b has 250 bytes left and draws 0.25 now.
    assert kernel(timeline, "b").end_ps == 5850
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 4850)]


def test_a_launch_that_waits_for_room_is_ready_when_there_is_some(monkeypatch: Patch) -> None:
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


def test_blocks_that_find_room_later_draw_what_they_have_in_flight_themselves(monkeypatch: Patch) -> None:
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


def test_a_trigger_takes_its_own_time_to_let_a_kernel_in(monkeypatch: Patch) -> None:
    machine = replace(TINY, pdl_trigger_to_launch_s=1700 * PS)
    works = {"a": stream(3000), "b": stream(100)}
    timeline = simulate(
        monkeypatch, works, [call(0, "a", trigger="start"), call(1, "b", launch="pdl")], machine, num_ranks=1
    )
    assert spans(kernel(timeline, "b"))[0] == ("launch", 1000, 2700)


def test_the_second_node_behind_one_starts_a_fork_later(monkeypatch: Patch) -> None:
    machine = replace(TINY, fork_s=70 * PS)
    works = {name: stream(100) for name in "abc"}
    calls = [call(0, "a"), call(1, "b"), call(2, "c", stream="aux", after=(0,))]
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1)
    begun = {stage: spans(kernel(timeline, stage))[1][1] for stage in "bc"}
    assert sorted(begun.values()) == [1200 + 500, 1200 + 570]


def test_a_push_into_the_own_memory_is_seen_slot_by_slot(monkeypatch: Patch) -> None:
    own = loopback_fabric(TINY)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, own, num_ranks=4)
    waited = [one for one in kernel(timeline, "b").spans if one.phase is Phase.POLL]
    other = simulate(monkeypatch, PUSH, PUSH_CALLS, replace(own, slot_visibility_s=0.0), num_ranks=4)
    assert kernel(timeline, "b").end_ps - kernel(other, "b").end_ps == 5  # one slot beyond the first
    assert waited


def test_state_is_told_from_weights_and_a_short_wait_for_the_input_hides_behind_both(monkeypatch: Patch) -> None:
    mixed = work(Pass(reads=(reads(600), reads(200, kind=ReadKind.KV_STATE)), num_dependent_loads=2))
    timeline = simulate(monkeypatch, {"a": mixed}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [
        ("ramp", 1000, 1100),
        ("weights", 1100, 1700),
        ("kv and state", 1700, 1900),
    ]


def test_an_input_that_takes_longer_than_the_stream_shows_and_holds_the_arithmetic_up(monkeypatch: Patch) -> None:
    slow = work(Pass(reads=(reads(600),), num_dependent_loads=90, flops=500.0))
    timeline = simulate(monkeypatch, {"a": slow}, [call(0, "a")], num_ranks=1)
    # Both are asked for at 1000; the input is there at 1900, and 500 flops on ten SMs take 50.
    assert spans(kernel(timeline, "a"))[1:] == [
        ("ramp", 1000, 1100),
        ("weights", 1100, 1700),
        ("latency", 1700, 1900),
        ("compute", 1900, 1950),
    ]


def test_the_last_slot_of_a_ring_is_multiplied_when_its_bytes_are_there(monkeypatch: Patch) -> None:
    # Two slots of 50 bytes in each of ten blocks: 500 of the 1000 bytes come last, and half of the 40 for 400 flops.
    ringed = work(Pass(reads=(reads(1000),), flops=400.0), num_blocks=10, bytes_in_flight_per_block=100, ring_slots=2)
    machine = replace(TINY, hbm_in_flight_curve=((100.0, 1e12),))
    timeline = simulate(monkeypatch, {"a": ringed}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("compute", 2100, 2120)]


def test_addresses_that_must_be_looked_up_come_before_the_stream(monkeypatch: Patch) -> None:
    paged = work(Pass(reads=(reads(600),), num_address_loads=2))
    timeline = simulate(monkeypatch, {"a": paged}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:3] == [("latency", 1000, 1020), ("ramp", 1020, 1120)]


def test_a_kernel_enters_and_drains_and_a_task_does_neither(monkeypatch: Patch) -> None:
    machine = replace(TINY, kernel_prologue_s=200 * PS, kernel_exit_cold_s=300 * PS)
    timeline = simulate(monkeypatch, {"a": stream(100)}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a")) == [
        ("launch", 0, 1200),
        ("ramp", 1200, 1300),
        ("weights", 1300, 1400),
        ("drain", 1400, 1700),
    ]
    assert waits_ps(critical_path(timeline))[Part.RAMP_DRAIN] == 400
    task = simulate(monkeypatch, {"a": stream(100)}, [call(0, "a", launch="task")], machine, num_ranks=1)
    assert spans(kernel(task, "a")) == [("ramp", 0, 100), ("weights", 100, 200)]


def test_what_is_written_back_shares_hbm_with_what_is_read(monkeypatch: Patch) -> None:
    updating = work(Pass(reads=(reads(600, kind=ReadKind.KV_STATE),), written_bytes=200))
    timeline = simulate(monkeypatch, {"a": updating}, [call(0, "a")], num_ranks=1)
    # Half each until the 200 are written at 1500; the read's other 400 bytes follow alone.
    assert kernel(timeline, "a").end_ps == 1900
    assert kernel(timeline, "a").hbm_bytes == counter_bytes(timeline, "hbm") == 800


def test_arithmetic_beyond_the_stream_is_compute(monkeypatch: Patch) -> None:
    # Ten SMs: 15000 flops take 1500 ps beside a stream of 1000.
    timeline = simulate(monkeypatch, {"a": stream(1000, flops=15_000.0)}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("compute", 2100, 2600)]


@pytest.mark.parametrize(
    ("unit", "fp4_flops", "compute_ps"),
    [
        (Unit.CUDA_CORE, 80e12, 4000),  # 1 flop a picosecond on each of ten SMs
        (Unit.BF16, 80e12, 2000),
        (Unit.FP8, 80e12, 1000),
        (Unit.FP4, 80e12, 500),
        (Unit.FP4, 0.0, 2000),  # without FP4 the bf16 rate
    ],
)
def test_each_unit_has_its_rate(monkeypatch: Patch, unit: Unit, fp4_flops: float, compute_ps: int) -> None:
    machine = replace(TINY, fp4_flops=fp4_flops)
    timeline = simulate(monkeypatch, {"a": work(Pass(flops=40_000.0, unit=unit))}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [("compute", 1000, 1000 + compute_ps)]


def test_fp4_weights_enter_the_tensor_core_at_a_rate_of_their_own(monkeypatch: Patch) -> None:
    # Five of ten SMs, four weights a clock, half a clock a picosecond: ten weights a picosecond.
    decoding = work(Pass(flops=1.0, unit=Unit.FP4, decoded_weights=3000, num_blocks=5, num_tensor_core_setups=2))
    timeline = simulate(monkeypatch, {"a": decoding}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [("latency", 1000, 1100), ("compute", 1100, 1400)]


@pytest.mark.parametrize(
    ("barrier", "reduce_ps"), [(Barrier.NONE, 0), (Barrier.CLUSTER, 60), (Barrier.GRID, 90), (Barrier.LAST, 105)]
)
def test_barriers_by_kind(monkeypatch: Patch, barrier: Barrier, reduce_ps: int) -> None:
    ending = work(Pass(num_block_reductions=2, barrier=barrier, num_barriers=3))
    timeline = simulate(monkeypatch, {"a": ending}, [call(0, "a")], num_ranks=1)
    expected = [("launch", 0, 1000), ("latency", 1000, 1014), ("reduce", 1014, 1014 + reduce_ps)]
    assert spans(kernel(timeline, "a")) == expected[: 3 if reduce_ps else 2]


def test_passes_follow_each_other_and_the_next_one_loads_during_the_barrier(monkeypatch: Patch) -> None:
    two = work(
        Pass(reads=(reads(1000),), barrier=Barrier.GRID, num_barriers=10),
        Pass(reads=(reads(400, early=True),), num_dependent_loads=3),
    )
    timeline = simulate(monkeypatch, {"a": two}, [call(0, "a")], num_ranks=1)
    # The second pass asks at 2100, its 400 bytes run from 2200 to 2600, of which 170 ps lie behind the loads.
    assert spans(kernel(timeline, "a"))[2:] == [
        ("weights", 1100, 2100),
        ("reduce", 2100, 2400),
        ("latency", 2400, 2430),
        ("weights", 2430, 2600),
    ]


def test_activations_come_from_l2_at_the_rate_of_one_sm(monkeypatch: Patch) -> None:
    timeline = simulate(
        monkeypatch, {"a": work(Pass(num_dependent_loads=1, activation_bytes_per_block=40))}, [call(0, "a")], num_ranks=1
    )
    assert spans(kernel(timeline, "a"))[1:] == [("latency", 1000, 1110)]


# -- L2 -----------------------------------------------------------------------------------------------------------


def test_a_prefetched_region_is_served_by_l2(monkeypatch: Patch) -> None:
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(4000, region="w"),)), prefetches=True),
        "b": work(Pass(reads=(reads(4000, region="w"),))),
    }
    timeline = simulate(monkeypatch, works, [call(0, "l2_prefetch.bulk"), call(1, "b")], num_ranks=1)
    fetched, run = kernel(timeline, "l2_prefetch.bulk"), kernel(timeline, "b")
    assert (fetched.end_ps, fetched.hbm_bytes) == (5000, 4000)
    assert spans(run)[-1] == ("l2", 6600, 7600)
    assert (run.hbm_bytes, run.l2_bytes) == (0, 4000)
    assert counter_bytes(timeline, "hbm") == 4000
    assert counter_bytes(timeline, "l2") == 8000


def test_a_region_evicted_before_its_use_comes_from_hbm_again(monkeypatch: Patch) -> None:
    # 4000 prefetched and 8000 of other reads into 10000 are 2000 too many; the region was there alone and loses them.
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(4000, region="w"),)), prefetches=True),
        "a": stream(8000),
        "b": work(Pass(reads=(reads(4000, region="w"),))),
    }
    timeline = simulate(monkeypatch, works, [call(0, "l2_prefetch.bulk"), call(1, "a"), call(2, "b")], num_ranks=1)
    run = kernel(timeline, "b")
    assert (run.hbm_bytes, run.l2_bytes) == (2000, 2000)
    # Both parts run together: L2's 2000 at three of four bytes a picosecond are hidden behind HBM's 2000.
    assert spans(run)[-1] == ("weights", run.end_ps - 2000, run.end_ps)


def test_a_prefetch_stops_where_the_kernel_that_needs_the_region_takes_over(monkeypatch: Patch) -> None:
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(5 << 20, region="w"),)), prefetches=True),
        "b": work(Pass(reads=(reads(5 << 20, region="w"),))),
    }
    machine = replace(TINY, l2_effective_bytes=16 << 20)
    calls = [call(0, "l2_prefetch.bulk", stream="prefetch"), call(1, "a"), call(2, "b")]
    # a keeps the chip busy until 3 MiB of the five have been prefetched: one chunk is there, one under way.
    works["a"] = work(Pass(flops=10.0 * (3 << 20)))
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1)
    run, fetched = kernel(timeline, "b"), kernel(timeline, "l2_prefetch.bulk")
    assert (run.l2_bytes, run.hbm_bytes) == (2 << 20, 3 << 20)
    # The chunk under way is finished; what the kernel read itself is not fetched again.
    assert counter_bytes(timeline, "hbm") == pytest.approx(7 << 20, abs=2)
    assert fetched.hbm_bytes == 4 << 20


# -- exchanges ----------------------------------------------------------------------------------------------------


PUSH = {"a": work(Pass(reads=(reads(1000),)), sent_bytes_per_peer=100), "b": work(Pass(num_dependent_loads=1))}
PUSH_CALLS = [call(0, "a", trigger="start", sends="x"), call(1, "b", launch="pdl", receives=(0,))]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_push_leaves_the_port_flies_and_is_seen(monkeypatch: Patch, all_ranks: bool) -> None:
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, all_ranks=all_ranks)
    for rank in timeline.ranks:
        sender, run = kernel(timeline, "a", rank), kernel(timeline, "b", rank)
        assert spans(sender)[-2:] == [("weights", 1100, 2100), ("send", 2100, 2200)]
        assert sender.sent_bytes == 100
        # The consumer does not wait for its own rank's kernel but for what all ranks sent.
        assert spans(run) == [
            ("launch", 1000, 2000),
            ("peers", 2000, 2400),
            ("poll", 2400, 2430),
            ("latency", 2430, 2440),
        ]
        assert (run.spans[1].cause, run.spans[1].cause_ps, run.spans[1].arrival_ps) == (sender.index, 2200, 2400)
    assert waits_ps(critical_path(timeline)) == {
        Part.WEIGHTS: 1000,
        Part.LAUNCH: 1000,
        Part.RAMP_DRAIN: 100,
        Part.LATENCY: 10,
        Part.NVLINK: 330,
    }


def test_without_multicast_every_peer_costs_egress(monkeypatch: Patch) -> None:
    machine = replace(TINY, nvlink_multicast=False)
    calls = [replace(one, group_size=5) for one in PUSH_CALLS]
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, PUSH, calls, machine, num_ranks=5, all_ranks=all_ranks)
        sender = kernel(timeline, "a")
        assert spans(sender)[-1] == ("send", 2100, 2500)
        assert sender.sent_bytes == 400
        assert counter_bytes(timeline, "nvlink egress") == 400
        assert counter_bytes(timeline, "nvlink ingress") == 400


def test_with_multicast_the_ingress_port_of_each_peer_is_the_limit(monkeypatch: Patch) -> None:
    calls = [replace(one, group_size=5) for one in PUSH_CALLS]
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, PUSH, calls, num_ranks=5, all_ranks=all_ranks)
        # Four peers send 100 bytes each at the same time into every port.
        assert spans(kernel(timeline, "a"))[-1] == ("send", 2100, 2500)
        assert counter_bytes(timeline, "nvlink egress") == 100
        assert counter_bytes(timeline, "nvlink ingress") == 400


def test_a_kernel_that_sends_and_receives_goes_on_when_all_data_is_there(monkeypatch: Patch) -> None:
    reduce = work(Pass(num_dependent_loads=1), Pass(num_block_reductions=1), sent_bytes_per_peer=100)
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, {"r": reduce}, [call(0, "r", sends="x", receives=(0,))], all_ranks=all_ranks)
        assert spans(kernel(timeline, "r")) == [
            ("launch", 0, 1000),
            ("latency", 1000, 1010),
            ("send", 1010, 1110),
            ("peers", 1110, 1310),
            ("poll", 1310, 1340),
            ("latency", 1340, 1347),
        ]
        assert waits_ps(critical_path(timeline)) == {Part.LAUNCH: 1000, Part.LATENCY: 17, Part.NVLINK: 330}
        assert kernel(timeline, "r").sent_bytes == counter_bytes(timeline, "nvlink egress") == 100


def test_a_pull_is_a_fenced_flag_and_a_load_over_the_switch(monkeypatch: Patch) -> None:
    reduce = work(Pass(num_dependent_loads=1), Pass(num_block_reductions=1), sent_bytes_per_peer=100)
    calls = [call(0, "r", sends="x", receives=(0,), transport="pull")]
    timeline = simulate(monkeypatch, {"r": reduce}, calls)
    assert spans(kernel(timeline, "r"))[2:] == [
        ("send", 1010, 1138),  # a line of 128 bytes
        ("peers", 1138, 1398),  # fence and flight
        ("poll", 1398, 1428),
        ("send", 1428, 1928),  # there and back, and 100 bytes
        ("latency", 1928, 1935),
    ]


def test_a_pull_without_in_switch_reduction_loads_every_peers_part(monkeypatch: Patch) -> None:
    machine = replace(TINY, nvlink_in_switch_reduction=False)
    reduce = work(Pass(num_dependent_loads=1), sent_bytes_per_peer=100)
    calls = [call(0, "r", sends="x", receives=(0,), transport="pull", group_size=4)]
    timeline = simulate(monkeypatch, {"r": reduce}, calls, machine, num_ranks=4)
    # There and back, and a port that serves three peers; rates are whole.
    assert spans(kernel(timeline, "r"))[-1][2] - spans(kernel(timeline, "r"))[-1][1] == 400 + 301


def test_a_slower_rank_holds_its_peers_up_and_the_split_says_so(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Paces, "pace", lambda self, rank, index: 2.0 if (rank, index) == (1, 0) else 1.0)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED)
    # Rank 1 streams until 3100 and has sent at 3200; its data is visible at 3400.
    assert kernel(timeline, "a", 0).end_ps == 2200
    assert kernel(timeline, "a", 1).end_ps == 3200
    run = kernel(timeline, "b", 0)
    assert spans(run) == [
        ("launch", 1000, 2000),
        ("peers", 2000, 3400),
        ("poll", 3400, 3430),
        ("latency", 3430, 3440),
    ]
    assert run.spans[1].arrival_ps == 2400
    assert timeline.critical_rank == 0
    assert waits_ps(critical_path(timeline)) == {
        Part.WEIGHTS: 1000,
        Part.LAUNCH: 1000,
        Part.RAMP_DRAIN: 100,
        Part.LATENCY: 10,
        Part.NVLINK: 330,
        Part.SLOWER_PEER: 1000,
    }


def test_expected_skew_delays_every_exchange_by_the_mean_of_the_slowest(monkeypatch: Patch) -> None:
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.EXPECTED)
    # The slower of two standard normals is 1/sqrt(pi) = 0.5642 late; a worked for 1200 ps, of which a tenth is
    # the standard deviation: 0.5642 * 120 = 68.
    run = kernel(timeline, "b")
    assert spans(run)[1:3] == [("peers", 2000, 2468), ("poll", 2468, 2498)]
    assert waits_ps(critical_path(timeline))[Part.SLOWER_PEER] == 68


def test_a_wait_for_peers_is_no_skew_of_this_ranks_own(monkeypatch: Patch) -> None:
    # The kernel computes for 1000 ps, exchanges, computes for 500 and sends what a third kernel waits for.
    both = work(Pass(flops=10_000.0), Pass(flops=5000.0), sent_bytes_per_peer=100)
    works = {"r": both, "a": work(Pass(), sent_bytes_per_peer=100), "b": work(Pass())}
    calls = [call(0, "r", sends="x", receives=(0,)), call(1, "a", sends="y"), call(2, "b", receives=(1,))]
    late_ps = []
    for skew in (Skew.OFF, Skew.EXPECTED):
        timeline = simulate(monkeypatch, works, calls, replace(TINY, nvlink_one_way_s=5000 * PS), skew=skew)
        waits = (kernel(timeline, name).spans for name in ("r", "b"))
        late_ps.append([sum(one.end_ps - one.start_ps for one in of if one.phase is Phase.PEERS) for of in waits])
    # 0.5642 of a tenth of 1000, then of a tenth of 500 and of the 100 that the second sending took.
    assert [late - on_time for late, on_time in zip(late_ps[1], late_ps[0], strict=True)] == [
        56,
        29,
    ]  # sqrt(50**2 + 10**2) = 51


def test_a_poller_that_comes_late_sees_the_data_at_once_and_waits_for_no_peer(monkeypatch: Patch) -> None:
    works = {**PUSH, "long": stream(5000)}
    calls = [PUSH_CALLS[0], call(1, "long"), call(2, "b", receives=(0,))]
    timeline = simulate(monkeypatch, works, calls)
    assert [name for name, _, _ in spans(kernel(timeline, "b"))] == ["release", "launch", "latency"]


def test_visibility_that_is_under_way_when_the_poller_comes_is_nvlink_flight(monkeypatch: Patch) -> None:
    # Data of 590 bytes' streaming is complete at 1990 and seen at 2020; the poller comes in between, at 2000.
    works = {**PUSH, "a": work(Pass(reads=(reads(590),)), sent_bytes_per_peer=100)}
    timeline = simulate(monkeypatch, works, PUSH_CALLS)
    assert spans(kernel(timeline, "b")) == [("launch", 1000, 2000), ("poll", 2000, 2020), ("latency", 2020, 2030)]
    assert waits_ps(critical_path(timeline)) == {
        Part.WEIGHTS: 590,
        Part.LAUNCH: 1000,
        Part.RAMP_DRAIN: 100,
        Part.LATENCY: 10,
        Part.NVLINK: 330,
    }


def test_exchanges_of_a_context_group_wait_for_its_ranks_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Paces, "pace", lambda self, rank, index: 2.0 if (rank, index) == (3, 0) else 1.0)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, num_ranks=4, skew=Skew.SAMPLED)
    assert kernel(timeline, "b", 0).end_ps == kernel(timeline, "b", 1).end_ps == 2440
    assert kernel(timeline, "b", 2).end_ps == 3440


def test_the_same_seed_gives_the_same_timeline_and_another_seed_another(monkeypatch: Patch) -> None:
    first = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=3)
    again = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=3)
    other = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=4)
    assert first == again
    assert first.step_ps != other.step_ps
