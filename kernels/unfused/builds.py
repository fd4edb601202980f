"""Builds of ``unfused``: the stock path's separate kernels by ranks, rows, heads and types."""

from __future__ import annotations

from functools import partial
from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels
from k3sim.kernels.toolchain.compile_cache import compile_kernel


def kernels() -> Kernels:
    def entry(module: str, name: str, **fields: Any) -> Compile:
        return partial(compile_kernel, f"unfused.{module}", f"compile_{name}", pdl=True, **fields)

    found = {
        "embedding": entry("exchange", "embedding", hidden=7168),
        "norm_7168": entry("rowwise", "norm", widths=(7168,)),
        "norm_1536_512": entry("rowwise", "norm", widths=(1536, 512)),
        "situ": entry("rowwise", "elementwise", kernel="situ"),
        "gate_multiply": entry("rowwise", "elementwise", kernel="gate_multiply"),
        "advance": entry("stepping", "advance"),
    }
    for ranks in (8, 16):
        found[f"embedding_push{ranks}"] = entry("exchange", "embedding", hidden=7168, peers=ranks)
        for rows in (1, 16):
            found[f"all_reduce_rows{rows}_ranks{ranks}"] = entry(
                "exchange", "all_reduce", hidden=7168, max_rows=16, release_next=True, rows=rows, ranks=ranks
            )
        found[f"sample_greedy_ranks{ranks}"] = entry("stepping", "sample", ranks=ranks, draw=False)
        found[f"sample_draw_ranks{ranks}"] = entry("stepping", "sample", ranks=ranks, draw=True)
    for heads in (6, 12):
        found[f"conv_update_heads{heads}"] = entry("recurrence", "conv_update", heads=heads)
        found[f"gated_norm_heads{heads}"] = entry("recurrence", "gated_norm", heads=heads)
        for name, yes in (("fp32", False), ("bf16", True)):
            for logits, fp32_logits in (("bf16", False), ("fp32", True)):
                found[f"recurrent_update_heads{heads}_{name}_logits_{logits}"] = entry(
                    "recurrence", "recurrent_update", heads=heads, bf16_state=yes, fp32_logits=fp32_logits
                )
        for name, yes in (("bf16", False), ("fp8", True)):
            found[f"query_and_cache_heads{heads}_{name}"] = entry("rowwise", "query_and_cache", heads=heads, fp8=yes)
    return found
