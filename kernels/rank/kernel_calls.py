"""Every call as launches on the current stream: the project's kernels, and cuBLAS through ``torch.mm`` and ``bmm``.

Nothing is allocated once a step has run (the first step compiles and sizes workspaces, before any capture). Outputs of
torch calls go to buffers by ``out=``, and copies are elementwise kernels, not copy-engine nodes, so that every
neighbour of an early launch is a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from k3sim.kernels.attn_res import launch as attn_res
from k3sim.kernels.expert_gemv import launch as expert_gemv
from k3sim.kernels.expert_gemv.launch import PackedExperts
from k3sim.kernels.kda_decode import launch as kda
from k3sim.kernels.l2_prefetch import launch as l2_prefetch
from k3sim.kernels.latent_tail import launch as latent_tail
from k3sim.kernels.lm_head import launch as lm_head
from k3sim.kernels.mla_decode import launch as mla
from k3sim.kernels.mla_prep import launch as mla_prep
from k3sim.kernels.proj_allreduce import launch as proj_allreduce
from k3sim.kernels.rank import bindings
from k3sim.kernels.rank.bindings import CallFunction
from k3sim.kernels.rank.state import Rank
from k3sim.kernels.router_topk import launch as router
from k3sim.kernels.unfused import launch as unfused
from k3sim.model.program import Call

if TYPE_CHECKING:
    import torch


def _site(rank: Rank, layer: int, site: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_norm, query, norm = (rank.weight(layer, name) for name in bindings.site_weights(rank, layer, site))
    return query_norm, query, norm


def _kept(rank: Rank, name: str, build: Any) -> Any:
    """A workspace of the rank, built at its first use."""
    if name not in rank.workspaces:
        rank.workspaces[name] = build()
    return rank.workspaces[name]


def _shared_gpu(rank: Rank) -> bool:
    """Whether several ranks run on this GPU: a launch that waits for them must then not let its successor in."""
    return bool(rank.exchange.shared_gpu)


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
    unfused.embedding(rank.sequence.tokens, table, rank.buffers["partial"], first_id=rank.first_token)


def embedding_push(rank: Rank, call: Call) -> None:
    table = rank.weight(-1, "embedding")
    unfused.embedding_push(rank.sequence.tokens, table, rank.exchange.row_peers, first_id=rank.first_token)


def all_reduce(rank: Rank, call: Call) -> None:
    exchange = rank.exchange
    unfused.all_reduce(
        rank.buffers["partial"],
        rank.buffers[bindings.reduced_into(rank, call)],
        exchange.sum_peers,
        exchange.sums,
        rank=rank.index,
        release_next=not _shared_gpu(rank),
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
    release_next = not _shared_gpu(rank)
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
        release_early=call.trigger == "start" and not _shared_gpu(rank),
    )


# ---- KDA ------------------------------------------------------------------------------------------------------------


def _kda_heads(rank: Rank) -> int:
    return int(rank.buffers["kda.out"].shape[1]) // kda.HEAD_DIM


def kda_f_b(rank: Rank, call: Call) -> None:
    import torch

    start = 4 * rank.buffers["kda.out"].shape[1]
    low_rank = rank.buffers["kda.projected"][:, start : start + kda.HEAD_DIM]
    torch.mm(low_rank, rank.weight(call.layer, "kda.f_b").t(), out=rank.buffers["kda.decay"])


def kda_conv(rank: Rank, call: Call) -> None:
    unfused.conv_update(
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.conv"),
        rank.sequence.state_slots,
        rank.conv_states[call.layer],
        rank.buffers["kda.convolved"],
        heads=_kda_heads(rank),
    )


def kda_recurrent(rank: Rank, call: Call) -> None:
    unfused.recurrent_update(
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
    unfused.gated_norm(
        rank.buffers["kda.read"],
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.norm"),
        rank.buffers["kda.out"],
        heads=_kda_heads(rank),
    )


def kda_decode(rank: Rank, call: Call) -> None:
    kda.kda_decode(
        rank.buffers["kda.projected"],
        rank.weight(call.layer, "kda.f_b"),
        rank.weight(call.layer, "kda.conv"),
        rank.weight(call.layer, "kda.dt_bias"),
        rank.weight(call.layer, "kda.a_log"),
        rank.weight(call.layer, "kda.norm"),
        rank.sequence.state_slots,
        rank.conv_states[call.layer],
        rank.states[call.layer],
        rank.buffers["kda.out"],
        heads=_kda_heads(rank),
        pdl=True,
    )


# ---- MLA ------------------------------------------------------------------------------------------------------------


def _latent_parts(rank: Rank, latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shape = rank.architecture.mla
    parts = (shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim)
    return tuple(latents.split((*parts, latents.shape[1] - sum(parts)), dim=1))


def _by_head(rank: Rank, call: Call, name: str, num_rows: int) -> torch.Tensor:
    """A half of kv_b as [heads, rows of a head, 512]."""
    return rank.weight(call.layer, name).view(-1, num_rows, rank.architecture.mla.kv_lora_rank)


def mla_norms(rank: Rank, call: Call) -> None:
    query, latent, *_ = _latent_parts(rank, rank.buffers["mla.latents"])
    unfused.norm(
        [
            (query, rank.weight(call.layer, "mla.query_norm"), rank.buffers["mla.query_latent"]),
            (latent, rank.weight(call.layer, "mla.kv_norm"), rank.buffers["mla.kv_latent"]),
        ]
    )


def _queries(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    shape = rank.architecture.mla
    nope, extra = (
        rank.buffers["mla.q"]
        .unflatten(1, (-1, shape.qk_head_dim))
        .split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
    )
    return nope, extra


def mla_absorb(rank: Rank, call: Call) -> None:
    import torch

    key_up = _by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim)
    torch.bmm(_queries(rank)[0].transpose(0, 1), key_up, out=rank.buffers["mla.absorbed"].transpose(0, 1))


def mla_query_cache(rank: Rank, call: Call) -> None:
    unfused.query_and_cache(
        rank.buffers["mla.absorbed"],
        _queries(rank)[1],
        rank.buffers["mla.kv_latent"],
        _latent_parts(rank, rank.buffers["mla.latents"])[2],
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
        _by_head(rank, call, "mla.w_uk", rank.architecture.mla.qk_nope_head_dim),
        rank.sequence.cache_slots,
        rank.buffers["mla.query"],
        rank.caches[call.layer],
    )


def attention(rank: Rank, call: Call) -> None:
    query, sequence = rank.buffers["mla.query"], rank.sequence
    workspace = _kept(
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
    value_up = _by_head(rank, call, "mla.w_uv", shape.v_head_dim)
    out = rank.buffers["mla.lifted"].unflatten(1, (-1, shape.v_head_dim)).transpose(0, 1)
    torch.bmm(rank.buffers["mla.attended"].transpose(0, 1), value_up.transpose(1, 2), out=out)


def gate_multiply(rank: Rank, call: Call) -> None:
    unfused.gate_multiply(rank.buffers["mla.lifted"], rank.buffers["mla.gate"], rank.buffers["mla.out"])


def lift_gate(rank: Rank, call: Call) -> None:
    gate = _latent_parts(rank, rank.buffers["mla.latents_gate"])[3]
    value_up = _by_head(rank, call, "mla.w_uv", rank.architecture.mla.v_head_dim)
    mla.lift_gate(rank.buffers["mla.attended"], value_up, gate, rank.buffers["mla.out"], pdl=True)


# ---- MoE ------------------------------------------------------------------------------------------------------------


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
        release_next=call.trigger == "start" and not _shared_gpu(rank),
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
    expert_gemv.expert_gemv_push(
        *operands, packed, exchange.tail_peers, rank.index, _expert_workspace(rank, packed)
    )


def _expert_workspace(rank: Rank, packed: PackedExperts) -> expert_gemv.ExpertWorkspace:
    workspace: expert_gemv.ExpertWorkspace = _kept(
        rank, "experts", lambda: expert_gemv.ExpertWorkspace.allocate(packed, max_rows=rank.rows)
    )
    return workspace


def _expert_hidden(rank: Rank, packed: PackedExperts) -> torch.Tensor:
    import torch

    shape = (rank.rows, expert_gemv.TOP_K, packed.width)
    hidden: torch.Tensor = _kept(
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
    l2_prefetch.l2_prefetch(_kept(rank, f"prefetch {call.index}", regions), budget_bytes=budget)


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

    best = _kept(
        rank, "best", lambda: torch.zeros((rank.rows,), dtype=torch.int64, device=rank.device)
    )
    torch.argmax(rank.exchange.all_logits(), dim=-1, out=best)
    torch.add(best, 0, out=rank.sequence.tokens)


def advance(rank: Rank, call: Call) -> None:
    unfused.advance(rank.sequence.num_tokens, rank.sequence.pages, rank.sequence.cache_slots)


KERNEL_CALLS: dict[str, CallFunction] = {
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
    "kda.in_proj/cublas.gemm": gemm,
    "kda.in_proj/skinny_gemv.tiled": skinny,
    "kda.f_b/cublas.gemm": kda_f_b,
    "kda.conv/unfused.conv_update": kda_conv,
    "kda.recurrent/unfused.recurrent_update": kda_recurrent,
    "kda.gated_norm/unfused.gated_norm": kda_gated_norm,
    "kda.decode/kda_decode.cluster": kda_decode,
    "kda.o_proj/cublas.gemm": gemm,
    "kda.o_proj/proj_allreduce.produce_whole": produce,
    "kda.all_reduce/unfused.all_reduce": all_reduce,
    "prefetch.o_proj/l2_prefetch.bulk": prefetch,
    "mla.gate/cublas.gemm": gemm,
    "mla.qkv_a/cublas.gemm": gemm,
    "mla.qkv_a_gate/skinny_gemv.tiled": skinny,
    "mla.norms/unfused.norm": mla_norms,
    "mla.q_b/cublas.gemm": gemm,
    "mla.absorb/cublas.batched_gemm": mla_absorb,
    "mla.query_cache/unfused.query_and_cache": mla_query_cache,
    "mla.prep/mla_prep.fused": prepare_attention,
    "mla.attention/mla_decode.clusters": attention,
    "mla.attention/mla_decode.clusters_early": attention,
    "mla.lift/cublas.batched_gemm": mla_lift,
    "mla.gate_multiply/unfused.elementwise": gate_multiply,
    "mla.lift_gate/mla_decode.lift_gate": lift_gate,
    "mla.o_proj/cublas.gemm": gemm,
    "mla.o_proj/proj_allreduce.produce_whole": produce,
    "mla.all_reduce/unfused.all_reduce": all_reduce,
    "dense.gate_up/cublas.gemm": gemm,
    "dense.gate_up/skinny_gemv.tiled_situ": skinny_situ,
    "dense.situ/unfused.elementwise": situ,
    "dense.down/cublas.gemm": gemm,
    "dense.down/proj_allreduce.produce_whole": produce,
    "dense.all_reduce/unfused.all_reduce": all_reduce,
    "moe.router/cublas.gemm": gemm,
    "moe.latent_down/cublas.gemm": gemm,
    "moe.front/skinny_gemv.tiled_push": front_push,
    "moe.shared_gate_up/cublas.gemm": gemm,
    "moe.shared_gate_up/skinny_gemv.tiled_situ": skinny_situ,
    "moe.shared_situ/unfused.elementwise": situ,
    "moe.shared_down/cublas.gemm": gemm,
    "moe.shared_down/skinny_gemv.tiled": skinny,
    "moe.routing/router_topk.select": select,
    "moe.routing/router_topk.gather_topk": gather_select,
    "moe.experts_1/expert_gemv.gate_up": experts_gate_up,
    "moe.experts_2/expert_gemv.down": experts_down,
    "moe.experts/expert_gemv.persistent": experts,
    "moe.experts/expert_gemv.persistent_push": experts_push,
    "moe.send_shared/latent_tail.send_shared": send_shared,
    "moe.tail_send/latent_tail.send": tail_send,
    "moe.latent_up/latent_tail.up_cluster": tail_up,
    "moe.tail_collect/latent_tail.collect": tail_collect,
    "head.attn_res/attn_res.combine": combine,
    "head.attn_res/proj_allreduce.consume_gathered": consume,
    "head.lm_head/cublas.gemm": gemm,
    "head.lm_head/skinny_gemv.tiled": skinny,
    "head.top_k/lm_head.select": local_top,
    "head.logits/unfused.gather": gather_logits,
    "head.sample/unfused.argmax": argmax,
    "head.sample/unfused.sample": sample,
    "head.advance/unfused.advance": advance,
}
