"""``k3sim sweep``: a grid of questions on all cores, into tables; the same command again goes on where it stopped."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Jobs, Json, Out, writable_folder
from k3sim.commands.progress import progress
from k3sim.errors import UserError
from k3sim.version import VERSION

EXAMPLE = "k3sim sweep --grid path=stock,fused --grid concurrency=1,2 --out my-sweep"


def sweep(
    grid_file: Annotated[
        str | None, typer.Argument(metavar="[GRID]", help="YAML or JSON file: options with values, lists or ranges.")
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="OPTION=VALUE,VALUE or OPTION=1:64:x2 (repeatable).")
    ] = None,
    jobs: Jobs = None,
    out: Out = "k3sim-sweep",
    json_output: Json = False,
) -> None:
    """Answer every combination of a grid of options; Parquet and CSV.

    Interrupted or killed, the same command goes on with the points that are missing.
    """
    from k3sim.calibrate.compare.jobs import run_jobs
    from k3sim.sim.sweep import Store, answer, grid_of, read_grid

    if (grid_file is None) == (not grid):
        raise UserError("a sweep needs a grid: a file, or --grid OPTION=VALUES; give one of them")
    asked = read_grid(grid_file) if grid_file is not None else grid_of(_given(grid or ()))
    folder = Path(out) if Path(out).is_dir() else writable_folder(out)
    store = Store(folder, asked, VERSION)
    try:
        left = store.missing()
        done = asked.num_points - len(left)
        with progress("sweeping") as told:
            told.doing(f"{done} of {asked.num_points} points were there" if done else f"{asked.num_points} points")
            for row in run_jobs([partial(answer, asked, *one) for one in left], jobs=jobs, on_done=told):
                store.add(row)
        rows = [store.rows[index] for index in range(asked.num_points)]
        files = {"points": str(store.path), **write_tables(folder, rows)}
    finally:
        store.close()
    refused = sum(1 for row in rows if row.get("refused"))
    if json_output:
        output.print_json(
            output.versioned({"num_points": len(rows), "num_refused": refused, "num_resumed": done, "files": files})
        )
        return
    terminal.console().print(
        f"{len(rows):,} points, {refused:,} of them refused" + (f"; {done:,} were there already" if done else "")
    )
    output.print_files(files)


def _given(items: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for item in items:
        word, equals, values = item.partition("=")
        if not equals or not values:
            raise UserError(f"--grid {item[:60]!r}: accepted: OPTION=VALUE,VALUE, as in tp=8,16")
        if word in given:
            raise UserError(f"--grid {word} is given twice; give all of its values at once")
        given[word] = values.split(",")
    return given


def write_tables(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """sweep.csv, and sweep.parquet where pyarrow is installed, each whole or not at all; kind -> path."""
    from k3sim.sim.export.whole_file import write_whole_file
    from k3sim.sim.sweep import columns_of

    columns, text = columns_of(rows), io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files = {"csv": str(folder / "sweep.csv")}
    write_whole_file(folder / "sweep.csv", text.getvalue().encode())
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        return files
    table = io.BytesIO()
    filled = [{column: row.get(column) for column in columns} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled), table)
    write_whole_file(folder / "sweep.parquet", table.getvalue())
    return {**files, "parquet": str(folder / "sweep.parquet")}
