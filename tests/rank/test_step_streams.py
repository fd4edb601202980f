"""What a step asks of streams and events, seen by stand-ins for them: every wait of the program becomes one.

The stand-ins follow CUDA's rules: work on a stream comes after what the stream has waited for, an event stands for all
that was on its stream when it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from small_model import small_architecture  # noqa: E402

from k3sim.kernels.rank.bindings import CallFunction, key  # noqa: E402
from k3sim.kernels.rank.call_table import KERNEL_CALLS  # noqa: E402
from k3sim.kernels.rank.state import Rank  # noqa: E402
from k3sim.kernels.rank.step import Step  # noqa: E402
from k3sim.model.layout import Layout, Workload  # noqa: E402
from k3sim.model.paths import SWITCHES, find_path  # noqa: E402
from k3sim.model.program import Call, Program, build_program  # noqa: E402

Work = tuple[int, int]  # (rank, call)


class FakeEvent:
    def __init__(self, done: frozenset[Work]) -> None:
        self.done = done


class FakeStream:
    """``done``: what has certainly ended before the next launch on the stream begins."""

    def __init__(self) -> None:
        self.done: frozenset[Work] = frozenset()

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done

    def wait_event(self, event: FakeEvent) -> None:
        self.done |= event.done

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.done)


class Gpu:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = self.origin = FakeStream()
        self.before: dict[Work, frozenset[Work]] = {}
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "stream", self.entered)

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def launch(self, work: Work) -> None:
        self.before[work] = self.before.get(work, frozenset()) | self.current.done
        self.current.done |= {work}


def fake_rank(program: Program, index: int) -> Rank:
    rank = Rank.__new__(Rank)
    rank.program, rank.index = program, index
    return rank


def run_on_fakes(program: Program, num_ranks: int, gpu: Gpu) -> None:
    def one(rank: Rank, call: Call) -> None:
        gpu.launch((rank.index, call.index))

    def halves(rank: Rank, call: Call) -> Iterator[None]:
        gpu.launch((rank.index, call.index))
        yield
        gpu.launch((rank.index, call.index))

    table: dict[str, CallFunction] = {
        name: halves if name in ("head.sample/unfused.sample", "head.logits/unfused.gather") else one
        for name in KERNEL_CALLS
    }
    Step([fake_rank(program, index) for index in range(num_ranks)], table).run()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def small_program(switches: tuple[str, ...], tp: int = 2) -> Program:
    path = find_path("fused" if switches else "stock", with_switches=switches, kernel_set="own")
    return build_program(small_architecture(), Layout(tp=tp), Workload(concurrency=1, context=64), path)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "switches", [(), SWITCHES, ("fused-allreduce",), ("low-batch-kernels", "l2-prefetch")], ids=str
)
def test_every_wait_of_the_program_is_kept(gpu: Gpu, switches: tuple[str, ...], num_ranks: int) -> None:
    program = small_program(switches)
    run_on_fakes(program, num_ranks, gpu)
    last: dict[str, int] = {}
    for call in program.calls:
        for rank in range(num_ranks):
            before = gpu.before[rank, call.index]
            needed = {*call.after, *([last[call.stream]] if call.stream in last else [])}
            assert {(rank, index) for index in needed} <= before, key(call)
        last[call.stream] = call.index
    everything = {(rank, call.index) for rank in range(num_ranks) for call in program.calls}
    assert everything <= gpu.origin.done, "the step joins all its streams"


def test_side_streams_run_beside_the_main_one(gpu: Gpu) -> None:
    """A side stream that waited for too much would be as correct, and hide nothing."""
    program = small_program(SWITCHES)
    run_on_fakes(program, 1, gpu)
    stages = {(call.layer, call.stage): call.index for call in program.calls}
    shared, experts = stages[1, "moe.shared_gate_up"], stages[1, "moe.experts"]
    assert (0, shared) not in gpu.before[0, experts]
    assert (0, experts) not in gpu.before[0, shared]
    prefetch = stages[2, "prefetch.o_proj"]
    assert (0, prefetch) not in gpu.before[0, stages[2, "attn_res.ffn"]]


def test_ranks_take_turns_where_a_launch_wants_everything(gpu: Gpu) -> None:
    program = small_program(SWITCHES)
    run_on_fakes(program, 2, gpu)
    for call in program.calls:
        if call.operator == "expert_gemv.persistent":
            assert (0, call.index) in gpu.before[1, call.index]


def test_ranks_poll_only_after_all_have_pushed(gpu: Gpu) -> None:
    program = small_program(SWITCHES)
    run_on_fakes(program, 2, gpu)
    polls = [call for call in program.calls if call.receives and call.index not in call.receives]
    assert {call.stage for call in polls} >= {"attn_res.mixer", "attn_res.ffn", "moe.routing", "moe.latent_up"}
    for call in polls:
        for pushed in call.receives:
            assert {(0, pushed), (1, pushed)} <= gpu.before[0, call.index] & gpu.before[1, call.index], key(call)
