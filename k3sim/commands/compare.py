"""``k3sim compare``: two predictions, or two files of steps, part by part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json, Out, takes_options, writable_folder
from k3sim.commands.progress import progress
from k3sim.errors import UserError
from k3sim.sim.options import OPTIONS, Options, read_side
from k3sim.sim.question import ask

if TYPE_CHECKING:
    from k3sim.commands.terminal import Table
    from k3sim.comparison import Comparison
    from k3sim.stage_comparison import StageComparison

EXAMPLE = "k3sim compare path=stock path=fused --machine gb200"


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
    """See what a path, machine, layout or switch changes.

    Keys of a side are the options by name; with and without take switches joined by +. Two files are compared as they
    are: what 'k3sim timeline' or 'k3sim decode' wrote.
    """
    files_given = [one for one in (before, after) if _is_file(one)]
    if len(files_given) == 2:
        _compare_files(before, after, out, json_output)
        return
    if files_given:
        _refuse_file_and_side(files_given[0], after if files_given[0] == before else before)
    sides = (read_side(before, options), read_side(after, options))
    for side in sides:
        output.warn(ask(side).warnings)
    folder = writable_folder(out)
    from k3sim.comparison import compare_options

    with progress("predicting") as told:
        comparison = compare_options(*sides, labels=(before, after), on_done=told)
        told.doing("writing the files")
        files = comparison.write(folder)
    if json_output:
        output.print_json(comparison.to_dict(files))
    else:
        print_comparison(comparison, files)


def _is_file(given: str) -> bool:
    """Whether a side names a file: one that exists or ends in .json, and does not begin as a key of the options."""
    key, separator, _ = given.partition("=")
    if separator and key in OPTIONS:
        return False
    return given.lower().endswith(".json") or (bool(given.strip()) and os.path.exists(given))


def _refuse_file_and_side(file: str, side: str) -> NoReturn:
    from k3sim.sim.timeline.file import read_document

    read_document(file)  # a file that is no step is at fault itself
    raise UserError(
        f"{file!r} is a file of a step and {side!r} a side to predict; accepted: two files, or two sides "
        "(key=value,...). 'k3sim timeline' writes a file for a side"
    )


def _compare_files(before: str, after: str, out: str, json_output: bool) -> None:
    from k3sim.stage_comparison import compare_files

    with progress("comparing files"):
        comparison = compare_files(before, after)
        files = comparison.write(writable_folder(out))
    if json_output:
        output.print_json(comparison.to_dict(files))
    else:
        print_stage_comparison(comparison, files)


def print_comparison(comparison: Comparison, files: Mapping[str, str]) -> None:
    """Both sides, part by part, and the difference."""
    from k3sim.compared_facts import facts_of_prediction
    from k3sim.sim.timeline.critical_path import Part

    console = terminal.console()
    before, after = comparison.before, comparison.after
    print_sides({side.label: facts_of_prediction(side.prediction) for side in (before, after)})
    table = terminal.table("part", before.label, after.label, "difference us")
    for part in Part:
        values = [side.prediction.waits_ps.get(part, 0) / 1e6 for side in (before, after)]
        if any(values):
            table.add_row(part.word, f"{values[0]:,.1f}", f"{values[1]:,.1f}", f"{values[1] - values[0]:+,.1f}")
    steps = [side.prediction.step_us for side in (before, after)]
    table.add_row("step", f"{steps[0]:,.1f}", f"{steps[1]:,.1f}", f"{steps[1] - steps[0]:+,.1f}")
    terminal.print_table(table)
    console.print(f"\n{after.label}: {comparison.speedup:.3f}x as fast as {before.label}")
    output.print_files(files)


def print_sides(sides: Mapping[str, Mapping[str, str]]) -> None:
    """What is compared: what both sides have in common, then what differs."""
    from k3sim.compared_facts import in_words

    first, second = sides.values()
    common = [in_words(fact, text) for fact, text in first.items() if text == second.get(fact)]
    terminal.console().print(f"both: {', '.join(common) or 'nothing in common'}\n")
    different = [fact for fact in {**first, **second} if first.get(fact) != second.get(fact)]
    if different:
        table = terminal.table("what differs", *sides, left=3, folded=(1, 2))
        for fact in different:
            table.add_row(fact, *(side.get(fact, "not stated") for side in (first, second)))
        terminal.print_table(table)
        terminal.console().print()


def print_stage_comparison(comparison: StageComparison, files: Mapping[str, str], most: int = 30) -> None:
    """Steps, and the stages that differ most."""
    console = terminal.console()
    print_sides({comparison.before: comparison.facts[0], comparison.after: comparison.facts[1]})
    console.print(
        f"{comparison.before}: {comparison.before_step_us:,.1f} us, "
        f"{comparison.after}: {comparison.after_step_us:,.1f} us"
        f" ({comparison.before_step_us / comparison.after_step_us:.3f}x as fast)\n",
        soft_wrap=True,
    )
    if any(one is not None for one in comparison.waits_us):
        terminal.print_table(_parts_of_files(comparison))
        console.print()
    for note in comparison.notes:
        console.print(note, soft_wrap=True)
    heads = [f"{what} {side}" for side in ("before", "after") for what in ("kernels", "us", "us on path")]
    table = terminal.table("stage", *heads, "difference us", "difference on path")
    for row in comparison.rows[:most]:
        table.add_row(
            row.stage,
            str(row.before_count),
            f"{row.before_us:,.1f}",
            f"{row.before_path_us:,.1f}",
            str(row.after_count),
            f"{row.after_us:,.1f}",
            f"{row.after_path_us:,.1f}",
            f"{row.delta_us:+,.1f}",
            f"{row.path_delta_us:+,.1f}",
        )
    terminal.print_table(table)
    if len(comparison.rows) > most:
        console.print(f"and {len(comparison.rows) - most} more in {files['json']}")
    output.print_files(files)


def _parts_of_files(comparison: StageComparison) -> Table:
    """Parts as each file has them; of a prediction beside a measured step also those by the rule for measured ones."""
    from k3sim.sim.timeline.critical_path import Part

    names, columns = ["us before", "us after"], list(comparison.waits_us)
    for side, (name, parts) in enumerate(zip(tuple(names), comparison.start_end_us, strict=True)):
        if parts is not None:
            position = 1 if side == 0 else 2
            names.insert(position, f"{name} by starts and ends")
            columns.insert(position, parts)
    # The two that are by one rule: the added column in place of the prediction's own.
    sides = zip(comparison.waits_us, comparison.start_end_us, strict=True)
    pair = [own if ruled is None else ruled for own, ruled in sides]
    table = terminal.table("part", *names, "difference us")

    def add(label: str, values: Sequence[float | None], compared: Sequence[float | None]) -> None:
        before, after = compared
        difference = "" if before is None or after is None else f"{after - before:+,.1f}"
        table.add_row(label, *("" if one is None else f"{one:,.1f}" for one in values), difference)

    for part in Part:
        values = [None if one is None else one.get(part.value) for one in columns]
        compared = [None if one is None else one.get(part.value) for one in pair]
        if any(values):
            add(part.word, values, compared)
    sums = [[None if one is None else fsum(one.values()) for one in some] for some in (columns, pair)]
    add("sum of the parts", *sums)
    return table
