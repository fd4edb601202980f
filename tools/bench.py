"""Speed, memory and repeatability of k3sim against their budgets; the project's own kernels too.

    python tools/bench.py [--json] [--runs 5]

A budget of speed is a ratio: CPU seconds over those of a reference loop (``reference``: a bare SimPy model of fixed
size) that runs before and after what is judged. Of several repetitions the smallest ratio counts. So a budget holds
on a slow machine and on a busy one, where absolute seconds would not. Seconds are printed for information. Memory is
judged in GB, and files by their bytes.

Kernels: one build where CUTLASS is installed, no GPU needed; where there is a GPU, one GEMV beside the time that its
bytes take at the read rate of that GPU. What cannot run is named as skipped.

Exit status 1 when a budget is exceeded or when two runs with one seed differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import simpy

TIMELINE = ("timeline", "--concurrency", "1")
ALL_RANKS = ("timeline", "--concurrency", "1", "--skew", "--seed", "7")

#: Name, the command, and its budget in reference loops: about one and a half times what it took on two busy cores,
#: 2026-12-01.
COMMANDS = (
    ("k3sim --help", ("--help",), 0.55),
    ("k3sim machines", ("machines",), 1.2),
    ("k3sim timeline, to all files", TIMELINE, 8.5),
)
#: Likewise of parts of a prediction, timed in this process.
PARTS = {
    "one path, folded": 0.42,
    "one path of the own kernels, folded": 0.65,
    "routing, busiest rank of four layouts": 0.11,
    "HTML report": 0.6,
    "all ranks with skew": 19.0,
    "trace of all ranks": 10.0,
}
BUILD_BUDGET = 10.0
MEMORY_BUDGET_GB = 1.0
GEMV_BUDGET = 1.5  # of the floor; 1.04 on an H200, 2026-11-29 (calibrate/data/h200-kernels.json)

SLOW_RUNS = 2  # of what takes several seconds


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one repetition took."""

    cpu_s: float
    wall_s: float
    peak_gb: float = 0.0  # of a child process


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Repetitions of one thing: the smallest ratio to the reference loop, and the smallest costs."""

    ratio: float
    least: Cost
    runs: int

    @staticmethod
    def of(costs: Sequence[Cost], loops: Sequence[tuple[Cost, Cost]]) -> Judged:
        """``loops`` are the reference's before and after each cost. The smallest counts: what else runs only adds."""
        around = [(before.cpu_s + after.cpu_s) / 2 for before, after in loops]
        return Judged(
            ratio=min(cost.cpu_s / loop for cost, loop in zip(costs, around, strict=True)),
            least=Cost(
                cpu_s=min(one.cpu_s for one in costs),
                wall_s=min(one.wall_s for one in costs),
                peak_gb=max(one.peak_gb for one in costs),
            ),
            runs=len(costs),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure beside what it may be; ``budget`` is an upper bound in ``unit``, a skipped row says why."""

    name: str
    value: float | None
    unit: str
    budget: float
    detail: str

    @property
    def holds(self) -> bool:
        return self.value is None or self.value <= self.budget

    @property
    def verdict(self) -> str:
        return "skipped" if self.value is None else "ok" if self.holds else "OVER BUDGET"


def reference() -> None:
    """A bare SimPy model of fixed size: 64 processes take turns at four places, 1,000 times each."""

    def user(env: simpy.Environment, places: simpy.Resource, pause: int) -> Iterator[simpy.Event]:
        for _ in range(1000):
            with places.request() as place:
                yield place
                yield env.timeout(pause)

    env = simpy.Environment()
    places = simpy.Resource(env, capacity=4)
    for number in range(64):
        env.process(user(env, places, 1 + number % 7))
    env.run()


def timed(call: Callable[[], object]) -> Cost:
    """CPU and wall seconds of a call in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall)


def start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """k3sim in ``folder`` as a child process."""
    # With compiled bytecode, as on a user's machine, from the second run on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [sys.executable, "-m", "k3sim", *arguments], cwd=folder, stdout=subprocess.DEVNULL, env=environment
    )


