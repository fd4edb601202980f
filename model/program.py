"""A program: the kernel calls of one decode step on one rank, in order, with what each waits for.

``paths`` says which kernels a path runs; this module binds them to an architecture, a layout and a workload.
Every rank runs the same program, so one list serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.collectives import FORMS, Collectives
from k3sim.model.draft import DRAFT_CONTEXT, DRAFT_HEAD, DRAFT_LAYER, DRAFT_POSITION
from k3sim.model.layout import Layout, Workload, stage_layers
from k3sim.model.matrices import Matrix, expert_slice, gqa_bytes_per_token, rank_matrices, rank_shapes, shared_slice
from k3sim.model.rank_load import RankLoad, rank_load
from k3sim.model.routing import UNIFORM, Routing
from k3sim.model.step import FEATURES, HEAD, PLAIN, STAGE_END, START, Path, Row, check_path, of_plain_residual


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
    group_stride: int = 1  # between one rank of the group and the next


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
    """Every number a path row may name, for one rank of one attention group.

    ``rows`` are the group's. ``front_rows`` are those whose router, latent projections and shared experts the rank
    computes, ``moe_rows`` those of which it knows the chosen experts, and ``expert_rows`` as many as have all their
    ``top_k`` experts on it: the tokens of its experts.
    """
    draft, users = architecture.draft, layout.rows(workload.concurrency)
    positions = draft.rows_per_user if draft else 1
    rows = users * positions
    front_rows = -(-rows // layout.attention_tp) if layout.dispatch else rows
    shapes = rank_shapes(architecture, layout)
    moe = architecture.moe
    load = rank_load(architecture, layout, rows * layout.attn_dp, routing)
    tp = layout.attention_tp
    mla = architecture.mla
    attended = min(workload.context, mla.index_top_k) if mla.index_heads else workload.context
    kv_row_bytes = (architecture.mla.kv_lora_rank + architecture.mla.qk_rope_head_dim) * workload.kv_element_bytes
    return {
        **{f"depth of {name}": matrix.depth for name, matrix in rank_matrices(architecture, layout).items()},
        "rows": rows,
        "users": users,
        "positions": positions,
        "hidden": architecture.hidden_size,
        "latent": moe.latent_size,
        "vocab": architecture.vocab_size,
        "front_rows": front_rows,
        "moe_rows": front_rows if layout.dispatch else rows * layout.attn_dp,
        "expert_rows": load.rows,
        "expert_pairs": load.rows * moe.top_k,
        "ranks": tp,
        "attention_groups": layout.attn_dp,
        "expert_ranks": layout.tp,
        "stages": 2,  # a hand-over between stages is of two ranks
        "all_reduce_form": FORMS.index(collectives.form(2 * rows * architecture.hidden_size, tp)),
        "latent_form": FORMS.index(collectives.form(2 * rows * moe.latent_size, tp)),
        "kda_heads": shapes.kda_heads,
        "kda_state_bytes": shapes.kda_state_bytes,
        "kda_value_bytes": architecture.state_bytes_per_value,
        "kda_conv_state_bytes": shapes.kda_conv_state_bytes,
        "kda_conv_weight_bytes": shapes.kda_conv_weight_bytes,
        "head_dim": architecture.kda.head_dim_v,
        "mla_heads": shapes.mla_heads * layout.dcp,  # with context parallel every rank attends for its group
        "mla_own_heads": shapes.mla_heads,
        "mla_value_width": shapes.mla_heads * architecture.mla.v_head_dim,
        "kv_lora_rank": architecture.mla.kv_lora_rank,
        "kv_row_bytes": kv_row_bytes,
        "mla_query_width": shapes.mla_heads * mla.cache_width,
        "kda_value_width": architecture.kda.value_width // tp,
        "gqa_heads": shapes.gqa_heads,
        "gqa_key_heads": shapes.gqa_key_heads,
        "gqa_head_dim": architecture.gqa.head_dim,
        "gqa_row_bytes": gqa_bytes_per_token(architecture, layout, workload.kv_dtype),
        "mla_rope_width": shapes.mla_heads * mla.qk_rope_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "context": -(-attended // layout.dcp),
        "cached": -(-workload.context // layout.dcp),
        "index_heads": mla.index_heads,
        "index_dim": mla.index_dim,
        "index_top_k": mla.index_top_k,
        "index_row_bytes": mla.index_dim + 4 if mla.index_heads else 0,  # fp8 and a scale in fp32
        "dcp": layout.dcp,
        "mla_query_heads": shapes.mla_heads * layout.dcp * positions,  # of a user's rows, which share its cache
        **(draft.dimensions(tp, users) if draft else {}),
        "draft_form": FORMS.index(collectives.form(2 * max(1, rows - users) * architecture.hidden_size, tp)),
        **_expert_dimensions(architecture, layout, load),
    }


def _expert_dimensions(architecture: Architecture, layout: Layout, load: RankLoad) -> dict[str, int]:
    """``dimensions`` of the feed-forward part: experts, and what travels for them."""
    moe, tp = architecture.moe, layout.attention_tp
    return {
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "top_k_groups": moe.top_k_groups if moe.num_groups > 1 else 1,
        "expert_depth": architecture.expert_depth,
        "tail_rows": moe.top_k if layout.attn_dp == 1 else 1,  # rows of a token that its experts leave to be added up
        "distinct_milli": round(1000 * load.experts),
        "expert_width": expert_slice(architecture, layout),
        "shared_width": shared_slice(architecture, layout),
        "dense_width": architecture.dense_intermediate // tp,
        "route_bytes": 4 * moe.num_experts // tp + 2 * moe.latent_size // tp,
        "logit_bytes": 4 * moe.num_experts // tp,
        "latent_bytes": 2 * moe.latent_size // tp,
        "front_bytes": 4 * (moe.num_experts + moe.latent_size) // tp,  # with the latent in fp32
        # What a token's experts take, and its scores beside it where others choose for it.
        "token_bytes": 2 * architecture.expert_depth,
        "scored_token_bytes": 2 * architecture.expert_depth + 4 * moe.num_experts,
        "hidden_bytes": 2 * architecture.hidden_size,
    }


def stage_ends(architecture: Architecture, layout: Layout) -> frozenset[int]:
    """The last layer of each pipeline stage but the last."""
    return frozenset(layers[-1] for layers in stage_layers(architecture.num_layers, layout.pp)[:-1])


def features_of(architecture: Architecture, path: Path, *, block_scaled: bool) -> frozenset[str]:
    """Which of ``step.FEATURES`` hold, for rows of a path to name."""
    mla, moe, kda = architecture.mla, architecture.moe, architecture.kda
    holds = {
        "attention residual": bool(architecture.attn_res_block_size),
        "latent": bool(moe.latent_size),
        "shared experts": bool(moe.shared_intermediate),
        "mla gate": mla.has_gate,
        "query latent": bool(mla.q_lora_rank),
        "rope": mla.has_rope,
        "head norms": architecture.gqa.has_norms,
        "indexer": bool(mla.index_heads),
        "convolution": kda.conv_width > 1,
        "gate in full": not kda.gate_rank,
        "expert groups": moe.num_groups > 1,
        "kda": bool(architecture.kda_layers),
        "drafts": architecture.draft is not None,
        "block-scaled": block_scaled,
        "vllm": path.engine == "vllm",
    }
    return frozenset(has if holds[has] else has_not for has, has_not in FEATURES)


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
    check_path(path, layout, verifies=architecture.draft is not None)
    kept = tuple(range(architecture.num_layers)) if only_layers is None else tuple(only_layers)
    dims = dimensions(architecture, layout, workload, routing, collectives)
    features = features_of(architecture, path, block_scaled=collectives.block_scaled)
    binder = _Binder(architecture, layout, path, dims, features)
    binder.add_table(START, -1, START, 1, kept[0])
    for position, layer in enumerate(kept):
        next_layer = kept[position + 1] if position + 1 < len(kept) else None
        kind = layer_kind(architecture, layer)
        mixer, ffn = architecture.mixer(layer), architecture.ffn(layer)
        binder.add_table(mixer, layer, kind, architecture.attn_res_sources(layer, "mixer"), next_layer)
        binder.add_table(ffn, layer, kind, architecture.attn_res_sources(layer, "ffn"), next_layer)
        if layer in stage_ends(architecture, layout):
            binder.add_table(STAGE_END, layer, kind, architecture.attn_res_sources(layer + 1, "mixer"), next_layer)
    last = architecture.num_layers
    binder.add_table(HEAD, last, HEAD, architecture.attn_res_sources(last, "mixer"), None)
    _add_draft(binder, architecture, last)
    return Program(path=path, num_ranks=layout.tp, layers=kept, calls=tuple(binder.calls))


def _add_draft(binder: _Binder, architecture: Architecture, last: int) -> None:
    """The draft's calls behind the head, as layers of their own after the model's."""
    draft = architecture.draft
    if draft is None:
        return
    binder.add_table(DRAFT_CONTEXT, last, "draft", 1, None)
    for layer in range(last + 1, last + 1 + draft.num_layers):
        binder.add_table(DRAFT_LAYER, layer, "draft", 1, None)
    end = last + 1 + draft.num_layers
    binder.add_table(DRAFT_HEAD, end, "draft", 1, None)
    for number in range(1, draft.num_drafts + 1):
        binder.add_table(f"{DRAFT_POSITION} {number}", end, "draft", 1, None)


def rows_of(
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    path: Path,
    table: str,
    *,
    collectives: Collectives = COLLECTIVES,
    snapshot: bool = False,
) -> list[Row]:
    """Rows of one table that run, in layers that keep a snapshot or in others.

    Raises UserError where the path has no kernel for what the model has.
    """
    dims = dimensions(architecture, layout, workload, UNIFORM, collectives)
    features = features_of(architecture, path, block_scaled=collectives.block_scaled)
    return _Binder(architecture, layout, path, dims, features).rows_of(table, snapshot=snapshot)


class _Binder:
    """Calls of a program so far: rows of the path's tables, bound to ``dims``."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        path: Path,
        dims: Mapping[str, int],
        features: frozenset[str],
    ) -> None:
        self._architecture = architecture
        self._layout = layout
        self._path = of_plain_residual(path) if "plain residual" in features else path
        self._dims = dims
        self._features = features
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
        for row in self.rows_of(table, snapshot=inside and self._architecture.is_snapshot(layer)):
            self._add(row, layer, kind, names, next_layer)

    def rows_of(self, table: str, *, snapshot: bool) -> list[Row]:
        """Rows of a table that run."""
        if (table, snapshot) not in self._rows:
            heads, rows = self._dims["kda_heads"], self._dims["rows"]
            plain = "plain residual" in self._features
            if plain and f"{PLAIN}{START}" not in self._path.tables:
                raise UserError(
                    f"path {self._path.name} with {self._path.kernel_set} kernels has none for a plain residual, which "
                    f"{self._architecture.name} has; accepted: --path stock or fused with --kernels public"
                )
            built = [
                row
                for row in self._path.tables.get(f"{PLAIN}{table}" if plain else table, ())
                if self._path.applies(
                    row, self._layout, heads, rows, snapshot=snapshot, features=self._features
                )
            ]
            found = [row for row in built if row.accepts(self._format(row))]
            self._check_formats(table, built, found)
            self._rows[table, snapshot] = found
        return self._rows[table, snapshot]

    def _format(self, row: Row) -> str:
        return self._architecture.weight_format(row.decided_by).name

    def _check_formats(self, table: str, built: list[Row], found: list[Row]) -> None:
        """UserError for a table that is not there, a matrix that no kernel reads, and one that there is not."""
        path, model = self._path, self._architecture.name
        stages = {row.stage for row in found}
        for row in built:
            if row.weights and row.stage not in stages:
                where = "" if "block-scaled" in self._features else " without block-scaled tensor cores"
                raise UserError(
                    f"no kernel for {self._format(row)} weights of {row.decided_by} on path {path.name}{where}"
                )
        if not found:
            raise UserError(f"no kernels for {table} layers of {model} on path {path.name}, kernels {path.kernel_set}")
        read = {name for row in found for name in row.weights}
        absent = sorted(read.difference(self._matrices, ("next layer",)))
        if absent:
            raise UserError(f"path {path.name} reads {', '.join(absent)}, which {model} has not")
        whole = {name.removesuffix("_shard") for name in read}
        left = [name for name in self._matrices if name.startswith(f"{table}.") and name not in whole | read
                and not name.endswith("_shard")]  # fmt: skip
        if left:
            raise UserError(f"no kernel on path {path.name} reads {', '.join(left)}, which {model} has")

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
                mixer = self._architecture.mixer(next_layer)
                plain = PLAIN if "plain residual" in self._features else ""
                coming = self._path.next_weights[f"{plain}{mixer}"]
                bound += [self._weight(one, next_layer) for one in coming if one in self._matrices]
        return tuple(bound)

    def _add(self, row: Row, layer: int, kind: str, names: Mapping[str, int], next_layer: int | None) -> None:
        layout, latest, index = self._layout, self._latest, len(self.calls)
        group_size = names[row.group]
        needs = [latest[stage] for stage in row.after if stage in latest]
        sources = [index if name == row.sends else latest[f"exchange {name}"] for name in row.receives]
        receives = [one for one in sources if (group_size > 1 if one == index else self.calls[one].sends)]
        # Where nothing travels, what another stream stores is waited for all the same.
        needs += [
            other for other in sources
            if other not in receives and other != index and self.calls[other].stream != row.stream
        ]  # fmt: skip
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
                sends=row.sends if group_size > 1 else "",
                transport=FORMS[names[str(row.shape["form"])]].value if row.transport == "library" else row.transport,
                group_size=group_size,
                group_stride=layout.attention_tp if row.group == "attention_groups" else 1,
                receives=tuple(receives),
            )
        )
        latest[row.stage] = index
        if row.sends:
            latest[f"exchange {row.sends}"] = index
