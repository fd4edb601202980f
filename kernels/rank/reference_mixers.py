"""Calls of the mixers in torch: a KDA layer's and an MLA layer's; ``reference_calls`` says what all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.kda_decode import reference as kda
from k3sim.kernels.mla_decode import reference as mla
from k3sim.kernels.rank.bindings import by_head, kda_operands, latent_parts, queries
from k3sim.kernels.rank.reference_calls import rms_norm
from k3sim.kernels.rank.state import PAGE_TOKENS, Rank
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


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
        *kda_operands(rank, call),
        heads=rank.buffers["kda.out"].shape[1] // kda.HEAD_DIM,
    )
    rank.buffers["kda.out"].copy_(out)


def mla_norms(rank: Rank, call: Call) -> None:
    query, latent, *_ = latent_parts(rank, rank.buffers["mla.latents"])
    rank.buffers["mla.query_latent"].copy_(rms_norm(query, rank.weight(call.layer, "mla.query_norm")))
    rank.buffers["mla.kv_latent"].copy_(rms_norm(latent, rank.weight(call.layer, "mla.kv_norm")))


def mla_absorb(rank: Rank, call: Call) -> None:
    import torch

    nope, _ = queries(rank, rank.buffers["mla.q"])
    absorbed = torch.einsum(
        "bhn,hnv->bhv", nope.float(), by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim).float()
    )
    rank.buffers["mla.absorbed"].copy_(absorbed)


def _write_cache(rank: Rank, call: Call, row: torch.Tensor) -> None:
    page, offset = rank.sequence.cache_slots // PAGE_TOKENS, rank.sequence.cache_slots % PAGE_TOKENS
    cache = rank.caches[call.layer]
    for index in range(rank.rows):
        cache[page[index], offset[index]] = row[index].to(cache.dtype)


def mla_query_cache(rank: Rank, call: Call) -> None:
    import torch

    _, extra_query = queries(rank, rank.buffers["mla.q"])
    rank.buffers["mla.query"].copy_(torch.cat([rank.buffers["mla.absorbed"], extra_query], dim=-1))
    extra = latent_parts(rank, rank.buffers["mla.latents"])[2]
    _write_cache(rank, call, torch.cat([rank.buffers["mla.kv_latent"], extra], dim=1))


def mla_prep(rank: Rank, call: Call) -> None:
    import torch

    latents = rank.buffers["mla.latents_gate"][:, : rank.buffers["mla.latents"].shape[1]]
    query, latent, extra, _ = latent_parts(rank, latents)
    normed = rms_norm(query, rank.weight(call.layer, "mla.query_norm")).to(rank.dtype)
    q = (normed.float() @ rank.weight(call.layer, "mla.q_b").float().T).to(rank.dtype)
    nope, extra_query = queries(rank, q)
    absorbed = torch.einsum(
        "bhn,hnv->bhv", nope.float(), by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim).float()
    )
    rank.buffers["mla.query"].copy_(torch.cat([absorbed, extra_query.float()], dim=-1))
    row = torch.cat([rms_norm(latent, rank.weight(call.layer, "mla.kv_norm")), extra.float()], dim=1)
    _write_cache(rank, call, row)


def attention(rank: Rank, call: Call) -> None:
    sequence = rank.sequence
    done = mla.mla_decode(rank.buffers["mla.query"], rank.caches[call.layer], sequence.pages, sequence.num_tokens)
    rank.buffers["mla.attended"].copy_(done.output_BHV)
    rank.buffers["mla.log_sum_exp"].copy_(done.log_sum_exp_BH)


def _lifted(rank: Rank, call: Call) -> torch.Tensor:
    import torch

    values = torch.einsum(
        "bhv,hnv->bhn",
        rank.buffers["mla.attended"].float(),
        by_head(rank, call, "mla.w_uv", rank.architecture.mla.v_head_dim).float(),
    )
    return values.flatten(1)


def mla_lift(rank: Rank, call: Call) -> None:
    rank.buffers["mla.lifted"].copy_(_lifted(rank, call))


def gate_multiply(rank: Rank, call: Call) -> None:
    gate = rank.buffers["mla.gate"].float().sigmoid()
    rank.buffers["mla.out"].copy_(rank.buffers["mla.lifted"].float() * gate)


def lift_gate(rank: Rank, call: Call) -> None:
    gate = rank.buffers["mla.latents_gate"][:, rank.buffers["mla.latents"].shape[1] :].float().sigmoid()
    rank.buffers["mla.out"].copy_(_lifted(rank, call) * gate)
