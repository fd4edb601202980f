"""How far long work is: what those that predict tell, and who does not ask."""

from __future__ import annotations

from collections.abc import Callable

OnDone = Callable[[int, int], None]  # how many pieces are done, and of how many


def ignore_progress(done: int, of: int) -> None:
    """For who does not ask."""
