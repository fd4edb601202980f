"""``python -m k3sim.kernels.multi_gpu --gpus 2``: check the hand-over kernels between GPUs (``check.py``).

Starts one process a GPU; under torchrun it is one of them. Exit status 1 when something differs, 124 when a process did
not come back in time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from k3sim.errors import UserError
from k3sim.kernels.multi_gpu.check import NUM_REPLAYS, check_hand_overs, check_options, write_rows
from k3sim.kernels.multi_gpu.compared import Compared
from k3sim.kernels.multi_gpu.processes import check_gpus, run_processes

MODULE = "k3sim.kernels.multi_gpu"


def start(
    operators: Sequence[str],
    *,
    gpus: int,
    ranks: int | None = None,
    replays: int = NUM_REPLAYS,
    seed: int = 0,
    out: str = "",
    timeout_s: float = 300.0,
) -> int:
    """Check from one process: starts one a GPU, which print; exit status. Raises UserError before it starts any."""
    check_gpus(gpus)
    check_options(operators, ranks, gpus, replays)
    arguments = [*operators, "--replays", str(replays), "--seed", str(seed)]
    if ranks is not None:
        arguments += ["--ranks", str(ranks)]
    if out:
        arguments += ["--out", out]
    return run_processes(MODULE, arguments, gpus, timeout_s=timeout_s)


def work(operators: Sequence[str], *, ranks: int | None, replays: int, seed: int, out: str) -> int:
    """What each of the processes does."""
    from k3sim.kernels.harness.bench import environment
    from k3sim.kernels.harness.check import require_gpu

    require_gpu("checking kernels between GPUs")
    rows: list[Compared] = []
    first = os.environ.get("RANK", "0") == "0"

    def report(one: Compared) -> None:
        rows.append(one)
        if first:
            sys.stdout.write(one.line + "\n")
            sys.stdout.flush()
            if out:
                write_rows(rows, Path(out), environment())

    check_hand_overs(operators, ranks=ranks, num_replays=replays, seed=seed, on_case=report)
    return int(not all(one.ok for one in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("operators", nargs="*", help="proj_allreduce, router_topk, latent_tail, lse_merge, engine")
    parser.add_argument("--gpus", type=int, default=None, help="processes to start; under torchrun leave it out")
    parser.add_argument("--ranks", type=int, default=None, help="ranks of the exchange: a multiple of the GPUs")
    parser.add_argument("--replays", type=int, default=NUM_REPLAYS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="JSON file, written after every case")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of all processes together")
    given = vars(parser.parse_args(arguments))
    gpus, timeout_s, operators = given.pop("gpus"), given.pop("timeout_s"), given.pop("operators")
    try:
        if gpus is not None and "RANK" not in os.environ:
            return start(operators, gpus=gpus, timeout_s=timeout_s, **given)
        return work(operators, **given)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"k3sim: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
