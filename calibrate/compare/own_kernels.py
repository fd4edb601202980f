"""Readings of the project's own kernels on one H200 (``k3sim kernels bench``) beside what their costs say.

A reading is a chain of calls on rotated copies in one CUDA graph, with programmatic dependent launch between them;
pairs that push and poll are looped back. ``data/h200-kernels*.json`` hold the samples. cuBLAS's are those of its peers
there, in the same chain on plain graph edges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.validate import Row
from k3sim.kernels.harness.cases import rows_in_words
from k3sim.model.paths import find_path
from k3sim.model.program import Call, Program, Weight
from k3sim.sim.components.skew import Skew
from k3sim.sim.engine import simulate
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine
from k3sim.sim.timeline.timeline import PS_PER_US
from k3sim.sim.whatif import loopback_fabric, of_card

# Kernels that were changed after the first was measured, on another H200; those whose loads have L1 since, on a third.
# The later reading counts.
READINGS = tuple(
    Path(__file__).parents[1] / "data" / f"h200-kernels{name}.json" for name in ("", "-changed", "-l1")
)
KDA_READINGS = Path(__file__).parents[1] / "data" / "h200-kda-attn-res.json"
#: Rows that only that file has, and the name of their timing.
MANY_ROWS = ((32, "kda h12 b32 c0/256 fp32 weights hot pdl1"), (128, "kda h12 b128 c0/256 fp32 weights hot pdl1"))
LOOPS = 12  # calls of a chain; the first ones are not counted
WARM_UP = 3
GEMVS = (
    (20480, 7168), (10240, 7168), (8448, 7168), (6288, 7168), (4224, 7168), (3648, 7168), (3584, 7168), (3216, 7168),
    (2880, 7168), (2112, 7168), (1536, 7168), (896, 7168), (768, 7168), (448, 7168), (112, 7168), (56, 7168),
    (7168, 4224), (7168, 3584), (7168, 2112), (7168, 1536), (7168, 768), (7168, 384), (896, 3584), (448, 3584),
    (2304, 1536), (1152, 1536), (1536, 128), (768, 128),
)  # fmt: skip
HIDDEN, LATENT = 7168, 3584


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kernel of a chain."""

    operator: str
    weights: tuple[tuple[int, int, int], ...] = ()  # outputs, depth, bytes
    shape: dict[str, int]
    launch: str = "pdl"
    trigger: str = "start"
    sends: str = ""
    receives: str = ""


def bf16(num_outputs: int, depth: int) -> tuple[int, int, int]:
    return num_outputs, depth, 2 * num_outputs * depth


