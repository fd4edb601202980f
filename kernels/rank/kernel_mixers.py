"""Calls of the mixers as launches: a KDA layer's and an MLA layer's. ``kernel_calls`` says what all launches share."""

from __future__ import annotations

from k3sim.kernels.kda_decode import launch as kda
from k3sim.kernels.mla_decode import launch as mla
from k3sim.kernels.mla_prep import launch as mla_prep
from k3sim.kernels.rank.bindings import by_head, kda_operands, kept, latent_parts, queries
from k3sim.kernels.rank.state import Rank
from k3sim.kernels.unfused import launch as unfused
from k3sim.kernels.unfused import recurrence_launch
from k3sim.model.program import Call


def _kda_heads(rank: Rank) -> int:
    return int(rank.buffers["kda.out"].shape[1]) // kda.HEAD_DIM


def kda_f_b(rank: Rank, call: Call) -> None:
    import torch

    start = 4 * rank.buffers["kda.out"].shape[1]
    low_rank = rank.buffers["kda.projected"][:, start : start + kda.HEAD_DIM]
    torch.mm(low_rank, rank.weight(call.layer, "kda.f_b").t(), out=rank.buffers["kda.decay"])


def kda_conv(rank: Rank, call: Call) -> None:
    recurrence_launch.conv_update(
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.conv"),
        rank.sequence.state_slots,
        rank.conv_states[call.layer],
        rank.buffers["kda.convolved"],
        heads=_kda_heads(rank),
    )


def kda_recurrent(rank: Rank, call: Call) -> None:
    recurrence_launch.recurrent_update(
        rank.buffers["kda.convolved"],
        rank.buffers["kda.decay"],
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.dt_bias"),
        rank.weight(call.layer, "kda.a_log"),
        rank.sequence.state_slots,
        rank.states[call.layer],
        rank.buffers["kda.read"],
    )


def kda_gated_norm(rank: Rank, call: Call) -> None:
    recurrence_launch.gated_norm(
        rank.buffers["kda.read"],
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.norm"),
        rank.buffers["kda.out"],
        heads=_kda_heads(rank),
    )


def kda_decode(rank: Rank, call: Call) -> None:
    kda.kda_decode(
        *kda_operands(rank, call),
        rank.buffers["kda.out"],
        heads=_kda_heads(rank),
        pdl=True,
    )


def mla_norms(rank: Rank, call: Call) -> None:
    query, latent, *_ = latent_parts(rank, rank.buffers["mla.latents"])
    unfused.norm(
        [
            (query, rank.weight(call.layer, "mla.query_norm"), rank.buffers["mla.query_latent"]),
            (latent, rank.weight(call.layer, "mla.kv_norm"), rank.buffers["mla.kv_latent"]),
        ]
    )


def mla_absorb(rank: Rank, call: Call) -> None:
    import torch

    key_up = by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim)
    torch.bmm(
        queries(rank, rank.buffers["mla.q"])[0].transpose(0, 1),
        key_up,
        out=rank.buffers["mla.absorbed"].transpose(0, 1),
    )


def mla_query_cache(rank: Rank, call: Call) -> None:
    unfused.query_and_cache(
        rank.buffers["mla.absorbed"],
        queries(rank, rank.buffers["mla.q"])[1],
        rank.buffers["mla.kv_latent"],
        latent_parts(rank, rank.buffers["mla.latents"])[2],
        rank.sequence.cache_slots,
        rank.buffers["mla.query"],
        rank.caches[call.layer],
    )


def prepare_attention(rank: Rank, call: Call) -> None:
    mla_prep.mla_prep(
        rank.buffers["mla.latents_gate"],
        rank.weight(call.layer, "mla.query_norm"),
        rank.weight(call.layer, "mla.kv_norm"),
        rank.weight(call.layer, "mla.q_b"),
        by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim),
        rank.sequence.cache_slots,
        rank.buffers["mla.query"],
        rank.caches[call.layer],
    )


def attention(rank: Rank, call: Call) -> None:
    query, sequence = rank.buffers["mla.query"], rank.sequence
    workspace = kept(
        rank,
        "mla",
        lambda: mla.make_workspace(heads=query.shape[1], max_rows=rank.rows, device=rank.device),
    )
    mla.mla_decode(
        query,
        rank.caches[call.layer],
        sequence.pages,
        sequence.num_tokens,
        rank.buffers["mla.attended"],
        rank.buffers["mla.log_sum_exp"],
        workspace,
        # Lengths and page table are those that the step before left behind; only the new row is of this step.
        settled_cache=call.operator == "mla_decode.clusters_early",
    )


def mla_lift(rank: Rank, call: Call) -> None:
    import torch

    shape = rank.architecture.mla
    value_up = by_head(rank, call, "mla.w_uv", shape.v_head_dim)
    out = rank.buffers["mla.lifted"].unflatten(1, (-1, shape.v_head_dim)).transpose(0, 1)
    torch.bmm(rank.buffers["mla.attended"].transpose(0, 1), value_up.transpose(1, 2), out=out)


def gate_multiply(rank: Rank, call: Call) -> None:
    unfused.gate_multiply(rank.buffers["mla.lifted"], rank.buffers["mla.gate"], rank.buffers["mla.out"])


def lift_gate(rank: Rank, call: Call) -> None:
    gate = latent_parts(rank, rank.buffers["mla.latents_gate"])[3]
    value_up = by_head(rank, call, "mla.w_uv", rank.architecture.mla.v_head_dim)
    mla.lift_gate(rank.buffers["mla.attended"], value_up, gate, rank.buffers["mla.out"], pdl=True)
