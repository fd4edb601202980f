"""The stock path of models with a plain residual: DeepSeek-V3, R1 and V3.2, Kimi-K2 and its successors, Kimi-Linear.

As vLLM 0.33.0 runs them (``models/deepseek_v2.py``, ``layers/mla.py``, ``layers/fused_moe``; for Kimi-Linear
``models/kimi_k3/nvidia`` with the older KDA layer), and SGLang 0.5.23 where a row needs it. A layer's norm is part of
the all-reduce in front of it; where KDA layers are, it is a launch of its own, as it is not settled whether vLLM's
fusion pass reaches that model. FP8 and bf16 experts run through Triton on Hopper, all formats through trtllm-gen on
Blackwell; int4 through Marlin, but in SGLang on Blackwell through trtllm-gen. Read a table from the top: it is the
order of the main stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.model.paths.exchanges import (
    DISPATCHED,
    KEPT,
    STAGE_END_ROWS,
    combine,
    dispatch,
    gather,
    gather_group,
    needing,
)
from k3sim.model.paths.formats import in_formats, product
from k3sim.model.paths.indexer import INDEXER_ROWS
from k3sim.model.paths.public import (
    ATTENTION,
    EXPERTS,
    FETCH,
    FRONT,
    HEAD_ROWS,
    KDA_UPDATE,
    LIBRARY_ALL_REDUCE,
    ROWS,
    START_ROWS,
    _row,
)
from k3sim.model.step import HEAD, PLAIN, STAGE_END, START, Row
from k3sim.model.weight_formats import FORMATS

WHOLE_ROW: dict[str, int | str] = {"rows": "rows", "width": "hidden"}
CHOSEN: dict[str, int | str] = {"rows": "moe_rows", "experts": "experts", "top_k": "top_k", "groups": "top_k_groups"}
EXPERT_ROWS: dict[str, int | str] = {"rows": "expert_rows", "top_k": "top_k", "width": "expert_width"}
TOKENS: dict[str, int | str] = {"rows": "moe_rows", "top_k": "top_k"}
# Up to how many rows the router's and the down projection's own kernels go; cuBLAS beyond.
FEW_ROWS = 16
# Beside the routed experts, from the layer's input on. SGLang issues them behind the routed branch, on the same fork.
ASIDE: dict[str, Any] = {"stream": "aux"}
LAYER_INPUT = ("gqa.all_reduce", "gqa.all_reduce.norm", "mla.all_reduce", "mla.all_reduce.norm", "kda.all_reduce.norm")


def _router() -> tuple[Row, ...]:
    """A bf16 product with a kernel of the engine's own for few rows; or columns of it, and a gather of the scores."""
    found: list[Row] = []
    for shard, needs in (("", "front whole"), ("_shard", "front divided")):
        how: dict[str, Any] = {"weights": (f"moe.router{shard}",), "needs": needs}
        found += (
            _row("moe.router", "skinny_gemv.tinygemm", FRONT, max_rows=FEW_ROWS, launch="pdl", trigger="stream", **how),
            _row("moe.router", "cublas.public_gemm", FRONT, min_rows=FEW_ROWS + 1, **how),
        )
    scores = _row(
        "moe.front_gather", "expert_exchange.all_gather",
        {"rows": "front_rows", "row_bytes": "logit_bytes", "ranks": "ranks"}, launch="pdl", sends="front",
        receives=("front",), transport="each", needs="front divided",
    )  # fmt: skip
    return (*found, scores)


def _sum_and_norm(stage: str, exchange: str) -> tuple[Row, ...]:
    """All-reduce, residual and the next RMSNorm, in one launch or two."""
    joint: dict[str, Any] = {
        "launch": "pdl", "sends": exchange, "receives": (exchange,), "transport": "library",
    }  # fmt: skip
    return (
        _row(stage, "unfused.all_reduce_norm", LIBRARY_ALL_REDUCE, needs="no kda, several ranks", **joint),
        _row(stage, "unfused.library_all_reduce", LIBRARY_ALL_REDUCE, needs="kda, several ranks", **joint),
        _row(f"{stage}.norm", "unfused.norm", WHOLE_ROW, needs="kda"),
        _row(f"{stage}.norm", "unfused.norm", WHOLE_ROW, needs="no kda, one rank"),
    )


