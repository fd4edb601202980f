"""The selection against a plain sort; ties, NaN, infinities; the kernel against the reference, sharded and polled."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.router_topk.launch import (  # noqa: E402
    front_peers,
    front_peers_looped,
    gather_topk,
    make_front_slots,
    router_topk,
)
from k3sim.kernels.router_topk.reference import gather_front  # noqa: E402
from k3sim.kernels.router_topk.reference import router_topk as reference  # noqa: E402
from k3sim.kernels.skinny_gemv.configuration import GemvConfiguration, rule_tiling  # noqa: E402
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES  # noqa: E402

EXPERTS, LATENT, HIDDEN = 896, 3584, 7168

_BUILD = """
from k3sim.kernels.router_topk.kernel import GatherConfiguration, RouterConfiguration, compile_gather, compile_router
compile_router(RouterConfiguration(num_shards=1))
compile_router(RouterConfiguration(num_shards=8, table=True))
compile_router(RouterConfiguration(num_shards=16, poll=True))
compile_gather(GatherConfiguration(num_shards=8, early=False, release_next=False))
compile_gather(GatherConfiguration(num_shards=32, early=True, release_next=True))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_builds_without_a_gpu(architecture: str, compiles: Callable[[str, str], None]) -> None:
    compiles(_BUILD, architecture)


def by_sorting(logits: list[float], bias: list[float]) -> list[int]:
    """Python's own sort on (NaN last, choice descending, id ascending)."""
    choice = [1 / (1 + math.exp(-x)) + b if x == x else x for x, b in zip(logits, bias, strict=True)]
    last = [math.isnan(one) for one in choice]
    return sorted(range(len(choice)), key=lambda i: (last[i], 0.0 if last[i] else -choice[i], i))[:16]


def hard_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, 896] that break a careless selection, and a bias [896]; values have gaps that fp32 sigmoids resolve."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(8)]).float() / 128 - 4
    rows = [steps[0], steps[1]]
    rows.append(torch.zeros(EXPERTS))  # all equal: ids 0 to 15
    rows.append((steps[2] * 2).round() / 2)  # many ties at the sixteenth place
    nan = steps[3].clone()
    nan[steps[3].topk(20).indices] = torch.nan  # NaN in place of the best
    rows.append(nan)
    few = torch.full((EXPERTS,), torch.nan)
    few[torch.tensor([5, 100, 895])] = torch.tensor([-1.0, 2.0, 0.5])  # three numbers, so 13 NaN by id
    rows.append(few)
    infinite = steps[4].clone()
    infinite[torch.tensor([7, 3, 800])] = torch.inf  # sigmoid 1, a tie
    infinite[:400:2] = -torch.inf
    rows.append(infinite)
    rows.append(torch.full((EXPERTS,), -torch.inf))  # scores all 0
    rows.append(torch.full((EXPERTS,), torch.nan))
    rows.append(torch.arange(EXPERTS).float() / 128 - 4)  # the best 16 in one group, the best groups adjacent
    rows.append(torch.where(torch.arange(EXPERTS) % 56 < 16, 1.0, -1.0))  # 256 ties
    saturated = torch.full((EXPERTS,), 30.0)  # all sigmoids round to 1
    saturated[::3] = 40.0
    rows.append(saturated)
    return torch.stack(rows), torch.zeros(EXPERTS)


def test_reference_orders_like_a_sort() -> None:
    rows, bias = hard_rows()
    ids, _ = reference(rows.double(), bias.double())
    for row, got in zip(rows, ids, strict=True):
        assert got.tolist() == by_sorting([max(x, -700.0) if x == x else x for x in row.tolist()], bias.tolist())


def test_equal_scores_go_by_id_nan_last() -> None:
    rows, bias = hard_rows()
    ids, weights = reference(rows, bias)
    assert ids[2].tolist() == list(range(16))
    assert weights[2].tolist() == pytest.approx([1 / 16] * 16)
    assert ids[5].tolist() == [100, 895, 5, 0, 1, 2, 3, 4, *range(6, 14)]
    assert weights[5, 3:].tolist() == [0.0] * 13
    assert ids[6, :3].tolist() == [3, 7, 800]
    assert weights[7].tolist() == [0.0] * 16
    assert ids[8].tolist() == list(range(16))


