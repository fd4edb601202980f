"""What the blocks of one kernel hold: of the whole chip (``Footprint``), or SM by SM (``Placement``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import simpy

from k3sim.sim.components.sm import BlockResources

Allocation = tuple[int, list[int]]  # an SM, and the registers of each partition that a block holds there


@dataclass(frozen=True)
class Footprint:
    """One wave of a kernel: its resident blocks and what they hold of the whole chip."""

    blocks: int
    smem_bytes: int
    threads: int
    registers: int = 0


@dataclass(eq=False)
class Placement:
    """``num_pending`` blocks wait for SMs; ``all_resident`` fires when the last of them has become resident.

    The value of both events is the kernel that made room, -1 where nobody had to.
    """

    block: BlockResources
    num_pending: int
    carve_out: int  # shared memory of an SM that the first of its blocks sets
    all_resident: simpy.Event
    first_resident: simpy.Event
    resident: dict[int, list[list[int]]] = field(default_factory=dict)  # by SM, the registers of each block
    first_wave: list[Allocation] = field(default_factory=list)  # of blocks that came before there was ``on_later_wave``
    on_later_wave: Callable[[list[Allocation]], object] | None = None  # gets what further blocks hold
    requests_carve_out: bool = False  # says itself how an SM's memory is to be divided
    was_pending: bool = False  # has blocks that did not fit when it was launched

    def blocks_by_sm(self) -> dict[int, int]:
        """Blocks on each SM that has some."""
        return {sm: len(blocks) for sm, blocks in self.resident.items()}

    def most_on_an_sm(self, before: Mapping[int, int] | None = None) -> int:
        """Blocks on the SM with most of them, less what it had ``before``."""
        return max((count - (before or {}).get(sm, 0) for sm, count in self.blocks_by_sm().items()), default=0)
