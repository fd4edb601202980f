"""``k3sim calibrate``: a machine profile from probes, and stored measurements beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Jobs, Json, Out, writable_folder
from k3sim.commands.progress import progress
from k3sim.errors import UserError
from k3sim.sim.export.whole_file import whole_file, whole_folder, write_whole_file
from k3sim.sim.quantities import in_one_unit

if TYPE_CHECKING:
    from k3sim.calibrate.compare.case import ComparedCase

MOST_SKIPPED = 5  # kernels without a prediction that are named; the JSON has all of them
EXAMPLE = "k3sim calibrate --from h200 --machine-out my-h200.json"


def calibrate(
    samples: Annotated[
        str | None,
        typer.Option("--from", help="Refit a sample file, or the stored samples of a machine (h200), on any computer."),
    ] = None,
    machine_out: Annotated[str | None, typer.Option(help="File for the machine profile, ending in .json.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Profile for what no sample gives; by default that of the samples' GPU.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Every stored measurement beside its prediction, instead of a fit.")
    ] = False,
    steps: Annotated[
        list[str] | None,
        typer.Option("--steps", help="With --check, instead: steps that 'k3sim decode --table' wrote (repeatable)."),
    ] = None,
    kernels: Annotated[
        list[str] | None,
        typer.Option("--kernels", help="Likewise times that 'k3sim kernels bench' wrote (repeatable)."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Profile of --check (a name or a JSON file), by default h200, with --steps and --kernels that of the "
            "GPU of each row; or of --tables (a name)."
        ),
    ] = None,
    draws: Annotated[int, typer.Option(help="Machines that --check draws for its intervals.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of bootstrap and draws.")] = 0,
    samples_out: Annotated[
        str | None, typer.Option(help="File for what is measured here; by default <gpu>-primitives.json.")
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option("--tables", help="Instead: fit --machine to public kernel tables in CSV (repeatable)."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A tenth of the replays, to see that all probes run.")] = False,
    jobs: Jobs = None,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Fit a machine profile to this GPU or to stored samples.

    Without --from and --check the probes run on the GPU at hand; a run that was stopped resumes. --check shows how far
    predictions are from every stored measurement, or from your own steps and kernels.
    """
    if (steps or kernels) and not check:
        raise UserError("--steps and --kernels are held against predictions: give them with --check")
    if tables:
        if check or samples is not None:
            raise UserError("--tables fits public tables: give it without --check and --from")
        _fit_tables(tables, machine or "h200", machine_out, json_output)
        return
    if check and (samples is not None or machine_out is not None):
        raise UserError("--check fits nothing: give it --machine, or --from and --machine-out without it")
    if check:
        given = ([Path(one) for one in steps or ()], [Path(one) for one in kernels or ()])
        document = _check(machine, given, draws, seed, jobs, out)
    else:
        document = _fit(samples, samples_out, quick, base, machine_out, seed, out)
    if json_output:
        output.print_json(document)
    elif check:
        print_check(document)
    else:
        print_calibration(document)


def _check(
    machine: str | None, given: tuple[list[Path], list[Path]], draws: int, seed: int, jobs: int | None, out: str
) -> dict[str, Any]:
    """Stored measurements, or those of the files of steps and of kernels that are given, beside their predictions.

    Returns the document that is printed; the page is written.
    """
    from k3sim.calibrate.compare.calibration_page import write_calibration_page
    from k3sim.calibrate.compare.check import STORED, check
    from k3sim.calibrate.compare.given_files import Given, check_given, read_given
    from k3sim.calibrate.fit.calibration import check_document
    from k3sim.sim.profile import load_machine

    files = read_given(*given, load_machine(machine) if machine else None) if any(given) else Given()
    machines = files.machines or [load_machine(machine or STORED)]
    folder = writable_folder(out)
    with progress("predicting measurements") as told:

        def say(one: ComparedCase) -> None:
            told.say(f"{one.label}: {one.predicted:,.2f} us for {one.measured:,.2f}, {100 * one.error:+.1f} %")

        if files.rows:
            cases = check_given(files, num_draws=draws, seed=seed, jobs=jobs, on_done=told, on_case=say)
        else:
            cases = check(machines[0], num_draws=draws, seed=seed, jobs=jobs, on_done=told, on_case=say)
    document = check_document(machines, cases, draws, seed, files.skipped)
    with whole_folder(folder) as inside:
        write_calibration_page(inside / "calibration-check.html", check=document)
    return {**document, "files": {"html": str(folder / "calibration-check.html")}}


