"""Bulk prefetch of a list of regions into L2, to be launched on a stream beside a phase that leaves HBM idle.

What it computes
    Nothing: mRegions [R, 2] int64 (address, bytes) are requested in order until the budget is spent.

How data moves
    A thread asks for 16 KiB at a time with cp.async.bulk.prefetch.L2: no register, shared memory or completion is held,
    so a block issues its share and leaves. Chunks of all regions are dealt to the threads of all blocks in turn, which
    keeps the order of the list roughly the order of arrival.

What it gives (H200, 2026-11-29; h200.json beside this file)
    A cold cuBLAS product of one row with 22 MB: 8.6 us after an empty prefetch, 8.1 to 8.2 with 5 MB, 8.0 with 11,
    7.7 with all of it. L2 is not much faster than HBM for a stream; the gain is the difference of the two. A chain of
    17 loads gains more: 10.2 us cold, 7.6 behind a prefetch.

    What it pays beside, and that a product which is launched early gains nothing: docs/journal/2026-12-01-prefetch.md.
    What lost: L2's evict-last priority for the lines. In one run they outlasted 400 MB of reads and the chain took 8.0
    us, in another they did not; no product was faster in either.

Limits
    Addresses and sizes multiples of 16. Few blocks issue, because requests are dropped silently where too many do: on
    an H200 with 40 blocks and 48 MiB, not with 16, which keep up with HBM (250 to 276 GB/s each); on a GB200 with 48
    and more, not with 40 (k3opt's design notes), which its faster HBM asks for. What an H200's L2 keeps are the 39 MiB
    touched last, so a larger budget evicts its own beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, const_expr

from k3sim.kernels.device import ptx

THREADS = 32
CHUNK_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class PrefetchConfiguration:
    """``blocks``: that issue."""

    blocks: int


@cute.kernel
def _prefetch(mRegions: Int64, num_regions: Int32, budget_bytes: Int64, configuration: cutlass.Constexpr) -> None:
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks = const_expr(configuration.blocks)
    requesters = Int64(THREADS * blocks)
    cute.arch.griddepcontrol_launch_dependents()
    left = budget_bytes
    turn = Int64(tid * blocks + block)  # neighbouring chunks go to different blocks
    for region in cutlass.range(num_regions, unroll=1):
        gRegion = ptx.load_long(mRegions + Int64(region) * 16)
        num_bytes = ptx.load_long(mRegions + Int64(region) * 16 + 8)
        taken = cutlass.min(num_bytes, left) // 16 * 16
        left = left - num_bytes
        num_chunks = (taken + (CHUNK_BYTES - 1)) // CHUNK_BYTES
        if left + num_bytes > 0:
            while turn < num_chunks:
                at = turn * CHUNK_BYTES
                size = Int32(cutlass.min(taken - at, Int64(CHUNK_BYTES)))
                ptx.bulk_prefetch(gRegion + at, size)
                turn = turn + requesters
            turn = turn - num_chunks
    # Launches behind this one on its stream rely on what came before it.
    cute.arch.griddepcontrol_wait()


def compile_prefetch(configuration: PrefetchConfiguration) -> Any:
    """Function of (regions, num_regions, budget_bytes, stream)."""

    @cute.jit
    def launch(mRegions: Int64, num_regions: Int32, budget_bytes: Int64, stream: CUstream) -> None:
        _prefetch(mRegions, num_regions, budget_bytes, configuration).launch(
            grid=[configuration.blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=True,
        )

    return cute.compile(launch, Int64(0), Int32(0), Int64(0), cute.runtime.make_fake_stream())
