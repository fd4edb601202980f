"""The launches of the engine at K3's widths: every argument is accepted, up to the check for a GPU that comes last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.multi_gpu.symmetric import SharedBlock  # noqa: E402
from k3sim.kernels.rank.bindings import functions_of, key  # noqa: E402
from k3sim.kernels.rank.call_table import KERNEL_CALLS, REFERENCE_CALLS  # noqa: E402
from k3sim.kernels.rank.exchange import connect_kernels, exchange_in_block, places_of  # noqa: E402
from k3sim.kernels.rank.state import Rank, build_rank  # noqa: E402
from k3sim.kernels.rank.weights import random_weights  # noqa: E402
from k3sim.model.config_file import load_architecture  # noqa: E402
from k3sim.model.layout import Layout, Workload  # noqa: E402
from k3sim.model.paths import SWITCHES, find_path  # noqa: E402
from k3sim.model.program import build_program  # noqa: E402
from k3sim.model.step import Path  # noqa: E402

K3 = load_architecture()
# A dense KDA layer, a KDA layer and an MLA layer; the second is a snapshot layer too.
ARCHITECTURE = replace(K3, num_layers=3, kda_layers=(0, 1), mla_layers=(2,), attn_res_block_size=1)


@pytest.fixture(autouse=True, scope="module")
def values_do_not_matter() -> Iterator[None]:
    """Leave weights and caches as they are allocated: filling a gigabyte would take most of the time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "normal_", lambda self, *_, **__: self)
    patch.setattr(torch.Tensor, "random_", lambda self, *_, **__: self)
    yield
    patch.undo()


def one_rank(path: Path, *, tp: int, rows: int) -> Rank:
    layout, workload = Layout(tp=tp), Workload(concurrency=rows, context=100)
    program = build_program(ARCHITECTURE, layout, workload, path)
    weights = random_weights(program, ARCHITECTURE, layout, device="cpu", resident_experts=2)
    rank = build_rank(ARCHITECTURE, layout, workload, program, weights, device="cpu", max_tokens=128)
    connect_kernels([rank], loop_back=True)
    return rank


def check_every_launch(rank: Rank) -> None:
    functions = functions_of(rank.program, KERNEL_CALLS, "kernel")
    for call, function in zip(rank.program.calls, functions, strict=True):
        if call.stage in ("moe.router", "head.lm_head") and call.operator == "cublas.gemm":
            continue  # fp32 results of bf16 operands: torch has that product on CUDA only
        try:
            halves = function(rank, call)
            if halves is not None:
                assert sum(1 for _ in halves) == 1
        except UserError as error:
            assert str(error).startswith("no CUDA GPU is visible"), (key(call), str(error))


SWITCH_SETS = [one for count in (0, 1, 3, 4) for one in itertools.combinations(SWITCHES, count)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches what it checks")
@pytest.mark.parametrize("switches", SWITCH_SETS, ids=lambda one: "+".join(one) or "stock")
def test_every_launch_accepts_its_arguments(switches: tuple[str, ...]) -> None:
    name = "fused" if switches else "stock"
    check_every_launch(one_rank(find_path(name, with_switches=switches, kernel_set="own"), tp=16, rows=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches what it checks")
@pytest.mark.parametrize(("tp", "rows"), [(8, 1), (16, 16), (8, 3)])
@pytest.mark.parametrize("name", ["stock", "fused"])
def test_other_layouts_and_more_rows(name: str, tp: int, rows: int) -> None:
    check_every_launch(one_rank(find_path(name, kernel_set="own"), tp=tp, rows=rows))


def test_both_backends_bind_the_same_calls() -> None:
    assert KERNEL_CALLS.keys() == REFERENCE_CALLS.keys()


def test_loop_back_pushes_land_in_each_slot() -> None:
    rank = one_rank(find_path("fused", kernel_set="own"), tp=16, rows=2)
    exchange, hidden = rank.exchange, ARCHITECTURE.hidden_size
    base, slot = exchange.sums.received.data_ptr(), 2 * hidden * 2
    landed = [int(address) + rank.index * slot for address in exchange.sum_peers]
    assert landed == [base + peer * slot for peer in range(16)]
    assert exchange.sums.received[0, 1].data_ptr() == landed[1]
    assert set(exchange.row_peers.tolist()) == {exchange.tail.gathered.data_ptr()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches what it checks")
@pytest.mark.parametrize("name", ["stock", "fused"])
def test_two_gpus_that_stand_for_eight_ranks(name: str) -> None:
    rank = one_rank(find_path(name, kernel_set="own"), tp=8, rows=3)
    places = places_of(rank)
    blocks = [torch.zeros(places["end"][0], dtype=torch.uint8) for _ in range(2)]
    addresses = [one.data_ptr() for one in blocks]
    block = SharedBlock(own=blocks[0], peers=blocks, addresses=addresses, rank=0, barrier=lambda: None)
    rank.exchange = exchange_in_block(rank, places, block)
    check_every_launch(rank)
