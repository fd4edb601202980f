"""Arithmetic of the SMs: rates of the units, chains, the last slot of a ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, TINY, call, kernel, reads, simulate, spans, stream, wave_of, work

from k3sim.kernels.work import Pass, Unit
from k3sim.sim.components.sm_timing import SmTiming, last_slot_share

Patch = pytest.MonkeyPatch


def test_the_last_tensor_core_slot_passes_shared_memory(monkeypatch: Patch) -> None:
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


def test_dependent_mmas_end_no_sooner_than_their_chain(monkeypatch: Patch) -> None:
    """Behind the first bytes they run beside the stream, and what is longer shows."""
    machine = replace(TINY, dependent_mma_s=20 * PS)
    for num_products, compute_ps in ((0, 0), (10, 0), (100, 1000)):
        chain = work(Pass(reads=(reads(1000),), num_dependent_mmas=num_products))
        run = kernel(simulate(monkeypatch, {"a": chain}, [call(0, "a")], machine, num_ranks=1), "a")
        assert sum(end - start for phase, start, end in spans(run) if phase == "compute") == compute_ps, num_products


def test_the_last_slot_is_multiplied_when_it_came(monkeypatch: Patch) -> None:
    # Two slots of 50 bytes in each of ten blocks: 500 of the 1000 bytes come last, and half of the 40 for 400 flops.
    ringed = work(Pass(reads=(reads(1000),), flops=400.0), num_blocks=10, bytes_in_flight_per_block=100, ring_slots=2)
    machine = replace(TINY, hbm_in_flight_curve=((100.0, 1e12),))
    timeline = simulate(monkeypatch, {"a": ringed}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("compute", 2100, 2120)]


def test_arithmetic_beyond_the_stream_is_compute(monkeypatch: Patch) -> None:
    # Ten SMs: 15000 flops take 1500 ps beside a stream of 1000.
    timeline = simulate(monkeypatch, {"a": stream(1000, flops=15_000.0)}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[2:] == [("weights", 1100, 2100), ("compute", 2100, 2600)]


@pytest.mark.parametrize(
    ("unit", "fp4_flops", "compute_ps"),
    [
        (Unit.CUDA_CORE, 80e12, 4000),  # 1 flop a picosecond on each of ten SMs
        (Unit.BF16, 80e12, 2000),
        (Unit.FP4, 80e12, 500),
        (Unit.FP4, 0.0, 2000),  # without FP4 the bf16 rate
    ],
)
def test_each_unit_has_its_rate(monkeypatch: Patch, unit: Unit, fp4_flops: float, compute_ps: int) -> None:
    machine = replace(TINY, fp4_flops=fp4_flops)
    timeline = simulate(monkeypatch, {"a": work(Pass(flops=40_000.0, unit=unit))}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [("compute", 1000, 1000 + compute_ps)]


def test_fp4_weights_have_a_rate_of_their_own(monkeypatch: Patch) -> None:
    # Five of ten SMs, four weights a clock, half a clock a picosecond: ten weights a picosecond.
    decoding = work(Pass(flops=1.0, unit=Unit.FP4, decoded_weights=3000, num_blocks=5, num_tensor_core_setups=2))
    timeline = simulate(monkeypatch, {"a": decoding}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [("tensor-core set-up", 1000, 1100), ("compute", 1100, 1400)]


def test_a_stage_is_instructions_port_and_sum() -> None:
    # 64 bytes a block and stage take half a clock of 2 ps, the sum 3; ten instructions 1 ps each.
    staged = work(Pass(reads=(reads(1280),), num_stages=2, stage_instructions=10), threads_per_block=32)
    wave = wave_of(staged, 10)
    timing = SmTiming(replace(TINY, instruction_s=1 * PS))
    assert timing.stage_ps(wave, staged.passes[0]) == pytest.approx(10 + 1 + 3)
    assert timing.arithmetic_ps(wave, staged.passes[0]) == pytest.approx(2 * 14)
    # Five warps on four schedulers issue one instruction in 2.5 ps, which is longer than 1.
    crowded = wave_of(replace(staged, threads_per_block=160), 10)
    assert timing.stage_ps(crowded, staged.passes[0]) == pytest.approx(25 + 1 + 3)


@pytest.mark.parametrize(("ring_slots", "share"), [(0, 0.0), (1, 1.0), (2, 0.5), (10, 0.1)])
def test_the_last_slot_is_its_share(ring_slots: int, share: float) -> None:
    one = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=100, ring_slots=ring_slots)
    assert last_slot_share(one, one.passes[0]) == share
