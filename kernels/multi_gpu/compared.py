"""What a hand-over or a captured step gave between GPUs, and how late its processes were made.

Apart from ``check.py``, which calls both kinds of check and would otherwise be imported by them.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE_US = 100_000.0
SKEW_US = 20.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one hand-over gave. ``reason`` is empty when it passed.

    ``unequal``: results, by kind of run, that differed in bits from the first run's, on all GPUs together;
    ``between_gpus``: elements in which the first run's results differed between GPUs.
    """

    operator: str
    case: str
    gpus: int
    ranks: int
    verdicts: tuple[str, ...]
    between_gpus: int
    replays: dict[str, int]
    unequal: dict[str, int]
    seconds: float
    reason: str

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def line(self) -> str:
        runs = ", ".join(f"{name} {self.unequal[name]} of {count} replays" for name, count in self.replays.items())
        verdict = "ok" if self.ok else f"FAILED: {self.reason}"
        return (
            f"{self.operator}  {self.gpus} GPUs for {self.ranks} ranks  {self.case}  unequal: {runs}  "
            f"{self.seconds:.1f} s  {verdict}"
        )
