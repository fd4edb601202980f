"""Every call in torch, on any device: what the kernel of the same binding computes, rounded where it rounds.

Sums are fp32; a buffer rounds to its dtype when it is written. Pushes and polls go through ``exchange.Mailbox``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res import reference as attn_res
from k3sim.kernels.expert_gemv import reference as experts_reference
from k3sim.kernels.expert_gemv.reference import Experts
from k3sim.kernels.kda_decode import reference as kda
from k3sim.kernels.lm_head import reference as lm_head
from k3sim.kernels.mla_decode import reference as mla
from k3sim.kernels.rank import bindings
from k3sim.kernels.rank.bindings import CallFunction
from k3sim.kernels.rank.state import PAGE_TOKENS, Rank
from k3sim.kernels.router_topk import reference as router
from k3sim.kernels.skinny_gemv import reference as skinny
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def _site(rank: Rank, layer: int, site: str) -> list[torch.Tensor]:
    return [rank.weight(layer, name) for name in bindings.site_weights(rank, layer, site)]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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
        return _rms_norm(value_BD, norm_D)
    largest_B, denominator_B, weighted_BD = part
    logit_B = _rms_norm(value_BD, query_norm_D) @ query_D.float()
    maximum_B = logit_B.maximum(largest_B)
    old_B, new_B = (largest_B - maximum_B).exp(), (logit_B - maximum_B).exp()
    mixed_BD = (old_B[:, None] * weighted_BD + new_B[:, None] * value_BD) / (old_B * denominator_B + new_B)[:, None]
    return _rms_norm(mixed_BD, norm_D)


def produce(rank: Rank, call: Call) -> None:
    source, weight, _ = bindings.PRODUCTS[call.stage]
    partial = rank.buffers[source].float() @ rank.weight(call.layer, weight).float().T
    rank.exchange.push("attention", partial.to(rank.dtype))


# ---- KDA ------------------------------------------------------------------------------------------------------------


def _kda_parts(rank: Rank) -> list[torch.Tensor]:
    """q, k and v together, output gate, f_a, beta."""
    width = rank.buffers["kda.out"].shape[1]
    heads = width // kda.HEAD_DIM
    projected = rank.buffers["kda.projected"]
    padding = projected.shape[1] - 4 * width - kda.HEAD_DIM - heads
    return list(projected.split((3 * width, width, kda.HEAD_DIM, heads, padding), dim=1))[:4]


def kda_f_b(rank: Rank, call: Call) -> None:
    low_rank = _kda_parts(rank)[2]
    rank.buffers["kda.decay"].copy_(low_rank.float() @ rank.weight(call.layer, "kda.f_b").float().T)


def kda_conv(rank: Rank, call: Call) -> None:
    import torch

    mixed = _kda_parts(rank)[0]
    state, weight = rank.conv_states[call.layer], rank.weight(call.layer, "kda.conv")
    slots = rank.sequence.state_slots.long()
    window = torch.cat([state[slots], mixed[:, None].to(state.dtype)], dim=1)
    state[slots] = window[:, 1:]
    rank.buffers["kda.convolved"].copy_(torch.nn.functional.silu((window.float() * weight.T).sum(1)))


def kda_recurrent(rank: Rank, call: Call) -> None:
    import torch

    _, _, _, beta = _kda_parts(rank)
    heads = beta.shape[1]
    q, k, v = rank.buffers["kda.convolved"].float().view(rank.rows, 3, heads, kda.HEAD_DIM).unbind(1)
    q = q * (q.square().sum(-1, keepdim=True) + kda.L2_EPSILON).rsqrt() * kda.HEAD_DIM**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + kda.L2_EPSILON).rsqrt()
    decay = (rank.buffers["kda.decay"].float() + rank.weight(call.layer, "kda.dt_bias")).view_as(q)
    scale = rank.weight(call.layer, "kda.a_log")[:heads].exp()[None, :, None]
    alpha = (kda.DECAY_BOUND * (scale * decay).sigmoid()).exp()
    slots = rank.sequence.state_slots.long()
    state = rank.states[call.layer][slots] * alpha[..., None]
    delta = beta.float().sigmoid()[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * delta[:, :, None]
    rank.states[call.layer][slots] = state
    rank.buffers["kda.read"].copy_(torch.einsum("bhk,bhkv->bhv", q, state).flatten(1))


def kda_gated_norm(rank: Rank, call: Call) -> None:
    gate = _kda_parts(rank)[1]
    read = rank.buffers["kda.read"].float().unflatten(1, (-1, kda.HEAD_DIM))
    normed = read * (read.square().mean(-1, keepdim=True) + kda.NORM_EPSILON).rsqrt()
    rank.buffers["kda.out"].copy_((normed * rank.weight(call.layer, "kda.norm")).flatten(1) * gate.float().sigmoid())


def kda_decode(rank: Rank, call: Call) -> None:
    out = kda.kda_decode(
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.f_b"),
        rank.weight(call.layer, "kda.conv"),
        rank.weight(call.layer, "kda.dt_bias"),
        rank.weight(call.layer, "kda.a_log"),
        rank.weight(call.layer, "kda.norm"),
        rank.sequence.state_slots,
        rank.conv_states[call.layer],
        rank.states[call.layer],
        heads=rank.buffers["kda.out"].shape[1] // kda.HEAD_DIM,
    )
    rank.buffers["kda.out"].copy_(out)


# ---- MLA ------------------------------------------------------------------------------------------------------------


def _latent_parts(rank: Rank, latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shape = rank.architecture.mla
    return tuple(latents.split((shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim), dim=1))


def _key_up(rank: Rank, call: Call) -> torch.Tensor:
    shape = rank.architecture.mla
    return rank.weight(call.layer, "mla.w_uk").view(-1, shape.qk_nope_head_dim, shape.kv_lora_rank)


def _value_up(rank: Rank, call: Call) -> torch.Tensor:
    shape = rank.architecture.mla
    return rank.weight(call.layer, "mla.w_uv").view(-1, shape.v_head_dim, shape.kv_lora_rank)


def mla_norms(rank: Rank, call: Call) -> None:
    query, latent, _ = _latent_parts(rank, rank.buffers["mla.latents"])
    rank.buffers["mla.query_latent"].copy_(_rms_norm(query, rank.weight(call.layer, "mla.query_norm")))
    rank.buffers["mla.kv_latent"].copy_(_rms_norm(latent, rank.weight(call.layer, "mla.kv_norm")))


def _queries(rank: Rank, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = rank.architecture.mla
    nope, extra = q.unflatten(1, (-1, shape.qk_head_dim)).split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
    return nope, extra


def mla_absorb(rank: Rank, call: Call) -> None:
    import torch

    nope, _ = _queries(rank, rank.buffers["mla.q"])
    absorbed = torch.einsum("bhn,hnv->bhv", nope.float(), _key_up(rank, call).float())
    rank.buffers["mla.absorbed"].copy_(absorbed)


def _write_cache(rank: Rank, call: Call, row: torch.Tensor) -> None:
    page, offset = rank.sequence.cache_slots // PAGE_TOKENS, rank.sequence.cache_slots % PAGE_TOKENS
    cache = rank.caches[call.layer]
    for index in range(rank.rows):
        cache[page[index], offset[index]] = row[index].to(cache.dtype)


def mla_query_cache(rank: Rank, call: Call) -> None:
    import torch

    _, extra_query = _queries(rank, rank.buffers["mla.q"])
    rank.buffers["mla.query"].copy_(torch.cat([rank.buffers["mla.absorbed"], extra_query], dim=-1))
    extra = _latent_parts(rank, rank.buffers["mla.latents"])[2]
    _write_cache(rank, call, torch.cat([rank.buffers["mla.kv_latent"], extra], dim=1))


def mla_prep(rank: Rank, call: Call) -> None:
    import torch

    latents = rank.buffers["mla.latents_gate"][:, : rank.buffers["mla.latents"].shape[1]]
    query, latent, extra = _latent_parts(rank, latents)
    normed = _rms_norm(query, rank.weight(call.layer, "mla.query_norm")).to(rank.dtype)
    q = (normed.float() @ rank.weight(call.layer, "mla.q_b").float().T).to(rank.dtype)
    nope, extra_query = _queries(rank, q)
    absorbed = torch.einsum("bhn,hnv->bhv", nope.float(), _key_up(rank, call).float())
    rank.buffers["mla.query"].copy_(torch.cat([absorbed, extra_query.float()], dim=-1))
    row = torch.cat([_rms_norm(latent, rank.weight(call.layer, "mla.kv_norm")), extra.float()], dim=1)
    _write_cache(rank, call, row)


def attention(rank: Rank, call: Call) -> None:
    sequence = rank.sequence
    done = mla.mla_decode(rank.buffers["mla.query"], rank.caches[call.layer], sequence.pages, sequence.num_tokens)
    rank.buffers["mla.attended"].copy_(done.output_BHV)
    rank.buffers["mla.log_sum_exp"].copy_(done.log_sum_exp_BH)


def _lifted(rank: Rank, call: Call) -> torch.Tensor:
    import torch

    values = torch.einsum("bhv,hnv->bhn", rank.buffers["mla.attended"].float(), _value_up(rank, call).float())
    return values.flatten(1)


def mla_lift(rank: Rank, call: Call) -> None:
    rank.buffers["mla.lifted"].copy_(_lifted(rank, call))


def gate_multiply(rank: Rank, call: Call) -> None:
    gate = rank.buffers["mla.gate"].float().sigmoid()
    rank.buffers["mla.out"].copy_(rank.buffers["mla.lifted"].float() * gate)


def lift_gate(rank: Rank, call: Call) -> None:
    gate = rank.buffers["mla.latents_gate"][:, rank.buffers["mla.latents"].shape[1] :].float().sigmoid()
    rank.buffers["mla.out"].copy_(_lifted(rank, call) * gate)


# ---- MoE ------------------------------------------------------------------------------------------------------------


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
    normed = _rms_norm(latent, rank.weight(call.layer, "moe.latent_norm"))
    columns = normed @ rank.weight(call.layer, "moe.latent_up_shard").float().T + shared
    for _, mailbox, slot in rank.exchange.landings():
        width = columns.shape[1]
        mailbox.slots["gathered"][:, slot * width : (slot + 1) * width].copy_(columns)


def tail_collect(rank: Rank, call: Call) -> None:
    prefix = rank.buffers["prefix"]
    prefix.copy_(prefix.float() + rank.exchange.own.take("gathered").float())


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


REFERENCE_CALLS: dict[str, CallFunction] = {
    "embed.lookup/unfused.embedding": lookup,
    "embed.all_reduce/unfused.all_reduce": all_reduce,
    "embed.push/unfused.embedding": embedding_push,
    "attn_res.mixer/attn_res.combine": combine,
    "attn_res.mixer/proj_allreduce.consume_gathered": consume,
    "attn_res.snapshot/unfused.copy": keep_snapshot,
    "attn_res.part_ffn/attn_res.snapshot_part": snapshot_part,
    "attn_res.part_mixer/attn_res.snapshot_part": snapshot_part,
    "attn_res.ffn/attn_res.combine": combine,
    "attn_res.ffn/proj_allreduce.consume": consume,
    "kda.in_proj/cublas.gemm": product,
    "kda.in_proj/skinny_gemv.tiled": product,
    "kda.f_b/cublas.gemm": kda_f_b,
    "kda.conv/unfused.conv_update": kda_conv,
    "kda.recurrent/unfused.recurrent_update": kda_recurrent,
    "kda.gated_norm/unfused.gated_norm": kda_gated_norm,
    "kda.decode/kda_decode.cluster": kda_decode,
    "kda.o_proj/cublas.gemm": product,
    "kda.o_proj/proj_allreduce.produce_whole": produce,
    "kda.all_reduce/unfused.all_reduce": all_reduce,
    "prefetch.o_proj/l2_prefetch.bulk": nothing,
    "mla.gate/cublas.gemm": product,
    "mla.qkv_a/cublas.gemm": product,
    "mla.qkv_a_gate/skinny_gemv.tiled": product,
    "mla.norms/unfused.norm": mla_norms,
    "mla.q_b/cublas.gemm": product,
    "mla.absorb/cublas.batched_gemm": mla_absorb,
    "mla.query_cache/unfused.query_and_cache": mla_query_cache,
    "mla.prep/mla_prep.fused": mla_prep,
    "mla.attention/mla_decode.clusters": attention,
    "mla.attention/mla_decode.clusters_early": attention,
    "mla.lift/cublas.batched_gemm": mla_lift,
    "mla.gate_multiply/unfused.elementwise": gate_multiply,
    "mla.lift_gate/mla_decode.lift_gate": lift_gate,
    "mla.o_proj/cublas.gemm": product,
    "mla.o_proj/proj_allreduce.produce_whole": produce,
    "mla.all_reduce/unfused.all_reduce": all_reduce,
    "dense.gate_up/cublas.gemm": product,
    "dense.gate_up/skinny_gemv.tiled_situ": situ_product,
    "dense.situ/unfused.elementwise": situ,
    "dense.down/cublas.gemm": product,
    "dense.down/proj_allreduce.produce_whole": produce,
    "dense.all_reduce/unfused.all_reduce": all_reduce,
    "moe.router/cublas.gemm": product,
    "moe.latent_down/cublas.gemm": product,
    "moe.front/skinny_gemv.tiled_push": front_push,
    "moe.shared_gate_up/cublas.gemm": product,
    "moe.shared_gate_up/skinny_gemv.tiled_situ": situ_product,
    "moe.shared_situ/unfused.elementwise": situ,
    "moe.shared_down/cublas.gemm": product,
    "moe.shared_down/skinny_gemv.tiled": product,
    "moe.routing/router_topk.select": select,
    "moe.routing/router_topk.gather_topk": gather_select,
    "moe.experts_1/expert_gemv.gate_up": nothing,
    "moe.experts_2/expert_gemv.down": experts,
    "moe.experts/expert_gemv.persistent": experts,
    "moe.experts/expert_gemv.persistent_push": experts_push,
    "moe.send_shared/latent_tail.send_shared": send_shared,
    "moe.tail_send/latent_tail.send": tail_send,
    "moe.latent_up/latent_tail.up_cluster": tail_up,
    "moe.tail_collect/latent_tail.collect": tail_collect,
    "head.attn_res/attn_res.combine": combine,
    "head.attn_res/proj_allreduce.consume_gathered": consume,
    "head.lm_head/cublas.gemm": product,
    "head.lm_head/skinny_gemv.tiled": product,
    "head.top_k/lm_head.select": local_top,
    "head.logits/unfused.gather": gather_logits,
    "head.sample/unfused.argmax": argmax,
    "head.sample/unfused.sample": sample,
    "head.advance/unfused.advance": advance,
}
