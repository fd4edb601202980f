"""Small device functions that several of the unfused kernels use. Imports cutlass, so only kernel modules import it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from k3sim.kernels.device import ptx
from k3sim.kernels.device.sums import lane_sum

LOG2E = 1.4426950408889634


def sigmoid(value: Float32) -> Float32:
    return cute.arch.rcp_approx(Float32(1.0) + ptx.exp2(value * Float32(-LOG2E)))


def tanh(value: Float32) -> Float32:
    """By the exponential, not tanh.approx, whose 11 bits would show in a bf16 product of two of them."""
    return Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(ptx.exp2(value * Float32(2 * LOG2E)) + Float32(1.0))


def block_sum(value: Float32, s_warps: Int32, tid: Int32, num_warps: int) -> Float32:
    """Sum over the block, for every thread; ``s_warps``: 4 bytes a warp of shared memory, not used before."""
    value = lane_sum(value)
    if num_warps == 1:
        return value
    # All lanes hold the same sum and write it to the same place: no branch.
    ptx.shared_store_float(s_warps + tid // 32 * 4, value)
    cute.arch.sync_threads()
    total = ptx.shared_load_float(s_warps)
    for warp in range(1, num_warps):
        total = total + ptx.shared_load_float(s_warps + warp * 4)
    return total
