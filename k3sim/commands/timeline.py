"""``k3sim timeline``: one decode step predicted, and what each switch of the fused path is worth."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import curve as curves
from k3sim.commands import output, speculation, terminal
from k3sim.commands.options import Jobs, Json, Out, takes_options, writable_folder
from k3sim.commands.progress import progress
from k3sim.errors import UserError
from k3sim.sim.compared_range import COMPARED_TEXT
from k3sim.sim.draws import MAX_DRAWS, NUM_DRAWS, check_draws
from k3sim.sim.options import Options
from k3sim.sim.question import ask

if TYPE_CHECKING:
    from k3sim.commands.terminal import Table
    from k3sim.report import Report
    from k3sim.sim.predict import Prediction

EXAMPLE = "k3sim timeline --concurrency 1"


@partial(takes_options, lists=("concurrency", "context"))
def timeline(
    options: Options,
    lists: Mapping[str, Sequence[int]],
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Also 90 % intervals: drawn machine values and errors of kernels.")
    ] = False,
    draws: Annotated[
        int | None, typer.Option(help=f"Machines to draw for --intervals, 2 to {MAX_DRAWS}; {NUM_DRAWS} by default.")
    ] = None,
    for_tpot: Annotated[
        str | None, typer.Option(help="The most users, or context, that keep a time per token, such as 20ms.")
    ] = None,
    for_tokens_per_second: Annotated[
        float | None, typer.Option(help="The same for tokens a second of one user.")
    ] = None,
    over: Annotated[str, typer.Option(help="What --for-tpot looks for: concurrency or context.")] = "concurrency",
    jobs: Jobs = None,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Predict where one decode step waits: table, page, trace.

    A list of users or contexts gives a curve: every path's step and gain, and the kernels behind each sudden change.
    Beside the path that is asked for stand the stock path, the fused one with its switches in turn, and the megakernel.

    {compared}
    """
    if intervals:
        check_draws(draws or NUM_DRAWS)
        gc.enable()  # of draws nothing is kept
    elif draws is not None:
        raise UserError("--draws: only with --intervals")
    most_us = curves.time_of(for_tpot, for_tokens_per_second)
    if options.acceptance and (most_us is not None or any(len(one) > 1 for one in lists.values())):
        raise UserError("--acceptance is for one number of users and context; curves and --for-tpot are of steps alone")
    if any(len(one) > 1 for one in lists.values()):
        if most_us is not None:
            raise UserError("--for-tpot looks for one number; give it without a list of users or contexts")
        curves.run_curve(
            options, lists["concurrency"], lists["context"], num_draws=(draws or NUM_DRAWS) if intervals else 0,
            jobs=jobs, out=out, json_output=json_output,
        )  # fmt: skip
        return
    found = None
    if most_us is not None:
        from k3sim.sim.largest import with_value

        found = curves.answer_of(options, over, most_us)
        options = with_value(options, over, found.value)
    options = speculation.with_best_length(options)
    question = ask(options)
    folder = writable_folder(out)
    output.warn(question.warnings)
    from k3sim.report import report_of

    with progress("predicting") as told:
        report = report_of(options, on_done=told)
        if intervals:
            told.doing(f"each path on {draws or NUM_DRAWS} drawn machines")
            report = report.with_intervals(draws or NUM_DRAWS, on_done=told)
        told.doing("writing the files")
        files = report.write(folder)
    if json_output:
        drafted = speculation.to_dict(speculation.gains(report))
        document = report.to_dict(files)
        output.print_json(curves.with_answer({**document, "speculation": drafted} if drafted else document, found))
        return
    if found is not None:
        terminal.console().print(curves.sentence_of(found))
    print_report(report, files)


timeline.__doc__ = (timeline.__doc__ or "").format(
    compared=f"Measured steps were compared for {COMPARED_TEXT}. A question outside is answered with a warning: its "
    "error is not known."
)


