"""Arithmetic of the SMs: rates of the units, chains, the last slot of a ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY, call, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass, Unit
from k3sim.sim.components.sm_timing import last_slot_share

Patch = pytest.MonkeyPatch


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


@pytest.mark.parametrize(("ring_slots", "share"), [(0, 0.0), (1, 1.0), (2, 0.5), (10, 0.1)])
def test_the_last_slot_is_its_share(ring_slots: int, share: float) -> None:
    one = work(Pass(reads=(reads(1000),)), bytes_in_flight_per_block=100, ring_slots=ring_slots)
    assert last_slot_share(one, one.passes[0]) == share