def _prefetch(stage: str, *weights: str, after: tuple[str, ...], budget_bytes: int = 16 << 20) -> Row:
    """Weights into L2 beside the kernels that do not read, whatever their format."""
    return _row(stage, "l2_prefetch.bulk", {"budget_bytes": budget_bytes}, weights=weights, on=(FETCH,),
                formats=tuple(FORMATS), stream="prefetch", after=after)


FAMILY_START_ROWS = (*START_ROWS[:2], *_sum_and_norm("embed.all_reduce", "embed"))

# The down projection of the latents, 2112 x 7168 for DeepSeek, is every rank's own copy. In bf16 it is the engines'
# fused_a kernel, whose tiles are those of FlashInfer's ``tinygemm2``: 16 outputs a block, loads before the wait.
FAMILY_MLA_ROWS = (
    *in_formats(
        _row("mla.qkv_a", "skinny_gemv.tinygemm", ROWS, weights=("mla.qkv_a",), needs="query latent",
             max_rows=FEW_ROWS, launch="pdl", trigger="stream")),
    *product("mla.qkv_a", "mla.qkv_a", needs="query latent", min_rows=FEW_ROWS + 1),
    _row("mla.q_norm", "unfused.norm", {"rows": "rows", "width": "q_lora_rank"}, needs="query latent"),
    *product("mla.q", "mla.q", needs="no query latent"),
    *product("mla.kv_a", "mla.kv_a", needs="no query latent"),
    _row("mla.kv_norm", "unfused.norm", {"rows": "rows", "width": "kv_lora_rank"}),
    *product("mla.q_b", "mla.q_b", needs="query latent"),
    _row("mla.rope", "unfused.elementwise", {"rows": "rows", "width": "mla_rope_width"}, needs="rope"),
    *INDEXER_ROWS,
    _row("mla.absorb", "unfused.batched_gemm", ROWS, weights=("mla.w_uk",)),
    _row("mla.query", "unfused.elementwise", {"rows": "rows", "width": "mla_query_width"}),
    _row("mla.cache", "unfused.query_and_cache", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}),
    _prefetch("prefetch.o_proj", "mla.o_proj", after=("mla.cache",)),
    _row("mla.query_gather", "unfused.query_gather", {"rows": "rows", "heads": "mla_own_heads",
         "kv_row_bytes": "kv_row_bytes"}, needs="dcp", launch="pdl", sends="query", receives=("query",), group="dcp"),
    _row("mla.attention", "mla_decode.split_kv", ATTENTION, needs="no dcp", launch="pdl"),
    _row("mla.attention", "mla_decode.partial", {**ATTENTION, "context_ranks": "dcp"}, needs="dcp", launch="pdl",
         sends="context", group="dcp"),
    _row("mla.lse_merge", "mla_decode.lse_merge", {"rows": "rows", "heads": "mla_own_heads", "ranks": "dcp",
         "kv_lora_rank": "kv_lora_rank"}, needs="dcp", launch="pdl", receives=("context",)),
    _row("mla.lift", "unfused.batched_gemm", ROWS, weights=("mla.w_uv",)),
    *product("mla.o_proj", "mla.o_proj"),
    *_sum_and_norm("mla.all_reduce", "attention"),
)  # fmt: skip

GQA_QUERY: dict[str, int | str] = {"rows": "rows", "heads": "gqa_heads", "head_dim": "gqa_head_dim"}
GQA_KEY: dict[str, int | str] = {"rows": "rows", "heads": "gqa_key_heads", "head_dim": "gqa_head_dim"}

FAMILY_GQA_ROWS = (
    *product("gqa.qkv", "gqa.qkv"),
    _row("gqa.q_norm", "gqa_decode.head_norm", GQA_QUERY, needs="head norms"),
    _row("gqa.k_norm", "gqa_decode.head_norm", GQA_KEY, needs="head norms"),
    _row("gqa.rope", "gqa_decode.rope", {**GQA_QUERY, "key_heads": "gqa_key_heads"}),
    _row("gqa.cache", "gqa_decode.cache_write", {"rows": "rows", "row_bytes": "gqa_row_bytes"}),
    _prefetch("prefetch.o_proj", "gqa.o_proj", after=("gqa.cache",)),
    _row("gqa.attention", "gqa_decode.split_kv",
         {**GQA_QUERY, "key_heads": "gqa_key_heads", "context": "context", "row_bytes": "gqa_row_bytes"}),
    *product("gqa.o_proj", "gqa.o_proj"),
    *_sum_and_norm("gqa.all_reduce", "attention"),
)  # fmt: skip

