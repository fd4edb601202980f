"""The chains that ``k3sim kernels bench`` times, as the costs of their kernels: what each stored reading is a round of.

One row a case, by the name of its operator and of the case. Pairs that push and poll are looped back.
"""

from __future__ import annotations

import re

from k3sim.calibrate.compare.chain import ChainedKernel, bf16, kda_counts
from k3sim.kernels.harness.cases import rows_in_words

GEMVS = (
    (20480, 7168), (10240, 7168), (8448, 7168), (6288, 7168), (4224, 7168), (3648, 7168), (3584, 7168), (3216, 7168),
    (2880, 7168), (2112, 7168), (1536, 7168), (896, 7168), (768, 7168), (448, 7168), (112, 7168), (56, 7168),
    (7168, 4224), (7168, 3584), (7168, 2112), (7168, 1536), (7168, 768), (7168, 384), (896, 3584), (448, 3584),
    (2304, 1536), (1152, 1536), (1536, 128), (768, 128),
)  # fmt: skip
HIDDEN, LATENT = 7168, 3584


def _experts(width: int, rows: int = 1) -> tuple[tuple[int, int, int], ...]:
    num_bytes = rows * 16 * 3 * width * LATENT * 17 // 32  # 4.25 bits a weight; no expert is chosen twice
    return (2 * width, LATENT, num_bytes * 2 // 3), (LATENT, width, num_bytes // 3)


def kda(heads: int, rows: int) -> ChainedKernel:
    weights = (bf16(heads * 128, 128),)
    return ChainedKernel(operator="kda_decode.cluster", weights=weights, shape=kda_counts(heads, rows))


def gemv(outputs: int, depth: int, rows: int) -> tuple[ChainedKernel, ...]:
    weights = (bf16(outputs, depth),)
    return (ChainedKernel(operator="skinny_gemv.tiled", weights=weights, shape={"rows": rows}),)


def _attention(heads: int, context: int, kv_row_bytes: int) -> ChainedKernel:
    shape = {"rows": 1, "heads": heads, "context": context, "kv_row_bytes": kv_row_bytes, "kv_lora_rank": 512}
    return ChainedKernel(operator="mla_decode.clusters_early", shape=shape)


def fused_allreduce(ranks: int, depth: int, rows: int = 1) -> tuple[ChainedKernel, ...]:
    """Projection and the consumer that polls ``ranks`` slots."""
    return (
        ChainedKernel(operator="proj_allreduce.produce_whole", weights=(bf16(HIDDEN, depth),), shape={"rows": rows},
             trigger="wait", sends="attention"),
        ChainedKernel(operator="proj_allreduce.consume", shape={"rows": rows, "hidden": HIDDEN, "slots": ranks},
             receives="attention"),
    )  # fmt: skip


def all_reduce(ranks: int, rows: int = 1, hidden: int = HIDDEN) -> tuple[ChainedKernel, ...]:
    shape = {"rows": rows, "hidden": hidden, "ranks": ranks}
    return (ChainedKernel(operator="unfused.all_reduce", shape=shape, trigger="end", sends="sum", receives="sum"),)


ONE_ROW = {"rows": 1}
SELECTED = {"rows": 1, "top_k": 16, "distinct_milli": 16000}
UP = {"rows": 1, "hidden": HIDDEN, "latent": LATENT, "ranks": 16}

CHAINS: dict[tuple[str, str], tuple[ChainedKernel, ...]] = {
    **{
        ("skinny_gemv", f"{outputs}x{depth}, {rows_in_words(rows)}"): gemv(outputs, depth, rows)
        for outputs, depth in GEMVS
        for rows in (1, 8)
    },
    ("mla_decode", "12 heads, 131072 tokens, 1 row, fp8"): (_attention(12, 131072, 576),),
    ("mla_decode", "12 heads, 8192 tokens, 1 row, fp8"): (_attention(12, 8192, 576),),
    ("mla_decode", "6 heads, 8192 tokens, 1 row, fp8"): (_attention(6, 8192, 576),),
    ("mla_decode", "6 heads, 131072 tokens, 1 row, fp8"): (_attention(6, 131072, 576),),
    ("mla_decode", "12 heads, 131072 tokens, 1 row, bf16"): (_attention(12, 131072, 1152),),
    ("mla_decode", "12 heads, 8192 tokens, 1 row, bf16"): (_attention(12, 8192, 1152),),
    **{
        ("mla_decode", f"lift_gate, {heads} heads, {rows_in_words(rows)}"): (
            ChainedKernel(operator="mla_decode.lift_gate", weights=(bf16(128 * heads, 512),),
                 shape={"rows": rows, "kv_lora_rank": 512}),
        )
        for heads in (6, 12)
        for rows in (1, 16)
    },
    **{
        ("mla_prep", f"{heads} heads, 1 row, fp8 cache"): (
            ChainedKernel(operator="mla_prep.fused", weights=(bf16(192 * heads, 1536), bf16(512 * heads, 128)),
                 shape={"rows": 1, "heads": heads, "kv_row_bytes": 576}),
        )
        for heads in (6, 12)
    },
    **{
        ("expert_gemv", f"16 experts a row of {width}, {rows_in_words(rows)}"): (
            ChainedKernel(operator="expert_gemv.persistent", weights=_experts(width, rows),
                 shape={"rows": rows, "top_k": 16, "distinct_milli": 16000 * rows, "width": width}),
        )
        for width in (384, 192)
        for rows in (1, 2, 8)
    },
    **{
        ("expert_gemv", f"16 experts a row of {width}, 1 row, two launches"): (
            ChainedKernel(operator="expert_gemv.gate_up", weights=_experts(width)[:1], shape=SELECTED),
            ChainedKernel(operator="expert_gemv.down", weights=_experts(width)[1:], shape=SELECTED),
        )
        for width in (384, 192)
    },
    ("kda_decode", "12 heads, 1 row, fp32 state"): (kda(12, 1),),
    ("kda_decode", "6 heads, 1 row, fp32 state"): (kda(6, 1),),
    ("kda_decode", "12 heads, 8 rows, fp32 state"): (kda(12, 8),),
    ("proj_allreduce", "produce and consume, 16 slots of this GPU, 7168x768, 1 row"): fused_allreduce(16, 768),
    ("proj_allreduce", "produce and consume, 8 slots of this GPU, 7168x1536, 1 row"): fused_allreduce(8, 1536),
    ("proj_allreduce", "produce and consume, 8 slots of this GPU, 7168x768, 1 row"): fused_allreduce(8, 768),
    **{
        ("router_topk", f"push of {4480 // ranks}x7168 and gather_topk, {ranks} shards looped back, 1 row"): (
            ChainedKernel(operator="skinny_gemv.tiled_push", weights=(bf16(4480 // ranks, 7168),),
                 shape={"rows": 1, "sent_bytes_per_row": 4 * 4480 // ranks}, sends="route"),
            ChainedKernel(operator="router_topk.gather_topk", shape={"rows": 1, "latent": LATENT}, receives="route",
                 trigger="end"),
        )
        for ranks in (8, 16)
    },
    **{
        ("proj_allreduce", f"produce and consume, 8 slots of this GPU, 7168x1536, {rows} rows"):
            fused_allreduce(8, 1536, rows)
        for rows in (8, 16)
    },
    **{
        ("mla_prep", f"12 heads, {rows} rows, fp8 cache"): (
            ChainedKernel(operator="mla_prep.fused", weights=(bf16(192 * 12, 1536), bf16(512 * 12, 128)),
                 shape={"rows": rows, "heads": 12, "kv_row_bytes": 576}),
        )
        for rows in (8, 16)
    },
    **{
        ("proj_allreduce", f"send, up and consume_gathered, {ranks} ranks looped back, {rows_in_words(rows)}"): (
            ChainedKernel(operator="latent_tail.send", shape={**UP, "rows": rows, "ranks": ranks, "expert_rows": rows},
                 sends="latent"),
            ChainedKernel(operator="latent_tail.up_cluster", weights=(bf16(HIDDEN // ranks, LATENT),),
                 shape={**UP, "rows": rows, "ranks": ranks}, trigger="wait", receives="latent", sends="residual"),
            ChainedKernel(operator="proj_allreduce.consume_gathered", shape={"rows": rows, "hidden": HIDDEN},
                 receives="residual"),
        )
        for ranks in (8, 16)
        for rows in (1, 16)
    },
    ("attn_res", "combine of 9 sources, 1 row"): (
        ChainedKernel(operator="attn_res.combine", shape={"rows": 1, "hidden": HIDDEN, "sources": 9}),
    ),
    ("unfused", "all_reduce, 16 slots of this GPU, 1 row"): all_reduce(16),
    **{
        ("latent_tail", f"up, {ranks} ranks, {rows_in_words(rows)}"): (
            ChainedKernel(operator="latent_tail.up_cluster", weights=(bf16(HIDDEN // ranks, LATENT),),
                 shape={**UP, "rows": rows, "ranks": ranks}),
        )
        for ranks in (8, 16)
        for rows in (1, 4, 16)
    },
}  # fmt: skip


def chain_of(operator: str, case: str) -> tuple[ChainedKernel, ...] | None:
    """The chain of a case of ``k3sim kernels bench``, None where it has no costs. Of a GEMV any shape has."""
    known = CHAINS.get((operator, case))
    shape = re.fullmatch(r"(\d{1,6})x(\d{2,6}), (\d{1,2}) rows?", case) if operator == "skinny_gemv" else None
    if known is not None or shape is None:
        return known
    outputs, depth, rows = map(int, shape.groups())
    # What the kernel takes: a whole fragment of the depth, at most the rows of two MMAs.
    return gemv(outputs, depth, rows) if outputs and depth >= 64 and 1 <= rows <= 16 else None
