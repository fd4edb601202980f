"""Slots of a rank in one block of memory, as ranks of other processes map it."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.kernels.engine.exchange import SLOT_ALIGNMENT, slot_layout  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailSlots  # noqa: E402
from k3sim.kernels.proj_allreduce.launch import make_receive_buffers  # noqa: E402
from k3sim.kernels.router_topk.launch import make_front_slots  # noqa: E402


@pytest.mark.parametrize(("num_ranks", "rows"), [(16, 1), (8, 5)])
def test_slots_are_apart_and_shaped_as_the_kernels_allocate_them(num_ranks: int, rows: int) -> None:
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
