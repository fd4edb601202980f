"""Machines drawn within the intervals of a profile's values, and what a question's step is on each of them.

``steps_us`` is what intervals are made from: it adds the errors of kernels (``sim/kernel_errors.py``).

All questions about one machine see the same draws, so that both sides of a ratio move together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from k3sim.sim.intervals import draw_machines, footprint_draw, with_errors_of_step
from k3sim.sim.machine import Machine
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import question_of

NUM_DRAWS = 10  # machines; stratified draws, so that few give steady percentiles


@lru_cache(maxsize=16)
def machine_and_draws(name: str, num_draws: int, seed: int) -> tuple[Machine, ...]:
    """The profile as it is shipped, then the drawn machines."""
    machine = load_machine(name)
    return (machine, *draw_machines(machine, num_draws, seed))


def predictions(command: str, num_draws: int, seed: int) -> list[Prediction]:
    """The command's prediction with its profile, then on each drawn machine."""
    question = question_of(command)
    _, *drawn = machine_and_draws(question.machine.name, num_draws, seed)
    return [
        predict(question),
        *(
            predict(replace(question, machine=one, footprint_draw=footprint_draw(draw, seed)))
            for draw, one in enumerate(drawn, start=1)
        ),
    ]


def steps_us(command: str, num_draws: int, seed: int) -> list[float]:
    """The command's step in microseconds with its profile, then on drawn machines with drawn errors of kernels."""
    return with_errors_of_step(predictions(command, num_draws, seed), seed)
