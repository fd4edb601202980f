"""Cost of a bulk L2 prefetch of a list of weight regions: a few blocks that issue and leave.

The simulator moves the bytes as a background stream; the list is cut at ``budget_bytes``, since what exceeds
L2 would evict what was fetched first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import MachineCode, Pass, Read, Work
from k3sim.model.program import Weight

ISSUING_BLOCKS = 40  # at 48 and more issuers requests are dropped silently (k3opt design plan, GB200)


def bulk(weights: Sequence[Weight], *, budget_bytes: int) -> Work:
    reads: list[Read] = []
    left = budget_bytes
    for one in weights:
        num_bytes = min(one.num_bytes, left)
        if num_bytes > 0:
            reads.append(Read(region=one.region, num_bytes=num_bytes, early=True))
        left -= num_bytes
    built = footprint("l2_prefetch", "plain")
    return Work(
        num_blocks=ISSUING_BLOCKS,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        registers_per_thread=built.allocated_registers,
        # A bulk request holds no register or shared memory of the SM. Beside a stream with 3.2 MB in flight eight
        # blocks keep the 1.6 TB/s that they have alone (H200, probe ``prefetch_arrival``): as if with so many.
        bytes_in_flight_per_block=256 * 1024,
        max_blocks_per_sm=1,
        passes=(Pass(reads=tuple(reads)),),
        prefetches=True,
    )


CODE: Mapping[str, MachineCode] = {
    "bulk": built_code("l2_prefetch", "plain"),
}