def ended(child: subprocess.Popen[bytes], wall_start_s: float) -> Cost:
    """What a child took that has run since ``wall_start_s``; waits for its end."""
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - wall_start_s
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{child.args} ended with status {child.returncode}")
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    return Cost(cpu_s=usage.ru_utime + usage.ru_stime, wall_s=wall_s, peak_gb=kilobytes * 1024 / 1e9)


def command_cost(arguments: Sequence[str], folder: Path) -> Cost:
    """A whole command, cold: interpreter, imports, simulation and files."""
    begin = time.perf_counter()
    return ended(start(arguments, folder), begin)


def in_turn(calls: Mapping[str, Callable[[], Cost]], runs: int) -> dict[str, Judged]:
    """Every call ``runs`` times, with the reference loop before and after each."""
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    loops: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in calls}
    before = timed(reference)
    for _ in range(runs):
        for name, call in calls.items():
            costs[name].append(call())
            after = timed(reference)
            loops[name].append((before, after))
            before = after
    return {name: Judged.of(costs[name], loops[name]) for name in calls}


def speed_row(name: str, judged: Judged, budget: float) -> Row:
    return Row(
        name=name,
        value=judged.ratio,
        unit="loops",
        budget=budget,
        detail=f"{judged.least.cpu_s:.3f} s of CPU, {judged.least.wall_s:.3f} s; least of {judged.runs}",
    )


