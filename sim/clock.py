"""The clock of a simulation: SimPy's environment, with what kernels do many times a microsecond made cheap.

A kernel waits some dozen times. Of SimPy's machinery for that the simulation needs the queue and the order: by time,
then by priority, then by creation. What it does without costs more than what it needs:

* an event whose time has come and that nobody waits for (``Moment``), and the event at the end of every process;
* copies of exceptions for processes that wait for others that fail: nothing fails here but the whole simulation;
* cyclic garbage collection, which finds little while all that was made is in use (``without_collection``).

None of these changes when, or in which order, anything else happens.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT

Steps = Generator[simpy.Event, Any, None]


class Clock(simpy.Environment):
    """An environment that begins at 0 and counts picoseconds. ``now``: how many have passed, for all to read."""

    now = 0  # an attribute, where SimPy has a property: it is read fifty times a kernel

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    def timeout(self, delay: float = 0, value: Any = None) -> simpy.Timeout:
        """An event ``delay`` from now."""
        assert delay >= 0, delay
        event = simpy.Timeout.__new__(simpy.Timeout)
        event.env, event.callbacks, event._value, event._ok = self, [], value, True
        heappush(self._queue, (self._now + delay, NORMAL, next(self._eid), event))
        return event

    def start(self, steps: Steps) -> None:
        """Run a process that nobody waits for. It begins as one of SimPy does: now, behind what is being done."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        assert event.callbacks is not None
        event.callbacks.append(_Process(steps).resume)
        heappush(self._queue, (self._now, URGENT, next(self._eid), event))

    def run_all(self) -> None:
        """Let everything happen."""
        queue = self._queue
        while queue:
            now, _, _, event = heappop(queue)
            self.now = self._now = now  # type: ignore[assignment, misc]
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has been processed
            for callback in callbacks:
                callback(event)
            if not event._ok:
                raise event._value


class _Process:
    """A generator between two of its waits."""

    __slots__ = ("_send",)

    def __init__(self, steps: Steps) -> None:
        self._send = steps.send

    def resume(self, event: simpy.Event) -> None:
        """Go on with the value of the event that it waited for, up to one that has not been processed."""
        try:
            while True:
                event = self._send(event._value)
                if event.callbacks is not None:
                    event.callbacks.append(self.resume)
                    return
        except StopIteration:
            return


class Moment:
    """Something that happens once, and that others may wait for. It is an event only where somebody does."""

    __slots__ = ("_env", "_event", "reached")

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._event: simpy.Event | None = None
        self.reached = False

    def wait(self) -> simpy.Event:
        """The event to wait for, while it has not been ``reached``."""
        assert not self.reached
        if self._event is None:
            self._event = simpy.Event(self._env)
        return self._event

    def reach(self) -> None:
        """It happens now."""
        assert not self.reached
        self.reached = True
        if self._event is not None:
            self._event.succeed()


@contextmanager
def without_collection() -> Iterator[None]:
    """No cyclic garbage collection inside: simulations and reports keep nearly all that they make until they end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
