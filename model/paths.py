"""Execution paths as data: for each kind of layer the kernels, their stream, what they wait for, what they read.

A path is a set of tables of ``Row``; a row applies when the switches it needs are on and those that replace it
are off, so ``stock`` is the ``fused`` path with every switch off, and one table shows what each switch changes.
No row holds a duration: ``operator`` names a cost function under ``kernels`` and ``shape`` its arguments, where
a string is the name of a dimension (see ``program.dimensions``).

Sources of the sequences: vLLM's K3 model of autumn 2026 for ``stock`` (vllm/models/kimi_k3/nvidia), and for the
switches the public low-latency builds (vLLM 53525, 53526, 53152, 54168; SGLang 32624, 36304; TokenSpeed 957,
1154; the "k3opt" plugin for 16 GB200).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from k3sim.errors import UserError

if TYPE_CHECKING:
    from k3sim.model.layout import Layout, Workload

SWITCHES = ("size-matched", "welded", "shared-routing", "prefetch")
PATH_NAMES = ("stock", "fused", "persistent")
# Whose kernels a path runs: the public ones that its sources describe, or those that this project ships.
KERNEL_SETS = ("public", "own")

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
        exchanges between ranks by name; ``push`` lands in peers' buffers, ``pull`` is a barrier and a load.
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
    switches: frozenset[str]
    tables: Mapping[str, tuple[Row, ...]]
    next_weights: Mapping[str, tuple[str, ...]]  # mixer -> what a prefetch for the coming layer fetches
    unpadded_rows: int = 0  # up to how many rows the expert kernels take a slice as it is
    switch_order: tuple[str, ...] = field(default=SWITCHES)
    kernel_set: str = "public"

    def layout(self, layout: Layout, workload: Workload, pad_experts: bool | None) -> Layout:
        """``layout`` with expert slices padded as asked, or (None) as the path's expert kernels need them.

        The public grouped launches round a rank's slice of 192 up to 256; the dedicated kernel does not.
        """
        rows = -(-workload.concurrency // layout.dp)
        return replace(layout, pad_experts=rows > self.unpadded_rows if pad_experts is None else pad_experts)


def find_path(
    name: str,
    *,
    with_switches: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    kernel_set: str = "public",
) -> Path:
    """The path ``name``; ``fused`` has all four switches unless some are named.

    ``with_switches`` alone starts from none and adds; ``without`` takes away from all four. ``kernel_set``: the
    public kernels of that path, or this project's own.

    Raises UserError for an unknown path, switch or kernel set, a switch both named and taken away, switches on a path
    that has none, and the persistent path with own kernels, which do not exist.
    """
    from k3sim.model.own_rows import OWN_TABLES
    from k3sim.model.path_rows import BLOCK_ROWS, FUSED_NEXT_WEIGHTS, FUSED_TABLES, PERSISTENT_TABLES

    for switch in (*with_switches, *without):
        if switch not in SWITCHES:
            raise UserError(f"unknown switch {switch!r}{nearest(switch, SWITCHES)}; accepted: {', '.join(SWITCHES)}")
    both = sorted(set(with_switches) & set(without))
    if both:
        raise UserError(f"switch {both[0]!r} is given to both --with and --without; give it to one of them")
    if name not in PATH_NAMES:
        raise UserError(f"unknown path {name!r}{nearest(name, PATH_NAMES)}; accepted: {', '.join(PATH_NAMES)}")
    if name != "fused" and (with_switches or without):
        raise UserError(f"--with and --without change the path 'fused'; path {name!r} has no switches")
    if kernel_set not in KERNEL_SETS:
        raise UserError(
            f"unknown kernels {kernel_set!r}{nearest(kernel_set, KERNEL_SETS)}; accepted: {', '.join(KERNEL_SETS)}"
        )
    if name == "persistent" and kernel_set == "own":
        raise UserError("path 'persistent' has no kernels of the project's own; give it with --kernels public")
    if name == "persistent":
        return Path(
            name=name,
            switches=frozenset(SWITCHES),
            tables=PERSISTENT_TABLES,
            next_weights=FUSED_NEXT_WEIGHTS,
            unpadded_rows=ANY_ROWS,
        )
    chosen: frozenset[str] = frozenset()
    if name == "fused":
        chosen = frozenset(with_switches) if with_switches else frozenset(SWITCHES) - frozenset(without)
    if kernel_set == "own":
        return Path(
            name=name,
            switches=chosen,
            tables=OWN_TABLES,
            next_weights=FUSED_NEXT_WEIGHTS,
            unpadded_rows=ANY_ROWS,
            kernel_set=kernel_set,
        )
    return Path(
        name=name,
        switches=chosen,
        tables=FUSED_TABLES,
        next_weights=FUSED_NEXT_WEIGHTS,
        unpadded_rows=BLOCK_ROWS if "size-matched" in chosen else 0,
    )


def nearest(given: str, accepted: tuple[str, ...] | list[str]) -> str:
    """`` (did you mean ...?)`` for a close name, else nothing."""
    from difflib import get_close_matches

    close = get_close_matches(given.lower(), [name.lower() for name in accepted], n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
