"""The inverse question: the largest concurrency, or context, whose step holds a time, and what memory holds.

A step grows with its rows between two places where a kernel changes, and may fall at such a place: the fused path of
129 users is faster than that of 128. So the places come first (``curve.changes``, which simulates nothing), the last
stretch whose beginning holds is taken, and halved. Kernels of two streams may also hide behind each other better with
a row more; such falls are small (2 % at most were seen, from 32 to 33 users of stock), so a few values more are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from k3sim.errors import UserError
from k3sim.sim.curve import CLIFF, Signature, changes, signature
from k3sim.sim.options import Options
from k3sim.sim.predict import predict
from k3sim.sim.question import Question, ask

LOOK_AHEAD = 8  # values beyond the one that halving finds


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest ``value`` of ``over`` whose step takes at most ``most_us``; ``is_monotone`` where the step grew with
    it at every value up to there that was tried."""

    over: str
    value: int
    step_us: float
    most_us: float
    is_monotone: bool
    limit: int  # up to which was looked
    fits: int | None  # the largest that memory holds; None where context takes none

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        return dict(self.__dict__)


def with_value(options: Options, over: str, value: int) -> Options:
    """``options`` with a concurrency, or a context, whether memory suffices or not."""
    found = replace(options, ignore_memory=True)
    return replace(found, concurrency=value) if over == "concurrency" else replace(found, context=value)


def largest(options: Options, over: str, most_us: float) -> Largest:
    """The largest concurrency, or context, that holds a time of a step.

    Raises UserError where one user, or one token of context, already takes longer, with what it takes, and where the
    path has no step for it.
    """
    from k3sim.model.layout import MAX_CONCURRENCY

    architecture = ask(with_value(options, over, 1)).architecture
    limit = MAX_CONCURRENCY if over == "concurrency" else architecture.max_position_embeddings
    tried: dict[int, float] = {1: predict(ask(with_value(options, over, 1))).step_us}

    def holds(value: int) -> bool:
        if value not in tried:
            try:
                tried[value] = predict(ask(with_value(options, over, value))).step_us
            except UserError:  # kernels that are not built for so many rows
                return False
        return tried[value] <= most_us

    powers = [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]
    places = _changes_between(options, over, powers)
    starts = sorted({*powers, *places})
    low = next((value for value in reversed(starts) if holds(value)), None)
    if low is None:
        unit = "user gets" if over == "concurrency" else "token of context gives"
        raise UserError(
            f"no {over} keeps {most_us / 1e3:g} ms: 1 {unit} a step of {tried[1] / 1e3:.3f} ms "
            f"({1e6 / tried[1]:.1f} tok/s/user)"
        )
    value = _furthest(holds, tried, low, min([one for one in starts if one > low], default=low), limit, most_us)
    for place in places:  # whether a smaller one does not hold
        if place <= value:
            holds(place - 1)
    ordered = [tried[one] for one in sorted(tried) if one <= value]
    return Largest(
        over=over, value=value, step_us=tried[value], most_us=most_us, is_monotone=ordered == sorted(ordered),
        limit=limit, fits=largest_that_fits(options, over, limit),
    )  # fmt: skip


def _furthest(
    holds: Callable[[int], bool], tried: dict[int, float], low: int, high: int, limit: int, most_us: float
) -> int:
    """The largest that holds from ``low``, which does, to ``high``, which does not, and a few beyond."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    for value in range(low + 1, min(low + LOOK_AHEAD, limit) + 1):
        if holds(value):
            low = value
        elif tried.get(value, most_us) > (1 + CLIFF) * most_us:
            break
    return low


def _changes_between(options: Options, over: str, marks: list[int]) -> list[int]:
    """Values at which a kernel of the path changes."""
    known: dict[int, Signature | None] = {}

    def kernels(value: int) -> Signature | None:
        if value not in known:
            try:
                known[value] = signature(ask(with_value(options, over, value)))
            except UserError:
                known[value] = None
        return known[value]

    places = chain.from_iterable(changes(kernels, low, high) for low, high in pairwise(marks))
    return [place for place in places if kernels(place - 1) != kernels(place)]


def largest_that_fits(options: Options, over: str, limit: int) -> int | None:
    """The largest concurrency, or context, that memory holds, 0 where none; None where no layer caches tokens.

    A path may pad its experts from some rows on, and then holds more weights: so it is halved up to ``limit``, and
    beyond, where no weight changes, goes by the room that is left.
    """

    first = ask(with_value(options, over, 1))

    def question(value: int) -> Question:  # not asked: memory does not mind how many rows kernels are built for
        workload = first.workload
        changed = replace(workload, concurrency=value) if over == "concurrency" else replace(workload, context=value)
        return replace(first, workload=changed)

    def fits(value: int) -> bool:
        room = question(value).room()
        return room.resident.total <= room.capacity

    if fits(limit):
        last = question(limit)
        room = last.room()
        if over == "concurrency":
            return room.users
        rows = last.layout.rows(last.workload.concurrency)
        return None if room.tokens is None else room.tokens // (last.layout.num_groups * rows)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
