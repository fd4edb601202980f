"""Execution paths as data: for each kind of layer the kernels, their stream, what they wait for, what they read.

A path is a set of tables of ``Row``; a row applies when the switches it needs are on and those that replace it
are off, so ``stock`` is the ``fused`` path with every switch off, and one table shows what each switch changes.
No row holds a duration: ``operator`` names a cost function under ``kernels`` and ``shape`` its arguments, where
a string is the name of a dimension (see ``program.dimensions``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3sim.errors import UserError
from k3sim.model.draft import DRAFT_LAYER
from k3sim.model.switches import named, parts_of, switch_of, switches_at

if TYPE_CHECKING:
    from k3sim.model.layout import Layout, Workload

START, HEAD = "start", "head"
STAGE_END = "stage end"  # the hand-over from one pipeline stage to the next
PLAIN = "plain "  # begins the names of the tables of models with a plain residual
ANY_ROWS = 1 << 30

#: What a model or its machine has or has not, as ``Row.needs`` names it; ``program.features_of`` says which hold.
FEATURES = (
    ("attention residual", "plain residual"),
    ("latent", "no latent"),
    ("shared experts", "no shared experts"),
    ("mla gate", "no mla gate"),
    ("query latent", "no query latent"),
    ("rope", "no rope"),
    ("head norms", "no head norms"),
    ("indexer", "no indexer"),
    ("convolution", "no convolution"),
    ("gate in full", "gate of low rank"),
    ("expert groups", "no expert groups"),
    ("kda", "no kda"),
    ("drafts", "no drafts"),  # to verify
    ("block-scaled", "no block-scaled"),  # tensor cores that take scales, from Blackwell on
    ("vllm", "sglang"),
)
K3_FEATURES = frozenset(
    {
        "attention residual", "latent", "shared experts", "mla gate", "query latent", "no rope", "no head norms",
        "no indexer", "convolution", "gate in full", "no expert groups", "kda", "no drafts", "block-scaled", "vllm",
    }
)  # fmt: skip


def layout_features(layout: Layout) -> tuple[str, ...]:
    """What a layout has or has not, as ``Row.needs`` names it.

    ``several ranks``: of an attention group. ``gathered``: attention groups give one another all their tokens before
    the experts; ``dispatched``: each token goes to its experts. ``divided``: of what is dispatched every rank of a
    group has a part of its group's.
    """
    several = layout.attention_tp > 1
    return (
        "dcp" if layout.dcp > 1 else "no dcp",
        "several ranks" if several else "one rank",
        "one attention group" if layout.attn_dp == 1 else "dispatched" if layout.dispatch else "gathered",
        "not dispatched" if not layout.dispatch else "divided" if several else "undivided",
        "front divided" if layout.shard_all and several else "front whole",
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel of a table.

    launch
        ``graph``: starts when its stream's predecessor and ``after`` have completed.
        ``pdl``: may start beside its stream's predecessor once that has triggered, and then waits for it.
        ``task``: a task of a persistent program: no launch, a counter instead of a completion.
        ``host``: launched by the host, outside the graph.
    trigger
        when a PDL successor may start: at this kernel's ``start``, after its ``wait`` on its stream's predecessor and
        before it polls, after its last ``stream``, or at its ``end``.
    after
        stages of other streams it waits for (the most recent call of each).
    sends, receives, transport
        exchanges between ranks by name; ``push`` lands in peers' buffers, ``each`` is another push to every peer,
        ``all-to-all`` one with a count behind it, ``pull`` is a barrier and a load, ``library`` an all-reduce in the
        form that libraries choose (``collectives.py``).
    group
        the ranks of an exchange: those of an attention group (``ranks``), or those of them that share a context
        (``dcp``); one of each attention group (``attention_groups``); all of a replica (``expert_ranks``); two stages.
    needs
        what must be so, joined by commas: of the layout (``layout_features``), of the layer, or of the model
        (``FEATURES``).
    formats, of
        formats of the weights that the kernel is built for (empty: those of the release of K3), and the matrix that
        says so where the kernel reads none.
    min_rows, max_rows
        the concurrency for which the kernel is built; beyond it a path falls back to the public kernels.
    """

    stage: str
    operator: str
    shape: Mapping[str, int | str]
    weights: tuple[str, ...] = ()
    stream: str = "main"
    launch: str = "graph"
    trigger: str = "end"
    after: tuple[str, ...] = ()
    sends: str = ""
    receives: tuple[str, ...] = ()
    transport: str = "push"
    group: str = "ranks"
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    needs: str = ""
    formats: tuple[str, ...] = ()
    of: str = ""
    min_rows: int = 1
    max_rows: int = ANY_ROWS

    @property
    def decided_by(self) -> str:
        """The matrix whose format decides whether the kernel is the one; "" for a kernel that any format has."""
        return self.of or (self.weights[0] if self.weights and self.weights[0] != "next layer" else "")

    def accepts(self, stored: str) -> bool:
        """Whether the kernel is built for weights in this format."""
        if not self.decided_by:
            return True
        return stored in (self.formats or ("mxfp4" if self.decided_by.startswith("moe.expert_") else "bf16",))

    def applies(
        self,
        switches: frozenset[str],
        layout: Layout,
        kda_heads: int,
        rows: int,
        *,
        snapshot: bool = False,
        features: frozenset[str] = K3_FEATURES,
    ) -> bool:
        """Whether the row runs under these switches, on this layout, for this many rows, in such a layer and model."""
        true = {
            *layout_features(layout),
            # The public fused KDA kernel is built for 12 heads a rank and more.
            "few kda heads" if kda_heads < 12 else "many kda heads",
            *(("snapshot layer",) if snapshot else ()),
        }
        if self.needs and not all(one in true or one in features for one in self.needs.split(", ")):
            return False
        if not self.min_rows <= rows <= self.max_rows:
            return False
        return switches.issuperset(self.on) and switches.isdisjoint(self.off)


