"""Activations that all blocks load from L2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY, call, kernel, reads, simulate, spans, wave_of, work

from k3sim.kernels.work import ActivationForm, Pass
from k3sim.sim.components.activations import ActivationLoads
from k3sim.sim.machine import Machine

Patch = pytest.MonkeyPatch


def test_each_form_of_activations_has_its_rates(monkeypatch: Patch) -> None:
    def latency_ps(form: ActivationForm, machine: Machine = TINY, **footprint: int) -> int:
        one = work(Pass(num_dependent_loads=1, activation_bytes_per_block=40, activation_form=form), **footprint)
        run = kernel(simulate(monkeypatch, {"a": one}, [call(0, "a")], machine, num_ranks=1), "a")
        return sum(end - start for phase, start, end in spans(run) if phase == "dependent loads")

    assert latency_ps(ActivationForm.COALESCED) == 10 + 100  # 40 bytes at 0.4
    assert latency_ps(ActivationForm.COALESCED, num_blocks=30) == 10 + 300  # three blocks an SM
    slow_l2 = replace(TINY, l2_read_bytes_per_s=1e12)
    assert latency_ps(ActivationForm.COALESCED, slow_l2) == 10 + 100
    assert latency_ps(ActivationForm.CP_ASYNC, slow_l2) == 10 + 400  # 400 bytes of ten blocks at 1
    assert latency_ps(ActivationForm.MMA_FRAGMENTS) == 10 + 500  # 400 bytes at 0.8
    assert latency_ps(ActivationForm.MMA_FRAGMENTS, num_blocks=2) == 10 + 400  # 40 bytes at 0.1


def test_streamed_activations_bound_the_stream(monkeypatch: Patch) -> None:
    def end_ps(later_bytes: int) -> int:
        one = work(Pass(reads=(reads(1000),), streamed_activation_bytes_per_block=later_bytes))
        return kernel(simulate(monkeypatch, {"a": one}, [call(0, "a")], num_ranks=1), "a").end_ps

    streamed = end_ps(0)
    assert end_ps(400) == streamed  # 400 bytes at 0.4 are there with the stream
    assert end_ps(800) == streamed + 1000


def test_activations_come_at_the_rate_of_one_sm(monkeypatch: Patch) -> None:
    loading = work(Pass(num_dependent_loads=1, activation_bytes_per_block=40))
    timeline = simulate(monkeypatch, {"a": loading}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:] == [("dependent loads", 1000, 1110)]


@pytest.mark.parametrize(("num_blocks", "load_ps"), [(10, 100), (11, 200), (20, 200), (21, 300)])
def test_the_fullest_sm_bounds_a_load(num_blocks: int, load_ps: float) -> None:
    one = work(Pass(), num_blocks=num_blocks)
    # 40 bytes of each block at 0.4 a picosecond and SM.
    assert ActivationLoads(TINY).load_ps(wave_of(one, num_blocks), one.passes[0], 40) == pytest.approx(load_ps)
