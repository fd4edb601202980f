"""What follows MLA attention: the lift of its latent output by W_UV, times the output gate, in one launch.

What it computes
    mOut [B, H x 128] bf16 = (mLatent [B, H, 512] bf16 times mValueUp [H, 128, 512] bf16, head by head) times
    sigmoid(mGate [B, H x 128] bf16), in fp32 with one rounding.

How data moves
    A block owns eight values of a head, each of its four warps a quarter of the latent. A thread requests its weights
    before the dependency wait, into the registers in which mma.sync m16n8k16 wants operand A (half of its rows stay
    zero); rows of the batch are operand B, loaded straight from global memory: the order of K is free, so 16 contiguous
    bytes are a thread's share of two products on both sides. The warps' sums are added up in shared memory.

Why this shape
    6 heads are 96 blocks and 12 are 192: one round on an H200, with all of W_UV in flight at once. 16 values a block
    would fill the tensor cores' rows but leave 48 blocks at 6 heads.

Limits
    1 to 16 rows. The weights are read before the dependency wait; latent and gate after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx, timestamps

LATENT = 512
VALUES = 128  # of a head
OUTPUTS = 8  # of a block
WARPS = 4
THREADS = 32 * WARPS
STEPS = LATENT // WARPS // 32  # 32-wide blocks along the latent of a warp
LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class LiftConfiguration:
    """``row_tiles``: 1 for up to 8 rows, 2 for up to 16."""

    heads: int
    row_tiles: int
    pdl: bool = False


@cute.kernel
def _lift_gate(
    mLatent: Int64, mValueUp: Int64, head_stride: Int64, mGate: Int64, gate_stride: Int64, mOut: Int64, rows: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    heads, row_tiles = configuration.heads, configuration.row_tiles
    tid, _, _ = cute.arch.thread_idx()
    part, head, _ = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    group, quad = lane // 4, lane % 4
    allocator = cutlass.memory.SmemAllocator()
    sSums = Int32(allocator.allocate(WARPS * row_tiles * 8 * OUTPUTS * 4, 16).toint())  # [warp, row, value] fp32
    began = timestamps.now("mla_decode")
    cute.arch.griddepcontrol_launch_dependents()

    along = (warp * STEPS * 32 + quad * 8) * 2
    gWeight = mValueUp + Int64(head) * head_stride + (part * OUTPUTS + group) * (2 * LATENT) + along
    weights = [ptx.load_weights(gWeight + step * 64) for step in range(STEPS)]
    cute.arch.griddepcontrol_wait()
    released = timestamps.now("mla_decode")

    # The gate of the value that this thread finishes; threads beyond the last row repeat it and store nothing.
    row, value = tid // OUTPUTS, part * OUTPUTS + tid % OUTPUTS
    safe_row = cutlass.min(row, rows - 1)
    gate = ptx.load_half_l2(mGate + safe_row * gate_stride + (head * VALUES + value) * 2)
    # Columns of operand B without a row repeat the last one; what they give is never read.
    latents = []
    for tile in range_constexpr(row_tiles):
        batch_row = cutlass.min(group + 8 * tile, rows - 1)
        gLatent = mLatent + (Int64(batch_row) * heads + head) * (2 * LATENT) + along
        latents.append([ptx.load_l2(gLatent + step * 64) for step in range(STEPS)])
    zero = Uint32(0)
    for tile in range_constexpr(row_tiles):
        sums: Any = [Float32(0.0)] * 4
        others: Any = [Float32(0.0)] * 4
        for step in range_constexpr(STEPS):
            w, x = weights[step], latents[tile][step]
            sums = ptx.mma(sums, [w[0], zero, w[1], zero], x[:2], operand="bf16")
            others = ptx.mma(others, [w[2], zero, w[3], zero], x[2:], operand="bf16")
        # Accumulators 0 and 1: value ``group``, rows 2 quad and 2 quad + 1 of these eight.
        sPlace = sSums + (((warp * row_tiles + tile) * 8 + 2 * quad) * OUTPUTS + group) * 4
        ptx.shared_store_float(sPlace, sums[0] + others[0])
        ptx.shared_store_float(sPlace + OUTPUTS * 4, sums[1] + others[1])
    cute.arch.sync_threads()

    if row < rows:
        total = Float32(0.0)
        for other in range_constexpr(WARPS):
            total = total + ptx.shared_load_float(sSums + ((other * row_tiles * 8 + row) * OUTPUTS + tid % OUTPUTS) * 4)
        total = total * cute.arch.rcp_approx(Float32(1.0) + ptx.exp2(ptx.low_bf16(gate) * Float32(-LOG2E)))
        gOut = mOut + (Int64(row) * (heads * VALUES) + head * VALUES + value) * 2
        ptx.store_half(gOut, ptx.pack_bf16(total, total))
    if const_expr(timestamps.on("mla_decode")):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:
            timestamps.record("mla_decode.lift_gate", head * (VALUES // OUTPUTS) + part, began, released)


def compile_lift_gate(configuration: LiftConfiguration) -> Any:
    """Function of (latent, value_up, its head stride, gate, its row stride, out, rows, stream); strides in bytes."""

    @cute.jit
    def launch(
        mLatent: Int64, mValueUp: Int64, head_stride: Int64, mGate: Int64, gate_stride: Int64, mOut: Int64,
        rows: Int32, stream: CUstream,
    ) -> None:
        _lift_gate(mLatent, mValueUp, head_stride, mGate, gate_stride, mOut, rows, configuration).launch(
            grid=[VALUES // OUTPUTS, configuration.heads, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 6, Int32(1), cute.runtime.make_fake_stream())
