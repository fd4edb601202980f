"""Every kernel timed on the GPU at hand, beside its floor and other packages: what ``k3sim kernels bench`` runs.

    document = measure(out=Path("h200-kernels.json"), budget_s=500, on_row=lambda row: print(row_line(row)))

First the read bandwidth of the same GPU, which is 100 %. Then every case by the protocol of bench.py: calls over
operands that come from HBM, in one graph, replayed, twice. The file is written anew after every case, so what was
measured survives the end of the program; ``resume`` resumes there. Cases of one row come first.

A row of the file: operator, case, the samples of ``bench.sample_row``, ``second_median_us`` (the same graph again),
``moved_bytes`` (from the operator's cost.py), and the rates and peers that follow from them.
"""

from __future__ import annotations

import datetime
import gc
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.kernels.harness.bench import Timing, environment, sample_row, time_twice, write_samples
from k3sim.kernels.harness.cases import Call, Case, Timed, cases_of
from k3sim.kernels.harness.check import require_gpu
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind

NUM_REPLAYS = 200
PEER_SHARE = 2  # peers are replayed half as often, which halves their part of the file and of the time

Row = dict[str, Any]
# Name, calls, replays: the samples, and those of the second run.
Timer = Callable[[str, Sequence[Call], int], tuple[Timing, Timing]]


def measure(
    operators: Sequence[str] = (),
    *,
    out: Path | None = None,
    num_replays: int = NUM_REPLAYS,
    budget_s: float | None = None,
    resume: bool = False,
    seed: int = 0,
    commit: str | None = None,
    on_row: Callable[[Row], None] = lambda _: None,
) -> dict[str, Any]:
    """Time all cases of ``operators`` (all when empty) and write ``out``; returns what is in it.

    ``out``: by default ``default_path`` in the current folder. ``budget_s``: no case begins after that many seconds.
    ``resume``: keep the rows of ``out``, which must be of the same GPU, and time only what it lacks. ``commit``: by
    default that of the checkout this package lies in. ``on_row`` gets each row as it is done.

    Raises UserError for an unknown operator, a bad number, or where no GPU or toolkit is.
    """
    cases = cases_of(operators)
    if num_replays < 2:
        raise UserError(f"replays: got {num_replays}, accepted: 2 or more")
    if budget_s is not None and not budget_s > 0:
        raise UserError(f"budget: got {budget_s} seconds, accepted: more than 0")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"out: the folder {out.parent} does not exist")
    require_gpu("timing kernels")
    import torch

    from k3sim.kernels.harness.read_rate import METHOD, read_rate

    begin = time.monotonic()
    where = environment(commit or _commit())
    path = out or default_path(where["gpu"])
    done = rows_of(path, where["gpu"]) if resume else []
    rate, _ = read_rate()
    where |= {"read_bytes_per_s": round(rate), "read_method": METHOD, "replays": num_replays, "seed": seed}
    l2_bytes = int(where["l2_bytes"])

    def timer(name: str, calls: Sequence[Call], replays: int) -> tuple[Timing, Timing]:
        return time_twice(name, calls, num_replays=replays)

    def prepare(case: Case) -> Timed:
        gc.collect()  # copies of the case before
        torch.cuda.empty_cache()
        assert case.timed is not None
        return case.timed("cuda", seed, l2_bytes)

    rows = measure_cases(
        cases,
        done=done,
        prepare=prepare,
        timer=timer,
        read_bytes_per_s=rate,
        num_replays=num_replays,
        out_of_time=lambda: budget_s is not None and time.monotonic() - begin > budget_s,
        on_rows=lambda rows: write_samples(path, rows, where),
        on_row=on_row,
    )
    return {"environment": where, "timings": rows, "file": str(path), "left": len(_left(cases, rows))}


