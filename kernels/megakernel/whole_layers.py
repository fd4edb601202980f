"""Layers of a KDA mixer or MLA and a dense FFN or latent experts written out.

With the references of the operators: no list, no instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch

from k3sim.kernels.attn_res.reference import attn_res
from k3sim.kernels.expert_gemv.reference import Experts, expert_gemv
from k3sim.kernels.kda_decode.reference import kda_decode
from k3sim.kernels.latent_tail.reference import latent_tail
from k3sim.kernels.mla_decode.cache import LATENT, ROW
from k3sim.kernels.mla_decode.reference import lift_gate, mla_decode
from k3sim.kernels.mla_prep.reference import mla_prep
from k3sim.kernels.router_topk.reference import router_topk
from k3sim.kernels.skinny_gemv.reference import situ_glu


def run_layers(memory: dict[str, torch.Tensor], num_layers: int, ranks: int, context: int = 0) -> None:
    """One step over ``memory``, by the names of ``schedule``: residual and states change in place.

    ``context``: tokens of MLA, the newest included. Every rank sends what this one computes, as on a loopback fabric.
    """
    embedding = memory["residual"].clone()
    residual = embedding.clone()
    for layer in range(num_layers):
        x = _mixed(memory, f"{layer}/attn_res.mixer", embedding[None][: 1 if layer else 0], residual)
        if f"{layer}/kda.state" in memory:
            mixed = _exchanged(memory[f"{layer}/kda.o_proj"], _kda(memory, layer, x), ranks)
        else:
            mixed = _exchanged(memory[f"{layer}/mla.o_proj"], _mla(memory, layer, x, context), ranks)
        residual = (mixed + (residual.float() if layer else 0)).bfloat16()
        x = _mixed(memory, f"{layer}/attn_res.ffn", embedding[None], residual)
        if f"{layer}/moe.bias" in memory:
            ffn = _experts(memory, layer, x, ranks)
        else:
            activated = _activated(memory[f"{layer}/dense.gate_up"], x)
            ffn = _exchanged(memory[f"{layer}/dense.down"], activated, ranks)
        residual = (ffn + residual.float()).bfloat16()
    memory["residual"].copy_(residual)


def _mixed(
    memory: Mapping[str, torch.Tensor], site: str, snapshots: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    vectors = (memory[f"{site}.{name}"] for name in ("query_norm", "query", "norm"))
    return attn_res(snapshots[None], residual[None], *vectors)[0]


def _kda(memory: Mapping[str, torch.Tensor], layer: int, x: torch.Tensor) -> torch.Tensor:
    projected = (memory[f"{layer}/kda.in_proj"].float() @ x).bfloat16()
    state, past = memory[f"{layer}/kda.state"], memory[f"{layer}/kda.past"]
    states, samples = torch.stack([state, state]), torch.stack([past, past])  # slot 0 stands for padding
    f_b, conv, dt_bias, a_log, norm = (
        memory[f"{layer}/kda.{name}"] for name in ("f_b", "conv", "dt_bias", "a_log", "norm")
    )
    slots = torch.ones(1, dtype=torch.int32, device=x.device)
    heads = state.shape[0]
    out = kda_decode(projected[None], f_b, conv, dt_bias, a_log, norm, slots, samples, states, heads=heads)
    state.copy_(states[1])
    past.copy_(samples[1])
    return out[0].bfloat16()


def _mla(memory: Mapping[str, torch.Tensor], layer: int, x: torch.Tensor, context: int) -> torch.Tensor:
    matrices = (memory[f"{layer}/mla.{name}"] for name in ("qkv_a", "gate"))
    return attended(memory, layer, torch.cat([(one.float() @ x).bfloat16() for one in matrices]), context)


def attended(
    memory: Mapping[str, torch.Tensor], layer: int, latents_gate: torch.Tensor, context: int
) -> torch.Tensor:
    """MLA's input of the output projection; the newest token's row is written into the cache first."""

    def of(name: str) -> torch.Tensor:
        return memory[f"{layer}/mla.{name}"]

    latents, gate = latents_gate.split((len(of("qkv_a")), len(of("gate"))))
    key_up_HNV = of("w_uk").unflatten(0, (-1, LATENT)).transpose(1, 2)
    vectors = (of("query_norm"), of("kv_norm"))
    prepared = mla_prep(latents[None], *vectors, of("q_b"), key_up_HNV, carry=torch.bfloat16)
    cache = of("cache")
    cache.view(-1, ROW)[context - 1] = prepared.row_BD[0].to(cache.dtype)
    pages = torch.arange(len(cache), dtype=torch.int32)[None]
    attended = mla_decode(prepared.query_BHD.bfloat16(), cache, pages, torch.tensor([context]))
    value_up = of("w_uv").unflatten(0, (key_up_HNV.shape[0], -1))
    return lift_gate(attended.output_BHV, value_up, gate[None])[0].bfloat16()


def _activated(gate_up: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = (part.float() @ x for part in gate_up.chunk(2))
    return situ_glu(gate, up).bfloat16()


def _experts(memory: Mapping[str, torch.Tensor], layer: int, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """All ranks have this one's shards of router, latent and columns."""

    def of(name: str) -> torch.Tensor:
        return memory[f"{layer}/moe.{name}"]

    logits = (of("router_shard").float() @ x).repeat(ranks)
    latent = (of("latent_down_shard").float() @ x).bfloat16().repeat(ranks)
    ids, weights = router_topk(logits[None], of("bias"))
    experts = Experts(**{one.name: of(f"experts.{one.name}") for one in fields(Experts)})
    partial = expert_gemv(latent[None].float(), ids, weights, experts).bfloat16().float()
    shared = (of("shared_down").float() @ _activated(of("shared_gate_up"), x).float()).bfloat16().float()
    own = latent_tail(
        partial.repeat(ranks, 1, 1), shared.view(ranks, 1, -1), of("latent_norm").float(),
        of("latent_up_shard").float(),
    )  # fmt: skip
    return own[0].bfloat16().float().repeat(ranks)


def _exchanged(weight: torch.Tensor, x: torch.Tensor, ranks: int) -> torch.Tensor:
    return (weight.float() @ x.float()).bfloat16().float() * ranks
