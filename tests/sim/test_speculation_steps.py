"""Steps with drafts: what they cost, and what acceptance gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3sim.commands.speculation import gain_of, with_best_length
from k3sim.errors import UserError
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.question import ask

DRAFTED = Options(path="stock", speculation="dspark", draft_length="2", acceptance="0,0")


def answer(options: Options) -> Prediction:
    return predict(ask(options))


@pytest.mark.parametrize("path", ["stock", "fused"])
def test_nothing_accepted_costs_a_draft(path: str) -> None:
    gain = gain_of(answer(replace(DRAFTED, path=path)))
    assert gain.tokens_per_step == 1.0
    assert 0 < gain.draft_us < gain.step_us - gain.plain_step_us
    assert gain.break_even_tokens_per_step == gain.step_us / gain.plain_step_us > 1.0


def test_no_draft_equals_the_plain_step() -> None:
    plain, drafted = answer(Options(path="stock")), answer(replace(DRAFTED, draft_length="0"))
    assert drafted.step_ps == plain.step_ps
    assert [run.stage for run in drafted.timeline.kernels] == [run.stage for run in plain.timeline.kernels]


def test_folded_draft_equals_the_full_one() -> None:
    question = ask(DRAFTED)
    folded, full = predict(question), predict(replace(question, folded=False))
    assert folded.step_us == pytest.approx(full.step_us, rel=1e-3)
    drafted = [run.stage for run in folded.full.kernels if run.stage.startswith("draft.")]
    assert drafted == [run.stage for run in full.timeline.kernels if run.stage.startswith("draft.")]


def test_longer_drafts_take_longer() -> None:
    steps = [answer(replace(DRAFTED, draft_length=length, acceptance="")).step_us for length in ("1", "3", "7")]
    assert steps == sorted(steps)


def test_best_length_is_zero_where_nothing_is_accepted() -> None:
    options = replace(DRAFTED, draft_length="best", acceptance="0,0")
    assert with_best_length(options).draft_length == "0"
    accepted = with_best_length(replace(options, acceptance="1,1"))
    assert accepted.draft_length == "2"


def test_best_length_needs_shares_by_position() -> None:
    with pytest.raises(UserError, match="by position"):
        with_best_length(replace(DRAFTED, draft_length="best", acceptance="2.5"))


def test_draft_that_does_not_fit_is_refused() -> None:
    assert ask(Options(path="stock", memory=142.0))
    with pytest.raises(UserError, match=r"more than the 142\.0 GB"):
        ask(replace(DRAFTED, memory=142.0))
