"""Child processes that end with their parent, whatever ends it: a killed parent asks nobody to stop."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """In a child before its program is started (``preexec_fn``): the kernel kills it when its parent ends.

    Linux alone has this. Elsewhere a child ends when it next writes to a pipe that nobody reads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
