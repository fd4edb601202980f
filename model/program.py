"""A program: the kernel calls of one decode step on one rank, in order, with what each waits for.

``paths`` says which kernels a path runs; this module binds them to an architecture, a layout and a workload.
Every rank runs the same program, so one list serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3sim.model.architecture import Architecture
from k3sim.model.collectives import FORMS, Collectives
from k3sim.model.layout import Layout, Matrix, Workload, expert_slice, rank_matrices, rank_shapes
from k3sim.model.routing import UNIFORM, Routing
from k3sim.model.step import HEAD, START, Path, Row


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A resident weight matrix of one layer, as a kernel reads it."""

    region: str
    num_outputs: int
    depth: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kernel call. ``after`` and ``receives`` hold indices of calls of the same program."""

    index: int
    layer: int
    kind: str
    stage: str
    operator: str
    weights: tuple[Weight, ...]
    shape: Mapping[str, int]
    stream: str
    launch: str
    trigger: str
    after: tuple[int, ...]
    sends: str  # name of the exchange it feeds, empty when none
    transport: str  # how peers get the data: "push", "pull", or the form of an all-reduce
    group_size: int  # ranks of its exchange
    receives: tuple[int, ...]  # calls whose exchange it polls; itself when it sends and then receives


@dataclass(frozen=True, kw_only=True)
class Program:
    """Calls of one step in program order; ``layers`` lists the layers present (fewer than all when folded)."""

    path: Path
    num_ranks: int
    layers: tuple[int, ...]
    calls: tuple[Call, ...]


COLLECTIVES = Collectives()


def layer_kind(architecture: Architecture, layer: int) -> str:
    return f"{architecture.mixer(layer)}+{architecture.ffn(layer)}"


def dimensions(
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    routing: Routing,
    collectives: Collectives = COLLECTIVES,
) -> dict[str, int]:
    """Every number a path row may name, for one rank of one data-parallel replica."""
    rows = -(-workload.concurrency // layout.dp)
    shapes = rank_shapes(architecture, layout)
    moe = architecture.moe
    if layout.ep > 1:
        distinct = routing.busiest_rank_experts(moe.num_experts, moe.top_k, rows, layout.ep)
    else:
        distinct = routing.distinct_experts(moe.num_experts, moe.top_k, rows)
    kv_row_bytes = (architecture.mla.kv_lora_rank + architecture.mla.qk_rope_head_dim) * workload.kv_element_bytes
    return {
        "rows": rows,
        "hidden": architecture.hidden_size,
        "latent": moe.latent_size,
        "vocab": architecture.vocab_size,
        "ranks": layout.tp,
        "all_reduce_form": FORMS.index(collectives.form(2 * rows * architecture.hidden_size, layout.tp)),
        "kda_heads": shapes.kda_heads,
        "kda_state_bytes": shapes.kda_state_bytes,
        "kda_conv_state_bytes": shapes.kda_conv_state_bytes,
        "kda_conv_weight_bytes": shapes.kda_conv_weight_bytes,
        "head_dim": architecture.kda.head_dim_v,
        "mla_heads": shapes.mla_heads * layout.dcp,  # with context parallel every rank attends for its group
        "mla_own_heads": shapes.mla_heads,
        "mla_value_width": shapes.mla_heads * architecture.mla.v_head_dim,
        "kv_lora_rank": architecture.mla.kv_lora_rank,
        "kv_row_bytes": kv_row_bytes,
        "context": -(-workload.context // layout.dcp),
        "dcp": layout.dcp,
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "distinct_milli": round(1000 * distinct),
        "expert_width": expert_slice(architecture, layout),
        "shared_width": moe.shared_intermediate // layout.tp,
        "dense_width": architecture.dense_intermediate // layout.tp,
        "route_bytes": 4 * moe.num_experts // layout.tp + 2 * moe.latent_size // layout.tp,
        "logit_bytes": 4 * moe.num_experts // layout.tp,
        "latent_bytes": 2 * moe.latent_size // layout.tp,
        "front_bytes": 4 * (moe.num_experts + moe.latent_size) // layout.tp,  # with the latent in fp32
    }


def build_program(
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    path: Path,
    *,
    routing: Routing = UNIFORM,
    collectives: Collectives = COLLECTIVES,
    only_layers: Iterable[int] | None = None,
) -> Program:
    """Bind ``path`` to shapes. ``only_layers`` keeps some layers (in order) for a folded simulation.

    ``collectives``: what a library finds on the machine and chooses the form of an all-reduce by.
    """
    kept = tuple(range(architecture.num_layers)) if only_layers is None else tuple(only_layers)
    binder = _Binder(architecture, layout, path, dimensions(architecture, layout, workload, routing, collectives))
    binder.add_table(START, -1, START, 1, kept[0])
    for position, layer in enumerate(kept):
        next_layer = kept[position + 1] if position + 1 < len(kept) else None
        kind = layer_kind(architecture, layer)
        mixer, ffn = architecture.mixer(layer), architecture.ffn(layer)
        binder.add_table(mixer, layer, kind, architecture.attn_res_sources(layer, "mixer"), next_layer)
        binder.add_table(ffn, layer, kind, architecture.attn_res_sources(layer, "ffn"), next_layer)
    last = architecture.num_layers
    binder.add_table(HEAD, last, HEAD, architecture.attn_res_sources(last, "mixer"), None)
    return Program(path=path, num_ranks=layout.tp, layers=kept, calls=tuple(binder.calls))


class _Binder:
    """Calls of a program so far: rows of the path's tables, bound to ``dims``."""

    def __init__(self, architecture: Architecture, layout: Layout, path: Path, dims: Mapping[str, int]) -> None:
        self._architecture = architecture
        self._layout = layout
        self._path = path
        self._dims = dims
        self._matrices = rank_matrices(architecture, layout)
        self._rows: dict[tuple[str, bool], list[Row]] = {}  # of a table that run, in layers with a snapshot or without
        self._latest: dict[str, int] = {}  # stage or exchange name -> its most recent call
        self.calls: list[Call] = []

    def add_table(self, table: str, layer: int, kind: str, sources: int, next_layer: int | None) -> None:
        """Add the calls of a table in one layer."""
        inside = 0 <= layer < self._architecture.num_layers
        names = {**self._dims, "sources": sources}
        if inside:
            names["ffn_sources"] = self._architecture.attn_res_sources(layer, "ffn")
        for row in self._rows_of(table, snapshot=inside and self._architecture.is_snapshot(layer)):
            self._add(row, layer, kind, names, next_layer)

    def _rows_of(self, table: str, *, snapshot: bool) -> list[Row]:
        if (table, snapshot) not in self._rows:
            heads, rows = self._dims["kda_heads"], self._dims["rows"]
            self._rows[table, snapshot] = [
                row
                for row in self._path.tables[table]
                if self._path.applies(row, self._layout, heads, rows, snapshot=snapshot)
            ]
        return self._rows[table, snapshot]

    def _weight(self, name: str, layer: int) -> Weight:
        matrix: Matrix = self._matrices[name]
        num_bytes = matrix.num_bytes
        if name.startswith("moe.expert_"):
            num_bytes = round(num_bytes * self._dims["distinct_milli"] / 1000)
        return Weight(
            region=f"{layer}/{name}", num_outputs=matrix.num_outputs, depth=matrix.depth, num_bytes=num_bytes
        )

    def _weights(self, row: Row, layer: int, next_layer: int | None) -> tuple[Weight, ...]:
        bound: list[Weight] = []
        for name in row.weights:
            if name != "next layer":
                bound.append(self._weight(name, layer))
            elif next_layer is not None:  # a prefetch for the layer that follows; there is none after the last
                coming = self._path.next_weights[self._architecture.mixer(next_layer)]
                bound += [self._weight(one, next_layer) for one in coming]
        return tuple(bound)

    def _add(self, row: Row, layer: int, kind: str, names: Mapping[str, int], next_layer: int | None) -> None:
        layout, latest, index = self._layout, self._latest, len(self.calls)
        needs = [latest[stage] for stage in row.after if stage in latest]
        receives = [index if name == row.sends else latest[f"exchange {name}"] for name in row.receives]
        if layout.tp == 1:  # nothing travels, but what another stream stores is waited for all the same
            needs += [other for other in receives if other != index and self.calls[other].stream != row.stream]
        self.calls.append(
            Call(
                index=index,
                layer=layer,
                kind=kind,
                stage=row.stage,
                operator=row.operator,
                weights=self._weights(row, layer, next_layer),
                shape={key: names[value] if isinstance(value, str) else value for key, value in row.shape.items()},
                stream=row.stream,
                launch=row.launch,
                trigger=row.trigger,
                after=tuple(needs),
                sends=row.sends if layout.tp > 1 else "",
                transport=FORMS[self._dims["all_reduce_form"]].value if row.transport == "library" else row.transport,
                group_size=names[row.group],
                receives=tuple(receives) if layout.tp > 1 else (),
            )
        )
        latest[row.stage] = index
        if row.sends:
            latest[f"exchange {row.sends}"] = index
