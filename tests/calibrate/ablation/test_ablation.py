"""Ablation: a rule that is off changes what is predicted, and leaves no trace behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from k3sim.calibrate.ablation.__main__ import main
from k3sim.calibrate.ablation.rules import RULES, Rule, switched_off
from k3sim.calibrate.ablation.table import COLUMNS, Ablated, find_rules
from k3sim.calibrate.compare.shipped_kernels import all_chains
from k3sim.calibrate.compare.shipped_steps import labelled_steps, step_case
from k3sim.errors import UserError
from k3sim.kernels import costs
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import question_of

ROOT = Path(__file__).parents[3]
BY_NAME = {one.name: one for one in RULES}
# Chains of every operator, and then steps: what first differs shows that a rule counts.
COMMANDS = (
    "k3sim timeline --machine gb200 --concurrency 4",
    "k3sim timeline --machine gb200 --path stock",
)
STEPS = ("fused, 1 row, 8k", "fused, 16 rows, 8k", "stock, 1 row, 8k")


def predictions(rule: Rule | None) -> Iterator[float]:
    with switched_off(rule) as changed:
        for chain in all_chains()[::3]:
            yield chain.predicted_us(changed(load_machine("h200")))
        for label, source, step in labelled_steps():
            if label in STEPS:
                yield step_case(step, label, source, [changed(load_machine("h200"))]).predicted
        for command in COMMANDS:
            asked = question_of(command)
            yield predict(replace(asked, machine=changed(asked.machine))).step_ps


@cache
def with_all_rules() -> list[float]:
    return list(predictions(None))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("rule", RULES, ids=lambda one: one.name)
def test_a_rule_that_is_off_changes_a_prediction(rule: Rule) -> None:
    base = with_all_rules()
    assert any(one != before for one, before in zip(predictions(rule), base, strict=True))


def test_a_rule_is_on_again_afterwards() -> None:
    chain, machine = all_chains()[0], load_machine("h200")
    before, work_of = chain.predicted_us(machine), costs._work_of
    for rule in RULES:
        values = [vars(owner)[name] for owner, name, _ in rule.replaced]
        with pytest.raises(KeyboardInterrupt), switched_off(rule):
            raise KeyboardInterrupt
        assert [vars(owner)[name] for owner, name, _ in rule.replaced] == values, rule.name
    assert costs._work_of is work_of
    assert chain.predicted_us(machine) == before


@pytest.mark.parametrize("rule", RULES, ids=lambda one: one.name)
def test_every_rule_is_stated_once_with_its_file(rule: Rule) -> None:
    assert (ROOT / rule.place).is_file()
    assert rule.says and BY_NAME[rule.name] is rule


def test_rules_are_found_by_name() -> None:
    assert find_rules([]) == RULES
    assert find_rules(["skew", "skew"]) == (BY_NAME["skew"],)
    with pytest.raises(UserError, match=r"no rule 'skw'; accepted: .*skew"):
        find_rules(["skw"])


def test_changes_are_relative_to_all_rules() -> None:
    base = Ablated(rule=None, errors={"steps": {"a": 0.0, "b": -0.5}})
    without = Ablated(rule=RULES[0], errors={"steps": {"a": 0.1, "b": -0.5}})
    assert without.moved(base)["steps"] == pytest.approx(0.1)


@pytest.mark.slow
def test_the_command_prints_each_rule_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "skew", "--json"]) == 0
    first, row = json.loads(capsys.readouterr().out)
    assert (first["rule"], row["rule"]) == ("", "skew")
    assert set(row["summary"]) == set(COLUMNS)
    assert row["largest_change"]["kernels"] == 0.0 < row["largest_change"]["published steps"]


def test_an_unknown_rule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--only", "none"])
    assert refused.value.code == 2
    assert "there is no rule 'none'" in capsys.readouterr().err