def test_bias_selects_but_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, EXPERTS), torch.zeros(EXPERTS)
    chosen = random.Random(0).sample(range(EXPERTS), 16)
    bias[chosen] = torch.linspace(1.0, 0.1, 16)
    ids, weights = reference(logits, bias)
    assert ids[0].tolist() == chosen
    assert weights[0].tolist() == pytest.approx([1 / 16] * 16)


def test_launch_names_the_argument_at_fault() -> None:
    ids, weights = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 16)
    logits, bias = torch.zeros(2, EXPERTS), torch.zeros(EXPERTS)
    for arguments, message in (
        ((logits.bfloat16(), bias, ids, weights), "logits: got torch.bfloat16"),
        ((logits[:1], bias, ids, weights), "logits.shape"),
        ((torch.zeros(3, 2, EXPERTS), bias, ids, weights), "shards of logits: got 3"),
        ((logits, bias[:10], ids, weights), "bias.shape"),
        ((logits, bias, ids.long(), weights), "ids: got torch.int64"),
    ):
        with pytest.raises(UserError, match=message):
            router_topk(*arguments)


def test_a_gathered_front_is_the_whole_product() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 64, generator=generator)
    router, down = torch.randn(EXPERTS, 64, generator=generator), torch.randn(LATENT, 64, generator=generator)
    for ranks in (1, 8, 16):
        shards = zip(router.chunk(ranks), down.chunk(ranks), strict=True)
        blocks = torch.stack([x @ torch.cat(shard).T for shard in shards])
        logits, latent = gather_front(blocks)
        torch.testing.assert_close(logits, x @ router.T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(latent, (x @ down.T).bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 32])