def _fit(
    samples: str | None,
    samples_out: str | None,
    quick: bool,
    base: str | None,
    machine_out: str | None,
    seed: int,
    out: str,
) -> dict[str, Any]:
    """A fit of samples, measured here where none are given, as the document that is printed; the page is written."""
    from k3sim.calibrate.compare.calibration_page import write_calibration_page
    from k3sim.calibrate.compare.check import shipped_samples
    from k3sim.calibrate.fit import calibration

    if samples is None:
        target = Path(samples_out) if samples_out else None
        with progress("measuring") as told:
            path = calibration.measure(target, quick=quick, on_case=told.counted())
    else:
        path = Path(samples) if samples.lower().endswith(".json") else shipped_samples(samples.lower())
    folder, target = writable_folder(out), Path(machine_out) if machine_out else None
    with progress("fitting"):
        document, profile = calibration.fitted(path, base=base, machine_out=target, seed=seed)
    # The profile comes last: there is none without its page.
    with nullcontext() if target is None else whole_file(target) as partial:
        if partial is not None:
            partial.write_bytes(profile)
        with whole_folder(folder) as inside:
            write_calibration_page(inside / "calibration.html", fit=document)
    return {**document, "files": {"html": str(folder / "calibration.html")}}


def _fit_tables(tables: Sequence[str], machine: str, machine_out: str | None, json_output: bool) -> None:
    from k3sim.calibrate.fit.fit import require_scipy
    from k3sim.calibrate.fit.kernel_tables import fit_tables, profile_of, read_tables
    from k3sim.calibrate.fit.profile_text import profile_text
    from k3sim.sim.profile import load_machine, machine_names, machine_of

    require_scipy()
    if machine not in machine_names():
        raise UserError(f"machine is {machine!r}; accepted with --tables: {', '.join(machine_names())}")
    target = Path(machine_out) if machine_out else None
    if target is not None and target.suffix.lower() != ".json":
        raise UserError(f"machine-out is {machine_out!r}; accepted: a path that ends in .json")
    rows, skipped = read_tables([Path(one) for one in tables], [machine])
    with progress("fitting"):
        found = fit_tables(load_machine(machine), rows)
    if target is not None:
        profile = profile_of(found, target.stem, ", ".join(Path(one).name for one in tables))
        machine_of(profile, "the profile fitted from tables")
        write_whole_file(target, profile_text(profile).encode())
    document = output.versioned(
        {**found.to_dict(), "skipped": skipped, "profile": str(target) if target else None}
    )
    if json_output:
        output.print_json(document)
    else:
        print_table_fit(document)


def print_calibration(document: Mapping[str, Any]) -> None:
    """Fitted values with intervals, what kernels say of others, what is not determined."""
    console = terminal.console()
    console.print(
        f"{document['gpu']}, {document['date']}: {document['num_samples']} samples, {len(document['refused'])} refused "
        f"as unstable; base profile {document['base']}",
        soft_wrap=True,
    )
    console.print()
    table = terminal.table("value", "fitted", "low", "high", "unit", "how", "worst case left out")
    for one in document["values"]:
        left_out = one["left_out_error"]
        if isinstance(one["value"], list):
            shown = ["curve", f"{one['low']:.4g}", f"{one['high']:.4g}", "factor"]
        else:
            shown = in_one_unit([one[key] for key in ("value", "low", "high")], one["unit"])
        table.add_row(
            one["field"],
            *shown,
            one["how"],
            "" if left_out is None else f"{100 * left_out:.1f} %",
        )
    terminal.print_table(table)
    found = [one for group in document["from_kernels"] for one in group["found"]]
    if found:
        columns = ("fitted", "low", "high", "in the profile", "unit", "verdict")
        kernels = terminal.table("from kernels, not put into the profile", *columns)
        for one in found:
            verdict = "determined" if one["determined"] else one["reason"]
            kernels.add_row(one["field"], *_found_row(one), verdict)
        console.print()
        terminal.print_table(kernels)
    reasons: dict[str, list[str]] = {}
    for name, reason in document["undetermined"].items():
        reasons.setdefault(reason, []).append(name)
    console.print()
    for reason, names in reasons.items():
        console.print(f"not determined, {reason}: {', '.join(names)}", soft_wrap=True)
    files = {"profile": document["profile"]} if document["profile"] else {}
    output.print_files({**files, **document["files"]})


