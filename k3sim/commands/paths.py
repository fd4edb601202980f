"""``k3sim paths``: the execution paths with their switches, and one path as the table of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json, takes_options
from k3sim.sim.options import Options
from k3sim.sim.question import ask

if TYPE_CHECKING:
    from k3sim.model.step import Row
    from k3sim.sim.question import Question

EXAMPLE = "k3sim paths fused --concurrency 4"

#: Tables of a path: what they are of, and what their first kernel on the main stream follows.
KINDS = {
    "start": ("before the layers", ""),
    "kda": ("mixer of a KDA layer", "the layer before"),
    "mla": ("mixer of an MLA layer", "the layer before"),
    "gqa": ("mixer of a grouped-query attention layer", "the layer before"),
    "dense": ("FFN of a dense layer", "the mixer"),
    "moe": ("FFN of an MoE layer", "the mixer"),
    "stage end": ("from one pipeline stage to the next", "the FFN"),
    "head": ("after the layers", "the last layer"),
}


@partial(takes_options, leave_out=("path",))
def paths(
    options: Options,
    name: Annotated[
        str | None, typer.Argument(help="Path to show kernel by kernel: stock, fused or megakernel.")
    ] = None,
    json_output: Json = False,
) -> None:
    """See which kernels a path runs and what each switch changes.

    Without a name: every path, and the switches of the fused one with their parts, which --with and --without take.
    With one: its kernels in order, with stream, launch, what each waits for and reads, and the switch that brings it.
    """
    if name is None:
        document = overview()
        output.print_json(output.versioned(document)) if json_output else print_overview(document)
        return
    document = table_of(ask(replace(options, path=name)))
    output.print_json(output.versioned(document)) if json_output else print_path(document)


def overview() -> dict[str, Any]:
    """Paths, switches and parts, each with what it is."""
    from k3sim.model.paths import PARTS, PATH_MEANINGS, SWITCHES
    from k3sim.model.switches import MEANINGS, parts_of

    return {
        "paths": [{"path": name, "meaning": meaning} for name, meaning in PATH_MEANINGS.items()],
        "switches": [
            {
                "switch": switch,
                "meaning": MEANINGS[switch],
                "parts": [
                    {"part": part, "meaning": MEANINGS[part], "stages": list(PARTS[part])}
                    for part in PARTS
                    if part in parts_of(switch)
                ],
            }
            for switch in SWITCHES
        ],
    }


def table_of(question: Question) -> dict[str, Any]:
    """The kernels that a question's path runs on its layout for its rows, by kind of layer and in order."""
    from k3sim.model.matrices import held_as, rank_matrices
    from k3sim.model.program import rows_of
    from k3sim.model.switches import parts_at
    from k3sim.sim.predict import collectives_of

    path, workload = question.path, question.workload
    layout = path.layout(question.layout, workload, question.pad_experts)
    collectives = collectives_of(question.machine, question.all_reduce)

    def running_rows(kind: str, *, snapshot: bool) -> list[Row]:
        return rows_of(
            question.architecture, layout, workload, path, kind, collectives=collectives, snapshot=snapshot
        )

    tables = {*question.architecture.tables, *(["stage end"] if layout.pp > 1 else [])}
    running = {kind: running_rows(kind, snapshot=True) for kind in KINDS if kind in tables}
    everywhere = {kind: running_rows(kind, snapshot=False) for kind in running}
    matrices = rank_matrices(question.architecture, layout)
    stages = {row.stage for table in running.values() for row in table}
    kinds: dict[str, list[dict[str, Any]]] = {}
    for kind, table in running.items():
        before: dict[str, str] = {}  # stream -> its latest stage
        kinds[kind] = []
        for row in table:
            kinds[kind].append(
                {
                    "stage": row.stage,
                    "operator": row.operator,
                    "stream": row.stream,
                    "launch": row.launch,
                    "predecessor": before.get(row.stream),
                    "after": [stage for stage in row.after if stage in stages],
                    "receives": list(row.receives),
                    "sends": row.sends,
                    "reads": list(row.weights),
                    "held": [held_as(matrices[name], layout) for name in row.weights if name in matrices],
                    "brought_by": list(parts_at(row.stage, row.on)),
                    "replaced_by": list(parts_at(row.stage, row.off)),
                    "snapshot_layers_only": row not in everywhere[kind],
                }
            )
            before[row.stream] = row.stage
    return {
        "path": path.name,
        "kernels": path.kernel_set,
        "switches": list(path.switch_names),
        "layout": layout.tag,
        "num_gpus": layout.num_gpus,
        "concurrency": workload.concurrency,
        "kinds": kinds,
    }


def print_overview(document: Mapping[str, Any]) -> None:
    """A line a path, a switch and a part."""
    console = terminal.console()
    found = terminal.table("path", "what it is", left=2, folded=(1,))
    for one in document["paths"]:
        found.add_row(one["path"], one["meaning"])
    terminal.print_table(found)
    console.print()
    found = terminal.table("switch or part of fused", "what it changes", left=2, folded=(1,))
    for switch in document["switches"]:
        found.add_row(switch["switch"], switch["meaning"])
        for part in switch["parts"]:
            found.add_row(f"  {part['part']}", part["meaning"])
    terminal.print_table(found)
    console.print("\n--with and --without take both names; 'k3sim paths fused' shows the kernels.")


def print_path(document: Mapping[str, Any]) -> None:
    """A table for each kind of layer, in the order of the step."""
    console = terminal.console()
    switches = ", ".join(document["switches"]) or "none"
    console.print(
        f"{document['path']} with {document['kernels']} kernels, {document['layout']} on "
        f"{terminal.num_gpus(document['num_gpus'])}, concurrency "
        f"{document['concurrency']}; switches: {switches}",
        soft_wrap=True,
    )
    replaced = any(row["replaced_by"] for rows in document["kinds"].values() for row in rows)
    columns = [
        "operator", "stream", "launch", "waits for", "reads", "of which a rank holds", "brought by",
        *(["replaced by"] * replaced),
    ]  # fmt: skip
    for kind, rows in document["kinds"].items():
        what, follows = KINDS[kind]
        found = terminal.table(f"{kind}: {what}", *columns, left=9, folded=(4, 5, 6, 7, 8))
        for row in rows:
            cells = [
                row["stage"],
                row["operator"],
                row["stream"],
                row["launch"],
                ", ".join(_waits_for(row, follows)),
                ", ".join(row["reads"]),
                ", ".join(dict.fromkeys(row["held"])),
                " + ".join(row["brought_by"]) + (" (snapshot layers)" if row["snapshot_layers_only"] else ""),
                *([" or ".join(row["replaced_by"])] * replaced),
            ]
            found.add_row(*cells)
        console.print()
        terminal.print_table(found)


def _waits_for(row: Mapping[str, Any], follows: str) -> list[str]:
    """The kernel before it on its stream, those of other streams, and what its peers send."""
    first = follows if row["stream"] == "main" else ""
    own = [row["predecessor"] or first]
    return [*filter(None, own), *row["after"], *(f"exchange {name}" for name in row["receives"])]
