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

from k3sim.model.switches import named, parts_of, switches_at

if TYPE_CHECKING:
    from k3sim.model.layout import Layout, Workload

START, HEAD = "start", "head"
ANY_ROWS = 1 << 30


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
        exchanges between ranks by name; ``push`` lands in peers' buffers, ``pull`` is a barrier and a load,
        ``library`` an all-reduce in the form that libraries choose (``collectives.py``).
    group
        the ranks of an exchange: all of them (``ranks``) or those that share a context (``dcp``).
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
    needs: str = ""  # "dcp" or "no dcp"; "few kda heads" or "many kda heads"; "snapshot layer"
    min_rows: int = 1
    max_rows: int = ANY_ROWS

    def applies(
        self, switches: frozenset[str], layout: Layout, kda_heads: int, rows: int, *, snapshot: bool = False
    ) -> bool:
        """Whether the row runs under these switches, on this layout, for this many rows, in such a layer."""
        condition = {
            "": True,
            "dcp": layout.dcp > 1,
            "no dcp": layout.dcp == 1,
            # The public fused KDA kernel is built for 12 heads a rank and more.
            "few kda heads": kda_heads < 12,
            "many kda heads": kda_heads >= 12,
            "snapshot layer": snapshot,
        }[self.needs]
        condition = condition and self.min_rows <= rows <= self.max_rows
        return condition and switches.issuperset(self.on) and switches.isdisjoint(self.off)


@dataclass(frozen=True, kw_only=True)
class Path:
    """Tables by kind of sublayer (``kda``, ``mla``, ``dense``, ``moe``) and ``start`` and ``head``."""

    name: str
    switches: frozenset[str]  # names of what is on: whole switches, and parts of others
    tables: Mapping[str, tuple[Row, ...]]
    next_weights: Mapping[str, tuple[str, ...]]  # mixer -> what a prefetch for the coming layer fetches
    unpadded_rows: int = 0  # up to how many rows the expert kernels take a slice as it is
    kernel_set: str = "public"

    def __hash__(self) -> int:
        """Of what tells paths apart in nearly all cases; tables are compared where that is equal."""
        return hash((self.name, self.switches, self.unpadded_rows, self.kernel_set))

    @property
    def switch_names(self) -> tuple[str, ...]:
        """What is on, in the order of the switches."""
        return named(part for name in self.switches for part in parts_of(name))

    def applies(self, row: Row, layout: Layout, kda_heads: int, rows: int, *, snapshot: bool = False) -> bool:
        """Whether a row of the path runs, on this layout, for this many rows, in such a layer."""
        switches = switches_at(row.stage, self.switches)
        return row.applies(switches, layout, kda_heads, rows, snapshot=snapshot)

    def layout(self, layout: Layout, workload: Workload, pad_experts: bool | None) -> Layout:
        """``layout`` with expert slices padded as asked, or (None) as the path's expert kernels need them.

        The public grouped launches round a rank's slice of 192 up to 256; the dedicated kernel does not.
        """
        rows = -(-workload.concurrency // layout.dp)
        return replace(layout, pad_experts=rows > self.unpadded_rows if pad_experts is None else pad_experts)
