"""The cost function of every operator a path may name: ``folder.function`` to ``(weights, **shape) -> Work``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from k3sim.kernels.attn_res import cost as attn_res
from k3sim.kernels.cublas import cost as cublas
from k3sim.kernels.expert_gemv import cost as expert_gemv
from k3sim.kernels.kda_decode import cost as kda_decode
from k3sim.kernels.l2_prefetch import cost as l2_prefetch
from k3sim.kernels.latent_tail import cost as latent_tail
from k3sim.kernels.lm_head import cost as lm_head
from k3sim.kernels.mla_decode import cost as mla_decode
from k3sim.kernels.mla_prep import cost as mla_prep
from k3sim.kernels.proj_allreduce import cost as proj_allreduce
from k3sim.kernels.router_topk import cost as router_topk
from k3sim.kernels.skinny_gemv import cost as skinny_gemv
from k3sim.kernels.unfused import cost as unfused
from k3sim.kernels.work import Work
from k3sim.model.program import Weight

CostFunction = Callable[..., Work]

COSTS: Mapping[str, CostFunction] = {
    "attn_res.combine": attn_res.combine,
    "attn_res.consume": attn_res.consume,
    "attn_res.single_block": attn_res.single_block,
    "attn_res.snapshot_part": attn_res.snapshot_part,
    "attn_res.snapshot_sums": attn_res.snapshot_sums,
    "cublas.batched_gemm": cublas.batched_gemm,
    "cublas.gemm": cublas.gemm,
    "expert_gemv.block": expert_gemv.block,
    "expert_gemv.down": expert_gemv.down,
    "expert_gemv.gate_up": expert_gemv.gate_up,
    "expert_gemv.gemm1": expert_gemv.gemm1,
    "expert_gemv.gemm2": expert_gemv.gemm2,
    "expert_gemv.persistent": expert_gemv.persistent,
    "expert_gemv.persistent_push": expert_gemv.persistent_push,
    "expert_gemv.task1": expert_gemv.task1,
    "expert_gemv.task2": expert_gemv.task2,
    "kda_decode.cluster": kda_decode.cluster,
    "kda_decode.per_head": kda_decode.per_head,
    "kda_decode.public_cluster": kda_decode.public_cluster,
    "l2_prefetch.bulk": l2_prefetch.bulk,
    "latent_tail.collect": latent_tail.collect,
    "latent_tail.reduce_pull": latent_tail.reduce_pull,
    "latent_tail.reduce_push": latent_tail.reduce_push,
    "latent_tail.up": latent_tail.up,
    "latent_tail.up_cluster": latent_tail.up_cluster,
    "latent_tail.up_ring": latent_tail.up_ring,
    "latent_tail.send": latent_tail.send,
    "latent_tail.send_shared": latent_tail.send_shared,
    "latent_tail.up_after_sum": latent_tail.up_after_sum,
    "lm_head.logits": lm_head.logits,
    "lm_head.select": lm_head.select,
    "lm_head.top_k": lm_head.top_k,
    "mla_decode.clusters": mla_decode.clusters,
    "mla_decode.clusters_early": mla_decode.clusters_early,
    "mla_decode.fused": mla_decode.fused,
    "mla_decode.lift_gate": mla_decode.lift_gate,
    "mla_decode.lse_merge": mla_decode.lse_merge,
    "mla_decode.partial": mla_decode.partial,
    "mla_decode.split_kv": mla_decode.split_kv,
    "mla_prep.fused": mla_prep.fused,
    "mla_prep.public_fused": mla_prep.public_fused,
    "proj_allreduce.consume": proj_allreduce.consume,
    "proj_allreduce.consume_gathered": proj_allreduce.consume_gathered,
    "proj_allreduce.produce": proj_allreduce.produce,
    "proj_allreduce.produce_whole": proj_allreduce.produce_whole,
    "router_topk.gather_select": router_topk.gather_select,
    "router_topk.gather_topk": router_topk.gather_topk,
    "router_topk.select": router_topk.select,
    "skinny_gemv.column_pair": skinny_gemv.column_pair,
    "skinny_gemv.low_latency": skinny_gemv.low_latency,
    "skinny_gemv.ring": skinny_gemv.ring,
    "skinny_gemv.ring_push": skinny_gemv.ring_push,
    "skinny_gemv.resident": skinny_gemv.resident,
    "skinny_gemv.resident_after_combine": skinny_gemv.resident_after_combine,
    "skinny_gemv.tiled": skinny_gemv.tiled,
    "skinny_gemv.tiled_push": skinny_gemv.tiled_push,
    "skinny_gemv.tiled_situ": skinny_gemv.tiled_situ,
    "unfused.advance": unfused.advance,
    "unfused.all_reduce": unfused.all_reduce,
    "unfused.argmax": unfused.argmax,
    "unfused.batched_gemm": unfused.batched_gemm,
    "unfused.conv_update": unfused.conv_update,
    "unfused.copy": unfused.copy,
    "unfused.elementwise": unfused.elementwise,
    "unfused.embedding": unfused.embedding,
    "unfused.gather": unfused.gather,
    "unfused.gated_norm": unfused.gated_norm,
    "unfused.norm": unfused.norm,
    "unfused.permutation": unfused.permutation,
    "unfused.poll": unfused.poll,
    "unfused.quantise": unfused.quantise,
    "unfused.query_and_cache": unfused.query_and_cache,
    "unfused.query_gather": unfused.query_gather,
    "unfused.recurrent_update": unfused.recurrent_update,
    "unfused.routing": unfused.routing,
    "unfused.sample": unfused.sample,
}


def work_of(operator: str, weights: Sequence[Weight], shape: Mapping[str, int]) -> Work:
    """Work of one call. A path that names an unknown operator is a programmer's mistake."""
    assert operator in COSTS, f"no cost function named {operator}"
    return COSTS[operator](weights, **shape)
