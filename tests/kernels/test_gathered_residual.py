"""The residual that peers gather by columns: addresses of looped-back ranks, refusals, whole layers on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.attn_res import reference as attn_res  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots, collect, send, up  # noqa: E402
from k3sim.kernels.proj_allreduce import launch, reference  # noqa: E402
from k3sim.kernels.tolerance import compare  # noqa: E402

LATENT, HIDDEN = 3584, 7168
NUM_SNAPSHOTS = 3


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def _are_empty(slots: TailSlots) -> bool:
    return all(bool((_bits(one) == -1).all()) for one in (slots.latent, slots.shared, slots.gathered))


@pytest.mark.parametrize(("ranks", "rank", "rows"), [(1, 0, 2), (8, 0, 1), (8, 5, 3), (16, 15, 2)])
def test_a_looped_back_rank_fills_every_slot_once(ranks: int, rank: int, rows: int) -> None:
    slots = TailSlots.allocate(ranks=ranks, max_rows=4, device="cpu")
    peers = TailPeers.looped_back(slots, rank=rank, rows=rows)
    outputs = HIDDEN // ranks
    # Where the kernels store (``send`` and ``up``): base of peer p, then this rank's slot, or row and first column.
    latent = {base + (rank * rows + row) * LATENT * 2 for base in peers.latent.tolist() for row in range(rows)}
    shared = {base + (rank * rows + row) * outputs * 2 for base in peers.shared.tolist() for row in range(rows)}
    gathered = {base + (row * HIDDEN + rank * outputs) * 2 for base in peers.gathered.tolist() for row in range(rows)}
    assert latent == {slots.latent.data_ptr() + at * LATENT * 2 for at in range(ranks * rows)}
    assert shared == {slots.shared.data_ptr() + at * outputs * 2 for at in range(ranks * rows)}
    assert gathered == {slots.gathered.data_ptr() + at * outputs * 2 for at in range(ranks * rows)}


def test_a_gathered_row_is_one_part_of_the_consumers_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    shards = torch.randn(4, 2, 64, generator=generator).bfloat16()
    residual = torch.randn(2, 256, generator=generator).bfloat16()
    vectors = [torch.randn(256, generator=generator).bfloat16() for _ in range(3)]
    gathered = torch.cat(tuple(shards), dim=-1)
    found = reference.consume(gathered[None], residual, None, *vectors)
    assert torch.equal(found.prefix_BD, (gathered.float() + residual.float()).bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"out": torch.zeros(1, 4096, dtype=torch.bfloat16)}, r"out.shape: got \(1, 4096\)"),
        ({"out": torch.zeros(5, HIDDEN, dtype=torch.bfloat16)}, "rows: got 5, accepted: 1 to 4"),
        ({"residual": torch.zeros(1, HIDDEN, dtype=torch.bfloat16)}, "residual.shape"),
        ({"prefix": torch.zeros(2, HIDDEN, dtype=torch.float32)}, "prefix: got torch.float32"),
        ({"prefix": torch.zeros(2, HIDDEN + 4, dtype=torch.bfloat16)[:, :HIDDEN]}, "prefix.stride"),
        ({"prefix": torch.zeros(1, HIDDEN, dtype=torch.bfloat16).expand(2, -1)}, "prefix.stride"),
        ({"snapshot_part": (torch.zeros(2, 2),)}, "snapshot_part: got 1 tensors"),
        ({"snapshot_part": (torch.zeros(2, 3), torch.zeros(2, HIDDEN))}, "snapshot_part.stats.shape"),
        ({"snapshot_part": (torch.zeros(2, 2), torch.zeros(2, 64))}, "snapshot_part.weighted.shape"),
        ({"query": torch.zeros(64, dtype=torch.bfloat16)}, "query.shape"),
    ],
)
def test_what_cannot_be_honoured_is_named(change, named) -> None:  # type: ignore[no-untyped-def]
    rows = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    vector = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    arguments = {
        "slots": TailSlots.allocate(ranks=8, max_rows=4, device="cpu"),
        "residual": rows,
        "snapshot_part": None,
        "query_norm": vector,
        "query": vector,
        "norm_weight": vector,
        "prefix": rows.clone(),
        "out": rows.clone(),
    }
    with pytest.raises(UserError, match=named):
        launch.consume_gathered(**{**arguments, **change})


class _Tail:
    """Tails of all ranks on one GPU, and what a mixer's consumer takes."""

    def __init__(self, ranks: int, rows: int, *, looped: bool = False, seed: int = 0) -> None:
        self.ranks, self.rows = ranks, rows
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        real = 1 if looped else ranks
        self.slots = [TailSlots.allocate(ranks=ranks, max_rows=rows, device="cuda") for _ in range(real)]
        self.peers = (
            TailPeers.looped_back(self.slots[0], rank=0, rows=rows) if looped else TailPeers.of(self.slots)
        )
        self.latent = normal(real, rows, LATENT).bfloat16()
        self.shared = (normal(real, rows, HIDDEN) / (2 * ranks**0.5)).bfloat16()
        self.norm = (1 + normal(LATENT) / 8).bfloat16()
        self.up_weight = (normal(HIDDEN, LATENT) / 60).bfloat16()
        self.residual = normal(rows, HIDDEN).bfloat16()
        self.snapshots = normal(rows, 8, HIDDEN).bfloat16()
        self.query_norm, self.norm_weight = normal(HIDDEN).bfloat16(), normal(HIDDEN).bfloat16()
        self.query = (normal(HIDDEN) / math.sqrt(HIDDEN)).bfloat16()
        largest, denominator, weighted = attn_res.snapshot_part(
            self.snapshots[:, :NUM_SNAPSHOTS], self.query_norm, self.query
        )
        self.part = (torch.stack((largest, denominator), dim=-1).contiguous(), weighted.contiguous())
        self.prefix = torch.full((real, rows, HIDDEN), math.nan, device="cuda").bfloat16()
        self.out = torch.full((real, rows, HIDDEN), math.nan, device="cuda").bfloat16()

    def send(self, rank: int) -> None:
        send(self.latent[rank], self.shared[rank], self.peers, rank)

    def up(self, rank: int) -> None:
        width = HIDDEN // self.ranks
        weight = self.up_weight[width * rank : width * (rank + 1)]
        up(self.slots[rank], self.norm, weight, self.peers, rank, self.rows, release_late=True)

    def consume(self, rank: int, *, prefix: torch.Tensor | None = None, with_past: bool = True) -> None:
        launch.consume_gathered(
            self.slots[rank],
            self.residual if with_past else None,
            self.part if with_past else None,
            self.query_norm,
            self.query,
            self.norm_weight,
            self.prefix[rank] if prefix is None else prefix,
            self.out[rank],
            release_next=False,
        )

    def run(self) -> None:
        """One stream, so that nothing waits for what is queued behind it."""
        for phase in (self.send, self.up, self.consume):
            for rank in reversed(range(len(self.slots))):
                phase(rank)

    def tail(self, rank: int = 0) -> torch.Tensor:
        """The gathered rows, by ``collect``."""
        tail = torch.full((len(self.slots), self.rows, HIDDEN), math.nan, device="cuda").bfloat16()
        for phase in (self.send, self.up):
            for one in range(len(self.slots)):
                phase(one)
        for one in range(len(self.slots)):
            collect(self.slots[one], tail[one])
        return tail[rank]

    def expected(self, tail: torch.Tensor) -> reference.Consumed:
        part = (self.part[0][:, 0], self.part[0][:, 1], self.part[1])
        return reference.consume(tail[None], self.residual, part, self.query_norm, self.query, self.norm_weight)

    def check(self, tail: torch.Tensor) -> None:
        torch.cuda.synchronize()
        expected = self.expected(tail)
        for prefix, out in zip(self.prefix, self.out, strict=True):
            assert torch.equal(_bits(prefix), _bits(expected.prefix_BD))
            assert torch.equal(_bits(out), _bits(self.out[0]))
        assert (verdict := compare(self.out[0], expected.normalised_BD, "bf16_activation")), verdict
        assert all(_are_empty(one) for one in self.slots)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 3), (8, 1), (8, 16), (16, 1), (16, 5)])
