"""Slots of a rank in one block of memory, as ranks of other processes map it."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from small_model import small_architecture  # noqa: E402

from k3sim.kernels.latent_tail.launch import TailSlots  # noqa: E402
from k3sim.kernels.multi_gpu.symmetric import SharedBlock, landing, sender  # noqa: E402
from k3sim.kernels.proj_allreduce.launch import make_receive_buffers  # noqa: E402
from k3sim.kernels.rank.exchange import (  # noqa: E402
    SLOT_ALIGNMENT,
    exchange_in_block,
    places_of,
    slot_layout,
)
from k3sim.kernels.rank.state import build_rank  # noqa: E402
from k3sim.kernels.rank.weights import RankWeights  # noqa: E402
from k3sim.kernels.router_topk.launch import make_front_slots  # noqa: E402
from k3sim.model.layout import Layout, Workload  # noqa: E402
from k3sim.model.paths import find_path  # noqa: E402
from k3sim.model.program import build_program  # noqa: E402


@pytest.mark.parametrize(("num_ranks", "rows"), [(16, 1), (8, 5)])
def test_slots_are_apart_and_shaped_as_allocated(num_ranks: int, rows: int) -> None:
    places = slot_layout(num_ranks, rows, 7168, 3584, 896, 163_840 // num_ranks, 64)
    end = 0
    for name, (offset, shape, element_bytes) in places.items():
        assert offset % SLOT_ALIGNMENT == 0
        assert offset >= end, name
        end = offset + math.prod(shape) * element_bytes
    tail = TailSlots.allocate(ranks=num_ranks, max_rows=rows, device="cpu")
    made = {
        "sums": make_receive_buffers(ranks=num_ranks, max_rows=rows, device="cpu").received,
        "latent": tail.latent,
        "shared": tail.shared,
        "gathered": tail.gathered,
        "front": make_front_slots(ranks=num_ranks, max_rows=rows, device="cpu"),
    }
    for name, tensor in made.items():
        assert places[name][1:] == (tuple(tensor.shape), tensor.element_size()), name
        # All bits set where the tail and the front are empty, as the block is filled.
        if name != "sums":
            assert bool((tensor.view(torch.uint8) == 0xFF).all()), name


STRIDED = ("sums", "latent", "shared", "gathered", "front")


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(4, 4), (4, 2), (4, 1)])
def test_pushes_fill_every_slot_of_every_gpu(num_ranks: int, num_gpus: int) -> None:
    """By the addresses in the tables and what the kernels add to them."""
    architecture, layout = small_architecture(), Layout(tp=num_ranks)
    workload = Workload(concurrency=3, context=64)
    program = build_program(architecture, layout, workload, find_path("stock", kernel_set="own"))
    size = 1 << 32  # addresses of GPU g begin at (g + 1) times this
    filled: dict[str, set[tuple[int, int]]] = {name: set() for name in STRIDED}
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    blocks = [torch.zeros(1 << 24, dtype=torch.uint8) for _ in range(num_gpus)]
    exchanges = []
    for gpu in range(num_gpus):
        rank = build_rank(architecture, layout, workload, program, RankWeights(), index=gpu, device="cpu")
        places = places_of(rank)
        block = SharedBlock(
            own=blocks[gpu], peers=blocks, addresses=[(one + 1) * size for one in range(num_gpus)], rank=gpu,
            barrier=lambda: None,
        )  # fmt: skip
        exchange = exchange_in_block(rank, places, block)
        exchanges.append(exchange)
        hidden = architecture.hidden_size
        strides = {
            "sums": rank.rows * hidden * 2,
            "latent": rank.rows * architecture.moe.latent_size * 2,
            "shared": rank.rows * hidden // num_ranks * 2,
            "gathered": hidden // num_ranks * 2,
            "front": rank.rows * (architecture.moe.num_experts + architecture.moe.latent_size) // num_ranks * 4,
        }
        tables = {
            "sums": exchange.sum_peers,
            "latent": exchange.tail_peers.latent,
            "shared": exchange.tail_peers.shared,
            "gathered": exchange.tail_peers.gathered,
            "front": exchange.front_peers,
        }
        for name, table in tables.items():
            assert len(table) == num_ranks
            for peer, address in enumerate(table.tolist()):
                # All kernels but the front's add this rank's slot.
                at = address + (0 if name == "front" else gpu * strides[name])
                target, slot = at // size - 1, (at % size - places[name][0]) / strides[name]
                assert (target, slot) == landing(peer, rank=gpu, num_gpus=num_gpus)
                assert (target, int(slot)) not in filled[name]
                filled[name].add((target, int(slot)))
        # A whole row goes to each GPU once: a second copy could arrive after the first has been taken.
        assert exchange.row_peers.tolist() == [(one + 1) * size + places["gathered"][0] for one in range(num_gpus)]
    everything = {(gpu, slot) for gpu in range(num_gpus) for slot in range(num_ranks)}
    assert all(found == everything for found in filled.values())
    for gpu, exchange in enumerate(exchanges):
        exchange.candidates.fill_(gpu + 1)
        exchange.push_candidates()
        exchange.push_logits(torch.full((3, architecture.vocab_size // num_ranks), gpu + 1.0))
    for exchange in exchanges:
        for slot in range(num_ranks):
            assert bool((exchange.candidate_slots[:, slot] == sender(slot, num_gpus) + 1).all())
            assert exchange.logit_slots is not None
            assert bool((exchange.logit_slots[:, slot] == sender(slot, num_gpus) + 1).all())
