"""Machine code of the project's own kernels, by their cost function: its size, and what runs straight through.

Counts are of the entry functions for sm_90a, TP16, one row (``k3sim kernels build --arch sm_90a``). A launch whose code
is no longer in the instruction caches of its SMs fetches it as it runs (``sim/engine.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

#: Bytes, which the tests hold to within a third of what is built. cuBLAS's kernels are not the project's to take apart;
#: 20 KB is assumed of them.
CODE_BYTES: Mapping[str, int] = {
    "attn_res.combine": 14336,
    "attn_res.snapshot_part": 9856,
    "cublas.batched_gemm": 20480,
    "cublas.gemm": 20480,
    "expert_gemv.down": 11008,
    "expert_gemv.gate_up": 13952,
    "expert_gemv.persistent": 25856,
    "expert_gemv.persistent_push": 26112,
    "kda_decode.cluster": 11392,
    "l2_prefetch.bulk": 3968,
    "latent_tail.collect": 1408,
    "latent_tail.send": 1920,
    "latent_tail.send_shared": 1920,
    "latent_tail.up_cluster": 17664,
    "lm_head.select": 26240,
    "mla_decode.clusters": 33024,
    "mla_decode.clusters_early": 33024,
    "mla_decode.lift_gate": 2560,
    "mla_decode.lse_merge": 12928,
    "mla_prep.fused": 14336,
    "proj_allreduce.consume": 13952,
    "proj_allreduce.consume_gathered": 8704,
    "proj_allreduce.produce_whole": 3456,
    "router_topk.gather_topk": 11648,
    "router_topk.select": 9472,
    "skinny_gemv.tiled": 5632,
    "skinny_gemv.tiled_push": 4864,
    "skinny_gemv.tiled_situ": 8576,
    "unfused.advance": 896,
    "unfused.all_reduce": 8704,
    "unfused.conv_update": 3072,
    "unfused.elementwise": 3840,
    "unfused.embedding": 2048,
    "unfused.gated_norm": 2560,
    "unfused.norm": 4224,
    "unfused.query_and_cache": 1792,
    "unfused.recurrent_update": 7680,
    "unfused.sample": 2560,
}


#: Instructions of 16 bytes that one warp runs straight through after the kernel's dependency wait, counted in SASS from
#: one meeting of the block or cluster to the next, along the warp that ends last. What other counts price is not in it:
#: loops, the products, what each slot of an exchange takes (its visibility). Where it grows with rows, a cost counts it
#: (``Work.serial_instructions``).
SERIAL_INSTRUCTIONS: Mapping[str, int] = {
    "attn_res.combine": 780,
    "attn_res.snapshot_part": 300,
    "expert_gemv.down": 150,
    "expert_gemv.gate_up": 220,
    "expert_gemv.persistent": 300,
    "expert_gemv.persistent_push": 300,
    "kda_decode.cluster": 440,
    "latent_tail.collect": 35,
    "latent_tail.send": 45,
    "latent_tail.send_shared": 45,
    "latent_tail.up_cluster": 475,
    "lm_head.select": 1620,
    "mla_decode.clusters": 600,
    "mla_decode.clusters_early": 600,
    "mla_decode.lift_gate": 100,
    "mla_decode.lse_merge": 380,
    "proj_allreduce.consume": 240,
    "proj_allreduce.consume_gathered": 310,
    "router_topk.gather_topk": 410,
    "router_topk.select": 405,
    "skinny_gemv.tiled": 110,
    "skinny_gemv.tiled_push": 160,
    "skinny_gemv.tiled_situ": 250,
    "unfused.advance": 40,
    "unfused.all_reduce": 130,
    "unfused.conv_update": 150,
    "unfused.elementwise": 220,
    "unfused.embedding": 30,
    "unfused.gated_norm": 110,
    "unfused.norm": 225,
    "unfused.query_and_cache": 60,
    "unfused.recurrent_update": 445,
    "unfused.sample": 135,
}

#: Straight code whose pace while it is held is part of another count: only the fetching is added. Products of cuBLAS
#: lost 0.2 to 0.4 us behind a launch that evicts code (H200, 2026-11-30; those samples were not kept).
ICACHE_MISS_INSTRUCTIONS: Mapping[str, int] = {"cublas.batched_gemm": 600, "cublas.gemm": 600}
