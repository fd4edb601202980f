"""``k3sim machines``: the machine profiles, and where their values come from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json
from k3sim.errors import UserError

if TYPE_CHECKING:
    from k3sim.sim.machine import Machine

EXAMPLE = "k3sim machines gb300"


def machines(
    name: Annotated[
        str | None, typer.Argument(help="Profile to show in full: a name or a JSON file. Or 'new', to write one.")
    ] = None,
    new_name: Annotated[str | None, typer.Argument(metavar="[NEW-NAME]", help="With 'new': its name.")] = None,
    like: Annotated[str | None, typer.Option(help="With 'new': the shipped profile that it resembles.")] = None,
    set_values: Annotated[
        list[str] | None, typer.Option("--set", help="With 'new': VALUE=NUMBER that differs (repeatable).")
    ] = None,
    out: Annotated[str, typer.Option(help="With 'new': folder for the file.")] = ".",
    json_output: Json = False,
) -> None:
    """List the GPUs that are known, or every value of one; 'new' writes a profile of your own.

    A value stands with its unit, kind, interval and source.

    k3sim machines new h20 --like h200 --set num_sms=78
    """
    if name == "new":
        file = write_new(new_name, like, set_values or [], out)
        document = {"file": str(file), "machine": machine_document(file)}
        if json_output:
            output.print_json(output.versioned(document))
        else:
            terminal.console().print(f"wrote {file}; use it with --machine {file}", soft_wrap=True)
        return
    for option, given in (("a second name", new_name), ("--like", like), ("--set", set_values)):
        if given:
            raise UserError(f"{option}: only with 'k3sim machines new NAME --like PROFILE --set VALUE=NUMBER'")
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


def machine_document(file: Path) -> dict[str, object]:
    """A profile's file as ``machines --json`` has each."""
    from k3sim.sim.machine import describe
    from k3sim.sim.profile import load_machine

    one = load_machine(str(file))
    return {"name": one.name, "title": one.title, "values": describe(one)}


def write_new(name: str | None, like: str | None, settings: Sequence[str], out: str) -> Path:
    """Write ``NAME.json`` with the values that differ from ``like``.

    Raises UserError that says every fault of the command, and for a file that is there already; nothing is written.
    """
    from k3sim.sim.export.whole_file import check_folder, write_whole_file
    from k3sim.sim.machine import PROFILE_FIELDS
    from k3sim.sim.profile import machine_names, machine_of
    from k3sim.sim.profile_like import stated
    from k3sim.sim.profile_rules import SCHEMA_VERSION

    faults = []
    if name is None or not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", name, re.ASCII) or name.lower().endswith(".json"):
        faults.append(f"name {name!r}; accepted: letters, digits and ._+- without an ending" if name else "no name")
    elif name.lower() in machine_names():
        faults.append(f"name {name!r} is that of a shipped profile; accepted: another")
    if like is None or like.lower() not in machine_names():
        faults.append(f"--like is {like!r}; accepted: {', '.join(machine_names())}")
    today = date.today().strftime("%Y-%m")
    values: dict[str, Any] = {}
    for setting in settings:
        field, separator, text = setting.partition("=")
        if field not in PROFILE_FIELDS:
            near = get_close_matches(field[:60], PROFILE_FIELDS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else "see 'k3sim machines b200'"
            faults.append(f"--set {field[:60]!r} is no value of a profile; {hint}")
        elif field in values:
            faults.append(f"--set {field} stands twice; accepted: once")
        elif not separator:
            faults.append(f"--set {field} has no value; accepted: {field}=NUMBER")
        else:
            try:
                values[field] = stated(json.loads(text), PROFILE_FIELDS[field].metadata["unit"], today)
            except ValueError:
                faults.append(f"--set {field} is {text[:60]!r}; accepted: a number, or true or false for a switch")
                continue
            if PROFILE_FIELDS[field].type == "Curve":
                values[field] = {"value": values[field]["value"], "date": today}
    profile = {"schema_version": SCHEMA_VERSION, "name": name, "title": name, "like": like, "values": values}
    try:
        known = profile if like and like.lower() in machine_names() else {**profile, "like": machine_names()[0]}
        machine_of({**known, "name": name or "x", "title": name or "x"}, "--set")
    except UserError as error:
        faults.append(str(error))
    if faults:
        raise UserError("; ".join(faults))
    folder = Path(out)
    check_folder(folder)
    file = folder / f"{name}.json"
    if file.exists():
        raise UserError(f"{file} is there already; give another name, or --out another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole_file(file, (json.dumps(profile, indent=1) + "\n").encode())
    return file


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
