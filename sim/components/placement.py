"""What the blocks of one kernel hold, SM by SM.

SMs are told apart by their numbers alone, which decide where a block starts when several are equally empty. A set of
SMs is an int whose bit ``i`` is SM ``i``: the sets of a kernel are few, and to join or divide them takes one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from k3sim.sim.components.sm import BlockRequest, Registers

SmSet = int  # bit i: SM i
Held = tuple[Registers, ...]  # what the blocks of a kernel hold of one SM's registers, in the order in which they came


class Allocation(NamedTuple):
    """One block on each SM of a set, and the registers of each partition that it holds there."""

    sms: SmSet
    registers: Registers


def num_blocks(allocations: Iterable[Allocation]) -> int:
    return sum(one.sms.bit_count() for one in allocations)


def lowest(sms: SmSet, count: int) -> SmSet:
    """The ``count`` SMs of a set with the lowest numbers, all of them where it has no more."""
    if sms.bit_count() <= count:
        return sms
    left = sms
    for _ in range(count):
        left &= left - 1  # without its lowest
    return sms & ~left


@dataclass(eq=False)
class Placement:
    """Of a wave of ``num_blocks`` ``num_pending`` wait for SMs; ``all_resident`` fires when the last is resident.

    The value of both events is the kernel that made room, -1 where nobody had to.
    """

    request: BlockRequest
    num_blocks: int
    num_pending: int
    all_resident: simpy.Event
    first_resident: simpy.Event
    resident: dict[Held, SmSet] = field(default_factory=dict)  # SMs by what its blocks hold there
    first_wave: list[Allocation] = field(default_factory=list)  # of blocks that came before there was ``on_later_wave``
    # Gets what further blocks hold, and the kernel that made room for them.
    on_later_wave: Callable[[list[Allocation], int], object] | None = None

    @property
    def sms(self) -> SmSet:
        """SMs with blocks of the kernel."""
        every = 0
        for sms in self.resident.values():
            every |= sms
        return every

    def num_on_sms(self) -> list[tuple[int, SmSet]]:
        """Blocks on an SM, and the SMs that have so many."""
        return [(len(held), sms) for held, sms in self.resident.items()]

    def most_on_an_sm(self, before: Iterable[tuple[int, SmSet]] = ()) -> int:
        """Blocks on the SM with most of them, less what it had ``before``."""
        most = 0
        for count, sms in self.num_on_sms():
            for earlier, there in before:
                if both := sms & there:
                    most = max(most, count - earlier)
                    sms &= ~both
            if sms:
                most = max(most, count)
        return most

    def change(self, sms: SmSet, before: Held, after: Held) -> None:
        """The blocks on a set of SMs held ``before`` and hold ``after``."""
        left = self.resident[before] & ~sms if before else 0
        if left:
            self.resident[before] = left
        elif before:
            del self.resident[before]
        if after:
            self.resident[after] = self.resident.get(after, 0) | sms
