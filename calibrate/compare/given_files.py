"""A user's own measured steps and kernels beside predictions: ``k3sim calibrate --check --steps FILE --kernels FILE``.

Nothing of them is kept. Every row says on which GPU it was measured; the shipped profile of that GPU predicts it, on a
card that reads as fast as the row says, by the same functions as the stored measurements (``check.py``). A profile that
is asked for takes the place of the shipped one of its GPU, and predicts GPUs of which none is shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import shipped_steps
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.given_rules import KERNELS, STEPS, read_kernels, read_steps
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.shipped_kernels import MeasuredChain, chains_of
from k3sim.calibrate.fit.profile_text import PROFILES
from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, Document, shown, shown_path
from k3sim.model.documents.lines import Keys
from k3sim.model.layout import check_layout, check_workload
from k3sim.model.paths.own import check_own
from k3sim.sim.draws import check_draws
from k3sim.sim.intervals import draw_machines
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress

WITHOUT_COST = "its kernels have no cost in a chain"


@dataclass(frozen=True, kw_only=True)
class GivenStep:
    """A measured step of a file, and the profile that predicts it."""

    step: dict[str, Any]
    label: str
    source: str
    machine: Machine

    def compared(self, machines: Sequence[Machine]) -> ComparedCase:
        """In microseconds, on the profile's machine, which is followed by machines drawn from it or by none."""
        found = shipped_steps.step_case(self.step, self.label, self.source, machines)
        return replace(found, hardware=self.machine.name)


@dataclass(frozen=True, kw_only=True)
class GivenChain:
    """A measured chain of kernels of a file, and the profile that predicts it."""

    chain: MeasuredChain
    machine: Machine

    def compared(self, machines: Sequence[Machine]) -> ComparedCase:
        """As of a step."""
        return replace(self.chain.compared(machines), hardware=self.machine.name)


@dataclass(kw_only=True)
class Given:
    """What the files of a command hold. ``skipped``: kernels that nothing predicts."""

    rows: list[GivenStep | GivenChain] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def machines(self) -> list[Machine]:
        """The profiles that predict, each once, in the order of the rows."""
        return list({one.machine.name: one.machine for one in self.rows}.values())


def read_given(steps: Sequence[Path], kernels: Sequence[Path], machine: Machine | None = None) -> Given:
    """Read and check all files; ``machine``: the profile that is asked for.

    Raises UserError, all faults of a file in one line, for a file of another kind, one that stands twice, a row whose
    GPU has no profile, files of which nothing can be predicted, and a profile that no row needs.
    """
    found = Given()
    seen: set[Path] = set()
    for path in (*steps, *kernels):
        if path.resolve() in seen:
            raise UserError(f"{shown_path(path)}: stands twice; accepted: each file once")
        seen.add(path.resolve())
    for path in steps:
        document, rows = read_steps(path)
        for at, step in rows:
            profile = _profile(document, (*at, "machine"), step["machine"], machine, STEPS)
            if profile is not None and _can_be_asked(document, at, step, profile):
                found.rows.append(
                    GivenStep(step=step, label=_label(step), source=_source(path, step["environment"]), machine=profile)
                )
        document.settle()
    for path in kernels:
        document, timings = read_kernels(path)
        where = document.value["environment"]
        profile = _profile(document, ("environment", "gpu"), where["gpu"], machine, KERNELS)
        document.settle()
        assert profile is not None
        for timing in timings:
            chains = chains_of(
                {**timing, "source": shown_path(path), "read_bytes_per_s": where["read_bytes_per_s"]}
            )
            found.rows += [GivenChain(chain=one, machine=profile) for one in chains]
            found.skipped += [] if chains else [f"{timing['operator']} {timing['case']}"]
    if not found.rows:
        names = ", ".join(shown_path(one) for one in (*steps, *kernels))
        raise UserError(f"{names}: {WITHOUT_COST}; accepted: a file with a kernel that docs/measured.md predicts")
    if machine is not None and machine not in found.machines:
        raise UserError(
            f"machine is {machine.name!r}, a profile of {machine.title}, and no row was measured on one; accepted: "
            f"no --machine, or a profile of {' or '.join(one.title for one in found.machines)}"
        )
    return found


def check_given(
    given: Given,
    *,
    num_draws: int,
    seed: int = 0,
    jobs: int | None = None,
    on_done: OnDone = ignore_progress,
    on_case: Callable[[ComparedCase], None] = lambda _: None,
) -> list[ComparedCase]:
    """Every row in microseconds beside its prediction, kernels and steps in the order of the files.

    ``on_done``, ``on_case`` and ``jobs`` as in ``check``. Raises UserError for fewer than two draws.
    """
    check_draws(num_draws)
    machines = {one.name: (one, *draw_machines(one, num_draws, seed)) for one in given.machines}
    tasks = [partial(one.compared, machines[one.machine.name]) for one in given.rows]
    found = []
    for one in run_jobs(tasks, jobs=jobs, on_done=on_done):
        found.append(one)
        on_case(one)
    return found


def _profile(document: Document, at: Keys, gpu: str, asked: Machine | None, accepted: Accepted) -> Machine | None:
    """The profile that predicts what was measured on ``gpu``; None where there is none, which is noted then."""
    shipped = load_machine(PROFILES[gpu]) if gpu in PROFILES else None
    if asked is not None and (shipped is None or shipped.title == asked.title):
        return asked
    if shipped is None:
        says = f"is {shown(gpu)}, of which no profile is shipped; accepted: {', '.join(PROFILES)}, or --machine"
        document.fault(at, f"{says} with a profile of it")
    return shipped


def _can_be_asked(document: Document, at: Keys, step: dict[str, Any], machine: Machine) -> bool:
    """Whether the project has kernels for what a row says that it ran; noted where it has not."""
    try:
        asked = shipped_steps.question_of_measured(step, machine)
        check_layout(asked.architecture, asked.layout)
        check_own(asked.architecture, asked.layout, asked.workload.concurrency)
        check_workload(asked.architecture, asked.workload)
    except UserError as error:
        document.fault(at, f"is refused: {error}")
        return False
    return True


def _label(step: dict[str, Any]) -> str:
    """As those of stored steps, and what differs from the whole model on sixteen ranks of one GPU."""
    tp, num_gpus = shipped_steps.ranks_of(step), step.get("gpus", 1)
    more = [
        f"{step['layers']} layers" if step["layers"] != shipped_steps.ALL_LAYERS else "",
        f"TP{tp}" if tp != shipped_steps.ALL_RANKS else "",
        f"{num_gpus} GPUs over NVLink" if num_gpus > 1 else "",
        f"{step['kv_dtype']} cache" if step["kv_dtype"] != "fp8" else "",
    ]
    return ", ".join([shipped_steps.label_of(step), *filter(None, more)])


def _source(path: Path, environment: dict[str, Any]) -> str:
    return f"{shown_path(path)}, {environment['date'][:10]}"
