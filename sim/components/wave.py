"""A wave: blocks of one kernel that are resident together.

As a rule a kernel is one wave, all of its resident blocks. Where blocks become resident in the place of others of their
kernel (wave quantization: the tail effect of a grid that does not divide evenly), each group is a wave with its share
of every pass: of bytes, stores and arithmetic ``resident blocks / blocks``. What a block does by itself (dependent
loads, reductions, barriers) each wave does whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import simpy

from k3sim.kernels.work import Pass, Work
from k3sim.sim.components.sm import warps_of
from k3sim.sim.components.stream import Stream
from k3sim.sim.timeline.timeline import KernelRun


@dataclass(eq=False)
class Wave:
    """Resident blocks of a kernel at work, and the record that gets their spans."""

    run: KernelRun
    work: Work
    num_blocks: int  # of the kernel, as far as they fit on an empty chip
    resident_blocks: int
    num_sms: int
    pace: float  # a factor on durations: the kernel's skew on this rank
    l1_bytes: int  # of an SM, as carved out: loads into registers have their place there until they have come
    is_part: bool = False  # its blocks make room for others of their kernel
    later: Stream | None = None  # early reads of blocks that became resident later
    asking: list[simpy.Event] = field(default_factory=list)  # fire when blocks have asked for their early reads

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks on the SM that has most of them, when they are spread evenly."""
        return -(-self.resident_blocks // self.num_sms)

    @property
    def warps_per_sm(self) -> int:
        return warps_of(self.work) * self.blocks_per_sm

    def passes(self) -> tuple[Pass, ...]:
        """What the blocks of this wave do of each pass of the kernel."""
        if not self.is_part:
            return self.work.passes
        share = self.resident_blocks / self.num_blocks
        return tuple(
            replace(
                one,
                reads=tuple(replace(read, num_bytes=round(share * read.num_bytes)) for read in one.reads),
                written_bytes=round(share * one.written_bytes),
                flops=share * one.flops,
                decoded_weights=round(share * one.decoded_weights),
                num_blocks=max(1, round(share * (one.num_blocks or self.work.num_blocks))),
            )
            for one in self.work.passes
        )


def first_streaming(passes: tuple[Pass, ...]) -> int:
    """The first pass that reads: what is loaded early is its, whatever the passes before it wait for."""
    return next((position for position, one in enumerate(passes) if one.reads), 0)
