"""Launch calls of the host and the kernels that they launched, by process and correlation id.

A graph replay is one call with hundreds of kernels under one id, so a call may belong to many kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from k3sim.calibrate.traces.events import LaunchCall, TraceKernel
from k3sim.errors import UserError

MOST_CALLS = 4_000_000
_LAUNCHING = ("Launch", "Memcpy", "Memset", "memcpy", "memset")


class Launches:
    """Calls as they are read, in any order relative to their kernels."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], LaunchCall] = {}

    def add(self, process: int, correlation: int | None, name: str, start_ps: int, end_ps: int) -> None:
        """Keep a call if it launches. Raises UserError for more calls than memory is for."""
        if not correlation or not any(word in name for word in _LAUNCHING):
            return
        if len(self._calls) >= MOST_CALLS:
            raise UserError(f"more than {MOST_CALLS:,} launch calls; cut the trace to fewer steps")
        self._calls[process, correlation] = LaunchCall(name, start_ps, end_ps)

    def join(self, kernels: Iterable[tuple[int, TraceKernel]]) -> None:
        """Give every kernel, which comes with its process, the call that launched it, where that is known."""
        for process, kernel in kernels:
            if kernel.correlation:
                kernel.launch = self._calls.get((process, kernel.correlation))
