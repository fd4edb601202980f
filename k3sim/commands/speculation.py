"""What speculation gives: tokens a step, break-even acceptance, and the draft length that gives the most.

Break-even is the number of tokens a step at which a user gets as many a second as without speculation: the step with
drafts over the plain step. It needs no acceptance, so it is always told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.model.draft import MAX_DRAFTS
from k3sim.sim.options import Options
from k3sim.sim.question import ask

if TYPE_CHECKING:
    from k3sim.report import Report
    from k3sim.sim.predict import Prediction

BEST = "best"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One path's step with drafts beside its plain step. ``tokens_per_step`` is None where no acceptance was given."""

    step_us: float
    plain_step_us: float
    draft_us: float  # of the step behind the sampling
    tokens_per_step: float | None
    break_even_tokens_per_step: float


def gains(report: Report) -> Mapping[str, Gain]:
    """By label of the report's paths; empty without speculation."""
    if report.question.architecture.draft is None:
        return {}
    return {label: gain_of(prediction) for label, prediction in report.labelled.items()}


def gain_of(prediction: Prediction) -> Gain:
    """What drafts cost and give on the prediction's path."""
    from k3sim.sim.predict import predict

    question = prediction.question
    plain = predict(replace(question, architecture=replace(question.architecture, draft=None), acceptance=None))
    stages = prediction.timeline.of_rank(prediction.timeline.critical_rank)
    begin_ps = min(run.start_ps for run in stages if run.stage.startswith("draft."))
    return Gain(
        step_us=prediction.step_us,
        plain_step_us=plain.step_us,
        draft_us=(prediction.timeline.step_ps - begin_ps) / 1e6,
        tokens_per_step=prediction.tokens_per_step if question.acceptance else None,
        break_even_tokens_per_step=prediction.step_us / plain.step_us,
    )


def to_dict(found: Mapping[str, Gain]) -> dict[str, Any]:
    """As JSON; docs/json.md describes it."""
    return {label: asdict(one) for label, one in found.items()}


def with_best_length(options: Options) -> Options:
    """``--draft-length best`` as the number that gives a user the most tokens a second, zero among them.

    Raises UserError without an acceptance by position: one number of tokens a step says nothing of other lengths.
    """
    if options.draft_length != BEST:
        return options
    from k3sim.model.speculation import read_acceptance
    from k3sim.sim.predict import predict

    if not options.speculation:
        raise UserError("--draft-length and --acceptance are of speculation; give --speculation dspark too")
    acceptance = read_acceptance(options.acceptance) if options.acceptance else None
    if acceptance is None or acceptance.mean is not None:
        raise UserError("--draft-length best needs --acceptance by position or geometric:P, which says what each gives")
    most = len(acceptance.shares) or MAX_DRAFTS
    lengths = [replace(options, draft_length=str(length)) for length in range(most + 1)]
    return max(lengths, key=lambda one: predict(ask(one).expected()).tokens_per_second_per_user)
