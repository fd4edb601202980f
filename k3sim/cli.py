"""The command line.

Exit status: 0 ok, 1 a kernel that fails its check, 2 bad input (one line on standard error), 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from k3sim.errors import UserError
from k3sim.sim.question import OPTIONS, Option, Options, ask, read_side

app = typer.Typer(
    name="k3sim",
    help="Predict where a Kimi K3 decode step waits, and what would remove it.",
    epilog="Example: k3sim timeline --concurrency 1",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)



def _annotated(word: str, option: Option) -> Any:
    """The annotation from which the command-line library makes one of the shared options."""
    kind: Any = list[str] if option.kind is tuple else option.kind
    kind = kind if option.default not in (None, ()) else kind | None
    flags = f"--{word}/--no-{word}" if option.kind is bool else f"--{word}"
    return Annotated[kind, typer.Option(flags, help=option.help)]


# What every prediction takes, by the names of ``Options``, whose defaults are theirs.
SHARED_OPTIONS: dict[str, Any] = {option.name: _annotated(word, option) for word, option in OPTIONS.items()}

Out = Annotated[str, typer.Option(help="Folder for the files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options on the command line; it gets them as one ``Options``."""
    hints = get_type_hints(command, include_extras=True)
    own = [one.replace(annotation=hints[one.name]) for one in signature(command).parameters.values()]
    shared = []
    for name, annotation in SHARED_OPTIONS.items():
        default = getattr(Options(), name)
        # The command-line library gives a repeatable option that is not there as None.
        default = None if default == () else default
        shared.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation))

    def parsed(**given: Any) -> None:
        values = {name: given.pop(name) for name in SHARED_OPTIONS}
        for name in ("with_switches", "without"):
            values[name] = tuple(values[name] or ())
        command(options=Options(**values), **given)

    position = next(index for index, one in enumerate(own) if one.name == "options")
    parameters = [*own[:position], *shared, *own[position + 1 :]]
    functools.update_wrapper(parsed, command)
    parsed.__annotations__ = {one.name: one.annotation for one in parameters}
    parsed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return parsed


def _print_version(wanted: bool) -> None:
    if wanted:
        from k3sim import __version__

        sys.stdout.write(f"k3sim {__version__}\n")
        raise typer.Exit


@app.callback()
def options_of_every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict where a Kimi K3 decode step waits, and what would remove it."""


@app.command(epilog="Example: k3sim timeline --concurrency 1")
@takes_options
def timeline(
    options: Options,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Also the middle 90 % of each path's step over drawn machine values.")
    ] = False,
    draws: Annotated[int, typer.Option(help="Machines to draw for --intervals.")] = 40,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Predict one decode step: waits, HTML page, Perfetto trace, JSON."""
    from k3sim.report import dump_json, report_of

    question = ask(options)
    folder = writable_folder(out)
    for warning in question.warnings:
        sys.stderr.write(f"k3sim: warning: {warning}\n")
    report = report_of(options)
    if intervals:
        report = report.with_intervals(draws)
    files = report.write(folder)
    if json_output:
        sys.stdout.write(dump_json(report.to_dict(files)))
    else:
        from k3sim.tables import print_report

        print_report(report, files)


