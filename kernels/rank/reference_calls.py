"""Every call in torch, on any device: what the kernel of the same binding computes, rounded where it rounds.

Sums are fp32; a buffer rounds to its dtype when it is written. Pushes and polls go through ``exchange.Mailbox``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res import reference as attn_res
from k3sim.kernels.lm_head import reference as lm_head
from k3sim.kernels.rank import bindings
from k3sim.kernels.rank.state import PAGE_TOKENS, Rank
from k3sim.kernels.skinny_gemv import reference as skinny
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def _site(rank: Rank, layer: int, site: str) -> list[torch.Tensor]:
    return [rank.weight(layer, name) for name in bindings.site_weights(rank, layer, site)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return attn_res.rms_norm(x.float(), weight.float())


# ---- products -------------------------------------------------------------------------------------------------------


def product(rank: Rank, call: Call) -> None:
    source, weight, target = bindings.PRODUCTS[call.stage]
    out = rank.buffers[target]
    out.copy_(rank.buffers[source].float() @ rank.weight(call.layer, weight).float().T)


def situ_product(rank: Rank, call: Call) -> None:
    source, weight, _ = bindings.PRODUCTS[call.stage]
    gate, up = (rank.buffers[source].float() @ rank.weight(call.layer, weight).float().T).chunk(2, dim=1)
    rank.buffers[bindings.SITU_OUTPUT[call.stage]].copy_(skinny.situ_glu(gate, up))


def situ(rank: Rank, call: Call) -> None:
    part = call.stage.removesuffix("situ")
    gate, up = rank.buffers[f"{part}gate_up"].float().chunk(2, dim=1)
    rank.buffers[f"{part}hidden"].copy_(skinny.situ_glu(gate, up))


# ---- residual stream ------------------------------------------------------------------------------------------------


def lookup(rank: Rank, call: Call) -> None:
    table, own = rank.weight(-1, "embedding"), rank.sequence.tokens.long() - rank.first_token
    here = (own >= 0) & (own < table.shape[0])
    rows = table[own.clamp(0, table.shape[0] - 1)].float()
    rank.buffers["partial"].copy_(rows * here[:, None])


def embedding_push(rank: Rank, call: Call) -> Iterator[None]:
    """The owner of a token stores its row at every rank."""
    table, own = rank.weight(-1, "embedding"), rank.sequence.tokens.long() - rank.first_token
    for row, index in enumerate(own.tolist()):
        if 0 <= index < table.shape[0]:
            for _, mailbox, _ in rank.exchange.landings():
                mailbox.slots["gathered"][row].copy_(table[index])
    yield


def all_reduce(rank: Rank, call: Call) -> Iterator[None]:
    name = {"embed.all_reduce": "embed", "dense.all_reduce": "ffn"}.get(call.stage, "attention")
    rank.exchange.push(name, rank.buffers["partial"])
    yield
    total = rank.exchange.own.take(name).float().sum(0)
    rank.buffers[bindings.reduced_into(rank, call)].copy_(total)


def combine(rank: Rank, call: Call) -> None:
    site = bindings.site_of(call)
    prefix = rank.buffers["prefix"]
    if bindings.pending_delta(rank, call):
        attn_res.add_delta(prefix, rank.buffers["delta"])
    count = rank.snapshots_before(call.layer, site)
    mixed = attn_res.attn_res(rank.buffers["snapshots"][:, :count], prefix, *_site(rank, call.layer, site))
    rank.buffers["x"].copy_(mixed)


def keep_snapshot(rank: Rank, call: Call) -> None:
    rank.buffers["snapshots"][:, bindings.snapshot_index(rank, call)].copy_(rank.buffers["prefix"])


def snapshot_part(rank: Rank, call: Call) -> None:
    layer, site, buffer = bindings.prepared_site(rank, call)
    count = rank.snapshots_before(layer, site)
    query_norm, query, _ = _site(rank, layer, site)
    part = attn_res.snapshot_part(rank.buffers["snapshots"][:, :count], query_norm, query)
    rank.buffers[f"part.{buffer}.stats"].copy_(_stack((part.maximum_B, part.denominator_B)))
    rank.buffers[f"part.{buffer}.weighted"].copy_(part.weighted_BD)


def _stack(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(pair, dim=1)


def consume(rank: Rank, call: Call) -> None:
    site = bindings.site_of(call)
    if bindings.arrives_in_parts(rank, call):
        arrived_RBD = rank.exchange.own.take("attention")
    else:
        arrived_RBD = rank.exchange.own.take("gathered")[None]
    part = None
    if rank.snapshots_before(call.layer, site):
        buffer = "ffn" if site == "ffn" else "mixer"
        stats = rank.buffers[f"part.{buffer}.stats"]
        part = (stats[:, 0], stats[:, 1], rank.buffers[f"part.{buffer}.weighted"])
    residual = rank.buffers["prefix"] if bindings.adds_prefix(rank, call) else None
    prefix = bindings.prefix_of(rank, call)
    prefix.copy_(arrived_RBD.float().sum(0) + (residual.float() if residual is not None else 0.0))
    rank.buffers["x"].copy_(_fold(prefix, part, *_site(rank, call.layer, site)))


def _fold(
    value_BD: torch.Tensor,
    part: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    query_norm_D: torch.Tensor,
    query_D: torch.Tensor,
    norm_D: torch.Tensor,
) -> torch.Tensor:
    """The prefix folded into a snapshots' part by the online softmax rule, then RMSNorm; without any rounding."""
    value_BD = value_BD.float()
    if part is None:
        return rms_norm(value_BD, norm_D)
    largest_B, denominator_B, weighted_BD = part
    logit_B = rms_norm(value_BD, query_norm_D) @ query_D.float()
    maximum_B = logit_B.maximum(largest_B)
    old_B, new_B = (largest_B - maximum_B).exp(), (logit_B - maximum_B).exp()
    mixed_BD = (old_B[:, None] * weighted_BD + new_B[:, None] * value_BD) / (old_B * denominator_B + new_B)[:, None]
    return rms_norm(mixed_BD, norm_D)


