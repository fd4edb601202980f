"""Calls of an MoE layer in torch, from the divided front to the tail; ``reference_calls`` says what all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.expert_gemv import reference as experts_reference
from k3sim.kernels.expert_gemv.reference import Experts
from k3sim.kernels.rank.reference_calls import rms_norm
from k3sim.kernels.rank.state import Rank
from k3sim.kernels.router_topk import reference as router
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def front_push(rank: Rank, call: Call) -> None:
    weight = rank.weight(call.layer, "moe.front")
    rank.exchange.push("route", rank.buffers["x"].float() @ weight.float().T)


def _select(rank: Rank, call: Call, logits: torch.Tensor) -> None:
    ids, weights = router.router_topk(logits, rank.weight(call.layer, "moe.bias"))
    rank.buffers["moe.ids"].copy_(ids)
    rank.buffers["moe.weights"].copy_(weights)


def select(rank: Rank, call: Call) -> None:
    _select(rank, call, rank.buffers["moe.logits"])


def gather_select(rank: Rank, call: Call) -> None:
    shards = rank.exchange.own.take("route")
    num_logits = rank.architecture.moe.num_experts // shards.shape[0]
    _select(rank, call, shards[..., :num_logits].transpose(0, 1).flatten(1))
    rank.buffers["moe.latent"].copy_(shards[..., num_logits:].transpose(0, 1).flatten(1))


def _expert_sums(rank: Rank, call: Call) -> torch.Tensor:
    weights = rank.weights.experts[call.layer]
    assert isinstance(weights, Experts), "the references read experts as a checkpoint stores them"
    ids, scores = rank.buffers["moe.ids"], rank.buffers["moe.weights"]
    return experts_reference.expert_gemv(rank.buffers["moe.latent"], ids, scores, weights)


def experts(rank: Rank, call: Call) -> None:
    rank.buffers["moe.experts"].copy_(_expert_sums(rank, call))


def experts_push(rank: Rank, call: Call) -> None:
    rank.exchange.push("latent", _expert_sums(rank, call))


def nothing(rank: Rank, call: Call) -> None:
    """A launch without a result of its own here: prefetches, and the half of a product that its other half does."""


def tail_send(rank: Rank, call: Call) -> None:
    rank.exchange.push("latent", rank.buffers["moe.experts"])
    send_shared(rank, call)


def send_shared(rank: Rank, call: Call) -> None:
    shares = rank.buffers["moe.shared"].chunk(rank.layout.tp, dim=1)
    for peer, mailbox, slot in rank.exchange.landings():
        mailbox.slots["shared"][slot].copy_(shares[peer])


def tail_up(rank: Rank, call: Call) -> None:
    latent = rank.exchange.own.take("latent").float().sum(0)
    shared = rank.exchange.own.take("shared").float().sum(0)
    normed = rms_norm(latent, rank.weight(call.layer, "moe.latent_norm"))
    columns = normed @ rank.weight(call.layer, "moe.latent_up_shard").float().T + shared
    for _, mailbox, slot in rank.exchange.landings():
        width = columns.shape[1]
        mailbox.slots["gathered"][:, slot * width : (slot + 1) * width].copy_(columns)


def tail_collect(rank: Rank, call: Call) -> None:
    prefix = rank.buffers["prefix"]
    prefix.copy_(prefix.float() + rank.exchange.own.take("gathered").float())