def test_it_is_collect_and_fold_in_one(ranks: int, rows: int) -> None:
    world = _Tail(ranks, rows)
    tail = world.tail()
    world.run()
    world.check(tail)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "rows"), [(8, 1), (16, 2), (16, 16)])
def test_one_rank_looped_back(ranks: int, rows: int) -> None:
    world = _Tail(ranks, rows, looped=True)
    tail = world.tail()
    for _ in range(50):
        world.prefix.fill_(math.nan)
        world.out.fill_(math.nan)
        world.run()
        world.check(tail)


@pytest.mark.gpu
def test_the_prefix_becomes_a_snapshot_without_a_copy() -> None:
    world = _Tail(8, 3)
    tail = world.tail()
    before = world.snapshots.clone()
    for phase in (world.send, world.up):
        for rank in range(8):
            phase(rank)
    world.consume(0, prefix=world.snapshots[:, NUM_SNAPSHOTS])
    expected = world.expected(tail)
    assert torch.equal(_bits(world.snapshots[:, NUM_SNAPSHOTS]), _bits(expected.prefix_BD))
    others = [one for one in range(8) if one != NUM_SNAPSHOTS]
    assert torch.equal(_bits(world.snapshots[:, others]), _bits(before[:, others]))
    assert (verdict := compare(world.out[0], expected.normalised_BD, "bf16_activation")), verdict


