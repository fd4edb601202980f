"""The table of ablation: errors with every rule, and without each, of steps, kernels, switches and published steps.

A rule earns its place where the errors grow without it. Errors are predicted over measured, less one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from k3sim.calibrate.ablation.rules import RULES, Rule, switched_off
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.shipped_kernels import MEASURED, MeasuredChain, all_chains
from k3sim.calibrate.compare.shipped_links import labelled_link_steps, link_chains
from k3sim.calibrate.compare.shipped_steps import labelled_steps, step_case
from k3sim.calibrate.compare.validate import loop_us
from k3sim.calibrate.evidence import load_evidence
from k3sim.errors import UserError
from k3sim.model.paths import SWITCHES
from k3sim.sim.machine import Machine
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import question_of

STEPS, SWITCH_SETS, KERNELS = "steps", "switch sets", "kernels"
LINK_STEPS, EXCHANGES = "steps over NVLink", "exchanges over NVLink"
PUBLISHED, PUBLIC = "published steps", "public kernels"
#: What is predicted with and without each rule: shipped kernels on one H200 and on two, and published results.
COLUMNS = (STEPS, SWITCH_SETS, KERNELS, LINK_STEPS, EXCHANGES, PUBLISHED, PUBLIC)

Errors = Mapping[str, Mapping[str, float]]  # column -> case -> predicted over measured, less one


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """Errors without ``rule``; with all where it is None."""

    rule: Rule | None
    errors: Errors

    @property
    def name(self) -> str:
        return "" if self.rule is None else self.rule.name

    def summary(self) -> dict[str, dict[str, float]]:
        """Of each column: median of the size of errors, mean error and the worst with its sign."""
        return {column: _summary(list(self.errors[column].values())) for column in COLUMNS}

    def moved(self, base: Ablated) -> dict[str, float]:
        """Of each column: the largest change of a prediction, relative to that with all rules."""
        return {
            column: max(abs((1 + error) / (1 + base.errors[column][case]) - 1) for case, error in cases.items())
            for column, cases in self.errors.items()
        }


def _summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(abs(one) for one in errors),
        "mean": statistics.fmean(errors),
        "worst": max(errors, key=abs),
    }


def find_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by name, all without one. Raises UserError for a name that no rule has."""
    by_name = {one.name: one for one in RULES}
    for name in names:
        if name not in by_name:
            raise UserError(f"there is no rule {name!r}; accepted: {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names)) or RULES


def ablate(
    rules: Sequence[Rule] = RULES, *, every_step: bool = False, jobs: int | None = None
) -> Iterator[Ablated]:
    """With all rules first, then without each, as soon as it is there.

    ``every_step``: all stored steps of the shipped kernels, not the sample of them (``_is_sampled``).
    """
    tasks = [partial(errors_without, None if rule is None else rule.name, every_step) for rule in (None, *rules)]
    for rule, errors in zip((None, *rules), run_jobs(tasks, jobs=jobs), strict=True):
        yield Ablated(rule=rule, errors=errors)


def errors_without(name: str | None, every_step: bool = False) -> Errors:
    """Errors of every case without the rule of that name, or with all."""
    (rule,) = (None,) if name is None else find_rules([name])
    with switched_off(rule) as changed:
        return {
            **_step_errors(changed, every_step),
            KERNELS: _chain_errors(all_chains(), changed),
            LINK_STEPS: _link_step_errors(changed),
            EXCHANGES: _chain_errors(link_chains(), changed),
            **_published_errors(changed),
        }


Change = Callable[[Machine], Machine]


def _is_sampled(step: Mapping[str, Any]) -> bool:
    """Steps that say most in least time: one context, and every second count of rows."""
    return step["context"] == 8192 and step["concurrency"] in (1, 4, 16)


def _step_errors(changed: Change, every_step: bool) -> Errors:
    """Whole steps of the shipped kernels: both paths, and sets of switches."""
    errors: dict[str, dict[str, float]] = {STEPS: {}, SWITCH_SETS: {}}
    machine = changed(load_machine("h200"))
    for label, source, step in labelled_steps():
        if not (every_step or _is_sampled(step)):
            continue
        is_whole = tuple(step["switches"]) in ((), SWITCHES)
        errors[STEPS if is_whole else SWITCH_SETS][label] = step_case(step, label, source, [machine]).error
    return errors


def _chain_errors(chains: Sequence[MeasuredChain], changed: Change) -> dict[str, float]:
    machine = changed(load_machine(MEASURED))
    return {chain.label: chain.compared([machine]).error for chain in chains}


def _link_step_errors(changed: Change) -> dict[str, float]:
    machine = changed(load_machine(MEASURED))
    return {
        label: step_case(step, label, source, [machine]).error
        for label, source, step in labelled_link_steps() if step.get("gpus", 1) > 1
    }  # fmt: skip


def _published_errors(changed: Change) -> Errors:
    """Published steps and kernels; of rates, the error of the time that they mean."""
    errors: dict[str, dict[str, float]] = {PUBLISHED: {}, PUBLIC: {}}
    predicted_us: dict[str, float] = {}
    for one in load_evidence():
        if not one.judged or one.kind == "stage":
            continue
        if one.loop is not None:
            predicted = loop_us(one.loop, changed(load_machine(one.loop["machine"])))
        else:
            if one.command not in predicted_us:
                question = question_of(one.command)
                predicted_us[one.command] = predict(replace(question, machine=changed(question.machine))).step_us
            predicted = predicted_us[one.command]
        case = ComparedCase(
            kind=one.kind, label=one.id, measured=one.value, predicted=0.0, unit=one.unit, tokens=one.tokens
        )  # fmt: skip
        errors[PUBLIC if one.loop is not None else PUBLISHED][one.id] = predicted / case.us(one.value) - 1.0
    return errors