def produce(rank: Rank, call: Call) -> None:
    source, weight, _ = bindings.PRODUCTS[call.stage]
    partial = rank.buffers[source].float() @ rank.weight(call.layer, weight).float().T
    rank.exchange.push("attention", partial.to(rank.dtype))


# ---- head -----------------------------------------------------------------------------------------------------------


def local_top(rank: Rank, call: Call) -> None:
    count = rank.buffers["head.top"].shape[1]
    found = lm_head.top_k(rank.buffers["head.logits"], count, first_id=rank.first_token)
    rank.buffers["head.top"].copy_(found.logits_BK)
    rank.buffers["head.ids"].copy_(found.ids_BK)


def sample(rank: Rank, call: Call) -> Iterator[None]:
    """Greedy: the largest of all ranks' candidates, equal ones by lower id."""
    rank.exchange.push("top", rank.buffers["head.top"])
    rank.exchange.push("ids", rank.buffers["head.ids"].float())
    yield
    top, ids = rank.exchange.own.take("top"), rank.exchange.own.take("ids")
    merged = lm_head.merge([lm_head.Candidates(*pair) for pair in zip(top, ids.int(), strict=True)], 1)
    rank.sequence.tokens.copy_(merged.ids_BK[:, 0])


def gather_logits(rank: Rank, call: Call) -> Iterator[None]:
    rank.exchange.push("logits", rank.buffers["head.logits"])
    yield
    rank.buffers["head.all_logits"].copy_(rank.exchange.own.take("logits").transpose(0, 1).flatten(1))


def argmax(rank: Rank, call: Call) -> None:
    rank.sequence.tokens.copy_(rank.buffers["head.all_logits"].argmax(-1))


def advance(rank: Rank, call: Call) -> None:
    sequence = rank.sequence
    sequence.num_tokens.add_(1)
    last = (sequence.num_tokens - 1).clamp_max(rank.max_tokens - 1).long()
    page = sequence.pages.gather(1, (last // PAGE_TOKENS)[:, None])[:, 0].long()
    sequence.cache_slots.copy_(page * PAGE_TOKENS + last % PAGE_TOKENS)
