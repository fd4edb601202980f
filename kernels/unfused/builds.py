"""Builds of ``unfused``: the stock path's separate kernels by ranks, rows, heads and types."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels


def kernels() -> Kernels:
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

    found = {
        "embedding": exchange("embedding"),
        "norm_7168": rowwise("norm", widths=(7168,)),
        "norm_1536_512": rowwise("norm", widths=(1536, 512)),
        "situ": rowwise("situ"),
        "gate_multiply": rowwise("gate_multiply"),
        "advance": stepping("advance"),
    }
    for ranks in (8, 16):
        found[f"embedding_push{ranks}"] = exchange("embedding", peers=ranks)
        for rows in (1, 16):
            found[f"all_reduce_rows{rows}_ranks{ranks}"] = exchange("all_reduce", rows=rows, ranks=ranks)
        found[f"sample_greedy_ranks{ranks}"] = stepping("sample", ranks=ranks, draw=False)
        found[f"sample_draw_ranks{ranks}"] = stepping("sample", ranks=ranks, draw=True)
    for heads in (6, 12):
        found[f"conv_update_heads{heads}"] = recurrence("conv_update", heads=heads)
        found[f"gated_norm_heads{heads}"] = recurrence("gated_norm", heads=heads)
        for name, yes in (("fp32", False), ("bf16", True)):
            for logits, fp32_logits in (("bf16", False), ("fp32", True)):
                found[f"recurrent_update_heads{heads}_{name}_logits_{logits}"] = recurrence(
                    "recurrent_update", heads=heads, bf16_state=yes, fp32_logits=fp32_logits
                )
        for name, yes in (("bf16", False), ("fp8", True)):
            found[f"query_and_cache_heads{heads}_{name}"] = rowwise("query_and_cache", heads=heads, fp8=yes)
    return found
