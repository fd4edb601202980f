"""``k3sim report``: a measured step from its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json, Out, writable_folder

if TYPE_CHECKING:
    from k3sim.measured_report import MeasuredReport

EXAMPLE = "k3sim report k3sim-out/measured.json"


def report(
    measured: Annotated[str, typer.Argument(help="File of a measured step, as 'k3sim decode' writes it.")],
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """See where a measured step went, from its file, without a GPU.

    Prints its parts and writes the HTML page and the Perfetto trace that predictions have.
    """
    from k3sim.measured_report import read_measured

    found = read_measured(measured)
    files = found.write(writable_folder(out))
    if json_output:
        keys = ("step_us", "profiled_us", "waits_us", "critical_path")
        output.print_json(output.versioned({**{key: found.document[key] for key in keys}, "files": files}))
    else:
        print_measured(found, files)


def print_measured(report: MeasuredReport, files: Mapping[str, str], most: int = 20) -> None:
    """Headline, parts of the profiled step, and the stages that hold most of it."""
    from k3sim.calibrate.decode.lines import part_lines
    from k3sim.compared_facts import facts_of_document, in_words
    from k3sim.sim.timeline.critical_path import Part

    console, document = terminal.console(), report.document
    console.print(", ".join(in_words(fact, text) for fact, text in facts_of_document(document).items()))
    console.print(f"step {document['step_us']:,.1f} us; a profiled one, {document['profiled_us']:,.1f} us, goes\n")
    console.print("\n".join(part_lines(document)) + "\n")
    table = terminal.table("stage", "part", "us", left=2)
    for row in document["critical_path"][:most]:
        table.add_row(row["stage"], Part(row["part"]).word, f"{row['us']:,.1f}")
    terminal.print_table(table)
    output.print_files(files)
