"""The residual that peers gather by columns: addresses of looped-back ranks, refusals, whole layers on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.attn_res import reference as attn_res  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots, collect, send, up  # noqa: E402
from k3sim.kernels.proj_allreduce import launch, reference  # noqa: E402
from k3sim.kernels.router_topk.launch import gather_topk, make_front_slots  # noqa: E402
from k3sim.kernels.router_topk.reference import gather_front  # noqa: E402

LATENT, HIDDEN = 3584, 7168
NUM_SNAPSHOTS = 3


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def _are_empty(slots: TailSlots) -> bool:
    return all(bool((_bits(one) == -1).all()) for one in (slots.latent, slots.shared, slots.gathered))


@pytest.mark.parametrize(("ranks", "rank", "rows"), [(1, 0, 2), (8, 0, 1), (8, 5, 3), (16, 15, 2)])
def test_a_looped_back_rank_fills_every_slot_once(ranks: int, rank: int, rows: int) -> None:
    slots = TailSlots.allocate(ranks=ranks, max_rows=4, device="cpu")
    peers = TailPeers.loopback_fabric(slots, rank=rank, rows=rows)
    outputs = HIDDEN // ranks
    # Where the kernels store (``send`` and ``up``): base of peer p, then this rank's slot, or row and first column.
    latent = {base + (rank * rows + row) * LATENT * 2 for base in peers.latent.tolist() for row in range(rows)}
    shared = {base + (rank * rows + row) * outputs * 2 for base in peers.shared.tolist() for row in range(rows)}
    gathered = {base + (row * HIDDEN + rank * outputs) * 2 for base in peers.gathered.tolist() for row in range(rows)}
    assert latent == {slots.latent.data_ptr() + at * LATENT * 2 for at in range(ranks * rows)}
    assert shared == {slots.shared.data_ptr() + at * outputs * 2 for at in range(ranks * rows)}
    assert gathered == {slots.gathered.data_ptr() + at * outputs * 2 for at in range(ranks * rows)}


def test_a_gathered_row_is_one_summand() -> None:
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
            TailPeers.loopback_fabric(self.slots[0], rank=0, rows=rows) if looped else TailPeers.of(self.slots)
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
def test_early_consumers_wait_for_later_sends() -> None:
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
    """Some layers of one or two processes, each on its own stream: embedding, all-reduce, divided front, tail, again.

    Together they pose as 16 ranks: each sends what it computes from as many slots as are its share. So blocks that
    wait for the other one (56 of ``up``, one an SM) leave SMs for everything that they wait for.
    """

    WORLD, DEPTH, LAYERS, SNAPSHOT_EVERY = 16, 384, 4, 2

    def __init__(self, rows: int, *, processes: int) -> None:
        self.rows, self.processes, self.share = rows, processes, self.WORLD // processes
        self.tails = [_Tail(self.WORLD, rows, looped=True, seed=layer) for layer in range(self.LAYERS)]
        self.streams = [torch.cuda.Stream() for _ in range(processes)]
        each = range(processes)
        self.slots = [TailSlots.allocate(ranks=self.WORLD, max_rows=rows, device="cuda") for _ in each]
        self.buffers = [launch.make_receive_buffers(ranks=self.WORLD, max_rows=rows) for _ in each]
        self.fronts = [make_front_slots(ranks=self.WORLD, max_rows=rows) for _ in each]
        width_bytes = HIDDEN // self.WORLD * 2
        self.tail_peers = [
            TailPeers(
                latent=self._posed([one.latent for one in self.slots], process, rows * LATENT * 2),
                shared=self._posed([one.shared for one in self.slots], process, rows * width_bytes),
                gathered=self._posed([one.gathered for one in self.slots], process, width_bytes),
                max_rows=rows,
            )
            for process in each
        ]
        received = [one.received for one in self.buffers]
        self.peers = [self._posed(received, process, rows * HIDDEN * 2) for process in each]
        front_bytes = rows * 280 * 4  # of a block; the kernel adds nothing to an address of a front
        self.front_peers = [
            self._posed(self.fronts, process, front_bytes) + self.rank(process) * front_bytes for process in each
        ]
        generator = torch.Generator(device="cuda").manual_seed(9)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.embedding = normal(rows, HIDDEN)
        self.x = normal(self.LAYERS, processes, rows, self.DEPTH)
        self.weight = normal(self.LAYERS, processes, HIDDEN, self.DEPTH) / 50
        self.front = normal(self.LAYERS, processes, 280, HIDDEN) / 60
        self.shared = normal(self.LAYERS, processes, rows, HIDDEN) / 8
        self.bias = normal(896).float() / 10
        self.ids = torch.zeros(processes, self.LAYERS, rows, 16, dtype=torch.int32, device="cuda")
        self.chosen = torch.zeros(processes, self.LAYERS, rows, 16, device="cuda")
        self.latent = torch.zeros(processes, rows, LATENT, device="cuda").bfloat16()
        self.snapshots = torch.zeros(processes, rows, 8, HIDDEN, device="cuda").bfloat16()
        self.prefix = torch.zeros(processes, rows, HIDDEN, device="cuda").bfloat16()
        self.outs = torch.zeros(processes, 2 * self.LAYERS + 1, rows, HIDDEN, device="cuda").bfloat16()

    def rank(self, process: int) -> int:
        return self.share * process

    def _posed(self, buffers: list[torch.Tensor], process: int, slot_bytes: int) -> torch.Tensor:
        """16 addresses: a share of the slots of every process. Kernels add ``rank`` slots to each."""
        slots = [self.rank(process) + one % self.share for one in range(self.WORLD)]
        bases = [buffers[one // self.share].data_ptr() for one in range(self.WORLD)]
        addresses = [
            base + (slot - self.rank(process)) * slot_bytes for base, slot in zip(bases, slots, strict=True)
        ]
        return torch.tensor(addresses, dtype=torch.int64, device="cuda")

    def step(self, process: int) -> None:
        """One decode step: what mixers and shared experts compute is given, the routed ones hand their input on."""
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        slots, prefix, rank = self.slots[process], self.prefix[process], self.rank(process)
        outs, latent = self.outs[process], self.latent[process]
        slots.gathered.copy_(self.embedding)
        for layer, tail in enumerate(self.tails):
            is_snapshot = layer % self.SNAPSHOT_EVERY == 0
            vectors = (tail.query_norm, tail.query, tail.norm_weight)
            launch.consume_gathered(
                slots,
                prefix if layer else None,
                tail.part if layer else None,
                *vectors,
                self.snapshots[process, :, layer // self.SNAPSHOT_EVERY] if is_snapshot else prefix,
                outs[2 * layer],
                empty_parts=layer > 0,
                release_next=False,
            )
            launch.produce(
                self.x[layer, process], self.weight[layer, process], self.peers[process], self.buffers[process],
                rank=rank,
            )  # fmt: skip
            launch.consume(
                self.buffers[process],
                None if is_snapshot else prefix,
                tail.part,
                *vectors,
                prefix,
                outs[2 * layer + 1],
                release_next=False,
            )
            skinny_gemv_push(
                outs[2 * layer + 1], self.front[layer, process], self.front_peers[process],
                out_dtype=torch.float32, polled=True,
            )  # fmt: skip
            gather_topk(
                self.fronts[process], self.bias, self.ids[process, layer], self.chosen[process, layer], latent,
                early=True, release_next=False,
            )  # fmt: skip
            send(latent, self.shared[layer, process], self.tail_peers[process], rank)
            weight = tail.up_weight[448 * rank : 448 * (rank + 1)]
            up(slots, tail.norm, weight, self.tail_peers[process], rank, self.rows, release_late=True)
        launch.consume_gathered(
            slots, prefix, tail.part, *vectors, prefix, outs[2 * self.LAYERS], release_next=False
        )

    def results(self) -> list[torch.Tensor]:
        return [self.prefix, self.outs, self.snapshots[:, :, :2], self.ids, self.chosen, self.latent]

    def poison(self) -> None:
        for one in self.results():
            one.fill_(-7 if one.dtype == torch.int32 else math.nan)
        torch.cuda.synchronize()

    def check(self) -> None:
        """Results of a step against the reference; prefixes and rows may differ by the roundings that pile up."""
        prefix = self.embedding
        for layer, tail in enumerate(self.tails):
            part = (tail.part[0][:, 0], tail.part[0][:, 1], tail.part[1])
            vectors = (tail.query_norm, tail.query, tail.norm_weight)
            mixed = reference.consume(prefix[None], None, part if layer else None, *vectors)
            _close(self.outs[0, 2 * layer], mixed.normalised_BD)
            each = [
                reference.produce(self.x[layer, one], self.weight[layer, one]) for one in range(self.processes)
            ]
            partials = torch.stack([each[rank // self.share] for rank in range(self.WORLD)])
            residual = None if layer % self.SNAPSHOT_EVERY == 0 else prefix
            prefix, normalised = reference.consume(partials, residual, part, *vectors)
            _close(self.outs[0, 2 * layer + 1], normalised)
            x = self.outs[0, 2 * layer + 1].float()
            blocks = [x @ self.front[layer, rank // self.share].float().T for rank in range(self.WORLD)]
            logits, latent = gather_front(torch.stack(blocks))
            # Processes repeat their experts' logits, so many choices tie: the values must be right, whatever the order.
            choice = logits.sigmoid() + self.bias
            best = choice.sort(dim=-1, descending=True).values[:, :16]
            torch.testing.assert_close(choice.gather(1, self.ids[0, layer].long()), best, rtol=0, atol=1e-4)
            total = self.WORLD * latent.float()
            latent = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * tail.norm.float()
            columns = []
            for rank in range(self.WORLD):
                process = rank // self.share
                first = self.rank(process)
                product = latent @ tail.up_weight[448 * first : 448 * (first + 1)].float().T
                parts = self.shared[layer].unflatten(-1, (self.WORLD, 448))[:, :, first : first + self.share]
                columns.append(product + parts.float().sum((0, 2)))
            prefix = (prefix.float() + torch.cat(columns, dim=-1).bfloat16().float()).bfloat16()
        _close(self.prefix[0], prefix)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < 1e-2, error


def _replay_a_thousand_times(world: _Layers) -> None:
    """The first result again, in every bit, with all graphs in flight at once; slots empty whenever nothing runs."""
    world.poison()
    for process, stream in enumerate(world.streams):
        with torch.cuda.stream(stream):
            world.step(process)
    torch.cuda.synchronize()
    first = [one.clone() for one in world.results()]
    assert not any(bool(one.isnan().any()) for one in first)
    for one in first:
        assert all(torch.equal(_bits(one[0]), _bits(other)) for other in one)
    assert torch.equal(_bits(world.snapshots[0, :, 0]), _bits(world.embedding))
    world.check()
    graphs = []
    for process, stream in enumerate(world.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            world.step(process)
        graphs.append(graph)
    for _ in range(10):
        world.poison()
        for _ in range(100):
            for graph, stream in zip(graphs, world.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for now, then in zip(world.results(), first, strict=True):
            assert torch.equal(_bits(now), _bits(then))
        assert all(_are_empty(one) for one in world.slots)
        assert all(bool((one.view(torch.int32) == -1).all()) for one in world.fronts)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_over_a_thousand_replays(rows: int) -> None:
    # One process alone compiles what two run: compilation between two processes' launches would leave one polling.
    for processes in (1, 2):
        _replay_a_thousand_times(_Layers(rows, processes=processes))
