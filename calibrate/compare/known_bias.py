"""How far published steps of the fused path are off: what a claim about that path is to be read with.

Nothing here is typed: every judged step of the public fused build is predicted, and where its source also has the step
before, so is the gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from k3sim.calibrate.evidence import Evidence, load_evidence
from k3sim.calibrate.evidence.claim_texts import step_us
from k3sim.sim.question import Question, question_of


@dataclass(frozen=True, kw_only=True)
class KnownBias:
    """Predicted over published, less one: negative for steps that are predicted too fast, and gains too small."""

    steps: int
    mean_error: float
    least_error: float
    most_error: float
    gains: int
    mean_gain_error: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """The same in words."""
        return (
            f"{self.steps} published steps of the fused path are predicted {_signed(self.mean_error)} off in the mean "
            f"({_signed(self.least_error)} to {_signed(self.most_error)}), {self.gains} published gains of it "
            f"{_signed(self.mean_gain_error)}"
        )


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"


def is_public_fused(command: str) -> bool:
    """Whether a command asks for the fused path with the kernels of public engines."""
    path = question_of(command).path
    return path.name == "fused" and path.kernel_set == "public"


@cache
def published_steps() -> tuple[tuple[Evidence, Evidence | None], ...]:
    """Judged steps of the public fused path, each with the stock step of the same source and workload."""
    judged = [one for one in load_evidence() if one.kind == "step" and one.judged]
    before = {_place(one): one for one in judged if question_of(one.command).path.name == "stock"}
    return tuple((one, before.get(_place(one))) for one in judged if is_public_fused(one.command))


def _place(one: Evidence) -> tuple[Any, ...]:
    asked: Question = question_of(one.command)
    return one.source, one.hardware, asked.layout, asked.workload


def commands() -> set[str]:
    """What has to be predicted."""
    return {one.command for pair in published_steps() for one in pair if one is not None}


def known_bias(predicted_us: Mapping[str, float]) -> KnownBias:
    """The bias, from a prediction for each of ``commands``."""
    errors = [predicted_us[one.command] / step_us(one) - 1 for one, _ in published_steps()]
    gains = [
        predicted_us[before.command] / predicted_us[one.command] / (step_us(before) / step_us(one)) - 1
        for one, before in published_steps()
        if before is not None
    ]
    return KnownBias(
        steps=len(errors),
        mean_error=statistics.fmean(errors),
        least_error=min(errors),
        most_error=max(errors),
        gains=len(gains),
        mean_gain_error=statistics.fmean(gains),
    )

