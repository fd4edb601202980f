"""``k3sim sensitivity``: which machine values a claim's verdict hangs on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from k3sim.commands import output
from k3sim.commands.options import Draws, Jobs, Json, Seed
from k3sim.commands.progress import progress

EXAMPLE = "k3sim sensitivity gb300-one-user"


def sensitivity(
    claim: Annotated[str, typer.Argument(help="Name of a shipped claim.")] = "gb300-one-user",
    values: Annotated[int, typer.Option(min=1, max=40, help="How many values to show of each figure.")] = 5,
    draws: Draws = 10,
    seed: Seed = 0,
    jobs: Jobs = None,
    json_output: Json = False,
) -> None:
    """See which machine values a claim's verdict hangs on.

    And by what factor each would have to be wrong for the verdict to be another.
    """
    from k3sim.calibrate.compare.sensitivity import lines_of
    from k3sim.calibrate.compare.sensitivity import sensitivity as find

    with progress("varying values") as told:
        found = find(
            claim, num_values=values, num_draws=draws, seed=seed, jobs=jobs, on_done=told, on_phase=told.doing
        )
    if json_output:
        output.print_json(output.versioned({"claim": claim, "figures": [one.to_dict() for one in found]}))
    else:
        sys.stdout.write("\n".join(lines_of(found)) + "\n")
