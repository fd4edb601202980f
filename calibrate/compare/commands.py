"""The ``k3sim timeline`` command that predicts a published result, as a question to the simulator.

Evidence and scenario files hold the command itself, so that a reader can run it. Only options that change the
prediction are accepted there, and each once (switches may repeat).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from k3sim.errors import UserError
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, check_layout, check_workload
from k3sim.model.memory import check_fits
from k3sim.model.paths import find_path
from k3sim.model.routing import REAL_TEXT_SKEW
from k3sim.model.step import Path
from k3sim.sim.predict import Question
from k3sim.sim.profile import load_machine

VERB = ("k3sim", "timeline")
#: Options of the command with their defaults there. A test holds them against those of the command line.
DEFAULTS: dict[str, Any] = {
    "machine": "gb300",
    "tp": 16,
    "ep": 1,
    "dp": 1,
    "dcp": 1,
    "path": "fused",
    "kernels": "public",
    "concurrency": 1,
    "context": 8192,
    "kv-dtype": "fp8",
    "routing-skew": REAL_TEXT_SKEW,
}
REPEATED = ("with", "without")
#: Options that exist once the workload has a field of that name; scenarios may use them before.
LATER = ("drafted-tokens", "accepted-tokens")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and the path that answers it."""

    question: Question
    path: Path


def workload_has(option: str) -> bool:
    """Whether this version can honour an option of ``LATER``."""
    return option.replace("-", "_") in {one.name for one in fields(Workload)}


@lru_cache(maxsize=512)
def asked(command: str) -> Asked:
    """The question of ``k3sim timeline ...``.

    Raises UserError for another command, an option that is unknown or given twice, a value that the option does not
    take, and everything that the command line refuses: unknown names, layouts that do not divide the model or do not
    fit.
    """
    values = options_of(command)
    machine = load_machine(values["machine"])
    architecture = load_architecture()
    path = find_path(
        values["path"],
        with_switches=tuple(values["with"]),
        without=tuple(values["without"]),
        kernel_set=values["kernels"],
    )
    layout = Layout(tp=values["tp"], ep=values["ep"], dp=values["dp"], dcp=values["dcp"])
    check_layout(architecture, layout)
    if values["kv-dtype"] not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {values['kv-dtype']!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    later = {one.replace("-", "_"): values[one] for one in LATER if one in values}
    workload = Workload(
        concurrency=values["concurrency"], context=values["context"], kv_dtype=values["kv-dtype"], **later
    )
    check_workload(architecture, workload)
    if not 0.0 <= values["routing-skew"] <= 4.0:
        raise UserError(f"routing skew is {values['routing-skew']}; accepted: 0 (uniform) to 4")
    check_fits(
        architecture,
        path.layout(layout, workload, None),
        hbm_capacity_bytes=machine.hbm_capacity_bytes,
        machine_name=machine.name,
        concurrency=workload.concurrency,
        context=workload.context,
        kv_dtype=workload.kv_dtype,
    )
    return Asked(
        question=Question(
            architecture=architecture,
            layout=layout,
            workload=workload,
            machine=machine,
            routing_skew=values["routing-skew"],
        ),
        path=path,
    )


def tokens_a_step(command: str) -> float:
    """Tokens that a user gets from one step: one, or what speculation has accepted where the workload says so."""
    return float(getattr(asked(command).question.workload, "accepted_tokens", None) or 1)


def options_of(command: str, *, later: bool = False) -> dict[str, Any]:
    """Every option of the command by its name, defaults filled in. Raises UserError as ``asked``.

    ``later``: accept options that this version cannot honour yet.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"command {command!r} cannot be read: {error}") from None
    if tuple(words[:2]) != VERB:
        raise UserError(f"command {command!r}; accepted: one that begins with 'k3sim timeline'")
    found: dict[str, Any] = {}
    rest = iter(words[2:])
    for word in rest:
        name = word.removeprefix("--")
        if not word.startswith("--") or name not in (*DEFAULTS, *REPEATED, *LATER):
            accepted = ", ".join(f"--{one}" for one in (*DEFAULTS, *REPEATED))
            raise UserError(f"unknown option {word!r} in {command!r}; accepted: {accepted}")
        value = next(rest, None)
        if value is None:
            raise UserError(f"option {word} of {command!r} has no value; accepted: one after each option")
        if name in REPEATED:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise UserError(f"option {word} stands twice in {command!r}; accepted: once")
        elif name in LATER and not later and not workload_has(name):
            raise UserError(f"option {word} of {command!r} is not there yet: no speculation is modelled")
        else:
            found[name] = _typed(word, value, DEFAULTS.get(name, 0))
    return {**DEFAULTS, "with": [], "without": [], **found}


def _typed(option: str, value: str, default: Any) -> Any:
    kind: Callable[[str], Any] = type(default)
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{option} is {value!r}; accepted: {what}") from None
