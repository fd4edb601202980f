"""Hand-overs between GPUs, with kernels played by their references on the CPU: addresses, slots, expected values.

Each launch is played in two halves, as all processes' pushes come before the polling of any. A push into a slot that is
not empty, or polling one that is, is a wrong address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from k3sim.kernels.latent_tail import launch as tail  # noqa: E402
from k3sim.kernels.latent_tail import reference as tail_reference  # noqa: E402
from k3sim.kernels.mla_decode import launch as mla  # noqa: E402
from k3sim.kernels.mla_decode import reference as mla_reference  # noqa: E402
from k3sim.kernels.multi_gpu.hand_overs import BLOCK_BYTES, HAND_OVERS, Arena, HandOver  # noqa: E402
from k3sim.kernels.multi_gpu.symmetric import SharedBlock  # noqa: E402
from k3sim.kernels.proj_allreduce import launch as proj  # noqa: E402
from k3sim.kernels.proj_allreduce import reference as proj_reference  # noqa: E402
from k3sim.kernels.router_topk import launch as router  # noqa: E402
from k3sim.kernels.router_topk import reference as router_reference  # noqa: E402
from k3sim.kernels.skinny_gemv import launch as gemv  # noqa: E402
from k3sim.kernels.unfused import exchange_launch as exchange  # noqa: E402

HIDDEN, LATENT = 7168, 3584
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
MINUS_ZERO = -(2**15)


class Players:
    """Memory of all GPUs, and the halves of launches that still have to be played."""

    def __init__(self, num_gpus: int) -> None:
        self.blocks = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(num_gpus)]
        self.addresses = [one.data_ptr() for one in self.blocks]
        self.later: list[Callable[[], None]] = []

    def block(self, rank: int) -> SharedBlock:
        return SharedBlock(
            own=self.blocks[rank], peers=self.blocks, addresses=self.addresses, rank=rank, barrier=lambda: None
        )

    def store(self, address: int, values: Any, empty: int = -1) -> None:
        """Into memory that must be empty."""
        num_bytes = values.numel() * values.element_size()
        for base, block in zip(self.addresses, self.blocks, strict=True):
            if base <= address < base + BLOCK_BYTES:
                place = block[address - base : address - base + num_bytes].view(values.dtype)
                assert bool((place.view(BITS[values.dtype]) == empty).all()), "a slot was filled twice"
                place.copy_(values.flatten())
                return
        raise AssertionError("a push beyond all blocks")

    def play(self, calls: list[Callable[[], object]]) -> None:
        """One call of every process, half by half."""
        halves = []
        for call in calls:
            self.later = []
            call()
            halves.append(self.later)
        for together in zip(*halves, strict=True):
            for half in together:
                half()


def taken(slots: Any, empty: int = -1) -> Any:
    """What has arrived; the slots are empty again."""
    bits = slots.view(BITS[slots.dtype])
    assert not bool((bits == empty).any()), "polled a slot that nobody has filled"
    found = slots.clone()
    bits.fill_(empty)
    return found


@pytest.fixture
def players_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Players]:
    def make(num_gpus: int) -> Players:
        players = Players(num_gpus)

        def push_sums(partial: Any, peers: Any, buffers: Any, rank: int) -> None:
            hidden = partial.shape[1]
            _, ranks, max_rows, _ = buffers.received.shape
            at = ((int(buffers.control[0]) * ranks + rank) * max_rows) * hidden * 2
            for address in peers.tolist():
                players.store(address + at, partial, MINUS_ZERO)

        def take_sums(buffers: Any, rows: int) -> Any:
            found = taken(buffers.received[int(buffers.control[0]), :, :rows], MINUS_ZERO)
            buffers.control[0] = (buffers.control[0] + 1) % 3
            return found

        def produce(x: Any, weight: Any, peers: Any, buffers: Any, *, rank: int) -> None:
            players.later.append(lambda: push_sums(proj_reference.produce(x, weight), peers, buffers, rank))

        def write(consumed: Any, prefix: Any, out: Any) -> None:
            prefix.copy_(consumed.prefix_BD)
            out.copy_(consumed.normalised_BD)

        def consume(buffers: Any, *operands: Any) -> None:
            *inputs, prefix, out = operands
            players.later.append(
                lambda: write(proj_reference.consume(take_sums(buffers, len(out)), *inputs), prefix, out)
            )

        def all_reduce(x: Any, out: Any, peers: Any, buffers: Any, *, rank: int) -> None:
            def add() -> None:
                total = torch.zeros(x.shape)
                for part in take_sums(buffers, len(x)):
                    total = total + part.float()
                out.copy_(total)

            players.later += [lambda: push_sums(x, peers, buffers, rank), add]

        def push_front(x: Any, w: Any, peers: Any, *, out_dtype: Any, polled: bool) -> None:
            assert polled and out_dtype == torch.float32
            front = x.float() @ w.float().T

            def push() -> None:
                for address in peers.tolist():
                    players.store(address, front)

            players.later.append(push)

        def gather_topk(slots: Any, bias: Any, ids: Any, weights: Any, latent: Any) -> None:
            def gather() -> None:
                ranks, _, width = slots.shape
                packed = slots.flatten(1)[:, : len(ids) * width]
                logits, rounded = router_reference.gather_front(taken(packed).view(ranks, len(ids), width))
                for target, found in zip((ids, weights), router_reference.router_topk(logits, bias), strict=True):
                    target.copy_(found)
                latent.copy_(rounded)

            players.later.append(gather)

        def send(latent: Any, shared: Any, peers: Any, rank: int) -> None:
            rows, width = len(latent), HIDDEN // peers.ranks

            def push() -> None:
                for peer in range(peers.ranks):
                    players.store(int(peers.latent[peer]) + rank * rows * LATENT * 2, latent)
                    columns = shared[:, peer * width : (peer + 1) * width].contiguous()
                    players.store(int(peers.shared[peer]) + rank * rows * width * 2, columns)

            players.later.append(push)

        def packed(slots: Any, rows: int) -> tuple[Any, Any]:
            width = HIDDEN // slots.ranks
            latent = slots.latent.flatten()[: slots.ranks * rows * LATENT].view(slots.ranks, rows, LATENT)
            return latent, slots.shared.flatten()[: slots.ranks * rows * width].view(slots.ranks, rows, width)

        def up(
            slots: Any, norm: Any, weight: Any, peers: Any, rank: int, rows: int, *, release_late: bool
        ) -> None:
            def project() -> None:
                latent, shared = packed(slots, rows)
                total = latent.double().sum(0)
                x = total * (total.square().mean(-1, keepdim=True) + tail_reference.EPS).rsqrt() * norm.double()
                y = (x @ weight.double().T + shared.double().sum(0)).bfloat16()
                for address in peers.gathered.tolist():
                    for row in range(rows):
                        players.store(address + (row * HIDDEN + rank * len(weight)) * 2, y[row])

            players.later.append(project)

        def empty(slots: Any, rows: int) -> Any:
            for one in packed(slots, rows):
                taken(one)
            return taken(slots.gathered[:rows])

        def collect(slots: Any, out: Any) -> None:
            players.later.append(lambda: out.copy_(empty(slots, len(out))))

        def consume_gathered(slots: Any, *operands: Any) -> None:
            *inputs, prefix, out = operands
            players.later.append(
                lambda: write(proj_reference.consume(empty(slots, len(out))[None], *inputs), prefix, out)
            )

        def mla_decode(query: Any, cache: Any, pages: Any, lengths: Any, out: Any, sums: Any, workspace: Any) -> None:
            found = mla_reference.mla_decode(query, cache, pages, lengths)
            out.copy_(found.output_BHV)
            sums.copy_(found.log_sum_exp_BH)

        def lse_merge(outputs: Any, sums: Any, out: Any, out_sums: Any) -> None:
            def merge() -> None:
                found = mla_reference.lse_merge(outputs, sums)
                out.copy_(found.output_BHV)
                out_sums.copy_(found.log_sum_exp_BH)

            players.later.append(merge)

        for module, function in (
            (proj, produce), (proj, consume), (proj, consume_gathered), (exchange, all_reduce), (router, gather_topk),
            (tail, send), (tail, up), (tail, collect), (mla, mla_decode), (mla, lse_merge),
        ):  # fmt: skip
            monkeypatch.setattr(module, function.__name__, function)
        monkeypatch.setattr(gemv, "skinny_gemv_push", push_front)
        return players

    return make


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(2, 2), (8, 2), (4, 1)])
@pytest.mark.parametrize("operator", HAND_OVERS)
def test_all_gpus_get_what_the_reference_says(
    operator: str, num_ranks: int, num_gpus: int, players_of: Callable[[int], Players]
) -> None:
    players = players_of(num_gpus)
    sides: list[HandOver] = [
        HAND_OVERS[operator](Arena(players.block(rank)), num_ranks, "cpu", 0) for rank in range(num_gpus)
    ]
    for turn in range(2):  # slots are empty again, and buffers have moved on
        for number in range(len(sides[0].calls)):
            problems = [side.calls[number] for side in sides]
            for problem in problems:
                problem.reset()
            players.play([problem.launch for problem in problems])
            for problem in problems if turn == 0 else problems[:1]:
                wrong = [str(verdict) for verdict in problem.judge() if not verdict]
                assert wrong == []
            for one, other in zip(problems[0].outputs, problems[-1].outputs, strict=True):
                assert torch.equal(one.tensor.view(torch.uint8), other.tensor.view(torch.uint8)), one.name
