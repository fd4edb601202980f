"""``k3sim timeline``: one decode step predicted, and what each switch of the fused path is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output
from k3sim.commands.options import Json, Out, takes_options, writable_folder
from k3sim.sim.question import Options, ask

if TYPE_CHECKING:
    from rich.table import Table

    from k3sim.report import Report
    from k3sim.sim.predict import Prediction

EXAMPLE = "k3sim timeline --concurrency 1"


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
    """Predict where one decode step waits: table, page, trace.

    Beside the path that is asked for stand the stock path, the fused one with its switches in turn, and the megakernel.
    """
    question = ask(options)
    folder = writable_folder(out)
    output.warn(question.warnings)
    from k3sim.report import report_of

    report = report_of(options)
    if intervals:
        report = report.with_intervals(draws)
    files = report.write(folder)
    if json_output:
        output.print_json(report.to_dict(files))
    else:
        print_report(report, files)


def print_report(report: Report, files: Mapping[str, str]) -> None:
    """Headline, waits by part, and what each switch is worth."""
    console, question = output.console(), report.question
    console.print(
        f"{question.architecture.name} on {question.machine.title}, {question.layout.tag}, "
        f"concurrency {question.workload.concurrency}, context {question.workload.context}"
    )
    console.print()
    between = ["90 % of draws us"] if report.intervals else []
    headline = output.table("path", "step us", *between, "tok/s/user", "speed-up", "floor us", "of floor", "HBM busy")
    for label, prediction in report.labelled.items():
        headline.add_row(
            label,
            f"{prediction.step_us:,.1f}",
            *(["{:,.0f} to {:,.0f}".format(*report.intervals[label])] if between else []),
            f"{prediction.tokens_per_second_per_user:.1f}",
            f"{report.stock.step_us / prediction.step_us:.2f}x",
            f"{prediction.floor_us:,.1f}",
            f"{100 * prediction.floor_us / prediction.step_us:.0f} %",
            f"{100 * prediction.hbm_busy_fraction:.0f} %",
        )
    console.print(headline)
    console.print()
    console.print(_waits_table(report.labelled))
    console.print()
    switches = output.table("switch", "added in turn us", "removed from all four us")
    before = report.ladder[0][1]
    for (label, prediction), (_, removed) in zip(report.ladder[1:], report.leave_one_out, strict=True):
        switches.add_row(
            label.removeprefix("+ "),
            f"{prediction.step_us - before.step_us:+,.1f}",
            f"{removed.step_us - report.reference.step_us:+,.1f}",
        )
        before = prediction
    console.print(switches)
    output.print_files(files)


def _waits_table(paths: Mapping[str, Prediction]) -> Table:
    from k3sim.sim.timeline.critical_path import WORK_PARTS, Part

    table = output.table("where the step goes (us)", *paths)
    for part in Part:
        values = [prediction.waits_ps.get(part, 0) / 1e6 for prediction in paths.values()]
        if any(values):
            label = part.word if part in WORK_PARTS else f"wait: {part.word}"
            table.add_row(label, *(f"{value:,.1f}" for value in values))
    table.add_row("step", *(f"{prediction.step_us:,.1f}" for prediction in paths.values()))
    return table
