"""The clock: processes, pauses and moments happen when, and in the order in which, SimPy has them happen."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import simpy

from k3sim.sim.clock import Clock, Moment, Steps, without_collection

Log = list[tuple[str, int]]


def told(clock: simpy.Environment, start: Callable[[Steps], object]) -> Log:
    """Three processes, two of which wait for the third, and one that waits for what has happened."""
    log: Log = []
    door = simpy.Event(clock)

    def one(name: str, pauses: tuple[int, ...]) -> Steps:
        for pause in pauses:
            yield clock.timeout(pause)
            log.append((name, int(clock.now)))
        yield door
        log.append((f"{name} goes on", int(clock.now)))

    def opens() -> Steps:
        log.append(("begins", int(clock.now)))
        yield clock.timeout(5)
        door.succeed()
        start(one("late", (0, 2)))
        log.append(("opens", int(clock.now)))

    for steps in (one("a", (3, 2)), one("b", (5, 0)), opens()):
        start(steps)
    log.append(("before all", int(clock.now)))
    return log


def test_processes_go_as_in_simpy() -> None:
    clock, plain = Clock(), simpy.Environment()
    ours, theirs = told(clock, clock.start), told(plain, plain.process)
    clock.run_all()
    plain.run()
    assert ours == theirs
    assert ours[:3] == [("before all", 0), ("begins", 0), ("a", 3)] and ours[-1] == ("late goes on", 7)


def test_a_moment_that_nobody_awaits_is_no_event() -> None:
    clock = Clock()
    moment, awaited = Moment(clock), Moment(clock)
    log: Log = []

    def waits(name: str) -> Steps:
        yield awaited.wait()
        log.append((name, int(clock.now)))

    def reaches() -> Steps:
        yield clock.timeout(7)
        moment.reach()
        assert moment.reached and clock.peek() == simpy.core.Infinity
        awaited.reach()

    for steps in (waits("first"), waits("second"), reaches()):
        clock.start(steps)
    clock.run_all()
    assert log == [("first", 7), ("second", 7)]


def test_an_error_in_a_process_reaches_the_caller() -> None:
    clock = Clock()

    def fails() -> Steps:
        yield clock.timeout(1)
        raise ValueError("too large")

    clock.start(fails())
    with pytest.raises(ValueError, match="too large"):
        clock.run_all()


def test_collection_resumes_behind_a_simulation() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
