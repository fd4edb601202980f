"""Many cases in one run, on one set of weights: the tables of measured steps.

A file is written after every case, so that a run which was stopped resumes with what is left.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3sim.calibrate.decode.measure import join_processes, measure, require_gpu
from k3sim.calibrate.decode.options import DecodeOptions, case_of, num_processes
from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind
from k3sim.model.paths import SWITCHES

TABLE = Accepted(what="steps that '--table' wrote", kinds=(Kind.MEASURED_STEPS,), most_bytes=32 << 20)


def table_cases(options: DecodeOptions) -> list[DecodeOptions]:
    """Both paths at every concurrency and context of the table, and each switch alone and left out at one row."""
    found = [
        replace(options, path=path, concurrency=rows, context=context, profile=False)
        for context in (8192, 1024, 131_072)
        for rows in (1, 2, 4, 8, 16)
        for path in ("stock", "fused")
    ]
    one = replace(options, path="fused", concurrency=1, context=8192, profile=False)
    found[2:2] = [
        *(replace(one, without=(switch,)) for switch in SWITCHES),
        *(replace(one, with_switches=(switch,)) for switch in SWITCHES),
    ]
    return found


def link_cases(options: DecodeOptions) -> list[DecodeOptions]:
    """For several GPUs: both paths by the number of rows, over the link, and at one row looped back as well."""
    found = [
        replace(options, path=path, concurrency=rows, profile=False, loop_back=False)
        for rows in (1, 8, 16, 2, 4)
        for path in ("stock", "fused")
    ]
    found[2:2] = [replace(one, loop_back=True) for one in found[:2]]
    return found


def run_table(options: DecodeOptions, file: Path, *, budget_s: float) -> int:
    """Measure what ``file`` does not hold yet, one set of weights for all, and write it after every case.

    Under torchrun the cases are those of ``link_cases``; the first process writes. No case begins once ``budget_s``
    have passed. Returns how many are left. Raises UserError as ``decode`` does.
    """
    if options.timestamps or options.timestamps_of:
        raise UserError("--timestamps makes steps longer, and a table holds times; measure one step with it")
    rows = rows_of(file)
    require_gpu()
    import torch

    from k3sim.kernels.harness.read_rate import read_rate
    from k3sim.kernels.rank.memory import check_memory
    from k3sim.kernels.rank.weights import random_weights

    began = time.perf_counter()
    done = {row["command"] for row in rows}
    wanted = table_cases(options) if num_processes() == 1 else link_cases(options)
    cases = [case_of(one) for one in wanted if one.command() not in done]
    if not cases:
        return 0
    index = join_processes()
    free_bytes, _ = torch.cuda.mem_get_info()
    largest = max(
        cases, key=lambda case: (case.workload.concurrency * case.workload.context, case.path.name == "stock")
    )
    check_memory(
        largest.architecture,
        largest.layout,
        largest.workload,
        largest.path,
        max_tokens=largest.max_tokens,
        free_bytes=free_bytes,
        also=tuple({case.path.switches: case.path for case in cases}.values()),
    )
    rate, _ = read_rate()
    torch.cuda.empty_cache()
    programs = [case.program for case in cases]
    weights = random_weights(
        programs, cases[0].architecture, cases[0].layout, seed=options.seed, index=index, device=f"cuda:{index}"
    )
    left = len(cases)
    for case in cases:
        if largest_of_all(time.perf_counter() - began) > budget_s:
            break
        measured = measure(case, weights, rate)
        row = measured.to_dict()
        for name in ("needed_bytes", "allocated_bytes", "start_s", "num_launches"):
            del row[name]  # of a rank that holds the weights of every path, and is not profiled
        left -= 1
        if index:
            del measured
            torch.cuda.empty_cache()
            continue
        rows.append(row)
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text('{"steps": [\n' + ",\n".join(json.dumps(one) for one in rows) + "\n]}\n")
        partial.replace(file)
        sys.stdout.write(f"{measured.step_us:10.1f} us  {case.options.command()}\n")
        sys.stdout.flush()
        del measured
        torch.cuda.empty_cache()
    return left


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Rows that an earlier run left in a file, none where there is no file.

    Raises UserError where it holds something else, or its folder does not exist.
    """
    if not file.absolute().parent.is_dir():
        raise UserError(f"table: the folder {file.parent} does not exist")
    if not file.exists():
        return []
    document = read_json(file, TABLE)
    rows = document.value.get("steps")
    if not isinstance(rows, list) or not all(isinstance(one, dict) and "command" in one for one in rows):
        document.fault(("steps",), "is no list of steps with their commands, accepted: what '--table' wrote")
    document.settle()
    return list(rows)


def largest_of_all(value: float) -> float:
    """The largest of all processes' values, so that they decide alike."""
    import torch

    if not torch.distributed.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return float(found)