@pytest.mark.gpu
def test_an_embedding_row_starts_the_prefix() -> None:
    world = _Tail(8, 2)
    embedding = torch.randn(2, HIDDEN, device="cuda").bfloat16()
    latent = world.slots[0].latent.clone()
    world.slots[0].gathered.copy_(embedding)
    launch.consume_gathered(
        world.slots[0], None, None, world.query_norm, world.query, world.norm_weight, world.prefix[0], world.out[0],
        empty_parts=False,
    )  # fmt: skip
    expected = reference.consume(embedding[None], None, None, world.query_norm, world.query, world.norm_weight)
    assert torch.equal(world.prefix[0], embedding)
    assert (verdict := compare(world.out[0], expected.normalised_BD, "bf16_activation")), verdict
    assert torch.equal(_bits(world.slots[0].latent), _bits(latent)) and _are_empty(world.slots[0])


@pytest.mark.gpu
def test_consumers_that_run_first_wait_for_what_is_sent_later() -> None:
    world = _Tail(2, 3)
    tail = world.tail()
    world.run()  # compiles
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        world.prefix.fill_(math.nan)
        world.out.fill_(math.nan)
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                world.up(rank)
                world.consume(rank)
        for rank in range(2):
            world.send(rank)
        world.check(tail)


class _Layers:
    """Some layers of residual traffic of two ranks, each on its own stream: embedding, all-reduce, tail, again.

    ``looped``: only the first rank is there, and hears itself in place of the second.
    """

    RANKS, DEPTH, LAYERS, SNAPSHOT_EVERY = 2, 384, 4, 2

    def __init__(self, rows: int, *, looped: bool) -> None:
        self.rows, self.real = rows, 1 if looped else self.RANKS
        self.tails = [_Tail(self.RANKS, rows, looped=looped, seed=layer) for layer in range(self.LAYERS)]
        for tail in self.tails[1:]:  # one set of slots, whatever the layer
            tail.slots, tail.peers = self.tails[0].slots, self.tails[0].peers
        self.buffers = [launch.make_receive_buffers(ranks=self.RANKS, max_rows=rows) for _ in range(self.real)]
        addresses = [one.received.data_ptr() for one in self.buffers]
        if looped:
            addresses.append(addresses[0] + rows * HIDDEN * 2)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        generator = torch.Generator(device="cuda").manual_seed(9)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.embedding = normal(rows, HIDDEN)
        self.x = normal(self.LAYERS, self.RANKS, rows, self.DEPTH)
        self.weight = normal(self.LAYERS, self.RANKS, HIDDEN, self.DEPTH) / 20
        self.snapshots = torch.zeros(self.real, rows, 8, HIDDEN, device="cuda").bfloat16()
        self.prefix = torch.zeros(self.real, rows, HIDDEN, device="cuda").bfloat16()
        self.outs = torch.zeros(self.real, 2 * self.LAYERS + 1, rows, HIDDEN, device="cuda").bfloat16()
        self.streams = [torch.cuda.Stream() for _ in range(self.real)]

    def step(self, rank: int) -> None:
        """One decode step of one rank: what the mixers and experts compute is given."""
        slots, prefix = self.tails[0].slots[rank], self.prefix[rank]
        slots.gathered.copy_(self.embedding)
        for layer, tail in enumerate(self.tails):
            is_snapshot = layer % self.SNAPSHOT_EVERY == 0
            vectors = (tail.query_norm, tail.query, tail.norm_weight)
            launch.consume_gathered(
                slots,
                prefix if layer else None,
                tail.part if layer else None,
                *vectors,
                self.snapshots[rank, :, layer // self.SNAPSHOT_EVERY] if is_snapshot else prefix,
                self.outs[rank, 2 * layer],
                empty_parts=layer > 0,
                release_next=False,
            )
            launch.produce(
                self.x[layer, rank], self.weight[layer, rank], self.peers, self.buffers[rank], rank=rank
            )
            launch.consume(
                self.buffers[rank],
                None if is_snapshot else prefix,
                tail.part,
                *vectors,
                prefix,
                self.outs[rank, 2 * layer + 1],
                release_next=False,
            )
            tail.send(rank)
            tail.up(rank)
        launch.consume_gathered(
            slots, prefix, tail.part, *vectors, prefix, self.outs[rank, 2 * self.LAYERS], release_next=False
        )

    def poison(self) -> None:
        for one in (self.prefix, self.outs, self.snapshots):
            one.fill_(math.nan)
        torch.cuda.synchronize()


def _replay_a_thousand_times(world: _Layers) -> None:
    """The first result again, in every bit, with all graphs in flight at once; slots empty whenever nothing runs."""
    world.poison()
    for rank, stream in enumerate(world.streams):
        with torch.cuda.stream(stream):
            world.step(rank)
    torch.cuda.synchronize()
    first = [one.clone() for one in (world.prefix, world.outs, world.snapshots[:, :, :2])]
    assert not any(bool(one.isnan().any()) for one in first)
    graphs = []
    for rank, stream in enumerate(world.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            world.step(rank)
        graphs.append(graph)
    for _ in range(10):
        world.poison()
        for _ in range(100):
            for graph, stream in zip(graphs, world.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for now, then in zip((world.prefix, world.outs, world.snapshots[:, :, :2]), first, strict=True):
            assert torch.equal(_bits(now), _bits(then))
        assert all(_are_empty(one) for one in world.tails[0].slots)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_of_two_ranks_over_a_thousand_replays(rows: int) -> None:
    # A rank alone compiles what both run: compilation between two ranks' launches would leave the first one polling.
    _replay_a_thousand_times(_Layers(rows, looped=True))
    world = _Layers(rows, looped=False)
    _replay_a_thousand_times(world)
    for one in (world.prefix, world.outs, world.snapshots[:, :, :2]):
        assert torch.equal(_bits(one[0]), _bits(one[1]))
    assert torch.equal(_bits(world.snapshots[0, :, 0]), _bits(world.embedding))
    _check_against_torch(world)


def _check_against_torch(world: _Layers) -> None:
    """Every normalised row of the step against the reference, starting from the kernels' own prefixes."""
    prefix = world.embedding
    for layer, tail in enumerate(world.tails):
        part = (tail.part[0][:, 0], tail.part[0][:, 1], tail.part[1])
        vectors = (tail.query_norm, tail.query, tail.norm_weight)
        mixed = reference.consume(prefix[None], None, part if layer else None, *vectors)
        verdict = compare(world.outs[0, 2 * layer], mixed.normalised_BD, "bf16_activation")
        assert layer or verdict, verdict  # later prefixes may differ by a rounding, which the next check bounds
        error = (world.outs[0, 2 * layer].float() - mixed.normalised_BD).norm() / mixed.normalised_BD.norm()
        assert error < 2e-2, (layer, error)
        partials = torch.stack([reference.produce(world.x[layer, r], world.weight[layer, r]) for r in range(2)])
        residual = None if layer % world.SNAPSHOT_EVERY == 0 else prefix
        prefix, normalised = reference.consume(partials, residual, part, *vectors)
        error = (world.outs[0, 2 * layer + 1].float() - normalised).norm() / normalised.norm()
        assert error < 2e-2, (layer, error)
        total = tail.latent.float().sum(0)
        latent = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * tail.norm.float()
        tail_rows = (latent @ tail.up_weight.float().T + tail.shared.float().sum(0)).bfloat16()
        prefix = (prefix.float() + tail_rows.float()).bfloat16()
    assert ((world.prefix[0].float() - prefix.float()).norm() / prefix.float().norm()) < 1e-2
