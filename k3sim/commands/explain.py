"""``k3sim explain``: where a step of the user's own trace waits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json, Out, writable_folder
from k3sim.errors import UserError

if TYPE_CHECKING:
    from re import Pattern

EXAMPLE = "k3sim explain rank0.json.gz --against before.json.gz"

PARTS = {
    "busy": "busy",
    "compute": "  compute",
    "exposed_communication": "  exposed communication",
    "exposed_copies": "  exposed copies",
    "idle": "idle (gaps)",
    "hidden_communication": "hidden communication",
    "overlap_on_a_stream": "overlap on a stream",
    "slower_peer": "slower peer",
}


def explain(
    traces: Annotated[list[str], typer.Argument(help="Traces of one run, a file a rank.")],
    against: Annotated[
        list[str] | None, typer.Option(help="A trace of before a change, to compare with; once a rank.")
    ] = None,
    step_kernel: Annotated[
        str | None, typer.Option("--step-kernel", help="Regular expression: each match begins a step.")
    ] = None,
    nvtx: Annotated[
        str | None, typer.Option("--nvtx", help="Regular expression: each NVTX range or annotation is a step.")
    ] = None,
    classes: Annotated[str | None, typer.Option(help='JSON file of {"pattern": "class"} for kernel names.')] = None,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """See where a step of your own trace waits: torch profiler, Nsight Systems or rocprofv3.

    Finds the steps, prints the waits of the median one, its kernels by class and name, and what changed against
    another trace; writes the HTML page, the Perfetto trace and JSON.
    """
    from k3sim.trace_report import explain_files

    folder = writable_folder(out)
    report = explain_files(
        traces, against or (), classes, _pattern("--step-kernel", step_kernel), _pattern("--nvtx", nvtx)
    )
    document, files = report.document, report.write(folder)
    if json_output:
        output.print_json({**document, "files": files})
        return
    _print_ranks(document)
    _print_classes(document)
    if "comparison" in document:
        _print_comparison(document["comparison"])
    output.print_files(files)
    output.warn(document["notes"])


def _pattern(option: str, text: str | None) -> Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{option} is {text!r:.80}, which is no regular expression ({error})") from None


def _print_ranks(document: Mapping[str, Any], most: int = 16) -> None:
    console = terminal.console()
    slowest = next(row for row in document["ranks"] if row["rank"] == document["slowest_rank"])
    gpu = f", {document['gpu']}" if document["gpu"] else ""
    console.print(f"{document['format']}{gpu}, {len(document['ranks'])} ranks, {document['kernels']:,} kernels")
    others = f", {slowest['other_steps']} others with other kernels" if slowest["other_steps"] else ""
    period = f", begins every {slowest['period_us']:,.1f} us" if slowest["period_us"] else ""
    console.print(
        f"{slowest['steps']} steps ({slowest['found_by']}){others}; rank {slowest['rank']}: step "
        f"{slowest['step']['us']:,.1f} us (p10 {slowest['step_p10_us']:,.1f}, p90 {slowest['step_p90_us']:,.1f})"
        f"{period}, {slowest['kernels']:,} kernels"
    )
    if slowest["outliers"]:
        named = ", ".join(f"step {one['step']} {one['us']:,.1f} us" for one in slowest["outliers"][:5])
        console.print(f"{len(slowest['outliers'])} outliers: {named}")
    console.print()
    table = terminal.table("part", "us", "of step", "label")
    for key, word in PARTS.items():
        _add_part(table, word, slowest[key], slowest["step"]["us"])
    for kind, row in slowest["gaps"].items():
        _add_part(table, f"gap: {kind}", row, slowest["step"]["us"])
    terminal.print_table(table)
    if len(document["ranks"]) > 1:
        console.print()
        table = terminal.table("rank", "step us", "busy us", "slower peer us")
        for row in document["ranks"][:most]:
            table.add_row(str(row["rank"]), *(_us(row[key]["us"]) for key in ("step", "busy", "slower_peer")))
        terminal.print_table(table)
    if slowest["largest_gaps"]:
        console.print()
        table = terminal.table("after", "before", "gap", "us", left=3, folded=(0, 1))
        for row in slowest["largest_gaps"][:5]:
            table.add_row(row["after"], row["before"], row["kind"], _us(row["us"]))
        terminal.print_table(table)


def _add_part(table: terminal.Table, word: str, row: Mapping[str, Any], step_us: float) -> None:
    if row["us"] is not None:
        share = 100 * row["us"] / step_us if step_us else 0.0
        table.add_row(word, _us(row["us"]), f"{share:.1f} %", row["label"])


def _print_classes(document: Mapping[str, Any], most: int = 15) -> None:
    console = terminal.console()
    console.print("\nkernels of the median step, durations added up")
    table = terminal.table("class", "kernels", "us")
    for row in document["classes"]:
        table.add_row(row["class"], str(row["kernels"]), _us(row["us"]))
    terminal.print_table(table)
    console.print()
    table = terminal.table("kernel", "class", "kernels", "us", left=2, folded=(0,))
    for row in document["names"][:most]:
        table.add_row(row["name"], row["class"], str(row["kernels"]), _us(row["us"]))
    terminal.print_table(table)
    console.print("\ncritical path")
    table = terminal.table("kernel", "part", "us", left=2, folded=(0,))
    for row in document["critical_path"][:most]:
        table.add_row(row["stage"], row["part"].replace("_", " "), _us(row["us"]))
    terminal.print_table(table)


def _print_comparison(comparison: Mapping[str, Sequence[Mapping[str, Any]]], most: int = 15) -> None:
    terminal.console().print("\nagainst the other trace (medians; noise is twice the standard error)")
    table = terminal.table("what", "before us", "after us", "change us", "noise us", "beyond noise", folded=(0,))
    for row in (*comparison["step"], *comparison["classes"], *comparison["names"][:most]):
        beyond = {True: "yes", False: "no", None: "unknown"}[row["beyond_noise"]]
        figures = (_us(row[key]) for key in ("before_us", "after_us"))
        table.add_row(row["what"], *figures, f"{row['change_us']:+,.2f}", _us(row["noise_us"]), beyond)
    terminal.print_table(table)


def _us(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}"
