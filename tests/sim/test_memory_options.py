"""Whether a question fits is said, can be stated otherwise, and can be ignored with a warning."""

from __future__ import annotations

import math

import pytest

from k3sim.errors import UserError
from k3sim.sim.options import Options
from k3sim.sim.question import ask


def test_refusal_names_the_options_that_help() -> None:
    with pytest.raises(UserError, match=r"tp=16 or tp=32 would fit; or --memory GB .* --ignore-memory"):
        ask(Options(machine="h200", tp=8))


def test_stated_memory_takes_the_place_of_the_profiles() -> None:
    assert ask(Options(machine="h200", tp=8, memory=300)).warnings == []
    with pytest.raises(UserError, match="of --memory"):
        ask(Options(memory=50))


def test_ignored_memory_is_a_warning() -> None:
    (warning,) = ask(Options(machine="h200", tp=8, ignore_memory=True)).warnings
    assert "--ignore-memory" in warning and "57.5 GB more" in warning
    assert ask(Options(ignore_memory=True)).warnings == []


@pytest.mark.parametrize("memory", [0, -1, math.nan, math.inf, 1e9])
def test_odd_memory_is_refused(memory: float) -> None:
    with pytest.raises(UserError, match="memory is"):
        ask(Options(memory=memory))