def command_rows(runs: int) -> list[Row]:
    """Start-up and the default command, with its memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = {name: lambda given=given: command_cost(given, folder) for name, given, _ in COMMANDS}
        judged = in_turn(calls, runs)
    rows = [speed_row(name, judged[name], budget) for name, _, budget in COMMANDS]
    peak_gb = judged[COMMANDS[-1][0]].least.peak_gb
    return [*rows, memory_row("its peak memory", peak_gb, f"largest of {runs}")]


def memory_row(name: str, peak_gb: float, detail: str) -> Row:
    return Row(name=name, value=peak_gb, unit="GB", budget=MEMORY_BUDGET_GB, detail=detail)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that a run wrote, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "k3sim-out").iterdir()}


def repeated_rows() -> list[Row]:
    """Two runs of the same question, with and without all ranks: their memory, and files that differ."""
    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name, "first"), Path(name, "second")
        differing, peak_gb = set[str](), 0.0
        for arguments in (TIMELINE, ALL_RANKS):
            for folder in (first, second):
                folder.mkdir(exist_ok=True)
            begin = time.perf_counter()
            # Beside each other, for nothing here is timed.
            children = [start(arguments, folder) for folder in (first, second)]
            peak_gb = max(peak_gb, *(ended(child, begin).peak_gb for child in children))
            before, after = digests(first), digests(second)
            differing |= {file for file in before | after if before.get(file) != after.get(file)}
    names = ", ".join(sorted(differing)) or "one seed, with and without all ranks"
    return [
        memory_row("peak memory of a command with all ranks", peak_gb, "three paths of all ranks"),
        Row(name="files that differ between two runs", value=len(differing), unit="", budget=0, detail=names),
    ]


def part_rows(runs: int) -> list[Row]:
    """The simulation and the files proper, imports left out."""
    import k3sim
    from k3sim.model.routing import Routing
    from k3sim.sim.export.html import write_html_report
    from k3sim.sim.export.perfetto import write_perfetto_trace
    from k3sim.sim.predict import Prediction, predict
    from k3sim.sim.question import ask

    def predicted(**options: Any) -> Prediction:
        prediction = predict(ask(k3sim.Options(**options)))
        assert prediction.step_ps > 0
        return prediction

    skews = iter(0.3 + 0.01 * number for number in range(10**6))

    def busiest_ranks() -> None:
        skew = next(skews)  # the result of one distribution is kept
        routing = Routing(name="counted", counts=tuple(rank**-skew for rank in range(1, 897)))
        for rows, ep in ((3, 8), (30, 8), (39, 16), (41, 32)):
            routing.busiest_rank_experts(896, 16, rows, ep)

    report = k3sim.predict(concurrency=1)
    timelines = {label: prediction.full for label, prediction in report.labelled.items()}
    all_ranks: list[Prediction] = []
    with tempfile.TemporaryDirectory() as folder:
        quick = {
            "one path, folded": lambda: predicted(),
            "one path of the own kernels, folded": lambda: predicted(machine="h200", kernels="own"),
            "routing, busiest rank of four layouts": busiest_ranks,
            "HTML report": lambda: write_html_report(report.html_data(), timelines, Path(folder, "report.html")),
        }
        slow = {
            "all ranks with skew": lambda: all_ranks.append(predicted(skew=True)),
            "trace of all ranks": lambda: write_perfetto_trace(
                {"fused": all_ranks[-1].timeline}, Path(folder, "step.pftrace")
            ),
        }
        rows = []
        for calls, count in ((quick, runs), (slow, min(runs, SLOW_RUNS))):
            judged = in_turn({name: lambda call=call: timed(call) for name, call in calls.items()}, count)
            rows += [speed_row(name, one, PARTS[name]) for name, one in judged.items()]
    return rows


def build_row() -> Row:
    """One kernel compiled for one architecture in a child process; no GPU is needed."""
    name = "build of one kernel"
    missing = [package for package in ("torch", "cutlass") if importlib.util.find_spec(package) is None]
    if missing:
        reason = f"{' and '.join(missing)} not installed: make kernel-tools"
        return Row(name=name, value=None, unit="loops", budget=BUILD_BUDGET, detail=reason)
    with tempfile.TemporaryDirectory() as folder:
        given = ("kernels", "build", "l2_prefetch", "--arch", "sm_90a", "--out", "build")
        judged = in_turn({name: lambda: command_cost(given, Path(folder))}, SLOW_RUNS)
    return speed_row(name, judged[name], BUILD_BUDGET)


def gemv_row() -> Row:
    """The largest one-row GEMV on this GPU, over the time of its bytes at the rate that a read-only kernel reaches."""
    name = "largest GEMV on the GPU"
    try:
        import torch
    except ImportError:
        available = False
    else:
        available = torch.cuda.is_available()
    if not available:
        return Row(name=name, value=None, unit="floors", budget=GEMV_BUDGET, detail="no CUDA GPU")
    from k3sim.kernels.harness.bench import time_calls
    from k3sim.kernels.harness.cases import cases_of
    from k3sim.kernels.harness.read_rate import read_rate

    rate, _ = read_rate()
    cases = [case for case in cases_of(["skinny_gemv"]) if case.rows == 1 and case.timed is not None]
    case = max(cases, key=lambda one: one.moved_bytes)
    assert case.timed is not None
    prepared = case.timed("cuda", 0, torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    timing = time_calls(case.name, prepared.calls)
    floor_us = case.moved_bytes / rate * 1e6
    return Row(
        name=name,
        value=timing.median_us / floor_us,
        unit="floors",
        budget=GEMV_BUDGET,
        detail=f"{case.name}: {timing.median_us:.2f} us, floor {floor_us:.2f} us at {rate / 1e12:.2f} TB/s",
    )


def measure(runs: int) -> Iterator[Row]:
    """Every row of the table, as it is measured.

    Commands come first: a child inherits the peak of a parent that has grown.
    """
    yield from command_rows(runs)
    yield from repeated_rows()
    yield build_row()
    yield from part_rows(runs)
    yield gemv_row()


def row_line(row: Row) -> str:
    value = f"{row.value:8.3g}" if row.value is not None else f"{'-':>8}"
    return f"{row.name:40}{value} {row.unit:6} of {row.budget:4g}  {row.verdict:12} {row.detail}"


def main() -> int:
    """Print the table or JSON; 1 when a budget is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of what is repeated (default 5)")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs is {given.runs}; a whole number of at least 1 is accepted")

    loop_s = min(timed(reference).cpu_s for _ in range(given.runs))
    machine = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "reference_loop_cpu_s": round(loop_s, 4),
    }
    if not given.json:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
    rows = []
    for row in measure(given.runs):
        rows.append(row)
        if not given.json:
            print(row_line(row), flush=True)
    if given.json:
        json.dump({"machine": machine, "rows": [{**asdict(row), "holds": row.holds} for row in rows]}, sys.stdout)
        sys.stdout.write("\n")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
