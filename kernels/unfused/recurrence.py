"""A KDA decode step as three kernels: convolution update, recurrent update, gated norm.

What they compute, on the tensors of ``kda_decode`` (D = 128, C = 3 heads D channels in the order q, k, v)
    ``conv_update``       convolved [B, C] bf16 = silu(conv4(conv_state, projected)); conv_state moves on by one sample.
    ``recurrent_update``  L2 norms of q and k, decay alpha = exp(-5 sigmoid(exp(a_log) (logits + dt_bias))), then
                          S' = diag(alpha) S, S'' = S' + k delta^T with delta = sigmoid(beta) (v - S'^T k), state in
                          place; read out [B, heads D] bf16 = S''^T q.
    ``gated_norm``        out [B, heads D] bf16 = rmsnorm(read out) norm_weight sigmoid(gate).
    The decay's logits [B, heads D] come from a GEMM of their own. Chained, the three give what ``kda_decode`` gives,
    with q, k, v and the read-out rounded to bf16 between them. A slot of 0 or less is padding: output 0, no write.

How data moves
    ``conv_update``: 8 channels a thread, every access 16 bytes, samples newest last. ``recurrent_update``: four blocks
    a head, each 32 value columns of the state in registers, and one pass over them suffices because
    S''^T q = S'^T q + (k . q) delta, as in ``kda_decode``: one barrier of threads for q, k and alpha, one for the sums
    over k. Blocks of a head share nothing. ``gated_norm``: a warp a head.

Limits
    States and slots are read after the dependency wait; only parameters are read before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx
from k3sim.kernels.device.sums import lane_sum, line_sums
from k3sim.kernels.unfused.pieces import LOG2E, sigmoid

HEAD_DIM = 128
L2_EPSILON = 1e-6
NORM_EPSILON = 1e-5
DECAY_BOUND = -5.0
CHUNK = 8
CONV_THREADS = 64
PARTS = 4  # blocks a head of the recurrent update
COLUMNS = HEAD_DIM // PARTS
THREADS = HEAD_DIM  # one a channel of a head while q, k and alpha are prepared
WARPS = THREADS // 32
PARTIALS = 2 * COLUMNS + 4  # of a warp: sums with k, sums with q, then k.k, q.q and k.q
NORM_LANES = HEAD_DIM // CHUNK


@dataclass(frozen=True, kw_only=True)
class ConvConfiguration:
    heads: int
    pdl: bool = False


@dataclass(frozen=True, kw_only=True)
class RecurrentConfiguration:
    heads: int
    bf16_state: bool
    fp32_logits: bool
    pdl: bool = False

    @property
    def vector(self) -> int:
        """State elements of one 16-byte access."""
        return 8 if self.bf16_state else 4

    @property
    def lanes(self) -> int:
        """Threads that share a row of the block's part of the state."""
        return COLUMNS // self.vector

    @property
    def rows(self) -> int:
        """Rows of the state that a thread holds."""
        return HEAD_DIM * self.lanes // THREADS


@dataclass(frozen=True, kw_only=True)
class GatedNormConfiguration:
    heads: int
    pdl: bool = False


