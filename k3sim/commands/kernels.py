"""``k3sim kernels``: the decode kernels that the project ships, built, checked and timed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Json, writable_folder
from k3sim.commands.progress import Progress, progress
from k3sim.errors import UserError

if TYPE_CHECKING:
    from k3sim.kernels.harness.check import Checked

kernels = typer.Typer(
    help="Build, check and time the project's own decode kernels.",
    epilog="Example: k3sim kernels list",
    no_args_is_help=True,
)

Operators = Annotated[list[str] | None, typer.Argument(help="Operators; all when none is named.")]
InputSeed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]


@kernels.command("list", epilog="Example: k3sim kernels list")
def list_kernels(json_output: Json = False) -> None:
    """List operators and their compiled forms."""
    from k3sim.kernels.toolchain.catalogue import BUILDS

    forms = {operator: list(builds()) for operator, builds in BUILDS.items()}
    if json_output:
        output.print_json(output.versioned({"operators": forms}))
    else:
        print_kernel_list(forms)


@kernels.command("build", epilog="Example: k3sim kernels build router_topk --arch sm_90a")
def build_kernels(
    operators: Annotated[list[str] | None, typer.Argument(help="Operators to build; all when none is named.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture (repeatable); all three by default.")] = None,
    out: Annotated[str, typer.Option(help="Folder for cubins and the manifest.")] = "build/kernels",
    json_output: Json = False,
) -> None:
    """Compile kernels without a GPU: cubins and a manifest.

    The manifest has registers, stack, shared memory and facts of the machine code.
    """
    from k3sim.kernels.toolchain.build import build
    from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES

    folder = writable_folder(out)
    with progress("building") as told:
        say = told.counted()
        manifest = build(
            folder,
            architectures=arch or ARCHITECTURES,
            operators=operators or (),
            on_kernel=lambda entry: say(f"{entry['architecture']} {entry['operator']} {entry['kernel']}"),
        )
    if json_output:
        output.print_json(output.versioned(manifest))
    else:
        print_kernel_build(manifest, str(folder / "manifest.json"))


@kernels.command("check", epilog="Example: k3sim kernels check router_topk --replays 100")
def check_kernels(
    operators: Operators = None,
    replays: Annotated[
        int | None, typer.Option(help="Replays of each call in a CUDA graph, 0 for none; 1000, between GPUs 10000.")
    ] = None,
    seed: InputSeed = 0,
    gpus: Annotated[
        int | None, typer.Option(help="Instead, hand-overs between so many GPUs: operators that push, and engine.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="With --gpus: ranks of the exchange, a multiple of the GPUs; as many by default.")
    ] = None,
    out: Annotated[str, typer.Option(help="With --gpus: file for the results, written after every case.")] = "",
    json_output: Json = False,
) -> None:
    """Run kernels against references on this GPU, or several.

    Exit status 1 when one fails.
    """
    if gpus is not None:
        from k3sim.kernels.multi_gpu.__main__ import start
        from k3sim.kernels.multi_gpu.check import NUM_REPLAYS as BETWEEN_GPUS

        if json_output:
            raise UserError("--json: not with --gpus, whose processes print as they go; --out has the results as JSON")
        count = BETWEEN_GPUS if replays is None else replays
        raise typer.Exit(start(operators or (), gpus=gpus, ranks=ranks, replays=count, seed=seed, out=out))
    if ranks is not None or out:
        raise UserError("--ranks and --out: only with --gpus")

    from k3sim.kernels.harness.check import NUM_REPLAYS, check

    num_replays = NUM_REPLAYS if replays is None else replays
    with progress("checking") as told:
        say = told.counted()
        # On a terminal a line belongs above the bar; results that go elsewhere are written as they come.
        above = json_output or (sys.stdout.isatty() and sys.stderr.isatty())
        found = check(
            operators or (), seed=seed, num_replays=num_replays,
            on_case=(lambda one: say(one.line)) if above else partial(print_checked, told),
        )  # fmt: skip
    if json_output:
        # Numbers that JSON has no word for, of a case that raised.
        cases = [{k: None if v != v else v for k, v in asdict(one).items()} for one in found]
        output.print_json(output.versioned({"cases": cases}))
    else:
        failed = sum(not one.ok for one in found)
        sys.stdout.write(f"{len(found)} cases, {failed} failed\n")
    if not all(one.ok for one in found):
        raise typer.Exit(1)


@kernels.command("bench", epilog="Example: k3sim kernels bench skinny_gemv --budget-s 120")
def bench_kernels(
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
    seed: InputSeed = 0,
    json_output: Json = False,
) -> None:
    """Time kernels on this GPU beside the floor and public ones.

    Those are cuBLAS, and FLA and FlashInfer where they are installed.
    """
    from k3sim.kernels.harness.measure import measure, row_line

    def say(row: dict[str, Any]) -> None:
        sys.stderr.write(row_line(row) + "\n")

    with progress("timing"):
        document = measure(
            operators or (),
            out=None if out is None else Path(out),
            num_replays=replays,
            budget_s=budget_s,
            resume=resume,
            seed=seed,
            on_row=say,
        )
    if json_output:
        output.print_json(output.versioned(document))
    else:
        print_bench(document)


def print_kernel_list(forms: Mapping[str, Sequence[str]]) -> None:
    """Operators with the number of forms that a build compiles, and an example of a name."""
    table = terminal.table("operator", "forms", "first", left=1)
    for operator, names in forms.items():
        table.add_row(operator, str(len(names)), names[0])
    terminal.print_table(table)


def print_kernel_build(manifest: Mapping[str, Any], path: str) -> None:
    """One line an operator and architecture: what its machine code holds at most."""
    console = terminal.console()
    columns = ("operator", "architecture", "kernels", "registers", "stack B", "spills", "16-byte loads")
    table = terminal.table(*columns, left=2)
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in manifest["kernels"]:
        groups.setdefault((entry["operator"], entry["architecture"]), []).extend(entry["functions"])
    for (operator, architecture), codes in groups.items():
        table.add_row(
            operator,
            architecture,
            str(len(codes)),
            str(max(code["registers"] for code in codes)),
            str(max(code["stack_bytes"] for code in codes)),
            str(sum(code["spills"] for code in codes)),
            str(sum(code["loads_16_byte"] + code["bulk_copies"] for code in codes)),
        )
    terminal.print_table(table)
    console.print(f"\nmanifest  {path}", soft_wrap=True)


def print_checked(told: Progress, checked: Checked) -> None:
    """One case of a check: error, bound, verdict."""
    told.doing(checked.line)
    sys.stdout.write(f"{checked.line}\n")
    sys.stdout.flush()  # a run takes minutes, and may be cut off


def print_bench(document: Mapping[str, Any]) -> None:
    """One line a case: times, rate, fraction of the floor, and the fastest peer that ran."""
    console = terminal.console()
    rate = document["environment"]["read_bytes_per_s"]
    console.print(f"{document['environment']['gpu']}, read bandwidth {rate / 1e12:.2f} TB/s = 100 %\n", soft_wrap=True)
    table = terminal.table(
        "operator", "case", "us", "p10", "p90", "again", "MB", "TB/s", "of floor", "best peer us", "x ours", left=2,
        folded=(1,),
    )  # fmt: skip
    for row in document["timings"]:
        ran = [peer for peer in row["peers"] if "error" not in peer]
        best = min(ran, key=lambda peer: peer["median_us"], default=None)
        moves = row["moved_bytes"] > 0
        table.add_row(
            row["operator"],
            row["case"],
            *(f"{row[key]:.2f}" for key in ("median_us", "p10_us", "p90_us", "second_median_us")),
            f"{row['moved_bytes'] / 1e6:.1f}" if moves else "",
            f"{row['tb_per_s']:.2f}" if moves else "",
            f"{100 * row['of_floor']:.0f} %" if moves else "",
            f"{best['median_us']:.2f}" if best else "",
            f"{best['ratio']:.2f}" if best else "",
        )
    terminal.print_table(table)
    rest = f"; {document['left']} cases left, for --resume" if document["left"] else ""
    console.print(f"\nsamples  {document['file']}{rest}", soft_wrap=True)
