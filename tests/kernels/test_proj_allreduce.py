"""Projection with all-reduce: the consumer's reference against the AttnRes one, refusals, simulated ranks on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.attn_res import reference as attn_res  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.proj_allreduce import launch, reference  # noqa: E402
from k3sim.kernels.proj_allreduce.cases import consumer_operands as _consumer_operands  # noqa: E402

HIDDEN = 7168


def test_consumer_sums_in_rank_order_and_combines() -> None:
    (residual, part, query_norm, query, norm_weight), snapshots = _consumer_operands(2, 256)
    partials = torch.randn(4, 2, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = reference.consume(partials, residual, part, query_norm, query, norm_weight)
    exact = partials.double().sum(0) + residual.double()
    assert torch.allclose(found.prefix_BD.double(), exact, rtol=2**-8, atol=1e-6)
    expected = attn_res.attn_res(snapshots, found.prefix_BD, query_norm, query, norm_weight, dtype=torch.float64)
    assert torch.allclose(found.normalised_BD.double(), expected, atol=1e-4)


def test_without_snapshots_the_mix_is_the_prefix() -> None:
    (_, _, query_norm, query, norm_weight), _ = _consumer_operands(1, 256)
    partials = torch.randn(2, 1, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = reference.consume(partials, None, None, query_norm, query, norm_weight)
    empty = torch.zeros(1, 0, 256)
    expected = attn_res.attn_res(empty, found.prefix_BD, query_norm, query, norm_weight, dtype=torch.float64)
    assert torch.allclose(found.normalised_BD.double(), expected, atol=1e-5)


def test_no_partial_reads_as_not_arrived() -> None:
    weight = torch.tensor([[-1e-30, 0.0], [1.0, 0.0], [-1.0, 0.0]]).bfloat16()
    partial = reference.produce(torch.tensor([[0.0, 1.0]]).bfloat16(), weight)
    assert not torch.signbit(partial).any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(1, 512, dtype=torch.bfloat16)}, "x.shape"),
        ({"x": torch.zeros(9, 768, dtype=torch.bfloat16)}, "rows: got 9, accepted: 1 to 8"),
        ({"weight": torch.zeros(HIDDEN, 800, dtype=torch.bfloat16)}, r"weight.shape\[1\]: got 800"),
        ({"peers": torch.zeros(3, dtype=torch.int64)}, "peers.shape"),
        ({"rank": 4}, "rank: got 4, accepted: 0 to 3"),
    ],
)
def test_what_cannot_be_honoured_is_named(change, named) -> None:  # type: ignore[no-untyped-def]
    buffers = launch.make_receive_buffers(ranks=4, max_rows=8, device="cpu")
    arguments = {
        "x": torch.zeros(1, 768, dtype=torch.bfloat16),
        "weight": torch.zeros(HIDDEN, 768, dtype=torch.bfloat16),
        "peers": torch.zeros(4, dtype=torch.int64),
        "buffers": buffers,
        "rank": 0,
    }
    with pytest.raises(UserError, match=named):
        launch.produce(**{**arguments, **change})


class _Ranks:
    """Ranks on one GPU: each has its buffers, its stream and its outputs."""

    def __init__(self, ranks: int, depth: int) -> None:
        self.ranks, self.depth = ranks, depth
        self.buffers = [launch.make_receive_buffers(ranks=ranks) for _ in range(ranks)]
        addresses = [one.received.data_ptr() for one in self.buffers]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def prepare(self, rows: int, seed: int, *, residual: bool = True, snapshots: bool = True) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.x = torch.randn(self.ranks, rows, self.depth, generator=generator, device="cuda").bfloat16()
        self.weight = (
            torch.randn(self.ranks, HIDDEN, self.depth, generator=generator, device="cuda") / math.sqrt(self.depth)
        ).bfloat16()
        self.weight[:, 9] = 0  # a partial of -0: a tiny negative product rounds to it
        self.weight[:, 9, 0] = -1e-38
        operands, _ = _consumer_operands(rows, HIDDEN, "cuda", seed)
        self.operands = [operands[0] if residual else None, operands[1] if snapshots else None, *operands[2:]]
        shape = (self.ranks, rows, HIDDEN)
        self.prefix = torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")
        self.out = torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()

    def step(self, rank: int) -> None:
        launch.produce(self.x[rank], self.weight[rank], self.peers, self.buffers[rank], rank=rank)
        launch.consume(self.buffers[rank], *self.operands, self.prefix[rank], self.out[rank], release_next=False)

    def step_and_check(self) -> None:
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.step(rank)
        self.check()

    def check(self) -> None:
        torch.cuda.synchronize()
        for rank in range(1, self.ranks):  # as bits: also the sign of zero
            assert torch.equal(self.prefix[0].view(torch.int16), self.prefix[rank].view(torch.int16))
            assert torch.equal(self.out[0].view(torch.int16), self.out[rank].view(torch.int16))
        partials = torch.stack([reference.produce(x, w) for x, w in zip(self.x, self.weight, strict=True)])
        expected = reference.consume(partials, *self.operands).prefix_BD.float()
        # A partial next to a rounding boundary may be one unit off, which is up to 2**-7 of it, and then so is the sum.
        bound = (partials.float().abs().sum(0) + expected.abs()) * 2**-7 + 1e-3
        assert ((self.prefix[0].float() - expected).abs() <= bound).all()
        normalised = reference.consume(self.prefix[:1], None, *self.operands[1:]).normalised_BD
        assert (verdict := compare(self.out[0], normalised, "bf16_activation")), verdict


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [384, 768, 1536, 2112, 4224])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_simulated_ranks_over_many_calls(ranks, depth) -> None:  # type: ignore[no-untyped-def]
    together = _Ranks(ranks, depth)
    for seed, (rows, residual, snapshots) in enumerate(
        [(1, True, True), (2, True, True), (1, False, True), (16, True, True), (1, True, False), (9, True, True)] * 2
    ):
        together.prepare(rows, seed, residual=residual, snapshots=snapshots)
        together.step_and_check()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_thousand_replays_give_the_same_bits(ranks) -> None:  # type: ignore[no-untyped-def]
    together = _Ranks(ranks, 768)
    together.prepare(2, 0)
    graphs = []
    together.step_and_check()
    prefix, out = together.prefix.clone(), together.out.clone()
    for rank in range(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=together.streams[rank]):
            for _ in range(2):
                together.step(rank)
        graphs.append(graph)
    for _ in range(10):
        together.prefix.fill_(math.nan)
        together.out.fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(100):
            for rank in range(ranks):
                with torch.cuda.stream(together.streams[rank]):
                    graphs[rank].replay()
        torch.cuda.synchronize()
        assert torch.equal(together.prefix, prefix) and torch.equal(together.out, out)
