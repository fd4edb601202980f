"""A stream: bytes on their way for one pass, and what bounded the time that they took.

Of ``b`` bytes from HBM that came in a time ``t``, on a stream with the cap ``c`` of an HBM with the rate ``R``:

| Part of the time | Length | Phase |
| --- | --- | --- |
| at the rate of HBM | ``b / R``, at most ``t``; KV and state have their share of the bytes | weights, KV and state |
| too few bytes in flight or too few SMs | ``b / c - b / R`` | bytes in flight |
| HBM shared with another stream | the rest; HBM is at its rate, so it counts as reading | weights, KV and state |
| after the last byte from HBM | only L2 was busy for the pass | L2 |
"""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from k3sim.sim.components.memory import StreamLimit
from k3sim.sim.timeline.timeline import PS_PER_US, Phase


@dataclass(eq=False)
class Stream:
    """Bytes on their way for one pass, and when the HBM part and the L2 part were through.

    Of reads that were started early, ``through`` fires when they are complete, and ``budget_bytes`` says how many
    bytes of the early reads they cover.
    """

    hbm_bytes: int = 0
    l2_bytes: int = 0
    kv_state_bytes: int = 0
    hbm_end_ps: int = -1
    l2_end_ps: int = -1
    parts: list[simpy.Event] = field(default_factory=list)
    through: simpy.Event | None = None
    asked: simpy.Event | None = None  # for the last of it: no more is left to come than may be on its way at once
    budget_bytes: int = 0
    began_ps: int = 0
    later: Stream | None = None  # of blocks that became resident later

    def expose(self, early: Stream, first_ps: int, start_ps: int) -> None:
        """Count in of early reads what came after ``start_ps``, evenly from their first bytes at ``first_ps`` on."""
        if early.hbm_end_ps > start_ps:
            exposed_ps, whole_ps = early.hbm_end_ps - max(first_ps, start_ps), early.hbm_end_ps - first_ps
            self.hbm_bytes += early.hbm_bytes * exposed_ps // whole_ps
            self.kv_state_bytes += early.kv_state_bytes * exposed_ps // whole_ps
        self.hbm_end_ps = max(self.hbm_end_ps, early.hbm_end_ps)
        self.l2_end_ps = max(self.l2_end_ps, early.l2_end_ps)

    def bounds(
        self, start_ps: int, end_ps: int, limit: StreamLimit, hbm_bytes_per_us: int
    ) -> list[tuple[Phase, int]]:
        """Phases and their lengths in picoseconds from ``start_ps`` on; what is left until ``end_ps`` is L2's."""
        duration_ps = min(end_ps, max(start_ps, self.hbm_end_ps)) - start_ps
        if duration_ps <= 0 or not self.hbm_bytes:
            return []
        at_peak_ps = min(duration_ps, -(-self.hbm_bytes * PS_PER_US // hbm_bytes_per_us))
        at_cap_ps = min(duration_ps, -(-self.hbm_bytes * PS_PER_US // limit.hbm_bytes_per_us))
        at_cap_ps = max(at_cap_ps, at_peak_ps)
        in_flight_ps = at_cap_ps - at_peak_ps
        reading_ps = duration_ps - in_flight_ps
        state_ps = reading_ps * self.kv_state_bytes // self.hbm_bytes
        return [
            (Phase.WEIGHTS, reading_ps - state_ps),
            (Phase.KV_STATE, state_ps),
            (Phase.IN_FLIGHT, in_flight_ps),
        ]