def print_report(report: Report, files: Mapping[str, str]) -> None:
    """Headline, waits by part, and what each switch is worth."""
    console, question = terminal.console(), report.question
    console.print(
        f"{question.architecture.name} on {terminal.num_gpus(question.layout.num_gpus)} of {question.machine.title}, "
        f"{question.layout.tag}, concurrency {question.workload.concurrency}, context {question.workload.context}"
    )
    console.print(terminal.memory_line(question.room()))
    if question.layout.pp > 1:
        filled = question.layout.pp * report.main.tokens_per_second
        console.print(f"with all {question.layout.pp} stages filled: {filled:,.1f} tok/s in all")
    console.print()
    between = ["90 % of draws us"] if report.intervals else []
    heads = ("path", "step us", *between, "tok/s/user", "tok/s/GPU", "tok/s total", "speed-up", "floor us", "of floor")
    headline = terminal.table(*heads, folded=(0,))
    for label, prediction in report.labelled.items():
        headline.add_row(
            label,
            f"{prediction.step_us:,.1f}",
            *(["{:,.0f} to {:,.0f}".format(*report.intervals[label])] if between else []),
            f"{prediction.tokens_per_second_per_user:,.1f}",
            f"{prediction.tokens_per_second_per_gpu:,.1f}",
            f"{prediction.tokens_per_second:,.1f}",
            f"{report.stock.step_us / prediction.step_us:.2f}x",
            f"{prediction.floor_us:,.1f}",
            f"{100 * prediction.floor_us / prediction.step_us:.0f} %",
        )
    terminal.print_table(headline)
    console.print()
    _print_speculation(report)
    terminal.print_table(_waits_table(report.labelled))
    console.print()
    for name, why in report.refused.items():
        console.print(f"{name} is not predicted: {why}")
    if not report.leave_one_out:
        output.print_files(files)
        return
    switches = terminal.table("switch", "added in turn us", "removed from all four us")
    before = report.ladder[0][1]
    for (label, prediction), (_, removed) in zip(report.ladder[1:], report.leave_one_out, strict=True):
        switches.add_row(
            label.removeprefix("+ "),
            f"{prediction.step_us - before.step_us:+,.1f}",
            f"{removed.step_us - report.reference.step_us:+,.1f}",
        )
        before = prediction
    terminal.print_table(switches)
    output.print_files(files)


def _print_speculation(report: Report) -> None:
    """Step, tokens a step and the acceptance that pays, where drafts are verified."""
    found, draft = speculation.gains(report), report.question.architecture.draft
    if not found or draft is None:
        return
    acceptance = report.question.acceptance
    table = terminal.table(
        f"{draft.num_drafts} drafts a step", "step us", "draft us", "plain step us", "tokens a step", "break-even"
    )
    for label, gain in found.items():
        table.add_row(
            label, f"{gain.step_us:,.1f}", f"{gain.draft_us:,.1f}", f"{gain.plain_step_us:,.1f}",
            "not given" if gain.tokens_per_step is None else f"{gain.tokens_per_step:.2f}",
            f"{gain.break_even_tokens_per_step:.2f}",
        )  # fmt: skip
    terminal.print_table(table)
    name = f"acceptance {acceptance.name}" if acceptance else "no --acceptance: tok/s are those of one token a step"
    terminal.console().print(f"{name}; break-even: tokens a step at which a user gets as many a second as without")
    terminal.console().print()


def _waits_table(paths: Mapping[str, Prediction]) -> Table:
    from k3sim.sim.timeline.critical_path import WORK_PARTS, Part

    table = terminal.table("where the step goes (us)", *paths)
    for part in Part:
        values = [prediction.waits_ps.get(part, 0) / 1e6 for prediction in paths.values()]
        if any(values):
            label = part.word if part in WORK_PARTS else f"wait: {part.word}"
            table.add_row(label, *(f"{value:,.1f}" for value in values))
    table.add_row("step", *(f"{prediction.step_us:,.1f}" for prediction in paths.values()))
    return table
