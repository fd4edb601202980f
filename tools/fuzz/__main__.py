"""Thousands of commands with mutated options and files, and what became of them: ``python tools/fuzz --runs 500``.

Each runs in a folder of its own, most of them in a copy of this process that has everything imported (50 ms each), some
as a process of their own (``invocations.py``). Counted are tracebacks, statuses that are not documented, what takes a
minute or a gigabyte, refusals that are not one line or leave anything, and output that is no JSON (``outcomes.py``).
The seed and the number of an invocation give it again: ``--seed 7 --only 123``. Exit status 1 where there is a fault;
Ctrl-C shows what there is so far.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from invocations import TAKES_FILE, Invocation, Originals, drawn
from outcomes import FAULTS, Outcome, run_alone, run_forked

from k3sim.cli import main as k3sim_main

MODULES = (
    "k3sim.app",
    "k3sim.commands.timeline",
    "k3sim.commands.compare",
    "k3sim.commands.paths",
    "k3sim.commands.machines",
    "k3sim.commands.report",
    "k3sim.commands.decode",
    "k3sim.commands.validate",
    "k3sim.commands.claims",
    "k3sim.commands.sensitivity",
    "k3sim.commands.calibrate",
    "k3sim.commands.kernels",
    "k3sim.report",
    "k3sim.comparison",
    "k3sim.stage_comparison",
    "k3sim.measured_report",
    "k3sim.sim.profile_rules",
    "k3sim.model.config_rules",
    "k3sim.calibrate.sample_rules",
    "k3sim.calibrate.evidence.rules",
    "k3sim.calibrate.evidence.scenario_rules",
    "k3sim.calibrate.fit.calibration",
    "k3sim.calibrate.fit.kernel_tables",
    "k3sim.calibrate.compare.validate",
    "k3sim.calibrate.compare.check",
    "k3sim.calibrate.compare.claims",
    "k3sim.calibrate.compare.sensitivity",
    "k3sim.sim.timeline.step_rules",
    "k3sim.sim.export.html",
    "k3sim.sim.export.perfetto",
    "rich.table",
    "rich.progress",
    "scipy.optimize",
)

#: A file of each kind that lacks nearly all.
FAULTY = (
    '{"values": {}, "name": "x"}', '{"model_type": "x"}', '{"step_us": 1, "stages": [{}]}',
    '{"step_us": 1, "measured": true, "stages": [{}]}', '{"records": [{"kind": "step"}, {"kind": "kernel"}]}',
    '{"claim": "x", "figures": [{}]}', '{"cases": [{}], "gpu": "x"}', '{"timings": [{}], "environment": {}}',
    "hardware,op,shape,dtype,condition,time_us,notes,source_url\nB200,gemm,M=1 N=8 K=8,,,x,,\n",
)  # fmt: skip


def prepare(folder: Path) -> Originals:
    """Good files of this version, written by it; every module is imported and every model of a file built here.

    What is done here once no copy of this process does again: a refusal takes ten milliseconds then.
    """
    for name in MODULES:
        __import__(name)
    fault = Path(folder) / "fault.json"
    fault.parent.mkdir()
    for content in FAULTY:
        fault.write_text(content)
        for command in (*TAKES_FILE, "timeline --tp"):
            with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                k3sim_main([*command.split(), str(fault)])
    command = [sys.executable, "-m", "k3sim", "timeline", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    originals = Originals.of(folder)
    gc.collect()
    gc.freeze()
    return originals


def run(invocation: Invocation, place: Path) -> Outcome:
    """Run one in a fresh folder below ``place``."""
    shutil.rmtree(place, ignore_errors=True)
    work = place / "work"
    work.mkdir(parents=True)
    invocation.lay_out(work)
    runs = run_alone if invocation.alone else run_forked
    return runs(invocation.arguments, work, invocation.streams)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first invocation")
    parser.add_argument("--only", type=int, help="one invocation by its number, with what it said")
    given = parser.parse_args()
    numbers = [given.only] if given.only is not None else range(given.first, given.first + given.runs)
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    num_faults = 0
    with tempfile.TemporaryDirectory(prefix="k3sim-fuzz-") as folder, suppress(KeyboardInterrupt):
        originals = prepare(Path(folder) / "originals")
        last_s = time.monotonic()
        for number in numbers:
            invocation = drawn(given.seed, number, originals)
            outcome = run(invocation, Path(folder) / "run")
            count(totals[invocation.kind], outcome)
            if outcome.faults or given.only is not None:
                num_faults += len(outcome.faults)
                tell(number, invocation, outcome)
            if time.monotonic() - last_s > 30:
                last_s = time.monotonic()
                sys.stderr.write(f"{number} of {numbers[-1]}, {num_faults} faults\n")
    num_done = int(print_table(totals))
    print(f"seed {given.seed}, {num_done} invocations, {num_faults} faults, {os.times().children_user:.0f} CPU s")
    return 1 if num_faults or num_done < len(numbers) else 0


def count(total: dict[str, float], outcome: Outcome) -> None:
    """Add an outcome to the row of its kind."""
    total["runs"] += 1
    total[{0: "answered", 2: "refused"}.get(outcome.status, "other")] += 1
    total["CPU s"] += outcome.cpu_s
    total["most MB"] = max(total["most MB"], outcome.peak_bytes / 1e6)
    total["most CPU s"] = max(total["most CPU s"], outcome.cpu_s)
    for fault in set(outcome.faults):
        total[fault] += 1


def tell(number: int, invocation: Invocation, outcome: Outcome) -> None:
    words = [one if len(one) < 80 else f"{one[:60]}...({len(one)})" for one in invocation.arguments]
    print(f"-- {number} {invocation.kind}: {words!r} {invocation.streams}")
    faults, megabytes = ", ".join(outcome.faults), outcome.peak_bytes / 1e6
    print(f"   status {outcome.status}, {outcome.cpu_s:.1f} s, {megabytes:.0f} MB: {faults}")
    print("   " + outcome.said[-1200:].encode(errors="backslashreplace").decode().replace("\n", "\n   "), flush=True)


def print_table(totals: dict[str, dict[str, float]]) -> float:
    """A row a kind as a table of Markdown; returns how many were run, of as many as there was time for."""
    columns = ("runs", "answered", "refused", "other", *FAULTS, "CPU s", "most MB", "most CPU s")
    whole: dict[str, float] = defaultdict(float)
    for total in totals.values():
        for name in columns:
            whole[name] = max(whole[name], total[name]) if name.startswith("most") else whole[name] + total[name]
    print(f"| kind | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for kind, total in [*sorted(totals.items()), ("all", whole)]:
        print(f"| {kind} | " + " | ".join(f"{total[name]:.0f}" for name in columns) + " |")
    return whole["runs"]


if __name__ == "__main__":
    sys.exit(main())
