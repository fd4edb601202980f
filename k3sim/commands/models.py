"""``k3sim models``: the models that are shipped, and what a model of the user's is read as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json

if TYPE_CHECKING:
    from k3sim.model.architecture import Architecture

EXAMPLE = "k3sim models"


def models(
    name: Annotated[str | None, typer.Argument(help="Model to show: a name, a config.json, or its folder.")] = None,
    json_output: Json = False,
) -> None:
    """List the models that --model takes by name, or say what one is read as.

    Layers, parameters, bytes of the checkpoint, and the format of each matrix that is not in bf16.
    """
    from k3sim.model.config_file import load_architecture, shipped_models

    loaded = [load_architecture(one) for one in (shipped_models() if name is None else (name,))]
    rows = [described(one) for one in loaded]
    if json_output:
        output.print_json(output.versioned({"models": rows}))
        return
    table = terminal.table("model", "layers", "mixers", "experts", "parameters", "active", "checkpoint GB", "formats")
    for row in rows:
        table.add_row(
            row["name"], str(row["num_layers"]), row["mixers"],
            f"{row['top_k']} of {row['num_experts']}" if row["num_experts"] else "none",
            f"{row['num_parameters'] / 1e9:,.1f} B", f"{row['num_active_parameters'] / 1e9:,.1f} B",
            f"{row['checkpoint_bytes'] / 1e9:,.1f}", row["formats_shown"],
        )  # fmt: skip
    terminal.print_table(table)
    if name is not None:
        output.warn(list(loaded[0].notes))


def described(architecture: Architecture) -> dict[str, Any]:
    """What a model is, as an entry of JSON."""
    from k3sim.model.checkpoint import active_parameters, total_bytes, total_parameters
    from k3sim.model.config_quantisation import MODULES

    moe = architecture.moe
    mixers = {
        "KDA": len(architecture.kda_layers), "MLA": len(architecture.mla_layers), "GQA": len(architecture.gqa_layers)
    }  # fmt: skip
    there = architecture.tables
    formats = {
        part: architecture.weight_format(part).name
        for part, (kind, _) in MODULES.items()
        if not kind or kind in there
    }
    shown = sorted({one for one in formats.values() if one != "bf16"})
    return {
        "name": architecture.name,
        "num_layers": architecture.num_layers,
        "mixers": " + ".join(f"{count} {kind}" for kind, count in mixers.items() if count),
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "num_parameters": total_parameters(architecture),
        "num_active_parameters": active_parameters(architecture),
        "checkpoint_bytes": total_bytes(architecture),
        "formats": formats,
        "formats_shown": ", ".join(shown) or "bf16",
        "notes": list(architecture.notes),
    }
