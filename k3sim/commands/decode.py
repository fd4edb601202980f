"""``k3sim decode``: a decode step of the project's own kernels, measured on the GPU at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output
from k3sim.commands.options import Json, Out, writable_folder
from k3sim.commands.progress import progress
from k3sim.errors import UserError

if TYPE_CHECKING:
    from k3sim.calibrate.decode.options import DecodeOptions

EXAMPLE = "k3sim decode --path stock --layers 12 --context 8192"


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
    table: Annotated[
        str | None,
        typer.Option(help="Instead: measure both paths, each switch, rows and contexts into this file; resumes."),
    ] = None,
    budget_s: Annotated[float, typer.Option(help="With --table: begin no step after so many seconds.")] = 480.0,
    out: Out = "k3sim-out",
    json_output: Json = False,
) -> None:
    """Run one rank of the model on this GPU and time its step.

    Its peers are looped back, unless several processes run. The weights are random.
    """
    from k3sim.calibrate.decode.options import DecodeOptions

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
    if table is None:
        _measure(options, out, json_output)
    else:
        _measure_table(options, Path(table), budget_s, json_output)


def _measure_table(options: DecodeOptions, file: Path, budget_s: float, json_output: bool) -> None:
    """Every step of a table into its file; a line each as they come."""
    from k3sim.calibrate.decode.tables import run_table

    if json_output:
        raise UserError("--table writes its file and prints a line a step: give it without --json")
    left = run_table(options, file, budget_s=budget_s)
    sys.stdout.write(f"{left} steps left{', for another run' if left else ''}\n")


def _measure(options: DecodeOptions, out: str, json_output: bool) -> None:
    """One step, its files and what is printed of it."""
    from importlib.util import find_spec

    from k3sim.calibrate.decode.lines import lines_of
    from k3sim.calibrate.decode.measure import decode as measure
    from k3sim.calibrate.decode.measured import write

    folder = writable_folder(out)
    with progress("measuring a step") as told:
        measured = measure(options, told.doing)
    files = {"json": str(write(measured, folder))}
    document = measured.to_dict()
    if measured.timeline is not None and find_spec("plotly") and find_spec("perfetto"):
        from k3sim.measured_report import measured_report

        files |= measured_report(document, "measured step").write(folder)
    if json_output:
        output.print_json(document)
    else:
        sys.stdout.write("\n".join([*lines_of(measured), *(f"wrote {file}" for file in files.values())]) + "\n")
