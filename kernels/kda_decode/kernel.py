"""KDA decode step in one launch: convolution, SiLU, L2 norms, low-rank decay gate, delta rule, gated RMSNorm.

What it computes, for one row (token) and head, D = 128::

    q, k, v = silu(conv4(conv_state, projected))        depthwise and causal, three past samples kept
    q, k    = q / |q| * D**-0.5, k / |k|
    alpha   = exp(-5 sigmoid(exp(a_log) (gate_weight f_a + dt_bias)))
    S'      = diag(alpha) S
    S''     = S' + k delta^T,    delta = sigmoid(beta) (v - S'^T k)
    out     = rmsnorm(S''^T q) norm_weight sigmoid(gate)

and one pass over S suffices, because ``S''^T q = S'^T q + (k . q) delta``: both sums over k are taken of the same
registers, and the norms of q and k enter as scalars afterwards, so that only one barrier of threads lies between the
inputs and those sums.

Tensors: ``projected [rows, q|k|v|gate|f_a|beta|padding]`` bf16, ``gate_weight [heads D, D]`` bf16, ``conv_weight
[3 heads D, 4]`` fp32, ``conv_state [slots, 3, 3 heads D]`` bf16 (oldest first), ``state [slots, heads, D (k), D (v)]``
fp32 or bf16, ``out [rows, heads D]`` bf16. Slot strides are 64-bit. A slot of 0 or less is padding: output 0, nothing
else written.

Two forms share the phases below.

* ``split_head``: a cluster of 2, 4 or 8 blocks owns a head of a row; each block holds 64, 32 or 16 value columns of
  the state in registers. Columns are independent but for the RMSNorm: every block sends its sum of squares to the
  others with ``st.async``, counted by a barrier in the receiver's shared memory, one hop instead of a store and a
  cluster barrier. Each block projects the whole decay gate itself, on tensor cores with f_a as the only distinct
  column of B: 16 instructions a warp cost less than the exchange that a split of the 128 outputs would need.
* ``stream``: one persistent block an SM walks over (head, row) pairs, head by head so that the gate weight stays in
  registers. Bulk copies of whole states (contiguous, 64 KiB or 32 KiB) fill a ring of shared memory; four warps
  prepare q, k, v and the decay two items ahead; eight warps update the state and read it out. New states leave from
  registers. The split matters: with all warps doing everything in turn, an item was one chain of 5.9 us on an H200,
  against 2.1 us that its bytes take.

State, weights and past samples are fetched before the wait on the preceding kernel. With programmatic dependent
launch the caller therefore promises that no kernel still in flight writes the state of these slots.

What lost: on an H200, 8 blocks a head against 4 (fp32, 2.45 and 2.31 us at 12 heads), 256 threads against 128 there
(2.41 us), and all warps doing everything in the streaming form. On paper: one block a head (12 of 132 SMs pull the
state at batch 1); columns owned by a warp, which needs no barrier for the sums over k but touches 32 cache lines a
load; f_a in fp32 FMAs (twice the instructions of the tensor cores' padded product).

Limits: the streaming form reaches 3.3 TB/s of state read and written at 128 rows of 12 heads, 61.5 us; it is not known
what holds it there. In bf16 (38.5 us) an item takes about 3 us where its bytes need 1, so the updating warps are the
likely bound.

One file, because both forms are one thought: the same recurrence by the same phases, over registers or over a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3sim.kernels.device import ptx, timestamps

HEAD_DIM = 128
L2_EPSILON = 1e-6
NORM_EPSILON = 1e-5
DECAY_BOUND = -5.0
VECTOR_BYTES = 16
MMA_ROWS = 16
# Of the streaming form: warps that prepare q, k, v and the decay, and the tiles of the gate each projects.
PREPARING_WARPS = 4
PREPARING_TILES = HEAD_DIM // MMA_ROWS // PREPARING_WARPS
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class KdaConfiguration:
    """One compiled form. ``cluster``: blocks a head (2, 4 or 8), or 0 for the streaming form with ``stages`` states.

    ``threads``: that compute, 128 or 256; 256 in the streaming form.
    """

    heads: int
    bf16_state: bool
    cluster: int
    threads: int
    stages: int = 0
    pdl: bool = False

    @property
    def columns(self) -> int:
        """Value columns a block."""
        return HEAD_DIM // max(self.cluster, 1)

    @property
    def vector(self) -> int:
        """State elements of one 16-byte access."""
        return VECTOR_BYTES // (2 if self.bf16_state else 4)

    @property
    def lanes_per_row(self) -> int:
        """Threads that share a row (one k) of the block's part of the state."""
        return self.columns // self.vector

    @property
    def rows_per_thread(self) -> int:
        """Consecutive rows of the state that a thread holds."""
        return HEAD_DIM * self.lanes_per_row // self.threads

    @property
    def warps(self) -> int:
        """Computing warps a block."""
        return self.threads // 32

    @property
    def gate_tiles(self) -> int:
        """Tiles of 16 decay channels that a warp projects."""
        return HEAD_DIM // MMA_ROWS // self.warps

    @property
    def sending_warps(self) -> int:
        """Warps of a block whose lanes between them hold every column once."""
        return max(1, self.columns // 32)

    @property
    def state_type(self) -> Any:
        """Element type of the state."""
        return BFloat16 if self.bf16_state else Float32


# ---- small pieces, traced inline ----------------------------------------------------------------------------------


def scalar(pointer: Any, offset: Any) -> Any:
    return cute.make_tensor(pointer + offset, cute.make_layout(1))[0]


def put(pointer: Any, offset: Any, value: Any) -> None:
    # A call in the target of an assignment would mark its arguments, the configuration too, as written.
    cute.make_tensor(pointer + offset, cute.make_layout(1))[0] = value


def vector_at(pointer: Any, offset: Any, num: int) -> Any:
    """``num`` consecutive elements as a tensor whose accesses are as wide as its size allows."""
    moved = pointer + offset
    aligned = cute.make_ptr(
        pointer.dtype, moved.toint(), pointer.memspace, assumed_align=min(16, num * pointer.dtype.width // 8)
    )
    return cute.make_tensor(aligned, cute.make_layout(num))


def load_vector(pointer: Any, offset: Any, num: int) -> Any:
    registers = cute.make_rmem_tensor(num, pointer.dtype)
    cute.autovec_copy(vector_at(pointer, offset, num), registers)
    return registers


def load_words(pointer: Any, offset: Any) -> Any:
    """Eight bf16 as four 32-bit words, as the tensor cores take them."""
    return load_vector(cute.recast_ptr(pointer + offset, dtype=Int32), 0, 4)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    return type(yes)(cutlass.select_(condition, yes, no))


def exp(x: Any) -> Any:
    return cute.math.exp(x, fastmath=True)


def sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def warp_sum(value: Any, offsets: Any) -> Any:
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


def prefetch_l2(pointer: Any) -> None:
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer.toint()])


