"""The known bias of the fused path, and texts of claims that take their numbers from what they stand beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_records import SCENARIO, scenario

from k3sim.calibrate.compare import claims, known_bias
from k3sim.calibrate.evidence import load_evidence
from k3sim.calibrate.evidence.claim_texts import filled, names_in, unknown_names
from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios
from k3sim.errors import UserError


def test_a_bias_is_what_published_steps_say() -> None:
    pairs = known_bias.published_steps()
    assert len(pairs) == 5 and all(before is not None for _, before in pairs)
    # Fused steps predicted a tenth too fast, the steps before them as published.
    predicted = {}
    for after, before in pairs:
        assert before is not None
        predicted[after.command] = 0.9 * known_bias.step_us(after)
        predicted[before.command] = known_bias.step_us(before)
    found = known_bias.known_bias(predicted)
    assert (found.steps, found.gains) == (5, 5)
    assert [found.mean_error, found.least_error, found.most_error] == pytest.approx([-0.1] * 3)
    assert found.mean_gain_error == pytest.approx(1 / 0.9 - 1)
    assert "5 published steps of the fused path are predicted -10.0 % off in the mean" in found.sentence


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("k3sim timeline", True),
        ("k3sim timeline --kernels own", False),
        ("k3sim timeline --path stock", False),
        ("k3sim timeline --path megakernel", False),
    ],
)
def test_a_bias_belongs_to_public_fused_alone(command: str, shown: bool) -> None:
    assert known_bias.is_public_fused(command) is shown


def test_a_fused_claim_shows_its_known_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {one.command: known_bias.step_us(one) for one in load_evidence() if one.kind == "step"}
    monkeypatch.setattr(claims, "_published_us", lambda command: published[command])
    monkeypatch.setattr(claims, "_steps_us", lambda command, draws, seed: (100.0, 90.0, 110.0))
    (one,) = claims.judge_claims([load_scenario(scenario(tmp_path))], num_draws=2, jobs=1)
    bias = one.to_dict()["known_bias"]
    assert bias is not None and abs(bias["mean_error"]) < 1e-9 and bias["steps"] == 5
    stock = scenario(tmp_path, unit="ms", against=None, command="k3sim timeline --path stock")
    (other,) = claims.judge_claims([load_scenario(stock)], num_draws=2, jobs=1)
    assert other.to_dict()["known_bias"] is None


def test_numbers_of_a_text_are_filled_in() -> None:
    gain = "{published gb200-k3opt-stock-c1 over gb200-k3opt-fused-c1}"
    text = "{gain} here; {published gb200-k3opt-fused-c1} ms, " + gain
    assert names_in(text)[0] == "gain"
    assert filled(text, {"gain": "1.6"}) == "1.6 here; 5.168 ms, 1.52"
    assert filled("{gain}", {}) == "not predicted"
    assert unknown_names("{gain} {where it holds} {published nothing}", ["gain"]) == ["published nothing"]


def test_a_text_that_names_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**SCENARIO, "boundary": "at most {gian}"}, indent=1), encoding="utf-8")
    with pytest.raises(UserError, match=r"\{gian\} \(did you mean gain\?\), accepted in braces: a label"):
        load_scenario(path)


def test_no_shipped_text_types_a_prediction() -> None:
    """Numbers that the model or published steps give stand in braces; each file that is predicted has some."""
    for path in shipped_scenarios():
        one = load_scenario(path)
        if one.id in ("gb300-one-user", "gain-falls-with-concurrency", "megakernel-16-gb200"):
            assert sum(len(names_in(text)) for text in (one.found, one.boundary, one.would_hold)) >= 3, one.id