@cute.kernel
def _conv_update(
    mProjected: Int64, projected_stride: Int64, mConvWeight: Int64, mSlots: Int64, mConvState: Int64,
    slot_stride: Int64, mConvolved: Int64, configuration: cutlass.Constexpr,
) -> None:
    channels = 3 * configuration.heads * HEAD_DIM
    tid, _, _ = cute.arch.thread_idx()
    block, row, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    chunk = block * CONV_THREADS + tid
    # Threads beyond the last channel repeat the last chunk; they store nothing.
    active = chunk < channels // CHUNK
    first = cutlass.min(chunk, Int32(channels // CHUNK - 1)) * CHUNK
    weights = [ptx.load_stream(mConvWeight + (Int64(first) + i) * 16) for i in range(CHUNK)]
    cute.arch.griddepcontrol_wait()
    slot = ptx.load_int(mSlots + Int64(row) * 4)
    live = slot > 0
    now = ptx.load_l2(mProjected + Int64(row) * projected_stride + first * 2)
    gState = mConvState + Int64(slot if live else Int32(0)) * slot_stride + first * 2
    past = [ptx.load_l2(gState + sample * (2 * channels)) for sample in range(3)]
    samples = [ptx.widen_bf16(one) for one in (*past, now)]
    values = []
    for i in range_constexpr(CHUNK):
        total = Float32(0.0)
        for sample in range_constexpr(4):
            total = total + ptx.bits_as_float(weights[i][sample]) * samples[sample][i]
        values.append(total * sigmoid(total))
    words = [word if live else Uint32(0) for word in ptx.narrow_bf16(values)]
    if active:
        ptx.store(mConvolved + (Int64(row) * channels + first) * 2, words)
    if active & live:
        ptx.store(gState, past[1])
        ptx.store(gState + 2 * channels, past[2])
        ptx.store(gState + 4 * channels, now)


def _half(g_address: Int64) -> Float32:
    """One bf16 that the launch before this one wrote."""
    return ptx.low_bf16(ptx.load_half_l2(g_address))


@cute.kernel
def _recurrent_update(
    mConvolved: Int64, mLogits: Int64, mProjected: Int64, projected_stride: Int64, mDtBias: Int64, mALog: Int64,
    mSlots: Int64, mState: Int64, slot_stride: Int64, mReadOut: Int64, configuration: cutlass.Constexpr,
) -> None:
    heads, vector, lanes, num_rows = (
        configuration.heads,
        configuration.vector,
        configuration.lanes,
        configuration.rows,
    )
    width = heads * HEAD_DIM
    element = 16 // vector  # bytes
    tid, _, _ = cute.arch.thread_idx()
    part, head, row = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    allocator = cutlass.memory.SmemAllocator()
    sQ = Int32(allocator.allocate(4 * HEAD_DIM, 16).toint())
    sK = Int32(allocator.allocate(4 * HEAD_DIM, 16).toint())
    sAlpha = Int32(allocator.allocate(4 * HEAD_DIM, 16).toint())
    sPartials = Int32(allocator.allocate(4 * WARPS * PARTIALS, 16).toint())
    cute.arch.griddepcontrol_launch_dependents()
    channel = head * HEAD_DIM + tid
    dt_bias = ptx.load_float(mDtBias + Int64(channel) * 4)
    rate = ptx.exp2(ptx.load_float(mALog + Int64(head) * 4) * Float32(LOG2E))
    cute.arch.griddepcontrol_wait()

    slot = ptx.load_int(mSlots + Int64(row) * 4)
    live = slot > 0
    gChannels = mConvolved + (Int64(row) * (3 * width) + channel) * 2
    q, k = _half(gChannels), _half(gChannels + 2 * width)
    if const_expr(configuration.fp32_logits):
        logit = ptx.load_float_l2(mLogits + (Int64(row) * width + channel) * 4)
    else:
        logit = _half(mLogits + (Int64(row) * width + channel) * 2)
    beta = sigmoid(_half(mProjected + Int64(row) * projected_stride + (4 * width + HEAD_DIM + head) * 2))
    # This thread's columns and rows of the state: rows group, group + THREADS / lanes, ...
    column, group = part * COLUMNS + tid % lanes * vector, tid // lanes
    gV = mConvolved + (Int64(row) * (3 * width) + 2 * width + head * HEAD_DIM + column) * 2
    v = [_half(gV + 2 * j) for j in range(vector)]
    gState = mState + Int64(slot if live else Int32(0)) * slot_stride
    gState = gState + ((head * HEAD_DIM + group) * HEAD_DIM + column) * element
    row_bytes = THREADS // lanes * HEAD_DIM * element
    words = [ptx.load_l2(gState + i * row_bytes) for i in range(num_rows)]

    ptx.shared_store_float(sQ + tid * 4, q)
    ptx.shared_store_float(sK + tid * 4, k)
    alpha = ptx.exp2(Float32(DECAY_BOUND * LOG2E) * sigmoid(rate * (logit + dt_bias)))
    ptx.shared_store_float(sAlpha + tid * 4, alpha)
    cute.arch.sync_threads()

    # Sums over this thread's rows: of S' with k and with q, then k.k, q.q and k.q.
    zero = Float32(0.0)
    sums = [zero] * (2 * vector + 3)
    decays, keys = [], []
    for i in range_constexpr(num_rows):
        at = (group + i * (THREADS // lanes)) * 4
        q_i, k_i = ptx.shared_load_float(sQ + at), ptx.shared_load_float(sK + at)
        decay = ptx.shared_load_float(sAlpha + at)
        decays.append(decay)
        keys.append(k_i)
        state = _state_values(words[i], configuration.bf16_state)
        for j in range_constexpr(vector):
            decayed = decay * state[j]
            sums[j] = sums[j] + k_i * decayed
            sums[vector + j] = sums[vector + j] + q_i * decayed
        sums[2 * vector] = sums[2 * vector] + k_i * k_i
        sums[2 * vector + 1] = sums[2 * vector + 1] + q_i * q_i
        sums[2 * vector + 2] = sums[2 * vector + 2] + k_i * q_i
    # Lanes that hold other rows of the same columns.
    offsets = tuple(offset for offset in (16, 8, 4, 2, 1) if offset >= lanes)
    sums = [lane_sum(one, offsets) for one in sums]
    sWarp = sPartials + warp * (4 * PARTIALS)
    if lane < lanes:
        for j in range_constexpr(vector):
            ptx.shared_store_float(sWarp + (lane * vector + j) * 4, sums[j])
            ptx.shared_store_float(sWarp + (COLUMNS + lane * vector + j) * 4, sums[vector + j])
    if lane == 0:
        for j in range_constexpr(3):
            ptx.shared_store_float(sWarp + (2 * COLUMNS + j) * 4, sums[2 * vector + j])
    cute.arch.sync_threads()

    kk, qq, kq, _ = _over_warps(sPartials + 2 * COLUMNS * 4)
    k_factor = cute.math.rsqrt(kk + Float32(L2_EPSILON), fastmath=True)
    q_factor = cute.math.rsqrt(qq + Float32(L2_EPSILON), fastmath=True) * Float32(HEAD_DIM**-0.5)
    with_k, with_q = [], []
    for j in range_constexpr(0, vector, 4):
        sColumns = sPartials + (tid % lanes * vector + j) * 4
        with_k += _over_warps(sColumns)
        with_q += _over_warps(sColumns + COLUMNS * 4)
    delta = [beta * (v[j] - k_factor * with_k[j]) for j in range(vector)]
    if tid < lanes:
        out = [q_factor * (with_q[j] + k_factor * kq * delta[j]) for j in range(vector)]
        packed = ptx.narrow_bf16([one if live else zero for one in out])
        gOut = mReadOut + (Int64(row) * width + head * HEAD_DIM + column) * 2
        if const_expr(configuration.bf16_state):
            ptx.store(gOut, packed)
        else:
            ptx.store_pair(gOut, packed)
    if live:
        for i in range_constexpr(num_rows):
            state = _state_values(words[i], configuration.bf16_state)
            fresh = [decays[i] * state[j] + keys[i] * k_factor * delta[j] for j in range(vector)]
            if const_expr(configuration.bf16_state):
                ptx.store(gState + i * row_bytes, ptx.narrow_bf16(fresh))
            else:
                ptx.store(gState + i * row_bytes, fresh)


def _state_values(words: Any, bf16_state: bool) -> list[Float32]:
    return ptx.widen_bf16(words) if bf16_state else [ptx.bits_as_float(word) for word in words]


def _over_warps(sValues: Int32) -> list[Float32]:
    """Four neighbouring partial sums, summed over the warps."""
    return line_sums(sValues, WARPS, 4 * PARTIALS)


@cute.kernel
def _gated_norm(
    mReadOut: Int64, mProjected: Int64, projected_stride: Int64, mNormWeight: Int64, mOut: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    width = configuration.heads * HEAD_DIM
    lane, _, _ = cute.arch.thread_idx()
    head, row, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    # Both halves of the warp do the same; the first one stores.
    first = lane % NORM_LANES * CHUNK
    scales = [
        ptx.load_float(mNormWeight + (Int64(first) + i) * 4) for i in range(CHUNK)
    ]  # no 16-byte load: the weight is a row of a larger parameter and aligned to 4
    cute.arch.griddepcontrol_wait()
    at = (Int64(row) * width + head * HEAD_DIM + first) * 2
    values = ptx.widen_bf16(ptx.load_l2(mReadOut + at))
    gGate = mProjected + Int64(row) * projected_stride + (3 * width + head * HEAD_DIM + first) * 2
    gates = ptx.widen_bf16(ptx.load_l2(gGate))
    square = Float32(0.0)
    for value in values:
        square = square + value * value
    square = lane_sum(square, (8, 4, 2, 1))
    factor = cute.math.rsqrt(square * Float32(1.0 / HEAD_DIM) + Float32(NORM_EPSILON), fastmath=True)
    out = [value * factor * scale * sigmoid(gate) for value, scale, gate in zip(values, scales, gates, strict=True)]
    if lane < NORM_LANES:
        ptx.store(mOut + at, ptx.narrow_bf16(out))


def compile_conv_update(configuration: ConvConfiguration) -> Any:
    """Function of (projected, its row stride, conv_weight, slots, conv_state, its slot stride, convolved, rows,
    stream); strides in bytes."""
    num_chunks = 3 * configuration.heads * HEAD_DIM // CHUNK

    @cute.jit
    def launch(
        mProjected: Int64, projected_stride: Int64, mConvWeight: Int64, mSlots: Int64, mConvState: Int64,
        slot_stride: Int64, mConvolved: Int64, rows: Int32, stream: CUstream,
    ) -> None:
        _conv_update(
            mProjected, projected_stride, mConvWeight, mSlots, mConvState, slot_stride, mConvolved, configuration
        ).launch(
            grid=[-(-num_chunks // CONV_THREADS), rows, 1],
            block=[CONV_THREADS, 1, 1],
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 7, Int32(1), cute.runtime.make_fake_stream())


def compile_recurrent_update(configuration: RecurrentConfiguration) -> Any:
    """Function of (convolved, logits, projected, its row stride, dt_bias, a_log, slots, state, its slot stride, read
    out, rows, stream); strides in bytes."""

    @cute.jit
    def launch(
        mConvolved: Int64, mLogits: Int64, mProjected: Int64, projected_stride: Int64, mDtBias: Int64, mALog: Int64,
        mSlots: Int64, mState: Int64, slot_stride: Int64, mReadOut: Int64, rows: Int32, stream: CUstream,
    ) -> None:
        _recurrent_update(
            mConvolved, mLogits, mProjected, projected_stride, mDtBias, mALog, mSlots, mState, slot_stride, mReadOut,
            configuration,
        ).launch(
            grid=[PARTS, configuration.heads, rows],
            block=[THREADS, 1, 1],
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=configuration.pdl,
        )  # fmt: skip

    return cute.compile(launch, *[Int64(0)] * 10, Int32(1), cute.runtime.make_fake_stream())


def compile_gated_norm(configuration: GatedNormConfiguration) -> Any:
    """Function of (read out, projected, its row stride in bytes, norm_weight, out, rows, stream)."""

    @cute.jit
    def launch(
        mReadOut: Int64, mProjected: Int64, projected_stride: Int64, mNormWeight: Int64, mOut: Int64, rows: Int32,
        stream: CUstream,
    ) -> None:
        _gated_norm(mReadOut, mProjected, projected_stride, mNormWeight, mOut, configuration).launch(
            grid=[configuration.heads, rows, 1], block=[32, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 5, Int32(1), cute.runtime.make_fake_stream())
