"""Every call as launches on the current stream: the project's kernels, and cuBLAS through ``torch.mm`` and ``bmm``.

Nothing is allocated once a step has run (the first step compiles and sizes workspaces, before any capture). Outputs of
torch calls go to buffers by ``out=``, and copies are elementwise kernels, not copy-engine nodes, so that every
neighbour of an early launch is a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res import launch as attn_res
from k3sim.kernels.lm_head import launch as lm_head
from k3sim.kernels.proj_allreduce import launch as proj_allreduce
from k3sim.kernels.rank import bindings
from k3sim.kernels.rank.bindings import kept, shares_gpu
from k3sim.kernels.rank.state import Rank
from k3sim.kernels.unfused import exchange_launch
from k3sim.kernels.unfused import launch as unfused
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def _site(rank: Rank, layer: int, site: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_norm, query, norm = (rank.weight(layer, name) for name in bindings.site_weights(rank, layer, site))
    return query_norm, query, norm


# ---- products -------------------------------------------------------------------------------------------------------


def gemm(rank: Rank, call: Call) -> None:
    import torch

    source, weight, target = bindings.PRODUCTS[call.stage]
    x, w, out = rank.buffers[source], rank.weight(call.layer, weight), rank.buffers[target]
    if out.dtype == torch.float32:
        torch.mm(x, w.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, w.t(), out=out)


def skinny(rank: Rank, call: Call) -> None:
    from k3sim.kernels.skinny_gemv.launch import skinny_gemv

    source, weight, target = bindings.PRODUCTS[call.stage]
    skinny_gemv(rank.buffers[source], rank.weight(call.layer, weight), rank.buffers[target])


def skinny_situ(rank: Rank, call: Call) -> None:
    from k3sim.kernels.skinny_gemv.configuration import Epilogue
    from k3sim.kernels.skinny_gemv.launch import skinny_gemv

    source, weight, _ = bindings.PRODUCTS[call.stage]
    out = rank.buffers[bindings.SITU_OUTPUT[call.stage]]
    skinny_gemv(rank.buffers[source], rank.weight(call.layer, weight), out, epilogue=Epilogue.SITU_GLU)


def situ(rank: Rank, call: Call) -> None:
    part = call.stage.removesuffix("situ")
    unfused.situ(rank.buffers[f"{part}gate_up"], rank.buffers[f"{part}hidden"])


# ---- residual stream ------------------------------------------------------------------------------------------------


def lookup(rank: Rank, call: Call) -> None:
    table = rank.weight(-1, "embedding")
    exchange_launch.embedding(rank.sequence.tokens, table, rank.buffers["partial"], first_id=rank.first_token)


def embedding_push(rank: Rank, call: Call) -> None:
    table = rank.weight(-1, "embedding")
    exchange_launch.embedding_push(rank.sequence.tokens, table, rank.exchange.row_peers, first_id=rank.first_token)


def all_reduce(rank: Rank, call: Call) -> None:
    exchange = rank.exchange
    exchange_launch.all_reduce(
        rank.buffers["partial"],
        rank.buffers[bindings.reduced_into(rank, call)],
        exchange.sum_peers,
        exchange.sums,
        rank=rank.index,
        release_next=not shares_gpu(rank),
    )


def combine(rank: Rank, call: Call) -> None:
    site = bindings.site_of(call)
    attn_res.attn_res(
        rank.buffers["snapshots"],
        rank.buffers["prefix"],
        rank.buffers["delta"] if bindings.pending_delta(rank, call) else None,
        *_site(rank, call.layer, site),
        rank.buffers["x"],
        num_snapshots=rank.snapshots_before(call.layer, site),
        pdl=call.launch == "pdl",
    )


def keep_snapshot(rank: Rank, call: Call) -> None:
    import torch

    place = rank.buffers["snapshots"][:, bindings.snapshot_index(rank, call)]
    torch.mul(rank.buffers["prefix"], 1, out=place)


def snapshot_part(rank: Rank, call: Call) -> None:
    layer, site, buffer = bindings.prepared_site(rank, call)
    query_norm, query, _ = _site(rank, layer, site)
    attn_res.snapshot_part(
        rank.buffers["snapshots"],
        query_norm,
        query,
        rank.buffers[f"part.{buffer}.stats"],
        rank.buffers[f"part.{buffer}.weighted"],
        num_snapshots=rank.snapshots_before(layer, site),
    )


def consume(rank: Rank, call: Call) -> None:
    site = bindings.site_of(call)
    buffer = "ffn" if site == "ffn" else "mixer"
    part = None
    if rank.snapshots_before(call.layer, site):
        part = (rank.buffers[f"part.{buffer}.stats"], rank.buffers[f"part.{buffer}.weighted"])
    operands = (
        rank.buffers["prefix"] if bindings.adds_prefix(rank, call) else None,
        part,
        *_site(rank, call.layer, site),
        bindings.prefix_of(rank, call),
        rank.buffers["x"],
    )
    release_next = not shares_gpu(rank)
    if bindings.arrives_in_parts(rank, call):
        proj_allreduce.consume(rank.exchange.sums, *operands, release_next=release_next)
    else:
        after_tail = bindings.preceding_layer(rank, call.layer) >= 0
        proj_allreduce.consume_gathered(
            rank.exchange.tail, *operands, empty_parts=after_tail, release_next=release_next
        )


def produce(rank: Rank, call: Call) -> None:
    source, weight, _ = bindings.PRODUCTS[call.stage]
    exchange = rank.exchange
    proj_allreduce.produce(
        rank.buffers[source],
        rank.weight(call.layer, weight),
        exchange.sum_peers,
        exchange.sums,
        rank=rank.index,
        release_early=call.trigger == "start" and not shares_gpu(rank),
    )


# ---- head -----------------------------------------------------------------------------------------------------------


def local_top(rank: Rank, call: Call) -> None:
    lm_head.top_k(rank.buffers["head.logits"], rank.exchange.top, rank.exchange.ids, first_id=rank.first_token)


def sample(rank: Rank, call: Call) -> Iterator[None]:
    rank.exchange.push_candidates()
    yield
    values, ids = rank.exchange.arrived_candidates()
    unfused.sample(values, ids, rank.sequence.tokens)


def gather_logits(rank: Rank, call: Call) -> Iterator[None]:
    rank.exchange.push_logits(rank.buffers["head.logits"])
    yield


def argmax(rank: Rank, call: Call) -> None:
    import torch

    best = kept(rank, "best", lambda: torch.zeros((rank.rows,), dtype=torch.int64, device=rank.device))
    torch.argmax(rank.exchange.all_logits(), dim=-1, out=best)
    torch.add(best, 0, out=rank.sequence.tokens)


def advance(rank: Rank, call: Call) -> None:
    unfused.advance(rank.sequence.num_tokens, rank.sequence.pages, rank.sequence.cache_slots)
