"""``k3sim machines``: the machine profiles, and where their values come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output
from k3sim.commands.options import Json

if TYPE_CHECKING:
    from k3sim.sim.machine import Machine

EXAMPLE = "k3sim machines gb300"


def machines(
    name: Annotated[str | None, typer.Argument(help="Profile to show in full: a name or a JSON file.")] = None,
    json_output: Json = False,
) -> None:
    """List the GPUs that are known, or every value of one.

    A value stands with its unit, kind, interval and source.
    """
    from k3sim.sim.machine import describe
    from k3sim.sim.profile import load_machine, machine_names

    names = machine_names() if name is None else [name]
    loaded = [load_machine(one) for one in names]
    if json_output:
        profiles = [{"name": one.name, "title": one.title, "values": describe(one)} for one in loaded]
        output.print_json(output.versioned({"machines": profiles}))
    elif name is None:
        print_machines(loaded)
    else:
        print_machine(loaded[0])


def print_machines(machines: Sequence[Machine]) -> None:
    """One line a profile."""
    table = output.table("name", "title", "SMs", "HBM GB", "HBM TB/s", "L2 MB", "NVLink GB/s", "domain", left=2)
    for machine in machines:
        table.add_row(
            machine.name,
            machine.title,
            str(machine.num_sms),
            f"{machine.hbm_capacity_bytes / 1e9:.0f}",
            f"{machine.hbm_read_bytes_per_s / 1e12:.2f}",
            f"{machine.l2_capacity_bytes / 1e6:.0f}",
            f"{machine.nvlink_egress_bytes_per_s / 1e9:.0f}",
            str(machine.nvlink_domain_gpus),
        )
    output.console().print(table)


def print_machine(machine: Machine) -> None:
    """Every value of a profile with where it comes from."""
    from k3sim.sim.machine import describe

    console = output.console()
    console.print(machine.title)
    for row in describe(machine):
        value = row["value"]
        shown = f"{len(value)} points" if isinstance(value, (list, tuple)) else f"{value:g}" if isinstance(
            value, float
        ) else str(value)
        console.print(f"\n{row['field']} = {shown} {row['unit']}  ({row['kind']}, {row['low']:g} to {row['high']:g})")
        console.print(f"    {row['source']}", soft_wrap=True)
