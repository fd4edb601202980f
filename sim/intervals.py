"""How far a predicted step may be off: seeded draws of a profile's values, and of the errors of kernels.

Each value of a profile has a ``low`` and a ``high``. A draw takes them as the 5th and the 95th percentile of a normal
distribution of the value's logarithm with another width on each side, since a value is as a rule nearer to one end.
Values move independently of each other. Draws are stratified (one from each of ``num_draws`` equally likely slices of
every value, in an order of its own), which makes the percentiles of few draws steady. All paths see the same draws, so
what is common to two paths moves both.

Kernels whose footprints are not published have others they may be, of which every draw takes one for each kernel
(``kernels/footprints/engines.py``).

What cost functions leave out comes from kernels that were measured (``kernel_errors.py``): with every drawn machine go
errors of kernels, drawn as well, each on the time that its stage has on the critical path. That is to first order: the
path itself stays. Every interval that is shown anywhere is made here, and ``k3sim validate`` counts how many published
results lie inside.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from k3sim.model.names import first_named
from k3sim.sim.draws import MAX_DRAWS, NUM_DRAWS
from k3sim.sim.kernel_errors import LEVEL, family_of, with_kernel_errors
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Answer, Prediction, predict, program_of
from k3sim.sim.question import Question
from k3sim.sim.timeline.critical_path import Part, Segment, critical_path, cut
from k3sim.sim.timeline.timeline import PS_PER_US

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
    read = machine.hbm_read_bytes_per_s
    return replace(
        machine,
        hbm_copy_bytes_per_s=min(machine.hbm_copy_bytes_per_s, read),
        l2_queueing_utilisation=min(machine.l2_queueing_utilisation, 0.99),
        hbm_in_flight_curve=tuple((at, min(rate, read)) for at, rate in machine.hbm_in_flight_curve),
    )


def footprint_draw(draw: int, seed: int) -> int:
    """Which footprints go with a drawn machine, of kernels that have a range of registers; 0 with the profile's own."""
    return draw and seed * MAX_DRAWS + draw


def drawn_steps_us(
    question: Question, *, num_draws: int = NUM_DRAWS, seed: int = 0, answer: Answer = predict
) -> list[float]:
    """The predicted step in microseconds, and then steps of drawn machines with drawn errors of kernels.

    Sampled skew between ranks is replaced by its mean, so that draws differ by what is not known alone. Paths see
    the same draws in the same order: their steps can be divided draw by draw. ``answer``: what predicts, such as one
    that also tells how far it is.
    """
    expected = question.expected()
    machines = (question.machine, *draw_machines(question.machine, num_draws, seed))
    families = families_of(expected)
    steps_us, kernels = [], []
    for draw, one in enumerate(machines):
        prediction = answer(replace(expected, machine=one, footprint_draw=footprint_draw(draw, seed)))
        steps_us.append(prediction.step_us)
        kernels.append(_kernels_of_step(prediction, families))
    return with_kernel_errors(steps_us, kernels, question.machine.title, seed)


def with_errors_of_step(predictions: Sequence[Prediction], seed: int) -> list[float]:
    """The step of the first prediction, and those of the others, on drawn machines, with drawn errors of kernels."""
    first = predictions[0]
    families = families_of(first.question)
    kernels = [_kernels_of_step(one, families) for one in predictions]
    return with_kernel_errors([one.step_us for one in predictions], kernels, first.question.machine.title, seed)


def with_errors_between(
    predictions: Sequence[Prediction], between_ps: Sequence[tuple[int, int]], seed: int
) -> list[float]:
    """The same for the time between two points of each prediction's ``full`` timeline, in microseconds."""
    first = predictions[0]
    families = families_of(first.question)
    values, kernels = [], []
    for one, (start_ps, end_ps) in zip(predictions, between_ps, strict=True):
        stages = {run.index: run.stage for run in one.full.kernels}
        times: dict[tuple[str, str], float] = {}
        for segment in cut(critical_path(one.full), start_ps, end_ps):
            _add(times, families, stages.get(segment.kernel, ""), segment.part, _us(segment))
        values.append((end_ps - start_ps) / PS_PER_US)
        kernels.append(times)
    return with_kernel_errors(values, kernels, first.question.machine.title, seed)


def families_of(question: Question) -> dict[str, str]:
    """Family of the kernel of each stage, those of the host left out."""
    program, _ = program_of(question)
    return {call.stage: family_of(call.operator) for call in program.calls if call.launch != "host"}


def _kernels_of_step(prediction: Prediction, families: dict[str, str]) -> dict[tuple[str, str], float]:
    """Microseconds of each stage on the critical path, by family and stage."""
    times: dict[tuple[str, str], float] = {}
    for stage, part, duration_us in prediction.contributions():
        _add(times, families, stage, part, duration_us)
    return times


def _add(
    times: dict[tuple[str, str], float], families: dict[str, str], stage: str, part: Part, duration_us: float
) -> None:
    """Count time of a stage; what waits for the host or a slower rank is no time of a kernel."""
    if stage in families and part not in (Part.HOST, Part.SLOWER_PEER):
        key = (families[stage], stage)
        times[key] = times.get(key, 0.0) + duration_us


def _us(segment: Segment) -> float:
    return (segment.end_ps - segment.start_ps) / PS_PER_US


def gain_interval(slower_us: Sequence[float], faster_us: Sequence[float]) -> tuple[float, float]:
    """The middle 90 % of the gain of one path over another, from the ``drawn_steps_us`` of both."""
    predicted, *gains = (slow / fast for slow, fast in zip(slower_us, faster_us, strict=True))
    return interval_around(predicted, gains)


def interval_around(predicted: float, draws: Sequence[float]) -> tuple[float, float]:
    """The middle 90 % of ``draws``, widened to hold the prediction.

    Some values stand near one end of their interval, so that draws may be slower than the prediction on the whole.
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
