"""Exchanges around the experts where attention groups have requests of their own, and between pipeline stages.

| Attention groups | Before the experts | Behind them |
| --- | --- | --- |
| that gather | all tokens with their scores, to every rank | sums over the groups, each its own |
| that dispatch | a token of one rank of its group, to each of its experts | results back, and to the group |
| one | nothing: every rank has every token | the all-reduce |

vLLM gathers unless told otherwise (``allgather_reducescatter``: router and latent projection run before), SGLang too
without a backend for all-to-all; to dispatch is DeepEP's form in both, in vLLM with the tokens of a group divided over
its ranks (sequence-parallel MoE) and with shared experts whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from k3sim.model.paths.formats import joined
from k3sim.model.step import Row

GATHERED, DISPATCHED, KEPT = "gathered", "dispatched", "not dispatched"
EACH: dict[str, Any] = {"launch": "pdl", "transport": "each"}
COUNTED: dict[str, Any] = {"transport": "all-to-all", "group": "expert_ranks"}
EXCHANGED: dict[str, int | str] = {
    "rows": "front_rows", "received_rows": "expert_rows", "top_k": "top_k", "depth": "expert_depth",
    "ranks": "expert_ranks",
}  # fmt: skip


def gather(*, after: tuple[str, ...] = (), **columns: Any) -> Row:
    """A group's tokens and their scores to one rank of every other group."""
    return Row(
        stage="moe.gather", operator="expert_exchange.all_gather", needs=GATHERED, after=after,
        shape={"rows": "rows", "row_bytes": "scored_token_bytes", "ranks": "attention_groups"},
        sends="tokens", receives=("tokens",), group="attention_groups", **EACH, **columns,
    )  # fmt: skip


def dispatch(**columns: Any) -> Row:
    """Each token to the ranks of its experts."""
    return Row(
        stage="moe.dispatch", operator="expert_exchange.dispatch", shape=EXCHANGED, needs=DISPATCHED, sends="tokens",
        receives=("tokens",), **COUNTED, **columns,
    )  # fmt: skip


def combine(*, summed_rows: str, **columns: Any) -> tuple[Row, Row]:
    """Results of the experts back to their tokens' group, or rank. ``summed_rows``: that are added up before."""
    scatter: Mapping[str, int | str] = {
        "rows": "rows", "row_bytes": "token_bytes", "ranks": "attention_groups", "summed_rows": summed_rows,
    }  # fmt: skip
    how: dict[str, Any] = {"stage": "moe.combine", "sends": "results", "receives": ("results",), **columns}
    return (
        Row(
            operator="expert_exchange.reduce_scatter", shape=scatter, needs=GATHERED, group="attention_groups", **EACH,
            **how,
        ),
        Row(operator="expert_exchange.combine", shape=EXCHANGED, needs=DISPATCHED, **COUNTED, **how),
    )  # fmt: skip


def gather_group(**columns: Any) -> Row:
    """The rows that the ranks of a group have divided among them, to all of them."""
    return Row(
        stage="moe.tail_gather", operator="expert_exchange.all_gather", needs="divided",
        shape={"rows": "front_rows", "row_bytes": "hidden_bytes", "ranks": "ranks"}, sends="residual",
        receives=("residual",), **EACH, **columns,
    )  # fmt: skip


def needing(rows: tuple[Row, ...], condition: str) -> tuple[Row, ...]:
    """``rows`` where ``condition`` holds too."""
    return tuple(replace(row, needs=joined(row.needs, condition)) for row in rows)


STAGE_END_ROWS = (
    Row(
        stage="pipeline.hand_over", operator="expert_exchange.hand_over",
        shape={"rows": "rows", "row_bytes": "hidden_bytes", "sources": "sources"}, sends="stage", receives=("stage",),
        group="stages",
    ),
)  # fmt: skip
