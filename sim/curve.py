"""Steps over concurrency and context: the points of a curve, and what changes between them.

A step grows with its rows, and jumps or falls where an engine hands over to another kernel. Each jump of more than
``CLIFF`` from one user to the next, and each fall of more than ``FALL``, is reported with the kernels that changed
there, and with the stages that changed most. ``largest`` asks the inverse question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from k3sim.errors import UserError
from k3sim.kernels.costs import work_of
from k3sim.sim.intervals import drawn_steps_us, interval_around
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, predict, program_of
from k3sim.sim.question import Question, ask

CLIFF = 0.05  # of the step, from one user to the next: a jump
FALL = 0.005  # a user more should not make a step faster
MAX_POINTS = 4096
PATHS = ("stock", "fused", "megakernel")

Signature = dict[str, str]  # kernel of each stage


@dataclass(frozen=True, kw_only=True)
class Point:
    """One path at one concurrency and context; ``refused`` says why there is no step."""

    path: str
    concurrency: int
    context: int
    num_gpus: int
    step_us: float | None = None
    floor_us: float | None = None
    total_bytes: int = 0  # of memory, a GPU
    users_that_fit: int = 0  # of this context, with the weights of this point
    capacity_bytes: int = 0
    refused: str = ""
    drawn_us: tuple[float, ...] = ()  # the step, and those of drawn machines, where an interval was asked for

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """The middle 90 % of the draws."""
        return interval_around(self.drawn_us[0], self.drawn_us[1:]) if self.drawn_us else None

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes

    @property
    def tokens_per_second_per_user(self) -> float | None:
        return None if self.step_us is None else 1e6 / self.step_us

    def to_dict(self) -> dict[str, Any]:
        """As JSON and as a row of a table; docs/json.md describes it."""
        per_user = self.tokens_per_second_per_user
        total = None if per_user is None else per_user * self.concurrency
        low, high = self.interval_us or (None, None)
        return {
            "path": self.path,
            "concurrency": self.concurrency,
            "context": self.context,
            "num_gpus": self.num_gpus,
            "step_us": self.step_us,
            "low_us": low,
            "high_us": high,
            "floor_us": self.floor_us,
            "tokens_per_s_per_user": per_user,
            "tokens_per_s_per_gpu": None if total is None else total / self.num_gpus,
            "memory_bytes": self.total_bytes,
            "capacity_bytes": self.capacity_bytes,
            "users_that_fit": self.users_that_fit,
            "fits": self.fits,
            "refused": self.refused,
        }


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """A step that jumps by more than ``CLIFF``, or falls by more than ``FALL``, from ``concurrency - 1`` users to
    ``concurrency``."""

    path: str
    concurrency: int
    context: int
    before_us: float
    after_us: float
    kernels: tuple[str, ...]  # what changed, in words; empty where nothing did
    grown: tuple[str, ...] = ()  # the stages that most of it is in

    @property
    def change(self) -> float:
        return self.after_us / self.before_us - 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        return {**self.__dict__, "kernels": list(self.kernels), "grown": list(self.grown), "change": self.change}

    def __str__(self) -> str:
        why = f"{', '.join(self.kernels) or 'no kernel changes'}; most in {', '.join(self.grown)}"
        return (
            f"{self.path} from {self.concurrency - 1} to {self.concurrency} users at context {self.context}: "
            f"{100 * self.change:+.1f} % ({why})"
        )


def at(options: Options, path: str, concurrency: int, context: int) -> Options:
    """The question's options at a point; other paths than its own have none of its switches and kernels."""
    found = replace(options, concurrency=concurrency, context=context, ignore_memory=True)
    if path == options.path:
        return found
    kernels = "public" if path == "megakernel" else options.kernels
    return replace(found, path=path, with_switches=(), without=(), kernels=kernels)


def point(options: Options, path: str, concurrency: int, context: int, num_draws: int = 0) -> Point:
    """One point, with ``num_draws`` drawn machines; what cannot be answered there is said in it."""
    drawn: list[float] = []
    try:
        question = ask(at(options, path, concurrency, context))
        prediction = predict(question)
        if num_draws:
            drawn = drawn_steps_us(question, num_draws=num_draws, seed=options.seed)
    except UserError as refusal:
        gpus = options.tp * options.pp * options.dp
        return Point(path=path, concurrency=concurrency, context=context, num_gpus=gpus, refused=str(refusal))
    room = question.room()
    return Point(
        path=path,
        concurrency=concurrency,
        context=context,
        num_gpus=question.layout.num_gpus,
        step_us=prediction.step_us,
        floor_us=prediction.floor_us,
        total_bytes=room.resident.total,
        users_that_fit=room.users,
        capacity_bytes=room.capacity,
        drawn_us=tuple(drawn),
    )


