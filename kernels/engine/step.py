"""One decode step of one rank, or of several that share a GPU: calls on their streams, events where streams meet.

The order of a step is the program's. A call waits for its predecessor on the same stream and for the calls of other
streams in ``after``; nothing else orders it, on the GPU or in ``legal_order``, which the tests use to show that this
is enough.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from k3sim.kernels.engine.bindings import CallFunction, functions_of
from k3sim.kernels.engine.state import Rank
from k3sim.model.program import Program


def run_in_order(ranks: Sequence[Rank], table: dict[str, CallFunction], order: Sequence[int] | None = None) -> None:
    """Run one step of all ranks on the host's time, call by call: every rank pushes before any of them polls.

    ``order``: indices of the program's calls (as they stand there, by default).
    """
    program = ranks[0].program
    functions = functions_of(program, table, "reference")
    for index in range(len(program.calls)) if order is None else order:
        halves = [functions[index](rank, rank.program.calls[index]) for rank in ranks]
        started = [half for half in halves if half is not None]
        for half in started:
            next(half)
        for half in started:
            assert next(half, None) is None, "a call has two halves"


def legal_order(program: Program, seed: int) -> list[int]:
    """A random order that keeps each stream's own order and ``after``: one of those that a GPU may run."""
    choose = random.Random(seed)
    streams: dict[str, list[int]] = {}
    for call in program.calls:
        streams.setdefault(call.stream, []).append(call.index)
    done: set[int] = set()
    order = []
    heads = dict.fromkeys(streams, 0)
    while len(order) < len(program.calls):
        ready = [
            stream
            for stream, indices in streams.items()
            if heads[stream] < len(indices) and done.issuperset(program.calls[indices[heads[stream]]].after)
        ]
        stream = choose.choice(ready)
        index = streams[stream][heads[stream]]
        heads[stream] += 1
        done.add(index)
        order.append(index)
    return order
