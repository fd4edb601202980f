"""``k3sim claims``: public claims on trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3sim.commands import output, terminal
from k3sim.commands.options import Draws, Jobs, Json, Seed
from k3sim.commands.progress import Progress, progress
from k3sim.errors import UserError
from k3sim.sim.question import gpus_of

if TYPE_CHECKING:
    from k3sim.calibrate.compare.claims import JudgedClaim

EXAMPLE = "k3sim claims gb300-one-user"


def claims(
    names: Annotated[
        list[str] | None, typer.Argument(help="Shipped claims, or scenario files ending in .json; all by default.")
    ] = None,
    draws: Draws = 10,
    seed: Seed = 0,
    jobs: Jobs = None,
    json_output: Json = False,
) -> None:
    """See which public claims about K3 decoding hold up.

    Each is predicted for its own conditions, with an interval, a verdict and the boundary of what it says.
    """
    from k3sim.calibrate.compare.claims import judge_claims
    from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios

    shipped = {path.stem: path for path in shipped_scenarios()}
    paths = []
    for name in names or shipped:
        if name not in shipped and not name.lower().endswith(".json"):
            raise UserError(f"unknown claim {name!r}; accepted: {', '.join(shipped)}, or a file that ends in .json")
        paths.append(shipped.get(name) or Path(name))
    scenarios = [load_scenario(path) for path in paths]
    with progress("judging claims") as advance:
        judged = judge_claims(
            scenarios, num_draws=draws, seed=seed, jobs=jobs, on_done=advance, on_claim=say_claim(advance)
        )
    if json_output:
        output.print_json(output.versioned({"claims": [one.to_dict() for one in judged]}))
    else:
        print_claims(judged)


def say_claim(advance: Progress) -> Callable[[JudgedClaim], None]:
    """What shows a verdict as soon as it is there."""
    return lambda one: advance.say(f"{one.scenario.id}: {one.verdict}")


def print_claims(claims: Sequence[JudgedClaim]) -> None:
    """Each claim with its figures, verdict, boundary and what would have to be true."""
    console = terminal.console()
    for one in claims:
        console.print(f"{one.scenario.title}: {one.scenario.claim}")
        heads = ("figure", "GPUs", "claimed", "predicted", "90 % of draws", "unit", "verdict")
        table = terminal.table(*heads, folded=(0,))
        for each in one.figures:
            falls, answer = each.figure.unit == "falls", each.answer
            table.add_row(
                each.figure.label,
                str(gpus_of(each.figure.sides[-1].command) or ""),
                "falls" if falls else f"{each.figure.value:g}",
                f"{answer.predicted:.4g}" if answer else "",
                f"{answer.low:.4g} to {answer.high:.4g}" if answer else "",
                "last / first" if falls else each.figure.unit,
                each.verdict,
            )
            for point in each.series:
                between = f"{point.low:.4g} to {point.high:.4g}"
                gpus = str(gpus_of(point.command) or "")
                table.add_row(f"  {point.label}", gpus, "", f"{point.predicted:.4g}", between, "x", "")
        for answer, holds in one.alternatives:
            table.add_row(
                f"  {answer.label}", str(gpus_of(answer.command) or ""), "", f"{answer.predicted:.4g}",
                f"{answer.low:.4g} to {answer.high:.4g}", "", "claim holds" if holds else "does not hold",
            )  # fmt: skip
        terminal.print_table(table)
        if one.bias is not None:
            console.print(f"known bias: {one.bias.sentence} ('k3sim validate gb200-k3opt')")
        console.print(f"boundary: {one.text('boundary')}")
        console.print(f"what would have to be true: {one.text('would_hold')}")
        console.print(f"behind it: {one.text('found')} ({one.scenario.source}, {one.scenario.date})\n")
    console.print(
        "The intervals hold what the machine's values and kernels of other families leave open (docs/accuracy.md); "
        "'k3sim validate' counts how many published results lie inside theirs.",
    )
