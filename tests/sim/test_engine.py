"""The engine: a whole program."""

from __future__ import annotations

import pytest
from tiny import PUSH, PUSH_CALLS, call, simulate, stream

from k3sim.sim.components.skew import Skew

Patch = pytest.MonkeyPatch


def test_a_program_that_waits_for_itself_is_reported(monkeypatch: Patch) -> None:
    calls = [call(0, "a", after=(1,)), call(1, "b", after=(0,))]
    with pytest.raises(AssertionError, match=r"never finished.*'a', 'b'"):
        simulate(monkeypatch, {"a": stream(1), "b": stream(1)}, calls, num_ranks=1)


def test_the_seed_decides_the_timeline(monkeypatch: Patch) -> None:
    first = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=3)
    again = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=3)
    other = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED, seed=4)
    assert first == again
    assert first.step_ps != other.step_ps