def mma_16x8x16(a: Any, b: Any, c: Any) -> Any:
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
        "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


# ---- phases -------------------------------------------------------------------------------------------------------


def load_gate_weight(num_tiles: int, m_gate_weight: Any, head: Any, warp: Any, lane: Any) -> list[Any]:
    """This warp's rows of the gate weight as A operands.

    Thread c of a quad takes 8 consecutive inputs of every 32; the product sums over inputs, so their order within
    the instruction is free as long as A and B agree.
    """
    words = []
    for tile in range(num_tiles):
        row = head * HEAD_DIM + (warp * num_tiles + tile) * MMA_ROWS + lane // 4
        for half in range(2):
            for part in range(4):
                offset = (row + 8 * half) * HEAD_DIM + 32 * part + 8 * (lane % 4)
                words.append(load_words(m_gate_weight.iterator, offset))
    return words


def gate_row(num_tiles: int, warp: Any, lane: Any) -> Any:
    """Decay channel that this lane finishes; lanes of a quad share the four rows they hold."""
    which = lane % 4 % (2 * num_tiles)
    return (warp * num_tiles + which // 2) * MMA_ROWS + 8 * (which % 2) + lane // 4


def project_gate(num_tiles: int, weight: list[Any], f_a: list[Any], lane: Any) -> Any:
    """Logit of channel ``gate_row``. Every column of B is f_a, so each lane of a quad gets the quad's rows."""
    logits = []
    for tile in range(num_tiles):
        low, high = weight[8 * tile : 8 * tile + 4], weight[8 * tile + 4 : 8 * tile + 8]
        even, odd = (Float32(0.0),) * 4, (Float32(0.0),) * 4
        for part in range(4):
            a_low, a_high, b = low[part], high[part], f_a[part]
            even = mma_16x8x16((a_low[0], a_high[0], a_low[1], a_high[1]), (b[0], b[1]), even)
            odd = mma_16x8x16((a_low[2], a_high[2], a_low[3], a_high[3]), (b[2], b[3]), odd)
        logits += [even[0] + odd[0], even[2] + odd[2]]
    which = lane % 4 % len(logits)
    logit = logits[0]
    for index in range(1, len(logits)):
        logit = choose(which == index, logits[index], logit)
    return logit


def load_past(pointer: Any, channels: int, channel: Any) -> list[Any]:
    return [scalar(pointer, sample * channels + channel) for sample in range(3)]


def store_past(pointer: Any, channels: int, channel: Any, past: list[Any], now: Any) -> None:
    for sample, value in enumerate((past[1], past[2], now)):
        put(pointer, sample * channels + channel, value)


def convolve(weight: Any, past: list[Any], now: Any) -> Any:
    total = weight[3] * now.to(Float32)
    for sample in range(3):
        total = total + weight[sample] * past[sample].to(Float32)
    return total * sigmoid(total)


def sum_over_k(
    conf: KdaConfiguration, state: list[Any], s_qk: Any, s_alpha: Any, s_partial: Any, warp: Any, lane: Any, group: Any
) -> Any:
    """Partial sums over this warp's rows of the state, into ``s_partial[warp]``; returns alpha and k of those rows.

    Layout of a warp's partials: sums with k of all columns, sums with q, then k.k, q.q and k.q.
    """
    num_rows, num = conf.rows_per_thread, conf.vector
    chunk = min(num_rows, 4)
    alpha: list[Any] = []
    k: list[Any] = []
    q: list[Any] = []
    for first in range(0, num_rows, chunk):
        offset = group * num_rows + first
        for values, pointer in ((q, s_qk), (k, s_qk + HEAD_DIM), (alpha, s_alpha)):
            loaded = load_vector(pointer, offset, chunk)
            values += [loaded[i] for i in range(chunk)]
    with_k, with_q = [Float32(0.0)] * num, [Float32(0.0)] * num
    kk, qq, kq = Float32(0.0), Float32(0.0), Float32(0.0)
    for i in range(num_rows):
        alpha_k, alpha_q = alpha[i] * k[i], alpha[i] * q[i]
        kk, qq, kq = kk + k[i] * k[i], qq + q[i] * q[i], kq + k[i] * q[i]
        for j in range(num):
            element = state[i][j].to(Float32)
            with_k[j] = with_k[j] + alpha_k * element
            with_q[j] = with_q[j] + alpha_q * element
    # Lanes that hold other rows of the same columns: exchange halves, so that every step also halves the values.
    values, first = with_k + with_q, Int32(0)
    offsets = [offset for offset in (16, 8, 4, 2, 1) if offset >= conf.lanes_per_row]
    for offset in offsets:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = [choose(upper, values[half + i], values[i]) for i in range(half)]
        sent = [choose(upper, values[i], values[half + i]) for i in range(half)]
        values = [kept[i] + cute.arch.shuffle_sync_bfly(sent[i], offset) for i in range(half)]
        first = first + choose(upper, Int32(half), Int32(0))
    kk, qq, kq = warp_sum(kk, offsets), warp_sum(qq, offsets), warp_sum(kq, offsets)
    column = lane % conf.lanes_per_row * num
    base = warp * partial_stride(conf)
    run = min(len(values), num)
    for start in range(0, len(values), run):
        index = first + start
        staged = cute.make_rmem_tensor(run, Float32)
        for i in range(run):
            staged[i] = values[start + i]
        target = base + index // num * conf.columns + column + index % num
        cute.autovec_copy(staged, vector_at(s_partial, target, run))
    totals = cute.make_rmem_tensor(4, Float32)
    totals[0], totals[1], totals[2], totals[3] = kk, qq, kq, Float32(0.0)
    # Every lane holds the same totals and writes them to the same place: no branch.
    cute.autovec_copy(totals, vector_at(s_partial, base + 2 * conf.columns, 4))
    return alpha, k


def partial_stride(conf: KdaConfiguration) -> int:
    return 2 * conf.columns + 4


def column_sums(conf: KdaConfiguration, s_partial: Any, offset: Any, num: int) -> list[Any]:
    sums = [Float32(0.0)] * num
    for other in range(conf.warps):
        loaded = load_vector(s_partial, other * partial_stride(conf) + offset, num)
        sums = [sums[i] + loaded[i] for i in range(num)]
    return sums


def read_out(conf: KdaConfiguration, s_partial: Any, s_v: Any, beta: Any, column: Any) -> Any:
    """Unnormalised output of ``column``, and the factors that normalise k."""
    kk, qq, kq, _ = column_sums(conf, s_partial, 2 * conf.columns, 4)
    k_factor = cute.math.rsqrt(kk + L2_EPSILON, fastmath=True)
    q_factor = cute.math.rsqrt(qq + L2_EPSILON, fastmath=True) * HEAD_DIM**-0.5
    (with_k,) = column_sums(conf, s_partial, column, 1)
    (with_q,) = column_sums(conf, s_partial, conf.columns + column, 1)
    delta = beta * (scalar(s_v, column) - k_factor * with_k)
    return q_factor * (with_q + k_factor * kq * delta), k_factor


def store_new_state(
    conf: KdaConfiguration,
    m_state: Any,
    offset: Any,
    state: list[Any],
    alpha: list[Any],
    k: list[Any],
    s_partial: Any,
    s_v: Any,
    beta: Any,
    k_factor: Any,
    first_column: Any,
) -> None:
    """``S'' = diag(alpha) S + k delta^T`` for this thread's rows and columns, back to where S came from."""
    num = conf.vector
    with_k: list[Any] = []
    for first in range(0, num, 4):
        with_k += column_sums(conf, s_partial, first_column + first, 4)
    v = load_vector(s_v, first_column, num)
    delta = [beta * k_factor * (v[j] - k_factor * with_k[j]) for j in range(num)]
    for i in range(conf.rows_per_thread):
        fresh = cute.make_rmem_tensor(num, Float32)
        for j in range(num):
            fresh[j] = alpha[i] * state[i][j].to(Float32) + k[i] * delta[j]
        stored = fresh
        if conf.bf16_state:
            stored = cute.make_rmem_tensor(num, BFloat16)
            stored.store(fresh.load().to(BFloat16))
        cute.autovec_copy(stored, vector_at(m_state.iterator, offset + i * HEAD_DIM, num))


@cute.jit
def fetch_item(
    conf: cutlass.Constexpr, copy: cute.CopyAtom, m_state: cute.Tensor, m_conv_state: cute.Tensor, slot: Int32,
    head: Int32, s_ring: cute.Pointer, s_full: cute.Pointer, stage: Int32, thread: Int32,
) -> None:
    """Start the copy of a head's state into ``stage`` and bring its past samples, in HBM too, into L2."""
    slot = choose(slot > 0, slot, Int32(0))
    elements = cutlass.const_expr(HEAD_DIM * HEAD_DIM)
    if thread == 0:  # a plain bulk copy elects no thread: every lane would issue its own
        cute.arch.mbarrier_arrive_and_expect_tx(s_full + stage, elements * conf.state_type.width // 8)
        cute.copy(
            copy,
            vector_at(m_state.iterator, Int64(slot) * m_state.stride[0] + head * elements, elements),
            cute.make_tensor(s_ring + stage * elements, cute.make_layout(elements)),
            mbar_ptr=s_full + stage,
        )
    # 3 samples of q, k and v, two lines of 128 bytes each; counted down from the last thread, the first one is busy.
    line = conf.threads - 1 - thread
    if line < 18:
        channel = line // 2 % 3 * (conf.heads * HEAD_DIM) + head * HEAD_DIM + line % 2 * (HEAD_DIM // 2)
        offset = line // 6 * (3 * conf.heads * HEAD_DIM) + channel
        prefetch_l2(m_conv_state.iterator + (Int64(slot) * m_conv_state.stride[0] + offset))


# ---- a head split over a cluster ----------------------------------------------------------------------------------


@cute.kernel
def split_head_kernel(
    m_projected: cute.Tensor, m_gate_weight: cute.Tensor, m_conv_weight: cute.Tensor, m_dt_bias: cute.Tensor,
    m_a_log: cute.Tensor, m_norm_weight: cute.Tensor, m_slots: cute.Tensor, m_conv_state: cute.Tensor,
    m_state: cute.Tensor, m_out: cute.Tensor, conf: cutlass.Constexpr,
) -> None:
    """Grid (cluster, heads, rows)."""
    thread, _, _ = cute.arch.thread_idx()
    rank, head, row = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    width = cutlass.const_expr(conf.heads * HEAD_DIM)
    channels = cutlass.const_expr(3 * width)
    columns = cutlass.const_expr(conf.columns)

    s_qk = cute.arch.alloc_smem(Float32, 2 * HEAD_DIM, 16)
    s_alpha = cute.arch.alloc_smem(Float32, HEAD_DIM, 16)
    s_v = cute.arch.alloc_smem(Float32, columns, 16)
    s_partial = cute.arch.alloc_smem(Float32, conf.warps * partial_stride(conf), 16)
    s_squares = cute.arch.alloc_smem(Float32, conf.cluster * conf.sending_warps, 16)
    s_arrived = cute.arch.alloc_smem(Int64, 1, 8)
    if thread == 0:
        cute.arch.mbarrier_init(s_arrived, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()  # the initialisation is one instruction of the warp, no lane's (SASS: a uniform SYNCS.EXCH)
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(s_arrived, 4 * conf.cluster * conf.sending_warps)
    began = timestamps.now("kda_decode")
    cute.arch.cluster_arrive_relaxed()  # the fence above published the barrier; nothing else is shared yet
    cute.arch.griddepcontrol_launch_dependents()

    # Everything that the preceding kernel does not write.
    slot = m_slots[row]
    live = slot > 0
    slot = choose(live, slot, Int32(0))
    column = thread % columns
    # A thread convolves one or two of the 256 channels of q and k, and one of its block's channels of v.
    numbers = [thread + first for first in range(0, 2 * HEAD_DIM, conf.threads)]
    channels_qk = [one // HEAD_DIM * width + head * HEAD_DIM + one % HEAD_DIM for one in numbers]
    channel_v = 2 * width + head * HEAD_DIM + rank * columns + column
    gate_channel = gate_row(conf.gate_tiles, warp, lane)
    weight = load_gate_weight(conf.gate_tiles, m_gate_weight, head, warp, lane)
    conv_qk = [load_vector(m_conv_weight.iterator, 4 * channel, 4) for channel in channels_qk]
    conv_v = load_vector(m_conv_weight.iterator, 4 * channel_v, 4)
    dt_bias = m_dt_bias[head * HEAD_DIM + gate_channel]
    rate = exp(m_a_log[head])
    norm_weight = m_norm_weight[rank * columns + column]
    past_pointer = m_conv_state.iterator + Int64(slot) * m_conv_state.stride[0]
    past_qk = [load_past(past_pointer, channels, channel) for channel in channels_qk]
    past_v = load_past(past_pointer, channels, channel_v)
    group, first_column = thread // conf.lanes_per_row, thread % conf.lanes_per_row * conf.vector
    state_offset = Int64(slot) * m_state.stride[0] + (
        (head * HEAD_DIM + group * conf.rows_per_thread) * HEAD_DIM + rank * columns + first_column
    )
    state = [
        load_vector(m_state.iterator, state_offset + i * HEAD_DIM, conf.vector) for i in range(conf.rows_per_thread)
    ]

    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()
    released = timestamps.now("kda_decode")

    projected = m_projected.iterator + Int64(row) * m_projected.stride[0]
    f_a = [load_words(projected, 4 * width + 32 * part + 8 * (lane % 4)) for part in range(4)]
    now_qk = [scalar(projected, channel) for channel in channels_qk]
    now_v = scalar(projected, channel_v)
    beta = sigmoid(scalar(projected, 4 * width + HEAD_DIM + head).to(Float32))
    gate = scalar(projected, 3 * width + head * HEAD_DIM + rank * columns + column)

    for i in cutlass.range_constexpr(len(numbers)):
        put(s_qk, numbers[i], convolve(conv_qk[i], past_qk[i], now_qk[i]))
    put(s_v, column, convolve(conv_v, past_v, now_v))
    decay = project_gate(conf.gate_tiles, weight, f_a, lane)
    alpha_here = exp(DECAY_BOUND * sigmoid(rate * (decay + dt_bias)))
    put(s_alpha, gate_channel, alpha_here)
    cute.arch.sync_threads()

    alpha, k = sum_over_k(conf, state, s_qk, s_alpha, s_partial, warp, lane, group)
    cute.arch.sync_threads()

    # The output first: its sum of squares has to travel. Each column is held several times; the first warps send.
    read, k_factor = read_out(conf, s_partial, s_v, beta, column)
    squares = warp_sum(read * read, [offset for offset in (16, 8, 4, 2, 1) if offset < columns])
    if warp < conf.sending_warps and lane < conf.cluster:
        target = s_squares + (rank * conf.sending_warps + warp)
        cute.arch.store_async_dsmem(target, squares.bitcast(Int32), s_arrived, lane)
    if live:
        store_new_state(conf, m_state, state_offset, state, alpha, k, s_partial, s_v, beta, k_factor, first_column)

    cute.arch.mbarrier_wait(s_arrived, 0)
    total = Float32(0.0)
    for other in cutlass.range_constexpr(conf.cluster * conf.sending_warps):
        total = total + scalar(s_squares, other)
    scale = cute.math.rsqrt(total * (1.0 / HEAD_DIM) + NORM_EPSILON, fastmath=True)
    value = read * scale * norm_weight * sigmoid(gate.to(Float32))
    if thread < columns:
        m_out[row, head * HEAD_DIM + rank * columns + column] = choose(live, value, Float32(0.0)).to(BFloat16)
    # All blocks of the cluster have read the past samples: their sums of squares depend on them.
    if live:
        if thread % HEAD_DIM // columns == rank:
            for i in cutlass.range_constexpr(len(numbers)):
                store_past(past_pointer, channels, channels_qk[i], past_qk[i], now_qk[i])
        if thread < columns:
            store_past(past_pointer, channels, channel_v, past_v, now_v)
    if cutlass.const_expr(timestamps.on("kda_decode")):  # noqa: SIM102 - one is of the build, the other of the thread
        if thread == 0:
            block = (row * conf.heads + head) * conf.cluster + rank
            timestamps.record("kda_decode.cluster", block, began, released)


# ---- states streamed through a ring -------------------------------------------------------------------------------


@cute.kernel
def stream_kernel(
    m_projected: cute.Tensor, m_gate_weight: cute.Tensor, m_conv_weight: cute.Tensor, m_dt_bias: cute.Tensor,
    m_a_log: cute.Tensor, m_norm_weight: cute.Tensor, m_slots: cute.Tensor, m_conv_state: cute.Tensor,
    m_state: cute.Tensor, m_out: cute.Tensor, conf: cutlass.Constexpr,
) -> None:
    """Grid (blocks,): a block takes consecutive (head, row) pairs, head by head.

    Warps: eight update states, four prepare q, k, v and the decay of the next items.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    num_blocks, _, _ = cute.arch.grid_dim()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    width = cutlass.const_expr(conf.heads * HEAD_DIM)
    channels = cutlass.const_expr(3 * width)
    state_elements = cutlass.const_expr(HEAD_DIM * HEAD_DIM)
    num_rows = m_slots.shape[0]
    num_items = num_rows * conf.heads
    begin = block * num_items // num_blocks
    end = (block + 1) * num_items // num_blocks

    s_ring = cute.arch.get_dyn_smem(conf.state_type, 128)
    # What the preparing warps hand over, two items deep.
    s_qk = cute.arch.alloc_smem(Float32, 2 * 2 * HEAD_DIM, 16)
    s_alpha = cute.arch.alloc_smem(Float32, 2 * HEAD_DIM, 16)
    s_v = cute.arch.alloc_smem(Float32, 2 * HEAD_DIM, 16)
    s_scale = cute.arch.alloc_smem(Float32, 2 * HEAD_DIM, 16)
    s_beta = cute.arch.alloc_smem(Float32, 2, 8)
    s_partial = cute.arch.alloc_smem(Float32, conf.warps * partial_stride(conf), 16)
    s_squares = cute.arch.alloc_smem(Float32, conf.warps, 16)
    s_full = cute.arch.alloc_smem(Int64, conf.stages, 8)
    s_ready = cute.arch.alloc_smem(Int64, 2, 8)
    s_free = cute.arch.alloc_smem(Int64, 2, 8)
    if thread == 0:
        for stage in cutlass.range_constexpr(conf.stages):
            cute.arch.mbarrier_init(s_full + stage, 1)
        for buffer in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(s_ready + buffer, PREPARING_WARPS)
            cute.arch.mbarrier_init(s_free + buffer, conf.warps)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()

    if warp >= conf.warps:
        column = thread - conf.threads
        preparing_warp = warp - conf.warps
        gate_channel = gate_row(PREPARING_TILES, preparing_warp, lane)
        norm_weight = m_norm_weight[column]
        # Of the head in hand.
        gate_weight = [cute.make_rmem_tensor(4, Int32) for _ in range(8 * PREPARING_TILES)]
        conv_weight = [cute.make_rmem_tensor(4, Float32) for _ in range(3)]
        decay_terms = cute.make_rmem_tensor(2, Float32)
        head_in_hand = Int32(-1)
        next_slot = Int32(0)
        if begin < end:
            next_slot = m_slots[begin % num_rows]
        cute.arch.griddepcontrol_wait()
        for item in range(begin, end):
            turn = item - begin
            buffer = turn % 2
            head, row = item // num_rows, item % num_rows
            live = next_slot > 0
            slot = choose(live, next_slot, Int32(0))
            past_pointer = m_conv_state.iterator + Int64(slot) * m_conv_state.stride[0]
            projected = m_projected.iterator + Int64(row) * m_projected.stride[0]
            own = [part * width + head * HEAD_DIM + column for part in range(3)]
            past = [load_past(past_pointer, channels, channel) for channel in own]
            now = [scalar(projected, channel) for channel in own]
            f_a = [load_words(projected, 4 * width + 32 * part + 8 * (lane % 4)) for part in range(4)]
            beta = scalar(projected, 4 * width + HEAD_DIM + head)
            gate = scalar(projected, 3 * width + head * HEAD_DIM + column)
            if item + 1 < end:
                next_slot = m_slots[(item + 1) % num_rows]
            if head != head_in_hand:
                fresh_gate = load_gate_weight(PREPARING_TILES, m_gate_weight, head, preparing_warp, lane)
                fresh_conv = [load_vector(m_conv_weight.iterator, 4 * channel, 4) for channel in own]
                for word in cutlass.range_constexpr(4):
                    for index in cutlass.range_constexpr(8 * PREPARING_TILES):
                        gate_weight[index][word] = fresh_gate[index][word]
                    for index in cutlass.range_constexpr(3):
                        conv_weight[index][word] = fresh_conv[index][word]
                decay_terms[0] = m_dt_bias[head * HEAD_DIM + gate_channel]
                decay_terms[1] = exp(m_a_log[head])
                head_in_hand = head

            q, k, v = [convolve(conv_weight[part], past[part], now[part]) for part in range(3)]
            decay = project_gate(PREPARING_TILES, gate_weight, f_a, lane)
            alpha = exp(DECAY_BOUND * sigmoid(decay_terms[1] * (decay + decay_terms[0])))
            if turn >= 2:
                cute.arch.mbarrier_wait(s_free + buffer, (turn // 2 - 1) % 2)
            put(s_qk, buffer * 2 * HEAD_DIM + column, q)
            put(s_qk, buffer * 2 * HEAD_DIM + HEAD_DIM + column, k)
            put(s_v, buffer * HEAD_DIM + column, v)
            put(s_alpha, buffer * HEAD_DIM + gate_channel, alpha)
            put(s_scale, buffer * HEAD_DIM + column, norm_weight * sigmoid(gate.to(Float32)))
            put(s_beta, buffer, sigmoid(beta.to(Float32)))
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s_ready + buffer)
            if live:
                for part in cutlass.range_constexpr(3):
                    store_past(past_pointer, channels, own[part], past[part], now[part])
    else:
        column = thread % HEAD_DIM
        group, first_column = thread // conf.lanes_per_row, thread % conf.lanes_per_row * conf.vector
        in_state = group * conf.rows_per_thread * HEAD_DIM + first_column
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), conf.state_type)
        for stage in cutlass.range_constexpr(conf.stages):
            if begin + stage < end:
                first_slot = m_slots[(begin + stage) % num_rows]
                fetch_item(
                    conf,
                    copy,
                    m_state,
                    m_conv_state,
                    first_slot,
                    (begin + stage) // num_rows,
                    s_ring,
                    s_full,
                    stage,
                    thread,
                )
        cute.arch.griddepcontrol_wait()
        for item in range(begin, end):
            turn = item - begin
            stage, buffer = turn % conf.stages, turn % 2
            head, row = item // num_rows, item % num_rows
            slot = m_slots[row]
            live = slot > 0
            slot = choose(live, slot, Int32(0))
            coming = cutlass.min(item + conf.stages, end - 1)
            coming_slot = m_slots[coming % num_rows]
            s_v_here = s_v + buffer * HEAD_DIM
            cute.arch.mbarrier_wait(s_full + stage, turn // conf.stages % 2)
            here = s_ring + (stage * state_elements + in_state)
            state = [load_vector(here, i * HEAD_DIM, conf.vector) for i in range(conf.rows_per_thread)]
            cute.arch.mbarrier_wait(s_ready + buffer, turn // 2 % 2)
            alpha, k = sum_over_k(
                conf, state, s_qk + buffer * 2 * HEAD_DIM, s_alpha + buffer * HEAD_DIM, s_partial, warp, lane, group
            )
            cute.arch.barrier(barrier_id=1, number_of_threads=conf.threads)

            # The state is in registers, its stage free.
            if item + conf.stages < end:
                fetch_item(
                    conf, copy, m_state, m_conv_state, coming_slot, coming // num_rows, s_ring, s_full, stage, thread
                )
            beta = scalar(s_beta, buffer)
            read, k_factor = read_out(conf, s_partial, s_v_here, beta, column)
            squares = warp_sum(read * read, (16, 8, 4, 2, 1))
            put(s_squares, warp, squares)
            if live:
                state_offset = Int64(slot) * m_state.stride[0] + (head * state_elements + in_state)
                store_new_state(
                    conf, m_state, state_offset, state, alpha, k, s_partial, s_v_here, beta, k_factor, first_column
                )
            cute.arch.barrier(barrier_id=1, number_of_threads=conf.threads)

            total = Float32(0.0)
            for other in cutlass.range_constexpr(4):
                total = total + scalar(s_squares, other)
            factor = cute.math.rsqrt(total * (1.0 / HEAD_DIM) + NORM_EPSILON, fastmath=True)
            value = read * factor * scalar(s_scale, buffer * HEAD_DIM + column)
            if thread < HEAD_DIM:
                m_out[row, head * HEAD_DIM + column] = choose(live, value, Float32(0.0)).to(BFloat16)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(s_free + buffer)


# ---- compilation --------------------------------------------------------------------------------------------------


@cute.jit
def launch_kda(
    m_projected: cute.Tensor, m_gate_weight: cute.Tensor, m_conv_weight: cute.Tensor, m_dt_bias: cute.Tensor,
    m_a_log: cute.Tensor, m_norm_weight: cute.Tensor, m_slots: cute.Tensor, m_conv_state: cute.Tensor,
    m_state: cute.Tensor, m_out: cute.Tensor, num_blocks: Int32, stream: Any, conf: cutlass.Constexpr,
) -> None:
    """``num_blocks``: of the streaming form; the split form takes its grid from the shapes."""
    arguments = (
        m_projected,
        m_gate_weight,
        m_conv_weight,
        m_dt_bias,
        m_a_log,
        m_norm_weight,
        m_slots,
        m_conv_state,
        m_state,
        m_out,
        conf,
    )
    if cutlass.const_expr(conf.cluster > 0):
        split_head_kernel(*arguments).launch(
            grid=(conf.cluster, conf.heads, m_slots.shape[0]),
            block=(conf.threads, 1, 1),
            cluster=(conf.cluster, 1, 1),
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=conf.pdl,
        )
    else:
        stream_kernel(*arguments).launch(
            grid=(num_blocks, 1, 1),
            block=(conf.threads + 32 * PREPARING_WARPS, 1, 1),
            smem=conf.stages * HEAD_DIM * HEAD_DIM * conf.state_type.width // 8,
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=conf.pdl,
        )


def compile_kda(conf: KdaConfiguration) -> Any:
    """Compile ``conf`` for the architecture of this process; takes no tensors and needs no GPU.

    The result is called with projected, gate_weight, conv_weight, dt_bias, a_log, norm_weight, slots, conv_state,
    state, out and the number of blocks, on the current stream.
    """
    width = conf.heads * HEAD_DIM
    rows, slots = cute.sym_int32(), cute.sym_int32()
    return cute.compile(
        launch_kda,
        make_fake_tensor(BFloat16, (rows, cute.sym_int32()), (cute.sym_int64(divisibility=8), 1), assumed_align=16),
        make_fake_tensor(BFloat16, (width, HEAD_DIM), (HEAD_DIM, 1), assumed_align=16),
        make_fake_tensor(Float32, (3 * width, 4), (4, 1), assumed_align=16),
        make_fake_tensor(Float32, (width,), (1,), assumed_align=4),
        make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=4),
        make_fake_tensor(Float32, (HEAD_DIM,), (1,), assumed_align=4),
        make_fake_tensor(Int32, (rows,), (1,), assumed_align=4),
        make_fake_tensor(
            BFloat16, (slots, 3, 3 * width), (cute.sym_int64(divisibility=8), 3 * width, 1), assumed_align=16
        ),
        make_fake_tensor(
            conf.state_type,
            (slots, conf.heads, HEAD_DIM, HEAD_DIM),
            (cute.sym_int64(divisibility=8), HEAD_DIM * HEAD_DIM, HEAD_DIM, 1),
            assumed_align=16,
        ),
        make_fake_tensor(BFloat16, (rows, width), (width, 1), assumed_align=16),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        conf,
        options="--enable-tvm-ffi",
    )
