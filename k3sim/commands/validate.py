"""``k3sim validate``: predictions beside published results, or beside the project's own measurements."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Draws, Jobs, Json, Seed, html_file
from k3sim.commands.progress import progress
from k3sim.errors import UserError
from k3sim.sim.question import gpus_of

if TYPE_CHECKING:
    from k3sim.calibrate.compare.case import ComparedCase
    from k3sim.calibrate.compare.shipped_steps import StageCase
    from k3sim.calibrate.compare.validate import Validation

EXAMPLE = "k3sim validate gb200 --html validation.html"


def validate(
    ids: Annotated[list[str] | None, typer.Argument(help="How ids of evidence begin; all of it by default.")] = None,
    evidence: Annotated[
        list[str] | None, typer.Option("--evidence", help="A table in place of the shipped ones (repeatable).")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Instead: the project's own kernels and steps as measured, without intervals.")
    ] = False,
    draws: Draws = 10,
    seed: Seed = 0,
    html: Annotated[str | None, typer.Option("--html", help="Also write an HTML page to this file.")] = None,
    jobs: Jobs = None,
    json_output: Json = False,
) -> None:
    """See how far predictions are from published results.

    Steps, stages, kernels and optimisation ladders, each with an interval; without arguments the claims as well.
    """
    if own:
        if ids or evidence or html:
            raise UserError("--own shows stored measurements: give it without ids, --evidence and --html")
        _validate_own(jobs, json_output)
        return
    from k3sim.calibrate.compare.claims import judge_claims
    from k3sim.calibrate.compare.validate import coverage
    from k3sim.calibrate.compare.validate import validate as compare_all
    from k3sim.calibrate.compare.validation_page import write_validation_page
    from k3sim.calibrate.evidence import load_evidence
    from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios
    from k3sim.commands.claims import print_claims, say_claim

    page = html_file(html)
    records = load_evidence([Path(one) for one in evidence]) if evidence else None
    everything = not ids and records is None
    with progress("predicting") as advance:
        found = compare_all(
            ids or (), records=records, num_draws=draws, seed=seed, jobs=jobs, on_done=advance,
            on_case=lambda row: advance.say(
                f"{row.label}: {row.predicted:,.4g} for {row.measured:,.4g} {row.unit}, {100 * row.error:+.1f} %"
            ),
        )  # fmt: skip
    claims = []
    if (everything and not json_output) or (page is not None and records is None):
        scenarios = [load_scenario(one) for one in shipped_scenarios()]
        with progress("judging claims") as advance:
            claims = judge_claims(
                scenarios, num_draws=draws, seed=seed, jobs=jobs, on_done=advance, on_claim=say_claim(advance)
            )
    if page is not None:
        write_validation_page(page, found, claims)
    if json_output:
        document = {
            "cases": [row.to_dict() for row in found.rows],
            "coverage": {kind: one.to_dict() for kind, one in coverage(found.rows).items()},
        }
        output.print_json(output.versioned(document))
        return
    print_validation(found)
    if claims:
        sys.stdout.write("\n")
        print_claims(claims)
    if page is not None:
        sys.stdout.write(f"wrote {page}\n")


def _validate_own(jobs: int | None, json_output: bool) -> None:
    from k3sim.calibrate.compare.shipped_kernels import cublas_cases, shipped_kernel_cases
    from k3sim.calibrate.compare.shipped_steps import shipped_stage_cases, shipped_step_cases

    sources = {"own_kernels_us": shipped_kernel_cases, "cublas_us": cublas_cases, "own_steps_ms": shipped_step_cases}
    tables = {}
    for name, cases in sources.items():
        with progress(f"predicting {name.rpartition('_')[0].replace('_', ' ')}") as advance:
            tables[name] = cases(jobs=jobs, on_done=advance)
    stages = shipped_stage_cases()
    if json_output:
        document: dict[str, Any] = {name: [row.to_dict() for row in rows] for name, rows in tables.items()}
        output.print_json(output.versioned({**document, "own_stages_us": [row.to_dict() for row in stages]}))
        return
    print_rows(tables)
    print_stages(stages)


def print_validation(found: Validation) -> None:
    """Published, predicted, error and interval of every row by hardware and engine; coverage; then the ladders."""
    from k3sim.calibrate.compare.validate import coverage, groups, summary

    console = terminal.console()
    for (kind, hardware, engine), rows in groups(found.rows).items():
        columns = ("GPUs", "unit", "published", "predicted", "error", "interval", "inside")
        table = terminal.table(f"{hardware}, {engine}: {kind}s", *columns)
        for row in rows:
            low, high = row.interval
            table.add_row(
                row.label if row.judged else f"({row.label})",
                str(gpus_of(row.command) or ""),
                row.unit,
                f"{row.measured:,.4g}",
                f"{row.predicted:,.4g}",
                f"{100 * row.error:+.1f} %",
                f"{low:,.4g} to {high:,.4g}",
                "yes" if row.inside_interval else "no",
            )
        terminal.print_table(table)
        console.print()
    for row in found.rows:
        if not row.judged:
            console.print(f"({row.label}): not judged, {row.why}")
    covered = coverage(found.rows)
    for kind, totals in summary(found.rows).items():
        console.print(
            f"{totals['rows']} judged {kind}s: median {100 * totals['median_error']:.1f} %, "
            f"worst {100 * totals['worst_error']:.1f} %; {covered[kind].text()}"
        )
    for ladder, steps in found.ladders:
        console.print()
        noise = f"{100 * ladder.noise:g} %: {ladder.noise_source}" if ladder.noise else "not said by its source"
        heads = ("after ms", "predicted ms", "saved ms", "predicted", "ratio", "noise ms", "verdict")
        table = terminal.table(ladder.title, *heads)
        for step in steps:
            start = step.verdict == "start"
            table.add_row(
                step.title,
                f"{step.published_ms:.3f}",
                "" if step.predicted_ms is None else f"{step.predicted_ms:.3f}",
                "" if start else f"{step.published_saving_ms:+.3f}",
                "" if start or step.predicted_saving_ms is None else f"{step.predicted_saving_ms:+.3f}",
                "" if start or step.ratio is None else f"{step.ratio:.2f}",
                f"{step.noise_ms:.3f}" if step.noise_ms and not start else "",
                step.verdict,
            )
        terminal.print_table(table)
        console.print(f"noise of a step {noise}", soft_wrap=True)


def print_rows(tables: Mapping[str, Sequence[ComparedCase]]) -> None:
    """Measured, predicted and error of each table, then the median and the worst."""
    console = terminal.console()
    for name, rows in tables.items():
        quantity, unit = name.rsplit("_", 1)
        table = terminal.table(quantity.replace("_", " "), f"measured {unit}", f"predicted {unit}", "error")
        for row in rows:
            table.add_row(row.label, f"{row.measured:.2f}", f"{row.predicted:.2f}", f"{100 * row.error:+.1f} %")
        terminal.print_table(table)
        errors = sorted(abs(row.error) for row in rows)
        console.print(f"median {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %\n")


def print_stages(rows: Sequence[StageCase]) -> None:
    """A measured step by stage: mean duration and mean increment along the main stream, measured and predicted."""
    table = terminal.table("own stages us", "kernels", "measured", "predicted", "measured step", "predicted step")
    for row in rows:
        main = row.stream == "main"
        table.add_row(
            row.stage,
            str(row.count),
            f"{row.duration.measured:.2f}",
            f"{row.duration.predicted:.2f}",
            f"{row.increment.measured:.2f}" if main else "",
            f"{row.increment.predicted:.2f}" if main else "",
        )
    terminal.print_table(table)
