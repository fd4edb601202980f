"""The DSpark draft as rows of a path, after the head: as vLLM runs Inferact's (``dspark_mla.py``).

Cached context: the taps of the rows just verified, to keys of all five layers in one product. Then one pass of the
layers over the positions to draft, which see one another; then logits, and a Markov head that walks over the positions.
Of its exchange only each rank's candidates travel (TokenSpeed's local top, greedy); vLLM's own form is not published.
The stock and the fused path run the same launches: no switch has kernels for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.model.draft import DRAFT_CONTEXT, DRAFT_HEAD, DRAFT_LAYER, DRAFT_POSITION, MAX_DRAFTS
from k3sim.model.step import Row

ROWS: dict[str, int | str] = {"rows": "draft_rows"}
REDUCED: dict[str, int | str] = {"rows": "draft_rows", "hidden": "hidden", "ranks": "ranks", "form": "draft_form"}
PUBLIC: dict[str, Any] = {"launch": "pdl", "trigger": "stream"}


def _row(stage: str, operator: str, shape: Mapping[str, int | str], *weights: str, **columns: Any) -> Row:
    return Row(stage=stage, operator=operator, shape=shape, weights=weights, formats=("bf16",), **columns)


def _product(stage: str, weight: str, rows: str = "draft_rows") -> Row:
    return _row(stage, "skinny_gemv.column_pair", {"rows": rows}, weight, **PUBLIC)


def _sum_and_norm(stage: str, exchange: str) -> tuple[Row, Row]:
    return (
        _row(stage, "unfused.all_reduce_norm", REDUCED, launch="pdl", needs="several ranks", sends=exchange,
             receives=(exchange,), transport="library"),
        _row(stage, "unfused.norm", {"rows": "draft_rows", "width": "hidden"}, needs="one rank"),
    )  # fmt: skip


CONTEXT_ROWS = (
    # The draft's graph; its launch does not wait for the token to be returned.
    _row("draft.launch", "host", {"num_launches": 0, "num_graph_launches": 1}, launch="host", stream="host",
         after=("host.sampling",)),
    _row("draft.context", "skinny_gemv.column_pair", {"rows": "rows"}, "draft_context.projection",
         after=("draft.launch",)),
    _row("draft.context_norm", "unfused.norm", {"rows": "rows", "width": "hidden"}),
    _product("draft.context_kv", "draft_context.kv", "rows"),
    _row("draft.context_kv_norm", "unfused.norm", {"rows": "rows", "width": "draft_kv_norm_width"}),
    _row("draft.context_rope", "unfused.elementwise", {"rows": "rows", "width": "draft_context_width"}),
    _row("draft.context_cache", "unfused.query_and_cache", {"rows": "rows", "heads": "draft_layers",
         "kv_row_bytes": "kv_row_bytes"}),
    _row("draft.embed", "unfused.embedding", {"rows": "draft_rows", "hidden": "hidden"}),
    *_sum_and_norm("draft.embed_all_reduce", "draft embed"),
)  # fmt: skip

LAYER_ROWS = (
    _product("draft.qkv_a", "draft_layer.qkv_a"),
    _row("draft.norms", "unfused.norm", {"rows": "draft_rows", "width": "draft_q_norm_width"}),
    _product("draft.q_b", "draft_layer.q_b"),
    _row("draft.absorb", "unfused.batched_gemm", ROWS, "draft_layer.w_uk"),
    _row("draft.rope", "unfused.elementwise", {"rows": "draft_rows", "width": "draft_rope_width"}),
    _row("draft.query_cache", "unfused.query_and_cache", {"rows": "draft_rows", "heads": "draft_heads",
         "kv_row_bytes": "kv_row_bytes"}),
    _row("draft.attention", "mla_decode.split_kv", {"rows": "users", "heads": "draft_query_heads",
         "context": "context", "kv_row_bytes": "kv_row_bytes", "kv_lora_rank": "kv_lora_rank"}, launch="pdl"),
    _row("draft.lift", "unfused.batched_gemm", ROWS, "draft_layer.w_uv"),
    _product("draft.o_proj", "draft_layer.o_proj"),
    *_sum_and_norm("draft.attention_all_reduce", "draft attention"),
    _product("draft.gate_up", "draft_layer.gate_up"),
    _row("draft.silu", "unfused.elementwise", {"rows": "draft_rows", "width": "draft_width"}),
    _product("draft.down", "draft_layer.down"),
    *_sum_and_norm("draft.ffn_all_reduce", "draft ffn"),
)  # fmt: skip

HEAD_ROWS = (_product("draft.lm_head", "lm_head"),)


def _position(number: int) -> tuple[Row, ...]:
    """One position of the Markov head; its stages have its number, as each is a kernel of the same layer."""
    return (
        # A row of the first table, of the token before.
        _row(f"draft.markov_row.{number}", "unfused.embedding", {"rows": "users", "hidden": "markov_rank"}),
        _row(f"draft.markov.{number}", "lm_head.top_k", {"rows": "users"}, "draft_position.w2", launch="pdl",
             sends="draft candidates"),
        _row(f"draft.sample.{number}", "unfused.sample", {"rows": "users", "ranks": "ranks"}, launch="pdl",
             receives=("draft candidates",)),
    )  # fmt: skip


DRAFT_TABLES: Mapping[str, tuple[Row, ...]] = {
    DRAFT_CONTEXT: CONTEXT_ROWS, DRAFT_LAYER: LAYER_ROWS, DRAFT_HEAD: HEAD_ROWS,
    **{f"{DRAFT_POSITION} {number}": _position(number) for number in range(1, MAX_DRAFTS + 1)},
}  # fmt: skip
