"""What a prefetch beside the kernel ahead saves a product: predictions beside readings (probe ``prefetch_gain``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import call, kernel, simulate

from k3sim.calibrate.samples import read_samples
from k3sim.kernels.work import Pass, Read, Work
from k3sim.sim.profile import load_machine

DATA = Path(__file__).parents[2] / "calibrate" / "data"
H200 = load_machine("h200")
PREFETCHED_BYTES_PER_S = 4.67e12  # of lines that a prefetch brought: slope of 20 us, idle, between 4 and 24 MiB
PAIRS, WARM_UP = 8, 3
MIB = 1 << 20


def read_us(**parameters: Any) -> float:
    """A pair of the probe, as it was read."""
    file = read_samples(DATA / "h200-prefetch.json")
    found = [*file.samples, *(one for one, _ in file.refused)]
    (value,) = {one.value for one in found if parameters.items() <= one.parameters.items()}
    return value


def predicted_us(patch: pytest.MonkeyPatch, machine: Any, us: int, mib: int, *, early: bool, prefetched: bool) -> float:
    """The same pair, behind a kernel that leaves HBM idle."""
    works, calls = {}, []
    # Kernels of the probe run again within microseconds, each under one name.
    machine = replace(machine, kernel_exit_cold_s=machine.kernel_exit_warm_s)
    cycles = us * 1e-6 * machine.sm_clock_hz
    idle = Pass(flops=2 * machine.fp32_fma_per_clock_per_sm * machine.num_sms * cycles)
    small = {"threads_per_block": 32, "smem_bytes_per_block": 0, "max_blocks_per_sm": 8, "registers_per_thread": 16}
    ahead = Work(num_blocks=132, bytes_in_flight_per_block=1, passes=(idle,), **small)
    for pair in range(PAIRS):
        reads = (Read(region=f"w{pair}", num_bytes=mib * MIB, early=early),)
        after = () if pair == 0 else (len(calls) - 1,)
        if prefetched:
            works[f"prefetch {pair}"] = Work(
                num_blocks=16, bytes_in_flight_per_block=MIB // 4, prefetches=True, passes=(Pass(reads=reads),), **small
            )
            calls.append(call(len(calls), f"prefetch {pair}", stream="prefetch", after=after))
        works[f"ahead {pair}"] = ahead
        calls.append(call(len(calls), f"ahead {pair}", trigger="start" if early else "end"))
        works[f"used {pair}"] = Work(
            num_blocks=132, threads_per_block=32, smem_bytes_per_block=176 * 1024, max_blocks_per_sm=1,
            registers_per_thread=32, bytes_in_flight_per_block=176 * 1024, ring_slots=11, deep_prefetch=early,
            passes=(Pass(reads=reads),),
        )  # fmt: skip
        calls.append(call(len(calls), f"used {pair}", launch="pdl" if early else "graph"))
    timeline = simulate(patch, works, calls, machine, num_ranks=1)
    ends = [kernel(timeline, f"used {pair}").end_ps for pair in range(PAIRS)]
    return (ends[-1] - ends[WARM_UP - 1]) / (PAIRS - WARM_UP) / 1e6


def saved_us(patch: pytest.MonkeyPatch, machine: Any, us: int, mib: int, *, early: bool) -> tuple[float, float]:
    """By a prefetch of the whole matrix: predicted, and read."""
    case = {
        "predecessor_us": us, "matrix_bytes": mib * MIB, "early_launch": early, "stream_bytes_in_flight_per_sm": 0,
    }  # fmt: skip
    without = predicted_us(patch, machine, us, mib, early=early, prefetched=False)
    with_it = predicted_us(patch, machine, us, mib, early=early, prefetched=True)
    read = read_us(**case, prefetched_bytes=None), read_us(**case, prefetched_bytes=mib * MIB, issuing_blocks=16)
    return without - with_it, read[0] - read[1]


@pytest.mark.parametrize("us", [5, 10, 20])
@pytest.mark.parametrize("mib", [4, 12, 24])
def test_pairs_without_a_prefetch_are_predicted(us: int, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_us(
        predecessor_us=us, matrix_bytes=mib * MIB, early_launch=False, stream_bytes_in_flight_per_sm=0,
        prefetched_bytes=None,
    )  # fmt: skip
    assert predicted_us(monkeypatch, H200, us, mib, early=False, prefetched=False) == pytest.approx(read, rel=0.03)


@pytest.mark.parametrize("mib", [4, 12, 24])
def test_an_early_product_gains_nothing(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, read = saved_us(monkeypatch, H200, 10, mib, early=True)
    assert read < 0
    assert -0.1 < predicted < 0.2


@pytest.mark.parametrize("us", [5, 10, 20])
@pytest.mark.parametrize("mib", [4, 12, 24])
def test_with_the_rate_read_savings_agree(us: int, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(H200, l2_read_bytes_per_s=PREFETCHED_BYTES_PER_S)
    predicted, read = saved_us(monkeypatch, machine, us, mib, early=False)
    assert predicted == pytest.approx(read, abs=0.4)


def test_the_profile_says_too_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two-sided: fails when the rules change, in either direction (docs/journal/2026-12-01-prefetch.md)."""
    predicted, read = saved_us(monkeypatch, H200, 20, 24, early=False)
    assert read == pytest.approx(0.45, abs=0.05)
    assert predicted == pytest.approx(2.7, abs=0.3)
