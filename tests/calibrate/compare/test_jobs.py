"""Work in processes: order, progress, errors, and no worker that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from k3sim.calibrate.compare import validate
from k3sim.calibrate.compare.check import check
from k3sim.calibrate.compare.jobs import num_workers, run_jobs
from k3sim.calibrate.evidence import load_evidence
from k3sim.errors import UserError
from k3sim.sim.profile import load_machine


def late(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


def late_file(path: Path, seconds: float) -> int:
    time.sleep(seconds)
    path.touch()
    return 0


def refuse(value: int) -> int:
    raise UserError(f"{value} is refused")


def tasks(count: int = 6) -> list[partial[int]]:
    """The first pieces take longest."""
    return [partial(late, value, 0.02 * (count - value)) for value in range(count)]


@pytest.mark.parametrize("jobs", [1, 2, 3, 20])
def test_results_come_in_the_order_of_tasks(jobs: int) -> None:
    told: list[tuple[int, int]] = []
    found = list(run_jobs(tasks(), jobs=jobs, on_done=lambda done, of: told.append((done, of))))
    assert found == [0, 1, 2, 3, 4, 5]
    assert told[-1] == (6, 6) and told == sorted(told)


def test_a_result_comes_before_the_last_is_done(tmp_path: Path) -> None:
    waiting = [partial(late, 0, 0.0), *(partial(late_file, tmp_path / str(value), 30.0) for value in range(1, 4))]
    results = run_jobs(waiting, jobs=2)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]  # ends the workers, which would sleep on
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_task_is_raised() -> None:
    with pytest.raises(UserError, match="3 is refused"):
        list(run_jobs([*tasks(3), partial(refuse, 3), partial(late, 4, 30.0)], jobs=2))


def test_less_than_one_job_is_refused() -> None:
    with pytest.raises(UserError, match="jobs is 0; accepted: 1 or more"):
        list(run_jobs(tasks(), jobs=0))
    assert num_workers(None) >= 1


PARENT = """
import os, sys, time
from functools import partial
from k3sim.calibrate.compare.jobs import run_jobs

def work(folder, number):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    if number:
        time.sleep(60)

if __name__ == "__main__":
    next(results := run_jobs([partial(work, sys.argv[1], number) for number in range(8)], jobs=3))
    print("working", flush=True)
    list(results)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    script, folder = tmp_path / "parent.py", tmp_path / "workers"
    script.write_text(PARENT)
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_keyboard,
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"working\n"
        while len(workers := [int(one.name) for one in folder.iterdir()]) < 3:
            time.sleep(0.02)
        parent.send_signal(number)
        parent.wait(timeout=30)
    for _ in range(500):
        if not any(runs(worker) for worker in workers):
            return
        time.sleep(0.02)
    raise AssertionError(f"still there: {[worker for worker in workers if runs(worker)]}")


def heed_keyboard() -> None:
    """A shell starts a job in the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_number_of_jobs_changes_no_result() -> None:
    h200 = load_machine("h200")
    kernels = [one for one in load_evidence() if one.kind == "kernel"][:5]
    one, three = (
        (
            validate.validate(records=kernels, num_draws=2, jobs=jobs),
            check(h200, kinds=("probe", "kernel"), num_draws=2, most=4, jobs=jobs),
        )
        for jobs in (1, 3)
    )
    assert one == three and len(one[0].rows) == 5 and len(one[1]) == 8


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises(UserError, match="one of 2 worker processes was ended from outside"):
        list(run_jobs([partial(die, number) for number in range(4)], jobs=2))