def _found_row(one: Mapping[str, Any]) -> list[str]:
    """Value, both ends, what the profile has, and the unit of all four."""
    from k3sim.sim.machine import PROFILE_FIELDS

    metadata = PROFILE_FIELDS[one["field"]].metadata if one["field"] in PROFILE_FIELDS else {}
    return in_one_unit([one[key] for key in ("value", "low", "high", "profile_value")], metadata.get("unit", "1"))


def print_table_fit(document: Mapping[str, Any]) -> None:
    """Values fitted from public tables, and the errors of fitted and held-out rows by group."""
    console = terminal.console()
    values = terminal.table("field", "value", "low", "high", "before", "unit", "verdict")
    for one in document["found"]:
        values.add_row(one["field"], *_found_row(one), one["reason"] or "determined")
    terminal.print_table(values)
    console.print()
    errors = terminal.table("rows of", "held out", "rows", "median error", "95th percentile", "mean")
    for one in document["errors"]:
        errors.add_row(
            one["group"],
            "yes" if one["held_out"] else "no",
            str(one["rows"]),
            f"{100 * one['median']:.1f} %",
            f"{100 * one['p95']:.1f} %",
            f"{100 * one['mean_signed']:+.1f} %",
        )
    terminal.print_table(errors)
    for reason, count in document["skipped"].items():
        console.print(f"{count} rows left out: {reason}")
    if document["profile"]:
        console.print(f"wrote {document['profile']}")


def print_check(document: Mapping[str, Any]) -> None:
    """Kernels and steps with interval and error, then by family, and totals. Probes are in the JSON and on the page."""
    console = terminal.console()
    several = "," in document["machine"]
    heads = ("kind", "case", *(("profile",) if several else ()))
    columns = ("measured us", "predicted us", "error", "interval us", "inside")
    table = terminal.table(*heads, *columns, left=len(heads))
    for one in document["cases"]:
        if one["kind"] != "probe":
            table.add_row(
                one["kind"],
                one["label"],
                *((one["hardware"],) if several else ()),
                f"{one['measured']:,.2f}",
                f"{one['predicted']:,.2f}",
                f"{100 * one['error']:+.1f} %",
                f"{one['low']:,.2f} to {one['high']:,.2f}",
                "yes" if one["inside_interval"] else "no",
            )
    terminal.print_table(table)
    console.print()
    families = terminal.table("kind", "family", "cases", "median", "mean", "worst", "inside", "worst case", left=2)
    for one in document["families"]:
        families.add_row(
            one["kind"],
            one["family"],
            str(one["cases"]),
            f"{100 * one['median_error']:.1f} %",
            f"{100 * one['mean_signed_error']:+.1f} %",
            f"{100 * one['worst_error']:+.1f} %",
            f"{100 * one['inside_interval']:.0f} %",
            one["worst"],
        )
    terminal.print_table(families)
    console.print()
    for kind, one in document["summary"].items():
        console.print(
            f"{one['cases']} {kind}s, none in a fit: median error {100 * one['median_error']:.1f} %, mean "
            f"{100 * one['mean_signed_error']:+.1f} %, 95th percentile {100 * one['p95_error']:.1f} %, worst "
            f"{100 * one['worst_error']:.1f} %; {100 * one['inside_interval']:.0f} % inside their 90 % interval",
            soft_wrap=True,
        )
    if document["skipped"]:
        count, shown = len(document["skipped"]), "; ".join(document["skipped"][:MOST_SKIPPED])
        more = f"; and {count - MOST_SKIPPED} more" if count > MOST_SKIPPED else ""
        console.print(f"{count} kernels are not predicted, for want of a cost: {shown}{more}", soft_wrap=True)
    output.print_files(document["files"])
