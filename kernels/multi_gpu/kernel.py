"""A kernel that does nothing for a while, so that ranks reach an exchange at different times.

One thread watches ``%globaltimer``. The length is ``shortest_ns`` plus a random share of ``range_ns``, drawn anew at
every launch from a number that the kernel keeps on the device, so that replays of one graph differ.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from k3sim.kernels.device import ptx


@cute.kernel
def _delay(m_state: Int64, shortest_ns: Int32, range_ns: Int32) -> None:
    start = cute.arch.globaltimer()
    state = ptx.load_int(m_state) * Int32(1664525) + Int32(1013904223)
    ptx.store_int(m_state, state)
    length = Int64(shortest_ns) + ((Int64(state >> 16) & 0xFFFF) * Int64(range_ns) >> 16)
    while cute.arch.globaltimer() - start < length:
        pass


def compile_delay() -> Any:
    """Function of (address of the state, shortest_ns, range_ns, stream)."""

    @cute.jit
    def launch(m_state: Int64, shortest_ns: Int32, range_ns: Int32, stream: CUstream) -> None:
        _delay(m_state, shortest_ns, range_ns).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    return cute.compile(launch, Int64(0), Int32(0), Int32(0), cute.runtime.make_fake_stream())