@app.command(epilog="Example: k3sim compare path=stock path=fused --machine gb200")
@takes_options
def compare(
    before: Annotated[
        str, typer.Argument(help="First side: key=value,... on top of the options, or a JSON file of a step.")
    ],
    after: Annotated[str, typer.Argument(help="Second side, likewise.")],
    options: Options,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Compare two paths, machines, layouts or switch sets, part by part."""
    from k3sim.comparison import compare_options
    from k3sim.report import dump_json

    if before.endswith(".json") and after.endswith(".json"):
        _compare_files(before, after, out, json_output)
        return
    sides = (read_side(before, options), read_side(after, options))
    for side in sides:
        for warning in ask(side).warnings:
            sys.stderr.write(f"k3sim: warning: {warning}\n")
    folder = writable_folder(out)
    comparison = compare_options(*sides, labels=(before, after))
    files = comparison.write(folder)
    if json_output:
        sys.stdout.write(dump_json(comparison.to_dict(files)))
    else:
        from k3sim.tables import print_comparison

        print_comparison(comparison, files)


def _compare_files(before: str, after: str, out: str, json_output: bool) -> None:
    from k3sim.report import dump_json
    from k3sim.stage_comparison import compare_files
    from k3sim.tables import print_stage_comparison

    comparison = compare_files(before, after)
    files = comparison.write(writable_folder(out))
    if json_output:
        sys.stdout.write(dump_json(comparison.to_dict(files)))
    else:
        print_stage_comparison(comparison, files)


@app.command(epilog="Example: k3sim decode --path stock --layers 12 --context 8192")
def decode(
    path: Annotated[str, typer.Option("--path", help="Execution path: stock or fused.")] = "fused",
    with_switches: Annotated[
        list[str] | None,
        typer.Option("--with", help="Switch of the fused path to have, starting from none (repeatable)."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Switch of the fused path to leave out (repeatable)."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel of the layout whose rank is run: 8 or 16.")] = 16,
    layers: Annotated[int | None, typer.Option(help="The model's first so many layers; all by default.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests decoded together, 1 to 16.")] = 1,
    context: Annotated[int, typer.Option(help="Cached tokens of each request.")] = 8192,
    kv_dtype: Annotated[str, typer.Option(help="KV cache type: fp8 or bf16.")] = "fp8",
    replays: Annotated[int, typer.Option(help="Replays of the captured step; every one is a sample.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    profile: Annotated[bool, typer.Option(help="Also profile a step: start and end of every kernel.")] = True,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Kernels record when each of their blocks ran; makes the step longer.")
    ] = False,
    timestamps_of: Annotated[
        list[str] | None, typer.Option(help="Only kernels of this family record (repeatable).")
    ] = None,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Run one rank of the model on this GPU, its peers looped back, and measure a decode step."""
    from importlib.util import find_spec

    from k3sim.calibrate.decode.lines import lines_of
    from k3sim.calibrate.decode.measure import decode as measure
    from k3sim.calibrate.decode.measured import write
    from k3sim.calibrate.decode.options import DecodeOptions
    from k3sim.report import dump_json

    options = DecodeOptions(
        path=path,
        with_switches=tuple(with_switches or ()),
        without=tuple(without or ()),
        tp=tp,
        layers=layers,
        concurrency=concurrency,
        context=context,
        kv_dtype=kv_dtype,
        replays=replays,
        seed=seed,
        profile=profile,
        timestamps=timestamps,
        timestamps_of=tuple(timestamps_of or ()),
    )
    folder = writable_folder(out)
    measured = measure(options)
    files = {"json": str(write(measured, folder))}
    document = measured.to_dict()
    if measured.timeline is not None and find_spec("plotly") and find_spec("perfetto"):
        from k3sim.measured_report import measured_report

        files |= measured_report(document, "measured step").write(folder)
    if json_output:
        sys.stdout.write(dump_json(document))
    else:
        sys.stdout.write("\n".join([*lines_of(measured), *(f"wrote {file}" for file in files.values())]) + "\n")


@app.command(epilog="Example: k3sim report k3sim-out/measured.json")
def report(
    measured: Annotated[str, typer.Argument(help="File of a measured step, as 'k3sim decode' writes it.")],
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Show a measured step from its file, without a GPU: parts, HTML page, Perfetto trace."""
    from k3sim.measured_report import read_measured
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_measured

    found = read_measured(measured)
    files = found.write(writable_folder(out))
    if json_output:
        keys = ("step_us", "profiled_us", "waits_us", "critical_path")
        document = {"schema_version": SCHEMA_VERSION, **{key: found.document[key] for key in keys}, "files": files}
        sys.stdout.write(dump_json(document))
    else:
        print_measured(found, files)


@app.command(epilog="Example: k3sim machines gb300")
def machines(
    name: Annotated[str | None, typer.Argument(help="Profile to show in full: a name or a JSON file.")] = None,
    json_output: Json = False,
) -> None:
    """List machine profiles, or show one with unit, kind, interval and source of every value."""
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.sim.machine import describe
    from k3sim.sim.profile import load_machine, machine_names

    names = machine_names() if name is None else [name]
    loaded = [load_machine(one) for one in names]
    if json_output:
        profiles = [{"name": one.name, "title": one.title, "values": describe(one)} for one in loaded]
        document = {"schema_version": SCHEMA_VERSION, "machines": profiles}
        sys.stdout.write(dump_json(document))
        return
    from k3sim.tables import print_machine, print_machines

    if name is None:
        print_machines(loaded)
    else:
        print_machine(loaded[0])


Draws = Annotated[int, typer.Option(help="Machines to draw for the intervals.")]
Html = Annotated[str | None, typer.Option("--html", help="Also write an HTML page to this file.")]


@app.command(epilog="Example: k3sim validate gb200 --html validation.html")
def validate(
    ids: Annotated[list[str] | None, typer.Argument(help="How ids of evidence begin; all of it by default.")] = None,
    evidence: Annotated[
        list[str] | None, typer.Option("--evidence", help="A table in place of the shipped ones (repeatable).")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Instead: the project's own kernels and steps as measured, without intervals.")
    ] = False,
    draws: Draws = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    html: Html = None,
    json_output: Json = False,
) -> None:
    """Predictions beside published results, with intervals: steps, stages, kernels, optimisation ladders, claims."""
    from k3sim.calibrate.compare.claims import judge_claims
    from k3sim.calibrate.compare.validate import validate as compare_all
    from k3sim.calibrate.compare.validation_page import write_validation_page
    from k3sim.calibrate.evidence import load_evidence
    from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios
    from k3sim.report import dump_json
    from k3sim.tables import print_claims, print_validation, progress_bar

    if own:
        if ids or evidence or html:
            raise UserError("--own shows stored measurements: give it without ids, --evidence and --html")
        _validate_own(json_output)
        return
    page = _html_file(html)
    records = load_evidence([Path(one) for one in evidence]) if evidence else None
    everything = not ids and records is None
    with progress_bar("predicting") as advance:
        found = compare_all(ids or (), records=records, num_draws=draws, seed=seed, on_done=advance)
    claims = []
    if (everything and not json_output) or (page is not None and records is None):
        scenarios = [load_scenario(one) for one in shipped_scenarios()]
        with progress_bar("judging claims") as advance:
            claims = judge_claims(scenarios, num_draws=draws, seed=seed, on_done=advance)
    if page is not None:
        write_validation_page(page, found, claims)
    if json_output:
        sys.stdout.write(dump_json([row.to_dict() for row in found.rows]))
        return
    print_validation(found)
    if claims:
        sys.stdout.write("\n")
        print_claims(claims)
    if page is not None:
        sys.stdout.write(f"wrote {page}\n")


def _html_file(name: str | None) -> Any:
    if name is None:
        return None
    page = Path(name)
    if page.suffix.lower() != ".html":
        raise UserError(f"html is {name!r}; accepted: a path that ends in .html")
    if not page.absolute().parent.is_dir():
        raise UserError(f"html: the folder {page.parent} does not exist")
    return page


def _validate_own(json_output: bool) -> None:
    from k3sim.calibrate.compare.shipped_kernels import cublas_cases, shipped_kernel_cases
    from k3sim.calibrate.compare.shipped_steps import shipped_stage_cases, shipped_step_cases
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_rows, print_stages

    tables = {
        "own_kernels_us": shipped_kernel_cases(),
        "cublas_us": cublas_cases(),
        "own_steps_ms": shipped_step_cases(),
    }
    stages = shipped_stage_cases()
    if json_output:
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        document |= {name: [row.to_dict() for row in rows] for name, rows in tables.items()}
        document["own_stages_us"] = [row.to_dict() for row in stages]
        sys.stdout.write(dump_json(document))
        return
    print_rows(tables)
    print_stages(stages)


@app.command(epilog="Example: k3sim claims gb300-one-user")
def claims(
    names: Annotated[
        list[str] | None, typer.Argument(help="Shipped claims, or scenario files ending in .json; all by default.")
    ] = None,
    draws: Draws = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    json_output: Json = False,
) -> None:
    """Public claims on trial: prediction and interval for the claim's own conditions, verdict and boundary."""
    from k3sim.calibrate.compare.claims import judge_claims
    from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_claims, progress_bar

    shipped = {path.stem: path for path in shipped_scenarios()}
    paths = []
    for name in names or shipped:
        if name not in shipped and not name.lower().endswith(".json"):
            raise UserError(f"unknown claim {name!r}; accepted: {', '.join(shipped)}, or a file that ends in .json")
        paths.append(shipped.get(name) or Path(name))
    scenarios = [load_scenario(path) for path in paths]
    with progress_bar("judging claims") as advance:
        judged = judge_claims(scenarios, num_draws=draws, seed=seed, on_done=advance)
    if json_output:
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, "claims": [one.to_dict() for one in judged]}))
    else:
        print_claims(judged)


