"""Start-up, speed, memory and repeatability of k3sim against their budgets.

    python tools/bench.py [--json] [--runs 5]

Whole commands run as child processes, cold: interpreter, imports, simulation and files. The simulation proper is
timed inside one child. Exit status 1 when a budget is exceeded or when two runs with one seed differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

COMMAND = ("timeline", "--concurrency", "1")
SAMPLED = ("timeline", "--concurrency", "1", "--skew", "--seed", "7")

FOLDED_BUDGET_S = 0.5
FULL_BUDGET_S = 10.0
COMMAND_BUDGET_S = 3.0
MEMORY_BUDGET_GB = 1.0

# Times one path, imports excluded, and prints the seconds of every repetition.
SIMULATE = """
import json, sys, time
from dataclasses import replace
from k3sim.ask import Options, ask
from k3sim.model.paths import find_path
from k3sim.sim.predict import predict
question, path = ask(Options(skew=True if sys.argv[1] == "full" else None))
seconds = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    prediction = predict(question, path)
    prediction.step_ps
    seconds.append(time.perf_counter() - start)
layers = {run.layer for run in prediction.timeline.kernels}
json.dump({"seconds": seconds, "ranks": len(prediction.timeline.ranks), "layers": len(layers) - 2}, sys.stdout)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure beside what it may be; ``budget`` is an upper bound in ``unit``."""

    name: str
    value: float
    unit: str
    budget: float
    detail: str

    @property
    def holds(self) -> bool:
        return self.value <= self.budget


def run_command(arguments: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Run k3sim in ``folder``; returns seconds and the child's peak resident memory in GB."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "k3sim", *arguments], cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"k3sim {' '.join(arguments)} ended with status {child.returncode}")
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    return seconds, kilobytes * 1024 / 1e9


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that a run wrote, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "k3sim-out").iterdir())
    }


def simulate(what: str, runs: int) -> tuple[float, str]:
    """Median seconds of one path's simulation, and what was simulated."""
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE, what, str(runs)], capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    return median(answer["seconds"]), f"{answer['ranks']} ranks, {answer['layers']} layers, median of {runs}"


def measure(runs: int) -> list[Row]:
    """Every row of the table, in the order in which they are measured."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = [run_command(COMMAND, folder) for _ in range(runs)]
        seconds = [one for one, _ in results]
        rows.append(
            Row(
                name="default command, cold, to all files",
                value=median(seconds),
                unit="s",
                budget=COMMAND_BUDGET_S,
                detail=f"median of {runs}, {min(seconds):.2f} to {max(seconds):.2f} s",
            )
        )
        peak = max(memory for _, memory in results)
        rows.append(
            Row(name="its peak memory", value=peak, unit="GB", budget=MEMORY_BUDGET_GB, detail=f"largest of {runs}")
        )

    seconds_folded, detail = simulate("folded", runs)
    rows.append(
        Row(name="one path, folded", value=seconds_folded, unit="s", budget=FOLDED_BUDGET_S, detail=detail)
    )
    seconds_full, detail = simulate("full", 1)
    rows.append(
        Row(name="one path, all ranks with skew", value=seconds_full, unit="s", budget=FULL_BUDGET_S, detail=detail)
    )

    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name, "first"), Path(name, "second")
        differing, peak = set[str](), 0.0
        for arguments in (COMMAND, SAMPLED):
            for folder in (first, second):
                folder.mkdir(exist_ok=True)
                peak = max(peak, run_command(arguments, folder)[1])
            before, after = digests(first), digests(second)
            differing |= {file for file in before | after if before.get(file) != after.get(file)}
    rows.append(
        Row(
            name="command with all ranks, peak memory",
            value=peak,
            unit="GB",
            budget=MEMORY_BUDGET_GB,
            detail="three paths of all ranks",
        )
    )
    rows.append(
        Row(
            name="files that differ between two runs",
            value=len(differing),
            unit="",
            budget=0,
            detail=", ".join(sorted(differing)) or "one seed, with and without skew",
        )
    )
    return rows


def main() -> int:
    """Print the table or JSON; 1 when a budget is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of what is repeated (default 5)")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs is {given.runs}; a whole number of at least 1 is accepted")

    rows = measure(given.runs)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
    if given.json:
        json.dump({"machine": machine, "rows": [{**asdict(row), "holds": row.holds} for row in rows]}, sys.stdout)
        sys.stdout.write("\n")
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        for row in rows:
            verdict = "ok" if row.holds else "OVER BUDGET"
            print(f"{row.name:38} {row.value:8.3g} {row.unit:3} of {row.budget:4g}  {verdict:12} {row.detail}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
