"""``k3sim machines``: the machine profiles, and where their values come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output, terminal
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
    table = terminal.table("name", "title", "SMs", "HBM GiB", "HBM TB/s", "L2 MiB", "NVLink GB/s", "domain", left=2)
    for machine in machines:
        table.add_row(
            machine.name,
            machine.title,
            str(machine.num_sms),
            f"{machine.hbm_capacity_bytes / 2**30:.0f}",
            f"{machine.hbm_read_bytes_per_s / 1e12:.2f}",
            f"{machine.l2_effective_bytes / 2**20:.0f}",
            f"{machine.nvlink_egress_bytes_per_s / 1e9:.0f}",
            str(machine.nvlink_domain_gpus),
        )
    terminal.print_table(table)


def print_machine(machine: Machine) -> None:
    """Every value of a profile with where it comes from."""
    from k3sim.sim.machine import PROFILE_FIELDS
    from k3sim.sim.quantities import quantity, quantity_range

    console = terminal.console()
    console.print(machine.title)
    for field, origin in machine.provenance.items():
        value, unit = getattr(machine, field), PROFILE_FIELDS[field].metadata["unit"]
        if isinstance(value, tuple):
            bytes_per_sm, rate = value[-1]
            shown = (
                f"{len(value)} points up to {quantity(rate, 'B/s')} from {quantity(bytes_per_sm, 'B')} an SM in flight"
            )
            between = f"x {quantity_range(origin.low, origin.high, '1')}"
        else:
            shown = quantity(value, unit, like=value or origin.high)
            between = quantity_range(origin.low, origin.high, unit, like=value or origin.high)
        exact = isinstance(value, bool) or origin.low == origin.high
        console.print(f"\n{field}: {shown}  ({origin.kind}{'' if exact else f', {between}'})")
        console.print(f"    {origin.source}", soft_wrap=True)
