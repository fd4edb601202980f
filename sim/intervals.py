"""How far a predicted step may be off because the machine's values are: seeded draws of a profile.

Each value of a profile has a ``low`` and a ``high``. A draw takes them as the 5th and the 95th percentile of a normal
distribution of the value's logarithm with another width on each side, since a value is as a rule nearer to one end.
Values move independently of each other. Draws are stratified (one from each of ``num_draws`` equally likely slices of
every value, in an order of its own), which makes the percentiles of few draws steady. All paths see the same draws, so
what is common to two paths moves both.

The interval of a step is thus that of the machine's values alone. What a cost function leaves out is not in it: whether
measured steps lie inside is for ``k3sim calibrate --check`` to say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from k3sim.model.names import first_named
from k3sim.sim.draws import NUM_DRAWS
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Answer, predict
from k3sim.sim.question import Question

LEVEL = 0.90
_NORMAL = NormalDist()
_EDGE = _NORMAL.inv_cdf((1 + LEVEL) / 2)  # low and high lie that many standard deviations out
_FURTHEST = 2.5  # standard deviations: tails beyond are cut, the interval does not need them


def draw_machines(machine: Machine, num_draws: int = NUM_DRAWS, seed: int = 0) -> list[Machine]:
    """``num_draws`` machines whose values are drawn within their intervals; the same for the same seed."""
    assert num_draws >= 2, num_draws
    drawn: list[dict[str, Any]] = [{} for _ in range(num_draws)]
    for name, origin in machine.provenance.items():
        value = getattr(machine, name)
        curve = isinstance(value, tuple)
        middle = 1.0 if curve else value
        if isinstance(value, bool) or origin.low == origin.high:
            continue
        # A generator for each field: a profile whose other values change draws this one as before.
        generator = random.Random(f"{seed} {first_named('machine value', name)}")
        slices = generator.sample(range(num_draws), num_draws)
        for values, place in zip(drawn, slices, strict=True):
            deviation = _NORMAL.inv_cdf((place + 1e-9 + (1 - 2e-9) * generator.random()) / num_draws)
            moved = _moved(middle, origin.low, origin.high, max(-_FURTHEST, min(_FURTHEST, deviation)))
            if curve:
                values[name] = tuple((at, rate * moved) for at, rate in value)
            else:
                values[name] = round(moved) if isinstance(value, int) else moved
    return [_consistent(replace(machine, **values)) for values in drawn]


def _moved(middle: float, low: float, high: float, deviation: float) -> float:
    """``middle`` moved by ``deviation`` standard deviations towards ``low`` (negative) or ``high``."""
    share, end = abs(deviation) / _EDGE, low if deviation < 0 else high
    if middle > 0 and end > 0:
        return float(middle * (end / middle) ** share)
    return max(0.0, middle + (end - middle) * share)  # zero has no logarithm


def _consistent(machine: Machine) -> Machine:
    """The bounds that a profile must keep (``load_machine`` refuses others), drawn independently or not."""
    read = min(machine.hbm_read_bytes_per_s, machine.hbm_datasheet_bytes_per_s)
    return replace(
        machine,
        hbm_read_bytes_per_s=read,
        hbm_copy_bytes_per_s=min(machine.hbm_copy_bytes_per_s, read),
        l2_queueing_utilisation=min(machine.l2_queueing_utilisation, 0.99),
        hbm_in_flight_curve=tuple((at, min(rate, read)) for at, rate in machine.hbm_in_flight_curve),
        l2_effective_bytes=min(machine.l2_effective_bytes, machine.l2_capacity_bytes),
        l2_near_latency_s=min(machine.l2_near_latency_s, machine.l2_far_latency_s),
    )


def drawn_steps_us(
    question: Question, *, num_draws: int = NUM_DRAWS, seed: int = 0, answer: Answer = predict
) -> list[float]:
    """The predicted step, and then that of each drawn machine, in microseconds.

    Sampled skew between ranks is replaced by its mean, so that draws differ by the machine's values alone. Paths see
    the same machines in the same order: their steps can be divided draw by draw. ``answer``: what predicts, such as one
    that also tells how far it is.
    """
    expected = question.expected()
    machines = (question.machine, *draw_machines(question.machine, num_draws, seed))
    return [answer(replace(expected, machine=one)).step_us for one in machines]


def gain_interval(slower_us: Sequence[float], faster_us: Sequence[float]) -> tuple[float, float]:
    """The middle 90 % of the gain of one path over another, from the ``drawn_steps_us`` of both."""
    predicted, *gains = (slow / fast for slow, fast in zip(slower_us, faster_us, strict=True))
    return interval_around(predicted, gains)


def interval_around(predicted: float, draws: Sequence[float]) -> tuple[float, float]:
    """The middle 90 % of ``draws``, widened to hold the prediction.

    Many values stand at the fast end of their interval, so that draws are slower than the prediction on the whole.
    """
    low, high = quantiles(sorted(draws))
    return min(low, predicted), max(high, predicted)


def quantiles(ordered: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Lower and upper bound of the middle ``level`` of sorted draws, by linear interpolation."""

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        index = min(int(place), len(ordered) - 2)
        return ordered[index] + (place - index) * (ordered[index + 1] - ordered[index])

    assert len(ordered) > 1
    return at((1 - level) / 2), at((1 + level) / 2)
