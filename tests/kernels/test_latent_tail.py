"""The tail against float64, sharded and whole; the three launches for all ranks as streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots, collect, send, up  # noqa: E402
from k3sim.kernels.latent_tail.reference import latent_tail  # noqa: E402
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES  # noqa: E402

LATENT, HIDDEN = 3584, 7168

_BUILD = """
from k3sim.kernels.latent_tail.kernel import TailConfiguration, compile_collect, compile_send, compile_up
for ranks in (8, 16):
    compile_send(TailConfiguration(ranks=ranks, fp32_latent=ranks == 8))
    compile_up(TailConfiguration(ranks=ranks, max_rows=1 if ranks == 8 else 16))
    compile_collect(TailConfiguration(ranks=ranks, prefix=ranks == 8))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_builds_without_a_gpu(architecture: str, compiles: Callable[[str, str], None]) -> None:
    compiles(_BUILD, architecture)


def test_reference_by_the_definition_of_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(3, 2, 8, dtype=torch.float64, generator=generator)
    shared = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    weight = torch.rand(8, dtype=torch.float64, generator=generator)
    up_weight = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    out = latent_tail(latent, shared, weight, up_weight, eps=0.25)
    for row in range(2):
        total = [sum(latent[rank, row, i].item() for rank in range(3)) for i in range(8)]
        rms = (sum(value * value for value in total) / 8 + 0.25) ** 0.5
        for h in range(4):
            expected = sum(up_weight[h, i].item() * weight[i].item() * total[i] / rms for i in range(8))
            expected += sum(shared[rank, row, h].item() for rank in range(3))
            assert out[row, h].item() == pytest.approx(expected, rel=1e-12)


def test_up_projection_shards_join_to_the_whole() -> None:
    latent, shared = torch.randn(8, 1, LATENT).double(), torch.randn(8, 1, HIDDEN).double()
    weight, up_weight = torch.rand(LATENT).double(), torch.randn(HIDDEN, LATENT).double()
    whole = latent_tail(latent, shared, weight, up_weight)
    parts = [
        latent_tail(latent, shared[..., n : n + 896], weight, up_weight[n : n + 896]) for n in range(0, HIDDEN, 896)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole)


