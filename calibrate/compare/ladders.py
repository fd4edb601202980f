"""Optimisation ladders: public builds that grew step by step, predicted step by step.

A public step is finer than a switch: it turns on parts of switches (``model/switches.py``). A step is judged on
direction and size; where the change has no part, or the source names only its class, it is listed as having no switch.
Steps that complete each other are judged together (``also``).

A source says by how much its measurements repeat, or does not. A published saving below that cannot show that a
prediction is right, so agreement with it is noise. It does not excuse one that is off: what is predicted twice or half
as large, or the other way, is called that, whatever the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.model.paths import PARTS, find_path
from k3sim.model.step import Path
from k3sim.sim.predict import predict
from k3sim.sim.question import question_of

if TYPE_CHECKING:
    from k3sim.calibrate.evidence import Ladder

#: Predicted over published saving within which the size of a step counts as right.
SIZE_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class JudgedStep:
    """One step beside its prediction; times in milliseconds a step. Savings are positive when a step gets faster."""

    title: str
    published_ms: float  # after the step
    published_saving_ms: float  # with those of the steps that complete it
    after: ComparedCase | None  # the whole step; None where the change is not modelled
    saving: ComparedCase | None  # None at the start, too
    noise_ms: float  # by which the source's measurements of such a step differ; 0 where it does not say
    verdict: str  # "start", "no switch", "with an earlier step", "noise", "direction", "direction and size", "wrong"
    why: str

    @property
    def predicted_ms(self) -> float | None:
        return self.after.predicted if self.after else None

    @property
    def predicted_saving_ms(self) -> float | None:
        return self.saving.predicted if self.saving else None

    @property
    def ratio(self) -> float | None:
        """Predicted over published saving; None at the start, of what is not predicted, and of a saving of nothing."""
        if self.saving is None or not self.published_saving_ms:
            return None
        return self.saving.predicted / self.published_saving_ms


def path_of(parts: Iterable[str]) -> Path:
    """The path of the public kernels with these parts of its switches on."""
    chosen = tuple(parts)
    return find_path("fused", with_switches=chosen) if chosen else find_path("stock")


def step_ms(command: str, parts: Iterable[str]) -> float:
    """Predicted step of the command's machine, layout and workload on the path with ``parts``."""
    return predict(replace(question_of(command), path=path_of(parts))).step_us / 1e3


def part_sets(ladder: Ladder) -> list[tuple[str, ...]]:
    """The parts that are on after each step, in the order of PARTS."""
    on: set[str] = set()
    found = []
    for step in ladder.steps:
        on |= set(step.parts)
        found.append(tuple(part for part in PARTS if part in on))
    return found


def judge(ladder: Ladder, predicted_ms: Mapping[tuple[str, ...], float]) -> list[JudgedStep]:
    """Every step of a ladder, given the predicted step for each of ``part_sets``."""

    def published(index: int) -> float:
        value = ladder.steps[index].value
        return 1e3 / value if ladder.unit == "tok/s/user" else value

    def saving(index: int) -> float:
        return published(index - 1) - published(index)

    sets = part_sets(ladder)
    share = ladder.layers / ladder.all_layers
    found = []
    for index, step in enumerate(ladder.steps):
        after = predicted_ms[sets[index]] * share
        if index == 0:
            found.append(_judged(ladder, 0, published(0), after, 0.0, None, "start"))
        elif not step.parts:
            led_by = any(index in other.also for other in ladder.steps)
            verdict = "with an earlier step" if led_by else "no switch"
            found.append(_judged(ladder, index, published(index), None, saving(index), None, verdict))
        else:
            before = predicted_ms[sets[index - 1]] * share
            was = saving(index) + fsum(saving(other) for other in step.also)
            verdict = verdict_of(before - after, was, ladder.noise * published(index))
            found.append(_judged(ladder, index, published(index), after, was, before - after, verdict))
    return found


def _judged(
    ladder: Ladder,
    index: int,
    published: float,
    predicted: float | None,
    was: float,
    saved: float | None,
    verdict: str,
) -> JudgedStep:
    step = ladder.steps[index]

    def case(measured: float, predicted: float | None) -> ComparedCase | None:
        if predicted is None:
            return None
        return ComparedCase(
            kind="ladder", label=step.title, measured=measured, predicted=predicted, unit="ms", source=ladder.source
        )

    return JudgedStep(
        title=step.title,
        published_ms=published,
        published_saving_ms=was,
        after=case(published, predicted),
        saving=case(was, saved),
        noise_ms=ladder.noise * published,
        verdict=verdict,
        why=step.why,
    )


def verdict_of(predicted: float, published: float, noise: float) -> str:
    """Of savings in one unit: ``wrong`` where the signs differ, ``direction`` where one is twice the other or more.

    Where the size is right, ``noise`` if the published saving is smaller than that.
    """
    if predicted * published <= 0:
        return "wrong"
    if not 1 / SIZE_FACTOR <= predicted / published <= SIZE_FACTOR:
        return "direction"
    return "noise" if abs(published) < noise else "direction and size"


def counts(steps: Sequence[JudgedStep]) -> dict[str, int]:
    """How many steps of each verdict, the start left out."""
    found: dict[str, int] = {}
    for step in steps:
        if step.verdict != "start":
            found[step.verdict] = found.get(step.verdict, 0) + 1
    return found