def measure_cases(
    cases: Sequence[Case],
    *,
    done: Sequence[Row],
    prepare: Callable[[Case], Timed],
    timer: Timer,
    read_bytes_per_s: float,
    num_replays: int,
    out_of_time: Callable[[], bool],
    on_rows: Callable[[list[Row]], None],
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Rows of ``done`` and of the cases that it lacks. ``on_rows`` gets all rows after each case.

    A case that cannot be timed gives no row in the result; its row, with ``error``, goes to ``on_row`` only.
    """
    rows = list(done)
    for case in _left(cases, rows):
        if out_of_time():
            break
        try:
            row = _row(case, prepare(case), timer, read_bytes_per_s, num_replays)
        except Exception as error:  # whatever it was, the next case is tried
            on_row({"operator": case.operator, "case": case.name, "error": _reason(error)})
            continue
        rows.append(row)
        on_rows(rows)
        on_row(row)
    return rows


def _left(cases: Sequence[Case], rows: Sequence[Row]) -> list[Case]:
    """Cases to time, those of one row first."""
    have = {(row["operator"], row["case"]) for row in rows}
    left = [case for case in cases if case.timed is not None and (case.operator, case.name) not in have]
    return sorted(left, key=lambda case: case.rows > 1)


def _row(case: Case, timed: Timed, timer: Timer, read_bytes_per_s: float, num_replays: int) -> Row:
    first, second = timer(f"{case.operator} {case.name}", timed.calls, num_replays)
    moved, median_s = case.moved_bytes, first.median_us * 1e-6
    row: Row = {
        "operator": case.operator,
        "case": case.name,
        "rows": case.rows,
        **sample_row(first),
        "second_median_us": round(second.median_us, 4),
        "moved_bytes": moved,
        "tb_per_s": round(moved / median_s * 1e-12, 4),
        "floor_us": round(moved / read_bytes_per_s * 1e6, 4),
        "of_floor": round(moved / read_bytes_per_s / median_s, 4),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "peers": [],
    }
    for name, make in timed.peers.items():
        try:
            first, second = timer(name, make(), max(2, num_replays // PEER_SHARE))
        except Exception as error:  # a peer that is missing or fails costs one line
            row["peers"].append({"name": name, "error": _reason(error)})
            continue
        peer = {**sample_row(first), "second_median_us": round(second.median_us, 4)}
        row["peers"].append({**peer, "ratio": round(first.median_us / row["median_us"], 4)})
    return row


def _reason(error: Exception) -> str:
    missing = isinstance(error, ImportError) and getattr(error, "name", None)
    return f"{missing} is not installed" if missing else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def row_line(row: Row) -> str:
    """A row in one line of text, and one line for each peer."""
    name = f"{row['operator']}  {row['case']}"
    if "error" in row:
        return f"{name}  FAILED: {row['error']}"
    noise = abs(row["second_median_us"] - row["median_us"])
    lines = [
        f"{name}  {row['median_us']:.2f} us ({row['p10_us']:.2f} to {row['p90_us']:.2f}, again {noise:.2f} apart)  "
        f"{row['moved_bytes'] / 1e6:.1f} MB  {row['tb_per_s']:.2f} TB/s  {100 * row['of_floor']:.0f} % of floor"
    ]
    for peer in row["peers"]:
        said = peer["error"] if "error" in peer else f"{peer['median_us']:.2f} us, {peer['ratio']:.2f} x ours"
        lines.append(f"    {peer['name']}: {said}")
    return "\n".join(lines)


def default_path(gpu: str) -> Path:
    """``h200-kernels.json`` for "NVIDIA H200"."""
    words = [one for one in re.split(r"[^a-z0-9]+", gpu.lower()) if one and one != "nvidia"]
    return Path(f"{'-'.join(words) or 'gpu'}-kernels.json")


def rows_of(path: Path, gpu: str) -> list[Row]:
    """Rows of an earlier file, none where it does not exist. Raises UserError if it is of another GPU or unreadable."""
    if not path.exists():
        return []
    accepted = Accepted(what="what it wrote", kinds=(Kind.KERNEL_TIMES,), most_bytes=32 << 20)
    try:
        read = read_json(path, accepted)
        read.settle()
        document = read.value
        was, rows = document["environment"]["gpu"], document["timings"]
        for row in rows:
            row["operator"], row["case"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot resume from {path}: it is not a file that 'k3sim kernels bench' wrote") from error
    if was != gpu:
        raise UserError(f"cannot resume from {path}: it was measured on {was}, and this is {gpu}")
    return list(rows)


def _commit() -> str | None:
    """Commit of the checkout that this file is part of, with "-dirty" where it was changed; None outside of one."""
    file = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(file.parent), *words], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", file.name)
    return git("describe", "--always", "--dirty", "--exclude=*") if tracked else None