def test_gathered_chunks_tile_the_slots_within_shards(ranks: int) -> None:
    # As in the kernel: 224 threads take four logits each, 448 take eight columns each.
    experts, columns = EXPERTS // ranks, LATENT // ranks
    chunks = [(tid * 4 // experts, tid * 4 % experts, 4) for tid in range(224)]
    chunks += [(one * 8 // columns, experts + one * 8 % columns, 8) for one in range(448)]
    words = [(shard, first + i) for shard, first, count in chunks for i in range(count)]
    assert sorted(words) == [(shard, word) for shard in range(ranks) for word in range(experts + columns)]
    assert all((shard * 3 * (experts + columns) + first) % 4 == 0 for shard, first, _ in chunks)  # 16 bytes


@pytest.mark.parametrize("num_sms", [132, 148, 152])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_sharded_routers_have_a_tiling_at_all_rows(ranks: int, num_sms: int) -> None:
    outputs = (EXPERTS + LATENT) // ranks
    for rows in range(1, 17):
        tiling = rule_tiling(num_outputs=outputs, depth=HIDDEN, rows=rows, num_sms=num_sms)
        configuration = GemvConfiguration(
            num_outputs=outputs, depth=HIDDEN, rows=rows, fp32_out=True, num_peers=min(ranks, 16), polled=True,
            tiling=tiling,
        ).check()  # fmt: skip
        edges = [tile * outputs // tiling.num_tiles for tile in range(tiling.num_tiles + 1)]
        assert max(b - a for a, b in itertools.pairwise(edges)) <= configuration.max_local_rows


def test_front_peers_point_to_this_ranks_block() -> None:
    slots = make_front_slots(ranks=16, max_rows=2, device="cpu")
    assert slots.shape == (16, 2, 280) and bool((slots.view(torch.int32) == -1).all())
    bases = [10_000_000 * (rank + 1) for rank in range(16)]
    assert front_peers(bases, 3, slots).tolist() == [base + 3 * 2 * 280 * 4 for base in bases]
    assert front_peers_looped(slots).tolist() == [slots[rank].data_ptr() for rank in range(16)]


def test_the_gathering_launch_names_the_argument_at_fault() -> None:
    arguments = {
        "slots": make_front_slots(ranks=16, max_rows=2, device="cpu"),
        "bias": torch.zeros(EXPERTS),
        "ids": torch.zeros(2, 16, dtype=torch.int32),
        "weights": torch.zeros(2, 16),
        "latent": torch.zeros(2, LATENT, dtype=torch.bfloat16),
    }
    for change, message in (
        ({"slots": torch.zeros(16, 2, 272)}, r"slots.shape\[2\]: got 272, accepted: 280 for 16 ranks"),
        ({"slots": torch.zeros(5, 2, 896)}, r"slots.shape\[0\]: got 5"),
        ({"ids": torch.zeros(3, 16, dtype=torch.int32)}, "rows of ids: got 3, accepted: 1 to 2"),
        ({"latent": torch.zeros(2, LATENT)}, "latent: got torch.float32"),
        ({"weights": torch.zeros(2, 8)}, "weights.shape"),
    ):
        with pytest.raises(UserError, match=message):
            gather_topk(**{**arguments, **change})
    with pytest.raises(UserError, match="addresses: got 2 addresses, accepted: 16, one a rank"):
        front_peers([0, 0], 0, arguments["slots"])


def run_sharded(
    logits: torch.Tensor, bias: torch.Tensor, num_shards: int, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on ``logits`` in ``num_shards`` shards: "buffer", "table" or "poll" (a buffer filled late)."""
    rows = logits.shape[0]
    ids = torch.full((rows, 16), -7, dtype=torch.int32, device="cuda")
    weights = torch.full((rows, 16), torch.nan, device="cuda")
    shards = logits.cuda().unflatten(1, (num_shards, -1)).transpose(0, 1).contiguous()
    if form == "table":
        parts = [shard.clone() for shard in shards]
        router_topk(torch.tensor([one.data_ptr() for one in parts], device="cuda"), bias.cuda(), ids, weights)
    elif form == "poll":
        buffer = torch.full_like(shards, -1, dtype=torch.int32).view(torch.float32)
        router_topk(shards.clone(), bias.cuda(), ids, weights, poll=True)  # compiles, with everything arrived
        ids.fill_(-7)
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        router_topk(buffer, bias.cuda(), ids, weights, poll=True)
        with torch.cuda.stream(other):
            for shard in range(num_shards):
                buffer[shard].copy_(shards[shard])
        torch.cuda.synchronize()
        assert bool((buffer.view(torch.int32) == -1).all())  # ready for the next use
    else:
        router_topk(shards, bias.cuda(), ids, weights)
    torch.cuda.synchronize()
    return ids.cpu(), weights.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["buffer", "table", "poll"])
@pytest.mark.parametrize("num_shards", [1, 8, 16])
def test_kernel_selects_exactly(num_shards: int, form: str) -> None:
    rows, bias = hard_rows()
    ids, weights = run_sharded(rows, bias, num_shards, form)
    expected, expected_weights = reference(rows, bias)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_kernel_on_random_rows_with_a_bias() -> None:
    logits, bias = torch.randn(256, EXPERTS), torch.randn(EXPERTS) * 0.1
    ids, weights = run_sharded(logits, bias, 8, "buffer")
    # Sigmoids differ in the last bits, so two choices closer than that may change places.
    choice = logits.double().sigmoid() + bias.double()
    best = choice.sort(dim=-1, descending=True).values[:, :16]
    torch.testing.assert_close(choice.gather(1, ids.long()), best, rtol=0, atol=1e-6)
    chosen = logits.double().sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-5, atol=0)
    assert all(len(set(row)) == 16 for row in ids.tolist())


class Front:
    """Fronts of all ranks on one GPU, or of one that hears itself in place of all."""

    def __init__(self, ranks: int, rows: int, *, looped: bool = False) -> None:
        self.ranks, self.rows = ranks, rows
        generator = torch.Generator(device="cuda").manual_seed(ranks * 100 + rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        self.real = 1 if looped else ranks
        self.x = normal(rows, HIDDEN).bfloat16()
        self.w = (normal(self.real, (EXPERTS + LATENT) // ranks, HIDDEN) / 60).bfloat16()
        self.bias = normal(EXPERTS) / 10
        self.slots = [make_front_slots(ranks=ranks, max_rows=16) for _ in range(self.real)]
        addresses = [one.data_ptr() for one in self.slots]
        self.peers = (
            [front_peers_looped(self.slots[0])]
            if looped
            else [front_peers(addresses, rank, self.slots[rank]) for rank in range(ranks)]
        )
        self.ids = torch.full((self.real, rows, 16), -7, dtype=torch.int32, device="cuda")
        self.weights = torch.full((self.real, rows, 16), torch.nan, device="cuda")
        self.latent = torch.full((self.real, rows, LATENT), torch.nan, device="cuda").bfloat16()

    def push(self, rank: int) -> None:
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        skinny_gemv_push(self.x, self.w[rank], self.peers[rank], out_dtype=torch.float32, polled=True)

    def gather(self, rank: int, *, early: bool = False) -> None:
        gather_topk(
            self.slots[rank], self.bias, self.ids[rank], self.weights[rank], self.latent[rank],
            early=early, release_next=False,
        )  # fmt: skip

    def poison(self) -> None:
        self.ids.fill_(-7)
        self.weights.fill_(torch.nan)
        self.latent.fill_(torch.nan)
        torch.cuda.synchronize()

    def blocks(self) -> torch.Tensor:
        """What the ranks' fronts compute, by the same kernel into memory that nobody polls."""
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        blocks = torch.zeros(self.ranks, self.rows, (EXPERTS + LATENT) // self.ranks, device="cuda")
        for rank in range(self.real):
            landing = blocks if self.real == 1 else blocks[rank : rank + 1]
            address = torch.tensor([one.data_ptr() for one in landing], device="cuda")
            skinny_gemv_push(self.x, self.w[rank], address, out_dtype=torch.float32)
        torch.cuda.synchronize()
        return blocks

    def check(self, blocks: torch.Tensor) -> None:
        torch.cuda.synchronize()
        logits, latent = gather_front(blocks)
        choice = logits.double().sigmoid() + self.bias.double()
        best = choice.sort(dim=-1, descending=True).values[:, :16]
        for rank in range(self.real):
            # Sigmoids differ in the last bits, so two choices closer than that may change places.
            torch.testing.assert_close(choice.gather(1, self.ids[rank].long()), best, rtol=0, atol=1e-6)
            chosen = logits.double().sigmoid().gather(1, self.ids[rank].long())
            expected = chosen / chosen.sum(-1, keepdim=True)
            torch.testing.assert_close(self.weights[rank].double(), expected, rtol=1e-5, atol=0)
            assert all(len(set(row)) == 16 for row in self.ids[rank].tolist())
            assert torch.equal(self.latent[rank], latent)
            assert torch.equal(self.ids[rank], self.ids[0]) and torch.equal(self.weights[rank], self.weights[0])
        assert all(bool((one.view(torch.int32) == -1).all()) for one in self.slots)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 3), (8, 1), (8, 16), (16, 1), (16, 2), (16, 9)])
def test_sharded_routers_select_alike_on_every_rank(ranks: int, rows: int, early: bool) -> None:
    world = Front(ranks, rows)
    blocks = world.blocks()
    torch.testing.assert_close(
        blocks, torch.stack([world.x.float() @ one.float().T for one in world.w]), rtol=1e-4, atol=1e-3
    )
    for _ in range(3):
        world.poison()
        for phase in (world.push, lambda rank: world.gather(rank, early=early)):
            for rank in range(ranks):
                phase(rank)
        world.check(blocks)


@pytest.mark.gpu
def test_a_gathering_launch_waits_for_later_blocks() -> None:
    world = Front(8, 2)
    blocks = world.blocks()
    world.poison()
    for rank in range(8):
        world.push(rank)
    for rank in range(8):
        world.gather(rank)  # compiles
    other = torch.cuda.Stream()
    for _ in range(20):
        world.poison()
        for rank in range(8):
            world.gather(rank)
        with torch.cuda.stream(other):
            for sender in range(8):
                for receiver in range(8):
                    world.slots[receiver].view(8, -1)[sender, : blocks[sender].numel()].copy_(blocks[sender].flatten())
        world.check(blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_a_looped_back_front_over_a_thousand_replays(rows: int) -> None:
    world = Front(16, rows, looped=True)
    blocks = world.blocks()
    world.push(0)
    world.gather(0)
    world.check(blocks)
    first = [one.clone() for one in (world.ids, world.weights, world.latent)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            world.push(0)
            world.gather(0)
    for _ in range(1000):
        world.poison()
        graph.replay()
        for now, then in zip((world.ids, world.weights, world.latent), first, strict=True):
            assert torch.equal(now, then)