def test_launches_name_the_argument_at_fault() -> None:
    slots = TailSlots.allocate(ranks=8, max_rows=2, device="cpu")
    peers = TailPeers.of([slots] * 8)
    bf16 = torch.bfloat16
    latent, shared, out = torch.zeros(2, LATENT), torch.zeros(2, HIDDEN, dtype=bf16), torch.zeros(2, HIDDEN, dtype=bf16)
    norm, weight = torch.ones(LATENT, dtype=bf16), torch.zeros(896, LATENT, dtype=bf16)
    for call, message in (
        (lambda: send(latent.half(), shared, peers, 0), "latent: got torch.float16"),
        (lambda: send(latent, shared[:, :100], peers, 0), "shared.shape"),
        (lambda: send(latent, shared, peers, 8), "rank: got 8, accepted: 0 to 7"),
        (lambda: send(torch.zeros(3, LATENT), torch.zeros(3, HIDDEN, dtype=bf16), peers, 0), "rows: got 3"),
        (lambda: up(slots, norm, weight[:448], peers, 0, 1), "up_weight.shape"),
        (lambda: up(slots, norm, weight, peers, 0, 3), "rows: got 3, accepted: 1 to 2"),
        (lambda: collect(slots, out.float()), "out: got torch.float32"),
        (lambda: collect(slots, out, prefix=out[:1]), "prefix.shape"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_slots_start_empty() -> None:
    slots = TailSlots.allocate(ranks=2, max_rows=1, device="cpu")
    for one in (slots.latent, slots.shared, slots.gathered):
        assert bool((one.view(torch.int32) == -1).all())


class Ranks:
    """All ranks of a tail on one GPU."""

    def __init__(self, ranks: int, rows: int, fp32_latent: bool) -> None:
        self.ranks, self.rows = ranks, rows
        self.slots = [TailSlots.allocate(ranks=ranks, max_rows=rows, device="cuda") for _ in range(ranks)]
        self.peers = TailPeers.of(self.slots)
        self.latent = torch.randn(ranks, rows, LATENT, device="cuda")
        if not fp32_latent:
            self.latent = self.latent.bfloat16()
        self.shared = (torch.randn(ranks, rows, HIDDEN, device="cuda") / (2 * ranks**0.5)).bfloat16()
        self.norm = (1 + torch.rand(LATENT, device="cuda")).bfloat16()
        self.up_weight = (torch.randn(HIDDEN, LATENT, device="cuda") / 180).bfloat16()
        self.prefix: torch.Tensor | None = None
        self.outs = torch.full((ranks, rows, HIDDEN), torch.nan, device="cuda").bfloat16()

    def send(self, rank: int) -> None:
        send(self.latent[rank], self.shared[rank], self.peers, rank)

    def up(self, rank: int) -> None:
        n = HIDDEN // self.ranks
        weight = self.up_weight[n * rank : n * rank + n]
        up(self.slots[rank], self.norm, weight, self.peers, rank, self.rows)

    def collect(self, rank: int) -> None:
        collect(self.slots[rank], self.outs[rank], self.prefix)

    def run(self) -> None:
        """One stream, so that nothing waits for what is queued behind it: all send, all multiply, all collect."""
        for phase in (self.send, self.up, self.collect):
            for rank in reversed(range(self.ranks)):
                phase(rank)

    def run_late(self) -> None:
        """Consumers first: they wait on streams of their own for parts that are sent afterwards."""
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(self.ranks)]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                self.up(rank)
                self.collect(rank)
        for rank in range(self.ranks):
            self.send(rank)
        torch.cuda.synchronize()

    def expected(self) -> torch.Tensor:
        latent = self.latent.bfloat16().double()
        return latent_tail(latent, self.shared.double(), self.norm.double(), self.up_weight.double())


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 1), (8, 1), (8, 5), (8, 16), (16, 1), (16, 3)])
@pytest.mark.parametrize("fp32_latent", [False, True])
def test_all_ranks_agree_and_match_float64(ranks: int, rows: int, fp32_latent: bool) -> None:
    world = Ranks(ranks, rows, fp32_latent)
    world.run()
    verdict = compare(world.outs[0], world.expected(), "bf16_activation")
    assert verdict, verdict
    assert all(torch.equal(one, world.outs[0]) for one in world.outs)
    for slots in world.slots:
        for one in (slots.latent, slots.shared, slots.gathered):
            assert bool((one.view(torch.int32) == -1).all())


@pytest.mark.gpu
def test_the_prefix_is_added_to_the_rounded_tail() -> None:
    world = Ranks(2, 3, False)
    world.run()
    tail = world.outs[0].float()
    world.prefix = torch.randn(3, HIDDEN, device="cuda").bfloat16()
    world.run()
    assert torch.equal(world.outs[0], (tail + world.prefix.float()).bfloat16())


@pytest.mark.gpu
def test_early_consumers_wait_for_later_sends() -> None:
    world = Ranks(2, 3, False)
    world.run()  # compiles
    expected = world.outs.clone()
    for _ in range(20):
        world.outs.fill_(torch.nan)
        world.run_late()
        assert torch.equal(world.outs, expected)


@pytest.mark.gpu
def test_a_thousand_replays_give_the_first_result() -> None:
    world = Ranks(8, 2, False)
    world.run()
    first = world.outs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.run()
    for _ in range(1000):
        world.outs.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(one, first) for one in world.outs)


@pytest.mark.gpu
def test_nan_of_all_ones_is_data() -> None:
    world = Ranks(2, 1, False)
    world.shared[1].view(torch.int16)[0, :4] = -1
    world.run()
    assert bool(world.outs[:, 0, :4].isnan().all())
    assert not bool(world.outs[:, 0, 4:].isnan().any())
