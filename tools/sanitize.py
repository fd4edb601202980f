"""compute-sanitizer over the project's kernels: memcheck, synccheck and racecheck for every operator, on a GPU.

    python tools/sanitize.py [--per-form 1] [--seconds 170] [--out FILE.json] [OPERATOR ...]

Of each operator the smallest cases of every form are run, each operator under each tool in a process of its own, since
a report of synccheck ends the context. Several run at once. A case counts as clean when the tool has no report between
its launch and its end and the outputs are right. Exit status 1 when a tool reports something, or when an operator was
not reached in time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

TOOLS = ("memcheck", "synccheck", "racecheck")
FORM = re.compile(r"\d+")  # cases whose names differ in numbers alone are of one form
REPORT = re.compile(r"^========= +(Error:|Warning:|Race reported|Invalid|Barrier error|Uninitialized)")


@dataclass
class Found:
    """What one tool said of one operator."""

    operator: str
    tool: str
    cases: list[str] = field(default_factory=list)  # run to their end, with right outputs
    wrong: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)


def chosen(operators: list[str], per_form: int) -> list[tuple[str, str]]:
    """Operator and name of the smallest cases of every form."""
    from k3sim.kernels.harness.cases import cases_of

    forms: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in cases_of(operators):
        if case.problem is not None:
            forms[case.operator, FORM.sub("n", case.name).replace("rows", "row")].append(case.name)
    return [
        (operator, name)
        for (operator, _), names in forms.items()
        for name in sorted(names, key=lambda one: sum(map(int, FORM.findall(one))))[:per_form]
    ]


def run_cases(wanted: list[tuple[str, str]]) -> None:
    """In the process that a tool watches: each case between two lines."""
    from k3sim.kernels.harness.cases import cases_of
    from k3sim.kernels.harness.check import check_cases

    by_name = {(case.operator, case.name): case for case in cases_of(())}
    for operator, name in wanted:
        print(f"BEGIN {operator}\t{name}", flush=True)
        (one,) = check_cases([by_name[operator, name]], "cuda", seed=0, num_replays=0)
        print(f"{'RIGHT' if one.ok else 'WRONG ' + one.reason}", flush=True)


def watch(tool: str, wanted: list[tuple[str, str]], seconds: float) -> Found:
    """Run the cases of one operator under one tool."""
    command = [
        "compute-sanitizer", "--tool", tool, "--print-limit", "20",
        sys.executable, __file__, "--run", json.dumps(wanted),
    ]  # fmt: skip
    current = Found(wanted[0][0], tool)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        from threading import Timer

        timer = Timer(seconds, process.kill)
        timer.start()
        case, block = "", 0
        assert process.stdout is not None
        for line in process.stdout:
            line = line.rstrip()
            if line.startswith("BEGIN "):
                case = line.split("\t")[1]
            elif case and line == "RIGHT":
                current.cases.append(case)
            elif case and line.startswith("WRONG"):
                current.wrong.append(f"{case}: {line[6:]}")
            elif case and REPORT.match(line):
                block = 6  # the lines that say where
                current.reports.append(f"{case}: {line[9:].strip()}")
            elif block and line.startswith("========="):
                block -= 1
                current.reports[-1] += f" | {line[9:].strip()}"
            else:
                block = 0
        timer.cancel()
    return current


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--per-form", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=170.0, help="of each process")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run_cases([(operator, name) for operator, name in json.loads(asked.run)])
        return 0
    wanted = chosen(asked.operators, asked.per_form)
    by_operator: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for one in wanted:
        by_operator[one[0]].append(one)
    jobs = [(tool, cases) for cases in by_operator.values() for tool in asked.tools.split(",")]
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = list(pool.map(lambda job: watch(*job, asked.seconds), jobs))
    if asked.out:
        asked.out.write_text(json.dumps([asdict(one) for one in results], indent=1))
    num_cases = {operator: sum(1 for one, _ in wanted if one == operator) for operator, _ in wanted}
    clean = True
    for one in results:
        reached = len(one.cases) + len(one.wrong)
        print(f"{one.tool:10} {one.operator:14} {reached} of {num_cases[one.operator]} cases, {len(one.wrong)} wrong, "
              f"{len(one.reports)} reports")  # fmt: skip
        for line in sorted(set(one.reports + one.wrong))[:6]:
            print(f"    {line[:400]}")
        clean = clean and not one.reports and not one.wrong and reached == num_cases[one.operator]
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