#: KDA with an output gate of low rank: separate kernels. SGLang joins the two inner products, and the outer two.
FAMILY_KDA_ROWS = (
    *product("kda.in_proj", "kda.in_proj", needs="vllm"),
    *product("kda.g_a", "kda.g_a", needs="gate of low rank, vllm"),
    *product("kda.g_b", "kda.g_b", needs="gate of low rank, vllm"),
    *product("kda.f_b", "kda.f_b", needs="vllm"),
    _row("kda.in_proj", "cublas.public_gemm", ROWS, weights=("kda.in_proj", "kda.g_a"),
         needs="gate of low rank, sglang"),
    _row("kda.in_proj", "cublas.public_gemm", ROWS, weights=("kda.in_proj",), needs="gate in full, sglang"),
    _row("kda.f_b", "cublas.batched_gemm", ROWS, weights=("kda.f_b", "kda.g_b"),
         needs="gate of low rank, sglang"),
    _row("kda.f_b", "cublas.public_gemm", ROWS, weights=("kda.f_b",), needs="gate in full, sglang"),
    _prefetch("prefetch.o_proj", "kda.o_proj", after=("kda.in_proj",)),
    _row("kda.conv", "unfused.conv_update",
         {"rows": "rows", "conv_state_bytes": "kda_conv_state_bytes", "conv_weight_bytes": "kda_conv_weight_bytes"},
         needs="convolution"),
    _row("kda.recurrent", "unfused.recurrent_update",
         KDA_UPDATE),
    _row("kda.copy_in", "unfused.elementwise", {"rows": "rows", "width": "kda_value_width"}),
    _row("kda.gated_norm", "unfused.gated_norm", {"rows": "rows", "heads": "kda_heads", "head_dim": "head_dim"}),
    _row("kda.copy_out", "unfused.elementwise", {"rows": "rows", "width": "kda_value_width"}),
    *product("kda.o_proj", "kda.o_proj"),
    *_sum_and_norm("kda.all_reduce", "attention"),
)  # fmt: skip

FAMILY_DENSE_ROWS = (
    *product("dense.gate_up", "dense.gate_up"),
    _row("dense.activate", "unfused.elementwise", {"rows": "rows", "width": "dense_width"}),
    *product("dense.down", "dense.down"),
    *_sum_and_norm("dense.all_reduce", "ffn"),
)


def _grouped(operator: str, formats: tuple[str, ...], needs: str, **columns: Any) -> tuple[Row, Row]:
    return (
        _row("moe.experts_1", operator, EXPERTS, weights=("moe.expert_w13",), formats=formats, needs=needs, **columns),
        _row("moe.experts_2", operator, EXPERTS, weights=("moe.expert_w2",), formats=formats, needs=needs, **columns),
    )


def _of_experts(stage: str, operator: str, shape: Mapping[str, int | str], formats: tuple[str, ...], needs: str,
                **columns: Any) -> Row:  # fmt: skip
    return _row(stage, operator, shape, of="moe.expert_w13", formats=formats, needs=needs, **columns)


def _trtllm(
    operator: str, formats: tuple[str, ...], *, quantises: bool, needs: str = "block-scaled"
) -> tuple[Row, ...]:
    """Routing with the selection inside, both products, and the sum over a token's experts."""

    def row(stage: str, operator: str, shape: Mapping[str, int | str], **columns: Any) -> Row:
        return _of_experts(stage, operator, shape, formats, needs, **columns)

    first, second = _grouped(operator, formats, needs, launch="pdl")
    quantise = row("moe.quantise", "quantised_gemm.quantise", {"rows": "moe_rows", "width": "expert_depth"})
    # Its FP8 with scales per block has no activation in the first product (FlashInfer ``trtllm_fused_moe_runner.cu``).
    activate = row("moe.activate", "grouped_experts.activate_and_quantise", EXPERT_ROWS, launch="pdl")
    exchanged = dispatch(of="moe.expert_w13", formats=formats)
    return (
        *needing(((quantise,) if quantises else ()), KEPT),
        *needing((row("moe.routing", "grouped_experts.route", CHOSEN, launch="pdl"),), KEPT),
        *needing((row("moe.routing", "grouped_experts.select", CHOSEN),), DISPATCHED),
        *needing((exchanged,), needs),
        first,
        *((activate,) if formats == ("fp8_block",) else ()),
        second,
        *needing((row("moe.finalize", "grouped_experts.finalize", {**TOKENS, "hidden": "expert_depth"}, launch="pdl"),),
                 KEPT),
    )


