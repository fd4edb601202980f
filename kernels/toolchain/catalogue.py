"""Every kernel that ``build`` compiles: operator -> name -> function that compiles it for this process's architecture.

The shapes are those of Kimi K3 at TP8 and TP16; a form that differs by rows, heads or state type has an entry of its
own. Calling an entry imports CUTLASS, so the lists themselves can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Compile = Callable[[], Any]
Kernels = dict[str, Compile]

NUM_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}
# Outputs and depth of the matrices at TP8 and TP16 (model/layout.py, rank_matrices).
GEMV_SHAPES = (
    (6288, 7168), (3216, 7168), (2112, 7168), (3648, 7168), (2880, 7168), (3584, 7168), (896, 7168), (448, 7168),
    (112, 7168), (56, 7168),
    (1536, 7168), (768, 7168), (8448, 7168), (4224, 7168), (7168, 1536), (7168, 768), (7168, 384), (7168, 4224),
    (7168, 2112), (7168, 3584), (896, 3584), (448, 3584), (2304, 1536), (1152, 1536), (1536, 128), (768, 128),
    (20480, 7168), (10240, 7168),
)  # fmt: skip
PRODUCE_SHAPES = ((1536, 8), (768, 16), (4224, 8), (2112, 16))  # depth and ranks: attention, dense layer
GEMV_ROWS = (1, 8)  # the FMA and the tensor-core form


def skinny_gemv() -> Kernels:
    from k3sim.kernels.skinny_gemv.configuration import Epilogue, GemvConfiguration, rule_tiling
    from k3sim.kernels.toolchain.compile_cache import architecture

    def entry(
        num_outputs: int, depth: int, rows: int, epilogue: Epilogue, num_peers: int, polled: bool = False
    ) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.skinny_gemv.kernel import compile_gemv

            paired = epilogue is Epilogue.SITU_GLU
            tiling = rule_tiling(
                num_outputs=num_outputs, depth=depth, rows=rows, paired=paired, num_sms=NUM_SMS[architecture()]
            )
            return compile_gemv(
                GemvConfiguration(
                    num_outputs=num_outputs,
                    depth=depth,
                    rows=rows,
                    fp32_out=polled,
                    epilogue=epilogue,
                    num_peers=num_peers,
                    polled=polled,
                    tiling=tiling,
                ).check()
            )

        return compile_one

    kernels = {
        f"{outputs}x{depth}_rows{rows}": entry(outputs, depth, rows, Epilogue.NONE, 0)
        for outputs, depth in GEMV_SHAPES
        for rows in GEMV_ROWS
    }
    for epilogue in Epilogue:
        if epilogue is not Epilogue.NONE:
            kernels[f"1536x7168_rows1_{epilogue.name.lower()}"] = entry(1536, 7168, 1, epilogue, 0)
    kernels["7168x768_rows1_push8"] = entry(7168, 768, 1, Epilogue.NONE, 8)
    for outputs, ranks in ((560, 8), (280, 16)):  # router and latent down shard, TP8 and TP16
        for rows in GEMV_ROWS:
            kernels[f"{outputs}x7168_rows{rows}_front{ranks}"] = entry(outputs, 7168, rows, Epilogue.NONE, ranks, True)
    return kernels


def kda_decode() -> Kernels:
    from k3sim.kernels.kda_decode.launch import RING_BYTES

    def entry(heads: int, bf16_state: bool, cluster: int, threads: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.kda_decode.kernel import HEAD_DIM, KdaConfiguration, compile_kda

            state_bytes = HEAD_DIM * HEAD_DIM * (2 if bf16_state else 4)
            return compile_kda(
                KdaConfiguration(
                    heads=heads,
                    bf16_state=bf16_state,
                    cluster=cluster,
                    threads=threads,
                    stages=0 if cluster else RING_BYTES // state_bytes,
                    pdl=True,
                )
            )

        return compile_one

    return {
        f"heads{heads}_{'bf16' if bf16 else 'fp32'}_{f'cluster{cluster}' if cluster else 'stream'}": entry(
            heads, bf16, cluster, threads
        )
        for heads in (6, 12)
        for bf16 in (False, True)
        for cluster, threads in ((8 if bf16 else 4, 128), (2, 256), (0, 256))
    }


def attn_res() -> Kernels:
    def entry(kernel: str, num_snapshots: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.attn_res.kernel import AttnResConfiguration, compile_attn_res

            return compile_attn_res(
                AttnResConfiguration(kernel=kernel, num_snapshots=num_snapshots, has_delta=True, cluster=4, pdl=True)
            )

        return compile_one

    return {
        **{f"combine_snapshots{number}": entry("combine", number) for number in range(9)},
        **{f"snapshot_part_snapshots{number}": entry("snapshot_part", number) for number in range(1, 9)},
        "fold_prefix": entry("fold_prefix", 0),
    }


def expert_gemv() -> Kernels:
    def entry(width: int, fp32_out: bool, part: str = "both", num_peers: int = 0) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.expert_gemv.kernel import ExpertConfiguration, compile_experts

            return compile_experts(ExpertConfiguration(width=width, fp32_out=fp32_out, part=part, num_peers=num_peers))

        return compile_one

    return {
        **{
            f"width{width}_{'fp32' if fp32 else 'bf16'}": entry(width, fp32)
            for width in (384, 192)
            for fp32 in (False, True)
        },
        **{f"width{width}_{part}": entry(width, False, part) for width in (384, 192) for part in ("gate_up", "down")},
        **{f"width{3072 // ranks}_push{ranks}": entry(3072 // ranks, False, "both", ranks) for ranks in (8, 16)},
    }


def router_topk() -> Kernels:
    def entry(num_shards: int, poll: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.router_topk.kernel import RouterConfiguration, compile_router

            return compile_router(RouterConfiguration(num_shards=num_shards, table=num_shards > 1, poll=poll))

        return compile_one

    def gather(num_shards: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.router_topk.kernel import GatherConfiguration, compile_gather

            return compile_gather(GatherConfiguration(num_shards=num_shards, early=True, release_next=True))

        return compile_one

    return {
        "whole": entry(1, False),
        "shards8": entry(8, True),
        "shards16": entry(16, True),
        "gather8": gather(8),
        "gather16": gather(16),
    }


def latent_tail() -> Kernels:
    def entry(part: str, ranks: int, max_rows: int, release_late: bool = False) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.latent_tail import kernel

            configuration = kernel.TailConfiguration(ranks=ranks, max_rows=max_rows, release_late=release_late)
            return {"send": kernel.compile_send, "up": kernel.compile_up, "collect": kernel.compile_collect}[part](
                configuration
            )

        return compile_one

    def send_shared(ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.latent_tail.kernel import TailConfiguration, compile_send

            return compile_send(TailConfiguration(ranks=ranks, shared_only=True))

        return compile_one

    return {
        **{
            f"{part}_ranks{ranks}_rows{rows}": entry(part, ranks, rows)
            for part in ("send", "up", "collect")
            for ranks in (8, 16)
            for rows in (1, 4)
        },
        **{f"up_ranks{ranks}_rows{rows}_late": entry("up", ranks, rows, True) for ranks in (8, 16) for rows in (1, 4)},
        **{f"send_shared_ranks{ranks}": send_shared(ranks) for ranks in (8, 16)},
    }


def mla_decode() -> Kernels:
    def decode(heads: int, fp8: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.cost import chosen_clusters
            from k3sim.kernels.mla_decode.kernel import MlaDecodeConfiguration, compile_mla_decode

            return compile_mla_decode(
                MlaDecodeConfiguration(
                    heads=heads, fp8=fp8, clusters=chosen_clusters(1, heads), settled_cache=True
                )
            )

        return compile_one

    def merge(ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.kernel import LseMergeConfiguration, compile_lse_merge

            return compile_lse_merge(LseMergeConfiguration(ranks=ranks))

        return compile_one

    def lift(heads: int, row_tiles: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.lift import LiftConfiguration, compile_lift_gate

            return compile_lift_gate(LiftConfiguration(heads=heads, row_tiles=row_tiles, pdl=True))

        return compile_one

    return {
        **{
            f"heads{heads}_{'fp8' if fp8 else 'bf16'}": decode(heads, fp8)
            for heads in (6, 12, 96)
            for fp8 in (True, False)
        },
        **{f"lse_merge_ranks{ranks}": merge(ranks) for ranks in (8, 16)},
        **{f"lift_heads{heads}_rows{8 * tiles}": lift(heads, tiles) for heads in (6, 12) for tiles in (1, 2)},
    }


def mla_prep() -> Kernels:
    def entry(heads: int, fp8: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_prep.kernel import MlaPrepConfiguration, compile_mla_prep

            return compile_mla_prep(MlaPrepConfiguration(rows=1, heads=heads, fp8=fp8))

        return compile_one

    return {f"heads{heads}_{'fp8' if fp8 else 'bf16'}": entry(heads, fp8) for heads in (6, 12) for fp8 in (True, False)}


def proj_allreduce() -> Kernels:
    def produce(depth: int, ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ProduceConfiguration, compile_produce

            return compile_produce(
                ProduceConfiguration(rows=1, depth=depth, hidden=7168, ranks=ranks, max_rows=16)
            )

        return compile_one

    def consume(ranks: int, snapshots: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ConsumeConfiguration, compile_consume

            return compile_consume(
                ConsumeConfiguration(
                    rows=1, hidden=7168, ranks=ranks, max_rows=16, residual=True, snapshots=snapshots, release_next=True
                )
            )

        return compile_one

    def gathered(ranks: int, snapshots: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ConsumeConfiguration, compile_consume_gathered

            return compile_consume_gathered(
                ConsumeConfiguration(
                    rows=1, hidden=7168, ranks=ranks, max_rows=0, residual=snapshots, snapshots=snapshots,
                    release_next=True, gathered=True, empties=snapshots,
                )
            )  # fmt: skip

        return compile_one

    return {
        **{f"produce_depth{depth}_ranks{ranks}": produce(depth, ranks) for depth, ranks in PRODUCE_SHAPES},
        **{
            f"consume_ranks{ranks}{'_snapshots' if snapshots else ''}": consume(ranks, snapshots)
            for ranks in (8, 16)
            for snapshots in (False, True)
        },
        **{f"gathered_ranks{ranks}": gathered(ranks, True) for ranks in (8, 16)},
        "gathered_embedding": gathered(16, False),
    }


def lm_head() -> Kernels:
    def entry(num_outputs: int, k: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.lm_head.kernel import TopKConfiguration, compile_top_k

            return compile_top_k(TopKConfiguration(num_outputs=num_outputs, k=k))

        return compile_one

    return {f"top{k}_of_{num_outputs}": entry(num_outputs, k) for num_outputs in (20480, 10240) for k in (1, 64)}


def l2_prefetch() -> Kernels:
    def entry(keep: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.l2_prefetch.kernel import PrefetchConfiguration, compile_prefetch

            return compile_prefetch(PrefetchConfiguration(keep=keep))

        return compile_one

    return {"keep": entry(True), "plain": entry(False)}


def unfused() -> Kernels:
    def exchange(name: str, **fields: Any) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.unfused import exchange

            if name == "embedding":
                return exchange.compile_embedding(exchange.EmbeddingConfiguration(hidden=7168, pdl=True, **fields))
            return exchange.compile_all_reduce(
                exchange.AllReduceConfiguration(hidden=7168, max_rows=16, release_next=True, pdl=True, **fields)
            )

        return compile_one

    def recurrence(name: str, **fields: Any) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.unfused import recurrence

            if name == "conv_update":
                return recurrence.compile_conv_update(recurrence.ConvConfiguration(pdl=True, **fields))
            if name == "recurrent_update":
                return recurrence.compile_recurrent_update(recurrence.RecurrentConfiguration(pdl=True, **fields))
            return recurrence.compile_gated_norm(recurrence.GatedNormConfiguration(pdl=True, **fields))

        return compile_one

    def rowwise(name: str, **fields: Any) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.unfused import rowwise

            if name == "norm":
                return rowwise.compile_norm(rowwise.NormConfiguration(pdl=True, **fields))
            if name == "query_and_cache":
                return rowwise.compile_query_and_cache(rowwise.QueryCacheConfiguration(pdl=True, **fields))
            return rowwise.compile_elementwise(rowwise.ElementwiseConfiguration(kernel=name, pdl=True))

        return compile_one

    def stepping(name: str, **fields: Any) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.unfused import stepping

            if name == "sample":
                return stepping.compile_sample(stepping.SampleConfiguration(pdl=True, **fields))
            return stepping.compile_advance(stepping.AdvanceConfiguration(pdl=True))

        return compile_one

    kernels = {
        "embedding": exchange("embedding"),
        "norm_7168": rowwise("norm", widths=(7168,)),
        "norm_1536_512": rowwise("norm", widths=(1536, 512)),
        "situ": rowwise("situ"),
        "gate_multiply": rowwise("gate_multiply"),
        "advance": stepping("advance"),
    }
    for ranks in (8, 16):
        kernels[f"embedding_push{ranks}"] = exchange("embedding", peers=ranks)
        for rows in (1, 16):
            kernels[f"all_reduce_rows{rows}_ranks{ranks}"] = exchange("all_reduce", rows=rows, ranks=ranks)
        kernels[f"sample_greedy_ranks{ranks}"] = stepping("sample", ranks=ranks, draw=False)
        kernels[f"sample_draw_ranks{ranks}"] = stepping("sample", ranks=ranks, draw=True)
    for heads in (6, 12):
        kernels[f"conv_update_heads{heads}"] = recurrence("conv_update", heads=heads)
        kernels[f"gated_norm_heads{heads}"] = recurrence("gated_norm", heads=heads)
        for name, yes in (("fp32", False), ("bf16", True)):
            for logits, fp32_logits in (("bf16", False), ("fp32", True)):
                kernels[f"recurrent_update_heads{heads}_{name}_logits_{logits}"] = recurrence(
                    "recurrent_update", heads=heads, bf16_state=yes, fp32_logits=fp32_logits
                )
        for name, yes in (("bf16", False), ("fp8", True)):
            kernels[f"query_and_cache_heads{heads}_{name}"] = rowwise("query_and_cache", heads=heads, fp8=yes)
    return kernels


BUILDS: Mapping[str, Callable[[], Kernels]] = {
    "skinny_gemv": skinny_gemv,
    "kda_decode": kda_decode,
    "attn_res": attn_res,
    "expert_gemv": expert_gemv,
    "router_topk": router_topk,
    "latent_tail": latent_tail,
    "mla_decode": mla_decode,
    "mla_prep": mla_prep,
    "proj_allreduce": proj_allreduce,
    "lm_head": lm_head,
    "l2_prefetch": l2_prefetch,
    "unfused": unfused,
}