@app.command(epilog="Example: k3sim sensitivity gb300-one-user")
def sensitivity(
    claim: Annotated[str, typer.Argument(help="Name of a shipped claim.")] = "gb300-one-user",
    values: Annotated[int, typer.Option(min=1, max=40, help="How many values to show of each figure.")] = 5,
    draws: Draws = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    json_output: Json = False,
) -> None:
    """Which machine values a claim's prediction hangs on most, and how wrong each must be to move the verdict."""
    from k3sim.calibrate.compare.sensitivity import lines_of
    from k3sim.calibrate.compare.sensitivity import sensitivity as find
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import progress_bar

    with progress_bar("varying values") as advance:
        found = find(claim, num_values=values, num_draws=draws, seed=seed, on_done=advance)
    if json_output:
        figures = [one.to_dict() for one in found]
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, "claim": claim, "figures": figures}))
    else:
        sys.stdout.write("\n".join(lines_of(found)) + "\n")


@app.command(epilog="Example: k3sim calibrate --from h200 --machine-out my-h200.json")
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
    machine: Annotated[
        str, typer.Option(help="Profile of --check (a name or a JSON file) or of --tables (a name).")
    ] = "h200",
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
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Fit a machine profile to this GPU or to stored samples, with intervals; or check stored measurements.

    Without --from and --check the probes run on the GPU at hand; a run that was stopped goes on where it was.
    """
    from k3sim.calibrate.compare.calibration_page import write_calibration_page
    from k3sim.calibrate.compare.check import check as check_stored
    from k3sim.calibrate.compare.check import shipped_samples
    from k3sim.calibrate.fit import calibration
    from k3sim.report import dump_json
    from k3sim.sim.profile import load_machine
    from k3sim.tables import print_calibration, print_check, progress_line

    document: dict[str, Any]
    if tables:
        if check or samples is not None:
            raise UserError("--tables fits public tables: give it without --check and --from")
        _calibrate_from_tables(tables, machine, machine_out, json_output)
        return
    if check:
        if samples is not None or machine_out is not None:
            raise UserError("--check fits nothing: give it --machine, or --from and --machine-out without it")
        profile = load_machine(machine)
        folder = writable_folder(out)
        cases = check_stored(profile, num_draws=draws, seed=seed, on_case=lambda one: progress_line(one.label))
        document = calibration.check_document(profile, cases, draws, seed)
        page = folder / "calibration-check.html"
        write_calibration_page(page, check=document)
    else:
        if samples is None:
            path = calibration.measure(
                Path(samples_out) if samples_out else None, quick=quick, on_case=progress_line
            )
        else:
            path = Path(samples) if samples.lower().endswith(".json") else shipped_samples(samples.lower())
        folder = writable_folder(out)
        target = Path(machine_out) if machine_out else None
        document = calibration.calibrate(path, base=base, machine_out=target, seed=seed)
        page = folder / "calibration.html"
        write_calibration_page(page, fit=document)
    document["files"] = {"html": str(page)}
    if json_output:
        sys.stdout.write(dump_json(document))
    elif check:
        print_check(document)
    else:
        print_calibration(document)


def _calibrate_from_tables(tables: Sequence[str], machine: str, machine_out: str | None, json_output: bool) -> None:
    from k3sim.calibrate.fit.fit import require_scipy
    from k3sim.calibrate.fit.kernel_tables import fit_tables, profile_of, read_tables
    from k3sim.calibrate.fit.profile_text import profile_text
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.sim.export.whole_file import write_whole_file
    from k3sim.sim.profile import load_machine, machine_names, machine_of
    from k3sim.tables import print_table_fit

    require_scipy()
    if machine not in machine_names():
        raise UserError(f"machine is {machine!r}; accepted with --tables: {', '.join(machine_names())}")
    target = Path(machine_out) if machine_out else None
    if target is not None and target.suffix.lower() != ".json":
        raise UserError(f"machine-out is {machine_out!r}; accepted: a path that ends in .json")
    rows, skipped = read_tables([Path(one) for one in tables], [machine])
    found = fit_tables(load_machine(machine), rows)
    if target is not None:
        profile = profile_of(found, target.stem, ", ".join(Path(one).name for one in tables))
        machine_of(profile, "the profile fitted from tables")
        write_whole_file(target, profile_text(profile).encode())
    document = {"schema_version": SCHEMA_VERSION, **found.to_dict(), "skipped": skipped,
                "profile": str(target) if target else None}  # fmt: skip
    if json_output:
        sys.stdout.write(dump_json(document))
    else:
        print_table_fit(document)


kernels_app = typer.Typer(
    help="The decode kernels that the project ships.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(kernels_app, name="kernels")


@kernels_app.command("list", epilog="Example: k3sim kernels list")
def kernels_list(json_output: Json = False) -> None:
    """List operators and their compiled forms."""
    from k3sim.kernels.toolchain.catalogue import BUILDS
    from k3sim.report import SCHEMA_VERSION, dump_json

    forms = {operator: list(kernels()) for operator, kernels in BUILDS.items()}
    if json_output:
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, "operators": forms}))
        return
    from k3sim.tables import print_kernel_list

    print_kernel_list(forms)


@kernels_app.command("build", epilog="Example: k3sim kernels build router_topk --arch sm_90a")
def kernels_build(
    operators: Annotated[list[str] | None, typer.Argument(help="Operators to build; all when none is named.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture (repeatable); all three by default.")] = None,
    out: Annotated[str, typer.Option(help="Folder for cubins and the manifest.")] = "build/kernels",
    json_output: Json = False,
) -> None:
    """Compile kernels with no GPU: cubins, and a manifest of registers, stack, shared memory and SASS facts."""
    from k3sim.kernels.toolchain.build import build
    from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_kernel_build, progress

    folder = writable_folder(out)
    with progress("building") as advance:
        manifest = build(folder, architectures=arch or ARCHITECTURES, operators=operators or (), on_kernel=advance)
    if json_output:
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, **manifest}))
    else:
        print_kernel_build(manifest, str(folder / "manifest.json"))


Operators = Annotated[list[str] | None, typer.Argument(help="Operators; all when none is named.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]


@kernels_app.command("check", epilog="Example: k3sim kernels check router_topk --replays 100")
def kernels_check(
    operators: Operators = None,
    replays: Annotated[
        int | None, typer.Option(help="Replays of each call in a CUDA graph, 0 for none; 1000, between GPUs 10000.")
    ] = None,
    seed: Seed = 0,
    gpus: Annotated[
        int | None, typer.Option(help="Instead, hand-overs between so many GPUs: operators that push, and engine.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="With --gpus: ranks of the exchange, a multiple of the GPUs; as many by default.")
    ] = None,
    out: Annotated[str, typer.Option(help="With --gpus: file for the results, written after every case.")] = "",
    json_output: Json = False,
) -> None:
    """Run kernels against references on this GPU, or between several; exit status 1 when one fails."""
    from dataclasses import asdict

    if gpus is not None:
        from k3sim.kernels.multi_gpu.__main__ import start
        from k3sim.kernels.multi_gpu.check import NUM_REPLAYS as BETWEEN_GPUS

        if json_output:
            raise UserError("--json: not with --gpus, whose processes print as they go; --out has the results as JSON")
        count = BETWEEN_GPUS if replays is None else replays
        status = start(operators or (), gpus=gpus, ranks=ranks, replays=count, seed=seed, out=out)
        raise typer.Exit(status)
    if ranks is not None or out:
        raise UserError("--ranks and --out: only with --gpus")

    from k3sim.kernels.harness.check import NUM_REPLAYS, check
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_checked

    num_replays = NUM_REPLAYS if replays is None else replays
    found = check(
        operators or (), seed=seed, num_replays=num_replays, on_case=(lambda _: None) if json_output else print_checked
    )
    if json_output:
        # Numbers that JSON has no word for, of a case that raised.
        cases = [{k: None if v != v else v for k, v in asdict(one).items()} for one in found]
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, "cases": cases}))
    else:
        failed = sum(not one.ok for one in found)
        sys.stdout.write(f"{len(found)} cases, {failed} failed\n")
    if not all(one.ok for one in found):
        raise typer.Exit(1)


@kernels_app.command("bench", epilog="Example: k3sim kernels bench skinny_gemv --budget-s 120")
def kernels_bench(
    operators: Operators = None,
    out: Annotated[
        str | None, typer.Option(help="File for the samples; by default <gpu>-kernels.json in this folder.")
    ] = None,
    replays: Annotated[int, typer.Option(help="Replays of each graph; every one is a sample.")] = 200,
    budget_s: Annotated[
        float | None, typer.Option(help="Begin no case after so many seconds; --resume measures the rest.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the file holds, of the same GPU, and measure what it lacks.")
    ] = False,
    seed: Seed = 0,
    json_output: Json = False,
) -> None:
    """Time kernels on this GPU beside the floor, cuBLAS, and FLA and FlashInfer where they are installed."""
    from k3sim.kernels.harness.measure import measure, row_line
    from k3sim.report import SCHEMA_VERSION, dump_json
    from k3sim.tables import print_bench

    def progress_line(row: dict[str, Any]) -> None:
        sys.stderr.write(row_line(row) + "\n")

    document = measure(
        operators or (),
        out=None if out is None else Path(out),
        num_replays=replays,
        budget_s=budget_s,
        resume=resume,
        seed=seed,
        on_row=progress_line,
    )
    if json_output:
        sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, **document}))
    else:
        print_bench(document)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a mistake in the input is one line on standard error and exit status 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=given or ["--help"], standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except typer.Abort:
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of the command-line library
            _fail(f"{error.format_message()}{_given(error)}; see 'k3sim --help'")
        raise
    raise SystemExit(status if isinstance(status, int) else 0)


def _given(error: Exception) -> str:
    """What was given where the library's message only says what is accepted."""
    rejection: Any = error.__cause__
    if not hasattr(rejection, "errors"):
        return ""
    return f" (given: {rejection.errors()[0]['input']!r})"


def writable_folder(folder: str | Path) -> Path:
    """Make the output folder; UserError when that or writing into it is not possible."""
    if not str(folder).strip():
        raise UserError("the name of the output folder is empty; give --out a folder")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {path}: {error.strerror}; give --out a folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"the output folder {path} cannot be written; give --out a folder that can")
    return path


def _fail(message: str) -> None:
    line = " ".join(message.split())
    sys.stderr.write(f"k3sim: {line}\n")
    raise SystemExit(2) from None

