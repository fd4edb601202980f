"""Calls of an MoE layer as launches, from the divided front to the tail; ``kernel_calls`` says what all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.expert_gemv import launch as expert_gemv
from k3sim.kernels.expert_gemv.launch import PackedExperts
from k3sim.kernels.l2_prefetch import launch as l2_prefetch
from k3sim.kernels.latent_tail import launch as latent_tail
from k3sim.kernels.rank.bindings import kept, shares_gpu
from k3sim.kernels.rank.state import Rank
from k3sim.kernels.router_topk import launch as router
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def front_push(rank: Rank, call: Call) -> None:
    import torch

    from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

    skinny_gemv_push(
        rank.buffers["x"],
        rank.weight(call.layer, "moe.front"),
        rank.exchange.front_peers,
        out_dtype=torch.float32,
        polled=True,
    )


def select(rank: Rank, call: Call) -> None:
    bias = rank.weight(call.layer, "moe.bias")
    router.router_topk(rank.buffers["moe.logits"], bias, rank.buffers["moe.ids"], rank.buffers["moe.weights"])


def gather_select(rank: Rank, call: Call) -> None:
    router.gather_topk(
        rank.exchange.front,
        rank.weight(call.layer, "moe.bias"),
        rank.buffers["moe.ids"],
        rank.buffers["moe.weights"],
        rank.buffers["moe.latent"],
        # The fused all-reduce ahead of the front has seen everything of the layer before end; nothing else shows that.
        early="fused-allreduce" in rank.program.path.switches,
        release_next=call.trigger == "start" and not shares_gpu(rank),
    )


def _packed(rank: Rank, call: Call) -> PackedExperts:
    packed = rank.weights.experts[call.layer]
    assert isinstance(packed, PackedExperts), "the expert kernel reads packed experts"
    return packed


def experts(rank: Rank, call: Call) -> None:
    packed = _packed(rank, call)
    operands = (rank.buffers["moe.latent"], rank.buffers["moe.ids"], rank.buffers["moe.weights"])
    expert_gemv.expert_gemv(*operands, packed, rank.buffers["moe.experts"], _expert_workspace(rank, packed))


def experts_push(rank: Rank, call: Call) -> None:
    packed = _packed(rank, call)
    operands = (rank.buffers["moe.latent"], rank.buffers["moe.ids"], rank.buffers["moe.weights"])
    exchange = rank.exchange
    expert_gemv.expert_gemv_push(*operands, packed, exchange.tail_peers, rank.index, _expert_workspace(rank, packed))


def _expert_workspace(rank: Rank, packed: PackedExperts) -> expert_gemv.ExpertWorkspace:
    workspace: expert_gemv.ExpertWorkspace = kept(
        rank, "experts", lambda: expert_gemv.ExpertWorkspace.allocate(packed, max_rows=rank.rows)
    )
    return workspace


def _expert_hidden(rank: Rank, packed: PackedExperts) -> torch.Tensor:
    import torch

    shape = (rank.rows, expert_gemv.TOP_K, packed.width)
    hidden: torch.Tensor = kept(
        rank, "expert hidden", lambda: torch.zeros(shape, dtype=torch.float16, device=rank.device)
    )
    return hidden


def experts_gate_up(rank: Rank, call: Call) -> None:
    packed = _packed(rank, call)
    operands = (rank.buffers["moe.latent"], rank.buffers["moe.ids"], rank.buffers["moe.weights"])
    expert_gemv.expert_gate_up(*operands, packed, _expert_hidden(rank, packed))


def experts_down(rank: Rank, call: Call) -> None:
    packed = _packed(rank, call)
    hidden = _expert_hidden(rank, packed)
    expert_gemv.expert_down(hidden, rank.buffers["moe.ids"], packed, rank.buffers["moe.experts"])


def tail_send(rank: Rank, call: Call) -> None:
    latent_tail.send(rank.buffers["moe.experts"], rank.buffers["moe.shared"], rank.exchange.tail_peers, rank.index)


def send_shared(rank: Rank, call: Call) -> None:
    latent_tail.send_shared(rank.buffers["moe.shared"], rank.exchange.tail_peers, rank.index)


def tail_up(rank: Rank, call: Call) -> None:
    latent_tail.up(
        rank.exchange.tail,
        rank.weight(call.layer, "moe.latent_norm"),
        rank.weight(call.layer, "moe.latent_up_shard"),
        rank.exchange.tail_peers,
        rank.index,
        rank.rows,
        # A fused consume behind it reads what other launches wrote without a wait of its own.
        release_late=call.trigger == "wait",
    )


def tail_collect(rank: Rank, call: Call) -> None:
    prefix = rank.buffers["prefix"]
    latent_tail.collect(rank.exchange.tail, prefix, prefix)


def prefetch(rank: Rank, call: Call) -> None:
    def regions() -> torch.Tensor:
        tensors = []
        for weight in call.weights:
            layer, name = weight.region.split("/", 1)
            tensors.append(rank.weight(int(layer), name))
        return l2_prefetch.make_regions(tensors)

    budget = call.shape["budget_bytes"]
    l2_prefetch.l2_prefetch(kept(rank, f"prefetch {call.index}", regions), budget_bytes=budget)