def _experts(width: int, rows: int = 1) -> tuple[tuple[int, int, int], ...]:
    num_bytes = rows * 16 * 3 * width * LATENT * 17 // 32  # 4.25 bits a weight; no expert is chosen twice
    return (2 * width, LATENT, num_bytes * 2 // 3), (LATENT, width, num_bytes // 3)


def _kda(heads: int, rows: int) -> Link:
    shape = {
        "rows": rows,
        "heads": heads,
        "state_bytes": heads * 128 * 128 * 4,
        "conv_state_bytes": heads * 2304,
        "conv_weight_bytes": heads * 6144,
    }
    return Link(operator="kda_decode.cluster", weights=(bf16(heads * 128, 128),), shape=shape)


def _attention(heads: int, context: int, kv_row_bytes: int) -> Link:
    shape = {"rows": 1, "heads": heads, "context": context, "kv_row_bytes": kv_row_bytes, "kv_lora_rank": 512}
    return Link(operator="mla_decode.clusters_early", shape=shape)


def fused_allreduce(ranks: int, depth: int, rows: int = 1) -> tuple[Link, ...]:
    """Projection and the consumer that polls ``ranks`` slots."""
    return (
        Link(operator="proj_allreduce.produce_whole", weights=(bf16(HIDDEN, depth),), shape={"rows": rows},
             trigger="wait", sends="attention"),
        Link(operator="proj_allreduce.consume", shape={"rows": rows, "hidden": HIDDEN, "slots": ranks},
             receives="attention"),
    )  # fmt: skip


def all_reduce(ranks: int, rows: int = 1, hidden: int = HIDDEN) -> tuple[Link, ...]:
    shape = {"rows": rows, "hidden": hidden, "ranks": ranks}
    return (Link(operator="unfused.all_reduce", shape=shape, trigger="end", sends="sum", receives="sum"),)


ONE_ROW = {"rows": 1}
SELECTED = {"rows": 1, "top_k": 16, "distinct_milli": 16000}
UP = {"rows": 1, "hidden": HIDDEN, "latent": LATENT, "ranks": 16}

CHAINS: dict[tuple[str, str], tuple[Link, ...]] = {
    **{
        ("skinny_gemv", f"{outputs}x{depth}, {rows_in_words(rows)}"):
            (Link(operator="skinny_gemv.tiled", weights=(bf16(outputs, depth),), shape={"rows": rows}),)
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
            Link(operator="mla_decode.lift_gate", weights=(bf16(128 * heads, 512),),
                 shape={"rows": rows, "kv_lora_rank": 512}),
        )
        for heads in (6, 12)
        for rows in (1, 16)
    },
    **{
        ("mla_prep", f"{heads} heads, 1 row, fp8 cache"): (
            Link(operator="mla_prep.fused", weights=(bf16(192 * heads, 1536), bf16(512 * heads, 128)),
                 shape={"rows": 1, "heads": heads, "kv_row_bytes": 576}),
        )
        for heads in (6, 12)
    },
    **{
        ("expert_gemv", f"16 experts a row of {width}, {rows_in_words(rows)}"): (
            Link(operator="expert_gemv.persistent", weights=_experts(width, rows),
                 shape={"rows": rows, "top_k": 16, "distinct_milli": 16000 * rows, "width": width}),
        )
        for width in (384, 192)
        for rows in (1, 2, 8)
    },
    **{
        ("expert_gemv", f"16 experts a row of {width}, 1 row, two launches"): (
            Link(operator="expert_gemv.gate_up", weights=_experts(width)[:1], shape=SELECTED),
            Link(operator="expert_gemv.down", weights=_experts(width)[1:], shape=SELECTED),
        )
        for width in (384, 192)
    },
    ("kda_decode", "12 heads, 1 row, fp32 state"): (_kda(12, 1),),
    ("kda_decode", "6 heads, 1 row, fp32 state"): (_kda(6, 1),),
    ("kda_decode", "12 heads, 8 rows, fp32 state"): (_kda(12, 8),),
    ("proj_allreduce", "produce and consume, 16 slots of this GPU, 7168x768, 1 row"): fused_allreduce(16, 768),
    ("proj_allreduce", "produce and consume, 8 slots of this GPU, 7168x1536, 1 row"): fused_allreduce(8, 1536),
    ("proj_allreduce", "produce and consume, 8 slots of this GPU, 7168x768, 1 row"): fused_allreduce(8, 768),
    **{
        ("router_topk", f"push of {4480 // ranks}x7168 and gather_topk, {ranks} shards looped back, 1 row"): (
            Link(operator="skinny_gemv.tiled_push", weights=(bf16(4480 // ranks, 7168),),
                 shape={"rows": 1, "sent_bytes_per_row": 4 * 4480 // ranks}, sends="route"),
            Link(operator="router_topk.gather_topk", shape={"rows": 1, "latent": LATENT}, receives="route",
                 trigger="end"),
        )
        for ranks in (8, 16)
    },
    **{
        ("proj_allreduce", f"produce and consume, 8 slots of this GPU, 7168x1536, {rows} rows"): fused_allreduce(8, 1536, rows)
        for rows in (8, 16)
    },
    **{
        ("mla_prep", f"12 heads, {rows} rows, fp8 cache"): (
            Link(operator="mla_prep.fused", weights=(bf16(192 * 12, 1536), bf16(512 * 12, 128)),
                 shape={"rows": rows, "heads": 12, "kv_row_bytes": 576}),
        )
        for rows in (8, 16)
    },
    **{
        ("proj_allreduce", f"send, up and consume_gathered, {ranks} ranks looped back, {rows_in_words(rows)}"): (
            Link(operator="latent_tail.send", shape={**UP, "rows": rows, "ranks": ranks, "expert_rows": rows},
                 sends="latent"),
            Link(operator="latent_tail.up_cluster", weights=(bf16(HIDDEN // ranks, LATENT),),
                 shape={**UP, "rows": rows, "ranks": ranks}, trigger="wait", receives="latent", sends="residual"),
            Link(operator="proj_allreduce.consume_gathered", shape={"rows": rows, "hidden": HIDDEN},
                 receives="residual"),
        )
        for ranks in (8, 16)
        for rows in (1, 16)
    },
    ("attn_res", "combine of 9 sources, 1 row"): (
        Link(operator="attn_res.combine", shape={"rows": 1, "hidden": HIDDEN, "sources": 9}),
    ),
    ("unfused", "all_reduce, 16 slots of this GPU, 1 row"): all_reduce(16),
    **{
        ("latent_tail", f"up, {ranks} ranks, {rows_in_words(rows)}"): (
            Link(operator="latent_tail.up_cluster", weights=(bf16(HIDDEN // ranks, LATENT),),
                 shape={**UP, "rows": rows, "ranks": ranks}),
        )
        for ranks in (8, 16)
        for rows in (1, 4, 16)
    },
}  # fmt: skip


def chain_us(
    links: Sequence[Link], machine: Machine, *, group_size: int = 16, skew: Skew = Skew.OFF
) -> float:
    """Time of one round of ``links`` in a long graph in which every round reads its own weights (cold L2).

    ``group_size``: ranks of an exchange.
    """
    calls: list[Call] = []
    for loop in range(LOOPS):
        sent: dict[str, int] = {}
        for position, link in enumerate(links):
            index = len(calls)
            if link.sends:
                sent[link.sends] = index
            weights = tuple(
                Weight(region=f"{loop}/{position}/{number}", num_outputs=outputs, depth=depth, num_bytes=num_bytes)
                for number, (outputs, depth, num_bytes) in enumerate(link.weights)
            )
            calls.append(
                Call(
                    index=index,
                    layer=loop,
                    kind="loop",
                    stage=f"{position}",
                    operator=link.operator,
                    weights=weights,
                    shape=link.shape,
                    stream="main",
                    launch=link.launch,
                    trigger=link.trigger,
                    after=(),
                    sends=link.sends,
                    transport="push",
                    group_size=group_size,
                    receives=(sent[link.receives],) if link.receives in sent else (),
                )
            )
    path = find_path("stock", kernel_set="own")
    program = Program(path=path, num_ranks=1, layers=tuple(range(LOOPS)), calls=tuple(calls))
    timeline = simulate(program, machine, skew=skew)
    ends = [max(run.end_ps for run in timeline.kernels if run.layer == loop) for loop in range(LOOPS)]
    return (ends[-1] - ends[WARM_UP - 1]) / (LOOPS - WARM_UP) / PS_PER_US


@cache
def readings() -> tuple[dict[str, Any], ...]:
    """Timings, each with its ``file`` and the read rate of its card.

    Of two of one case the later file's.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in READINGS:
        document = json.loads(file.read_text(encoding="utf-8"))
        rate = document["environment"]["read_bytes_per_s"]
        for timing in document["timings"]:
            found[timing["operator"], timing["case"]] = {**timing, "file": file.name, "read_bytes_per_s": rate}
    return tuple(found.values())


def own_kernel_rows() -> list[Row]:
    """Every reading whose calls the simulator has a cost for, in microseconds a round of the chain."""
    machine = load_machine("h200")
    rows = [
        Row(
            label=f"h200: {timing['operator']} {timing['case']}",
            measured=timing["median_us"],
            predicted=chain_us(
                CHAINS[timing["operator"], timing["case"]], loopback_fabric(of_card(machine, timing["read_bytes_per_s"]))
            ),
            source=f"calibrate/data/{timing['file']}, {timing['date'][:10]}",
        )
        for timing in readings()
        if (timing["operator"], timing["case"]) in CHAINS
    ]
    return rows + [
        Row(
            label=f"h200: kda_decode 12 heads, {num_rows} rows",
            measured=_kda_median_us(name),
            predicted=chain_us((_kda(12, num_rows),), load_machine("h200")),
            source=f"calibrate/data/{KDA_READINGS.name}, 2026-11-29",
        )
        for num_rows, name in MANY_ROWS
    ]


def _kda_median_us(name: str) -> float:
    timings = json.loads(KDA_READINGS.read_text(encoding="utf-8"))["timings"]
    return float(next(timing["median_us"] for timing in timings if timing["name"] == name))


def cublas_rows() -> list[Row]:
    """cuBLAS on the same shapes, on plain graph edges."""
    machine = load_machine("h200")
    rows = []
    for timing in readings():
        links = CHAINS.get((timing["operator"], timing["case"]), ())
        for peer in timing["peers"]:
            if links and timing["operator"] == "skinny_gemv" and peer["name"] == "cuBLAS":
                link = Link(operator="cublas.gemm", weights=links[0].weights, shape=links[0].shape, launch="graph",
                            trigger="end")
                rows.append(
                    Row(
                        label=f"h200: cuBLAS {timing['case']}",
                        measured=peer["median_us"],
                        predicted=chain_us((link,), loopback_fabric(of_card(machine, timing["read_bytes_per_s"]))),
                        source=f"calibrate/data/{timing['file']}, {timing['date'][:10]}",
                    )
                )
    return rows