def _sorted(
    operator: str, formats: tuple[str, ...], *, quantises: bool, needs: str = "no block-scaled"
) -> tuple[Row, ...]:
    """Selection, two launches that sort the tokens, both products with what is between them, and the sum."""

    def row(stage: str, operator: str, shape: Mapping[str, int | str]) -> Row:
        return _of_experts(stage, operator, shape, formats, needs)

    first, second = _grouped(operator, formats, needs)
    quantise = row("moe.quantise", "quantised_gemm.quantise", {"rows": "moe_rows", "width": "expert_depth"})
    requantise = row("moe.requantise", "grouped_experts.quantise", EXPERT_ROWS)
    sort = (
        row("moe.align", "grouped_experts.align", {**TOKENS, "experts": "experts"}),
        row("moe.place", "grouped_experts.place", TOKENS),
    )
    return (
        row("moe.routing", "grouped_experts.select", CHOSEN),
        *needing((*((quantise,) if quantises else ()), *sort), KEPT),
        *needing((dispatch(of="moe.expert_w13", formats=formats),), needs),
        first,
        row("moe.activate", "grouped_experts.activate", EXPERT_ROWS),
        *((requantise,) if quantises else ()),
        second,
        *needing((row("moe.finalize", "grouped_experts.finalize", {**TOKENS, "hidden": "expert_depth"}),), KEPT),
    )


INT4 = ("int4_g32", "int4_g128")

FAMILY_MOE_ROWS = (
    *_router(),
    gather(),
    *_trtllm("grouped_experts.trtllm_fp8", ("fp8_block",), quantises=True),
    *_trtllm("grouped_experts.trtllm_fp4", ("nvfp4", "mxfp4"), quantises=True),
    *_trtllm("grouped_experts.trtllm_int4", ("int4_g32",), quantises=False, needs="block-scaled, sglang"),
    *_trtllm("grouped_experts.trtllm_bf16", ("bf16",), quantises=False),
    *_sorted("grouped_experts.triton_fp8", ("fp8_block",), quantises=True),
    *_sorted("grouped_experts.triton_bf16", ("bf16",), quantises=False),
    *_sorted("grouped_experts.marlin", INT4, quantises=False),
    *_sorted("grouped_experts.marlin", INT4, quantises=False, needs="block-scaled, vllm"),
    _prefetch("prefetch.next", "next layer", after=("moe.experts_2",), budget_bytes=48 << 20),
    *combine(summed_rows="moe_rows"),
    *product("moe.shared_gate_up", "moe.shared_gate_up", rows="front_rows", needs="shared experts", after=LAYER_INPUT,
             **ASIDE),
    _row("moe.shared_activate", "unfused.elementwise", {"rows": "front_rows", "width": "shared_width"},
         needs="shared experts", **ASIDE),
    *product("moe.shared_down", "moe.shared_down", rows="front_rows", needs="shared experts", **ASIDE),
    _row("moe.add", "unfused.elementwise", {"rows": "front_rows", "width": "hidden"}, needs="shared experts",
         after=("moe.shared_down",)),
    *needing(_sum_and_norm("moe.all_reduce", "ffn"), KEPT),
    gather_group(),
    _row("moe.all_reduce.norm", "unfused.norm", WHOLE_ROW, needs=DISPATCHED),
)

FAMILY_HEAD_ROWS = HEAD_ROWS[3:]

#: What a prefetch for the coming layer fetches, by its mixer.
FAMILY_NEXT_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    f"{PLAIN}kda": ("kda.in_proj",),
    f"{PLAIN}gqa": ("gqa.qkv",),
    f"{PLAIN}mla": ("mla.qkv_a", "mla.q", "mla.kv_a", "mla.q_b"),
}

#: By kind of sublayer, as a ``Path`` holds them beside those of models with attention residuals.
FAMILY_TABLES: Mapping[str, tuple[Row, ...]] = {
    f"{PLAIN}{START}": FAMILY_START_ROWS,
    f"{PLAIN}kda": FAMILY_KDA_ROWS,
    f"{PLAIN}mla": FAMILY_MLA_ROWS,
    f"{PLAIN}gqa": FAMILY_GQA_ROWS,
    f"{PLAIN}dense": FAMILY_DENSE_ROWS,
    f"{PLAIN}moe": FAMILY_MOE_ROWS,
    f"{PLAIN}{STAGE_END}": STAGE_END_ROWS,
    f"{PLAIN}{HEAD}": FAMILY_HEAD_ROWS,
}
