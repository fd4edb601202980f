"""Sums over lanes and over lines of shared memory, in the order that the kernels which share them rely on.

Traced as plain Python, so a kernel's machine code is the same as with these lines in its own body. Imports cutlass, so
only kernel modules import this one.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from k3sim.kernels.device import ptx


def lane_sum(value: Float32, offsets: tuple[int, ...] = (16, 8, 4, 2, 1)) -> Float32:
    """Sum over the lanes that differ in the bits ``offsets``; all of them get it."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def line_sums(s_first: Int32, count: int, stride_bytes: int = 16) -> list[Float32]:
    """Four neighbouring fp32 values, each summed over ``count`` lines of shared memory, in the order of the lines."""
    totals = [Float32(0.0)] * 4
    for line in range(count):
        words = ptx.shared_load4(s_first + line * stride_bytes)
        totals = [total + ptx.bits_as_float(word) for total, word in zip(totals, words, strict=True)]
    return totals