def tasks(
    options: Options,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
    paths: Sequence[str],
    num_draws: int = 0,
) -> list[Callable[[], Point]]:
    """The points of a curve, as work for processes.

    Raises UserError for more than ``MAX_POINTS``, and for what no point could answer.
    """
    count = len(concurrencies) * len(contexts)
    if count > MAX_POINTS:
        raise UserError(f"{count} points; accepted: up to {MAX_POINTS}")
    for concurrency in (min(concurrencies), max(concurrencies)):
        for context in (min(contexts), max(contexts)):
            ask(at(options, options.path, concurrency, context))
    return [
        partial(point, options, path, concurrency, context, num_draws)
        for path in paths
        for context in contexts
        for concurrency in concurrencies
    ]


# -- what changes from one user to the next ---------------------------------------------------------------------------


def signature(question: Question) -> Signature:
    """Which kernel each stage runs, in words that change where the kernel does."""
    program, _ = program_of(question)
    found: Signature = {}
    for call in program.calls:
        if call.launch == "host":
            continue
        work = work_of(call.operator, call.weights, call.shape)
        units = "+".join(one.unit.value for one in work.passes if one.flops)
        form = f"{len(work.passes)} passes, {work.threads_per_block} threads, {call.transport}, {units}"
        found[call.stage] = f"{call.operator} ({form})"
    return found


def changed(before: Signature, after: Signature) -> tuple[str, ...]:
    """Stages that are another kernel, new, or gone."""
    found = []
    for stage in dict.fromkeys((*before, *after)):
        old, new = before.get(stage), after.get(stage)
        if old == new:
            continue
        if old is None or new is None:
            found.append(f"{stage} {'ends' if new is None else 'begins'}")
        else:
            old_name, new_name = old.partition(" ")[0], new.partition(" ")[0]
            found.append(f"{stage}: {old_name} to {new_name}" if old_name != new_name else f"{stage}: another form")
    return tuple(found)


def changes(kernels: Callable[[int], Signature | None], low: int, high: int) -> Iterator[int]:
    """Values above ``low`` and up to ``high`` at which ``kernels`` changes, by halving; of neighbours ``high``."""
    if high - low == 1:
        yield high
    elif high > low and kernels(low) != kernels(high):
        middle = (low + high) // 2
        yield from changes(kernels, low, middle)
        yield from changes(kernels, middle, high)


def is_sudden(before_us: float, after_us: float) -> bool:
    """Whether one user more makes a step jump, or fall."""
    return not (1 - FALL) * before_us <= after_us <= (1 + CLIFF) * before_us


def cliffs(options: Options, path: str, concurrencies: Sequence[int], context: int) -> Iterator[Cliff]:
    """Jumps and falls of one path between the least and the most users of a curve.

    Between two points whose kernels differ the place is found by halving; neighbours are compared as they are.
    """
    listed = sorted(set(concurrencies))
    signatures: dict[int, Signature | None] = {}

    def kernels(users: int) -> Signature | None:
        if users not in signatures:
            try:
                signatures[users] = signature(ask(at(options, path, users, context)))
            except UserError:
                signatures[users] = None
        return signatures[users]

    for place in range(1, len(listed)):
        for users in changes(kernels, listed[place - 1], listed[place]):
            before, after = kernels(users - 1), kernels(users)
            if before is None or after is None:
                continue
            first, second = (predict(ask(at(options, path, one, context))) for one in (users - 1, users))
            if is_sudden(first.step_us, second.step_us):
                yield Cliff(
                    path=path, concurrency=users, context=context, before_us=first.step_us, after_us=second.step_us,
                    kernels=changed(before, after), grown=_grown(first, second),
                )  # fmt: skip


def _grown(before: Prediction, after: Prediction) -> tuple[str, ...]:
    """The three stages of the critical path that changed most, with by how much."""
    totals: dict[str, float] = {}
    for sign, one in ((-1, before), (1, after)):
        for stage, _, us in one.contributions():
            totals[stage] = totals.get(stage, 0.0) + sign * us
    most = sorted(totals, key=lambda stage: (-abs(totals[stage]), stage))[:3]
    return tuple(f"{stage} {totals[stage]:+,.0f} us" for stage in most)


def all_cliffs(options: Options, path: str, concurrencies: Sequence[int], context: int) -> list[Cliff]:
    """``cliffs`` as one piece of work for a process."""
    return list(cliffs(options, path, concurrencies, context))
