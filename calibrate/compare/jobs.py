"""Pieces of work in several processes, with results in order as they come.

Which process does a piece changes no result: a piece is a function of its arguments, and the results are put in the
order of the pieces. Workers take no signal from the keyboard and end as soon as their parent asks or is gone, so that
neither Ctrl-C nor a killed parent leaves one running.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any, TypeVar

from k3sim.errors import UserError
from k3sim.sim.progress import OnDone, ignore_progress

Result = TypeVar("Result")
LEAST_TASKS = 4  # fewer are done here: starting processes takes as long


def num_workers(jobs: int | None) -> int:
    """Processes that work at once: ``jobs``, or one for each core that this process may use.

    Raises UserError for less than one.
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs is {jobs}; accepted: 1 or more, by default as many as there are cores")
    if jobs is not None:
        return jobs
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    tasks: Sequence[Callable[[], Result]], *, jobs: int | None = None, on_done: OnDone = ignore_progress
) -> Iterator[Result]:
    """The results of ``tasks`` in their order, each as soon as it and those before it are there.

    ``tasks`` must be picklable (``functools.partial`` of a function of a module). ``on_done`` is told of every piece
    when it is done, whatever the order. Raises what a task raises, and UserError for ``jobs`` below one.
    """
    workers = min(num_workers(jobs), len(tasks))
    if workers < 2 or len(tasks) < LEAST_TASKS:
        for number, task in enumerate(tasks, start=1):
            result = task()
            on_done(number, len(tasks))
            yield result
        return
    asked_to_stop, stop = multiprocessing.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, initializer=_attend, initargs=(asked_to_stop,))
    try:
        yield from _in_order([pool.submit(task) for task in tasks], on_done)
    except BrokenProcessPool:
        raise UserError(
            f"one of {workers} worker processes was ended from outside, for want of memory perhaps; give fewer --jobs"
        ) from None
    except BaseException:  # Ctrl-C and a caller that stops half-way among them
        stop.send_bytes(b"stop")
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _in_order(futures: Sequence[Future[Any]], on_done: OnDone) -> Iterator[Any]:
    waiting, given = set(futures), 0
    while waiting:
        _, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        on_done(len(futures) - len(waiting), len(futures))
        while given < len(futures) and futures[given].done():
            yield futures[given].result()
            given += 1


def _attend(asked_to_stop: Connection) -> None:
    """In a worker: leave the keyboard to the parent, and end when it asks or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in (signal.SIGTERM, signal.SIGHUP):  # which the command line unwinds the parent by
        signal.signal(one, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_any([parent.sentinel, asked_to_stop])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
