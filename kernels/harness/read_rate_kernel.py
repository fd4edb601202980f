"""The kernel of ``read_rate``: every byte once, folded into a word that is stored only if it is a certain number."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, range_constexpr

from k3sim.kernels.device import ptx

THREADS = 512
BLOCKS_PER_SM = 4  # at most 32 registers a thread
LOADS = 4
TURN_BYTES = THREADS * LOADS * 16  # of one block
NEVER = 0x5EAD5EAD  # a store that the compiler cannot rule out keeps the loads


@cute.kernel
def _read(mData: Int64, mSink: Int64, turns: Int32, num_blocks: cutlass.Constexpr) -> None:
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    gData = mData + Int64(block) * TURN_BYTES + tid * 16
    folded = Uint32(0)
    for _ in cutlass.range(turns, unroll=1):
        words = [ptx.load_stream(gData + at * THREADS * 16) for at in range(LOADS)]
        for at in range_constexpr(LOADS):
            for i in range_constexpr(4):
                folded = folded ^ words[at][i]
        gData = gData + Int64(num_blocks) * TURN_BYTES
    if folded == Uint32(NEVER):
        ptx.store_int(mSink, Int32(1))


def compile_read(num_blocks: int) -> Any:
    """Function of (data, sink, turns, stream); reads turns x num_blocks x 32 KiB."""

    @cute.jit
    def launch(mData: Int64, mSink: Int64, turns: Int32, stream: CUstream) -> None:
        _read(mData, mSink, turns, num_blocks).launch(
            grid=[num_blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    return cute.compile(launch, Int64(0), Int64(0), Int32(0), cute.runtime.make_fake_stream())
