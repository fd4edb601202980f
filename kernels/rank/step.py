"""One decode step of one rank, or of several that share a GPU: calls on their streams, events between streams.

The order of a step is the program's. A call waits for its predecessor on the same stream and for the calls of other
streams in ``after``; nothing else orders it, on the GPU or in ``legal_order``, which the tests use to show that this
is enough.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.rank.bindings import CallFunction, functions_of
from k3sim.kernels.rank.state import Rank
from k3sim.model.program import Call, Program

if TYPE_CHECKING:
    import torch


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
    """A random order that keeps each stream's own order, ``after``, and pushes before polls: one that a GPU may run."""
    choose = random.Random(seed)
    streams: dict[str, list[int]] = {}
    for call in program.calls:
        streams.setdefault(call.stream, []).append(call.index)
    done: set[int] = set()
    order: list[int] = []
    heads = dict.fromkeys(streams, 0)
    while len(order) < len(program.calls):
        ready = [
            stream
            for stream, indices in streams.items()
            if heads[stream] < len(indices) and done.issuperset(_needs(program.calls[indices[heads[stream]]]))
        ]
        stream = choose.choice(ready)
        index = streams[stream][heads[stream]]
        heads[stream] += 1
        done.add(index)
        order.append(index)
    return order


def _needs(call: Call) -> set[int]:
    return {*call.after, *(sender for sender in call.receives if sender != call.index)}


# All blocks of such a launch must be resident at once: two of them at a time could each hold what the other needs.
WANT_THE_GPU = ("expert_gemv.persistent", "expert_gemv.persistent_push")


class Step:
    """One step on the GPU: ``run`` launches it, ``capture`` makes one CUDA graph of it, ``replay`` runs that.

    Every rank has streams of its own; the first rank's main stream is the one the step is launched on. The first
    ``run`` compiles and sizes workspaces and so must come before ``capture``, which does both in turn.
    """

    def __init__(self, ranks: Sequence[Rank], table: dict[str, CallFunction]) -> None:
        import torch

        self.ranks = ranks
        self.functions = functions_of(ranks[0].program, table, "kernel")
        self.graph: torch.cuda.CUDAGraph | None = None
        calls = ranks[0].program.calls
        # Calls that another stream waits for: an event is recorded behind them.
        # On a shared GPU so do pollers for pushes, which are else waited for by their data alone.
        shared = len(ranks) > 1
        self._awaited = {
            index
            for call in calls
            for index in (_needs(call) if shared else call.after)
            if calls[index].stream != call.stream
        }
        names = dict.fromkeys(call.stream for call in calls)
        self._streams = [
            {name: torch.cuda.Stream() for name in names if number or name != "main"} for number in range(len(ranks))
        ]

    def run(self, *, marked: bool = False) -> None:
        """Launch one step on the current stream and its side streams, which it joins again.

        Where ranks share a GPU, a call that polls begins once every rank's push is under way (a poller that fills SMs
        could otherwise keep a peer from pushing), and launches whose blocks wait for each other take turns. ``marked``:
        calls are ranges ``k3sim call N`` of torch's profiler.
        """
        import contextlib

        import torch

        origin = torch.cuda.current_stream()
        streams = [{"main": origin, **own} for own in self._streams]
        for number in range(1, len(self.ranks)):
            streams[number]["main"].wait_stream(origin)
        events: list[dict[int, torch.cuda.Event]] = [{} for _ in self.ranks]
        entered: list[set[str]] = [{"main"} for _ in self.ranks]
        for index, function in enumerate(self.functions):
            halves = []
            waited_for = self.ranks[0].program.calls[index].receives
            if waited_for and index not in waited_for:
                self._meet([one["main"] for one in streams])
                if len(self.ranks) > 1:  # pushes of side streams
                    for pushed in [held[sender] for held in events for sender in waited_for if sender in held]:
                        for one in streams:
                            one["main"].wait_event(pushed)
            for number, rank in enumerate(self.ranks):
                call = rank.program.calls[index]
                stream = streams[number][call.stream]
                mark = torch.profiler.record_function(f"k3sim call {index}") if marked else contextlib.nullcontext()
                for other in call.after:
                    if other in events[number] and rank.program.calls[other].stream != call.stream:
                        stream.wait_event(events[number][other])
                        entered[number].add(call.stream)
                assert call.stream in entered[number], f"{call.stage} enters {call.stream} and waits for nothing"
                if call.operator in WANT_THE_GPU and number:
                    before = streams[number - 1][call.stream]
                    stream.wait_event(before.record_event())
                with torch.cuda.stream(stream), mark:
                    half = function(rank, call)
                    if half is not None:
                        next(half)
                        halves.append((half, stream))
            if halves:
                self._meet([stream for _, stream in halves])
                for half, stream in halves:
                    mark = torch.profiler.record_function(f"k3sim call {index}") if marked else contextlib.nullcontext()
                    with torch.cuda.stream(stream), mark:
                        assert next(half, None) is None, "a call has two halves"
            if index in self._awaited:
                for number, rank in enumerate(self.ranks):
                    events[number][index] = streams[number][rank.program.calls[index].stream].record_event()
        for number, own in enumerate(streams):
            for name, stream in own.items():
                if name in entered[number] and stream is not origin:
                    origin.wait_stream(stream)

    @staticmethod
    def _meet(streams: Sequence[torch.cuda.Stream]) -> None:
        """Let each stream wait for what the others hold so far."""
        if len(streams) > 1:
            events = [stream.record_event() for stream in streams]
            for stream in streams:
                for event in events:
                    stream.wait_event(event)

    def capture(self) -> None:
        """Run once, then capture. The state of the ranks moves on by one step; the capture itself moves nothing."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Thread-local: the watchdog of a process group may ask for its events meanwhile.
        with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
            self.run()
        torch.cuda.synchronize()

    def replay(self) -> None:
        assert self.graph is not None, "capture the step first"
        self.graph.replay()