@dataclass(frozen=True, kw_only=True)
class Path:
    """Tables by kind of sublayer (``kda``, ``mla``, ``dense``, ``moe``) and ``start`` and ``head``.

    Those of models with a plain residual have names that begin with ``PLAIN``.
    """

    name: str
    switches: frozenset[str]  # names of what is on: whole switches, and parts of others
    tables: Mapping[str, tuple[Row, ...]]
    next_weights: Mapping[str, tuple[str, ...]]  # mixer -> what a prefetch for the coming layer fetches
    exchange_rows: int = ANY_ROWS  # up to how many rows its own exchanges run; the libraries' beyond
    unpadded_rows: int = 0  # up to how many rows the expert kernels take a slice as it is
    kernel_set: str = "public"
    engine: str = "vllm"  # whose list of kernels it is, where engines differ

    def __hash__(self) -> int:
        """Of what tells paths apart in nearly all cases; tables are compared where that is equal."""
        return hash((self.name, self.switches, self.unpadded_rows, self.kernel_set, self.engine))

    @property
    def switch_names(self) -> tuple[str, ...]:
        """What is on, in the order of the switches."""
        return named(part for name in self.switches for part in parts_of(name))

    def applies(
        self,
        row: Row,
        layout: Layout,
        kda_heads: int,
        rows: int,
        *,
        snapshot: bool = False,
        features: frozenset[str] = K3_FEATURES,
    ) -> bool:
        """Whether a row of the path runs, on this layout, for this many rows, in such a layer and model."""
        switches = switches_at(row.stage, self.switches)
        if rows > self.exchange_rows:
            switches = frozenset(one for one in switches if switch_of(one) != "fused-allreduce")
        return row.applies(switches, layout, kda_heads, rows, snapshot=snapshot, features=features)

    def layout(self, layout: Layout, workload: Workload, pad_experts: bool | None) -> Layout:
        """``layout`` with expert slices padded as asked, or (None) as the path's expert kernels need them.

        The public grouped launches round a rank's slice of 192 up to 256; the dedicated kernel does not.
        """
        rows = -(-workload.concurrency // layout.dp)
        return replace(layout, pad_experts=rows > self.unpadded_rows if pad_experts is None else pad_experts)


#: Parts of switches that have kernels for a plain residual; all others change kernels of attention residuals.
PLAIN_PARTS = frozenset({"sharded-router.sampling", "l2-prefetch.weights"})


def of_plain_residual(path: Path) -> Path:
    """``path`` with the parts of its switches that have kernels for a plain residual."""
    parts = frozenset(part for name in path.switches for part in parts_of(name))
    return replace(path, switches=frozenset(named(parts & PLAIN_PARTS)))


def check_path(path: Path, layout: Layout, *, verifies: bool = False) -> None:
    """UserError for a layout that only the stock path's kernels have: others sum in ways that it has no place for.

    ``verifies``: the step verifies drafts, and makes the next ones.
    """
    if verifies and DRAFT_LAYER not in path.tables:
        raise UserError(
            f"path {path.name} with {path.kernel_set} kernels has none that verify drafts; accepted: --path stock or "
            "fused with --kernels public"
        )
    found = [
        word
        for word, has in (
            ("attention groups", layout.attn_dp > 1),
            ("pipeline stages", layout.pp > 1),
            ("front that is divided without a switch", layout.shard_all and path.kernel_set == "own"),
        )
        if has
    ]
    if found and (path.name != "stock" or path.kernel_set == "own"):
        raise UserError(
            f"path {path.name} with {path.kernel_set} kernels has no {' and no '.join(found)}; accepted: --path stock "
            "with --kernels public"
        )
    parts = path.switches & {"sharded-router.latent", "sharded-router.logits"}
    if layout.shard_all and len(parts) == 1:
        raise UserError(f"shard-all with only {min(parts)}: give the whole switch sharded-router, or neither part")
    if layout.shard_all and layout.dispatch:
        raise UserError("shard-all with expert-exchange dispatch: a rank projects rows that are its own; give one")
