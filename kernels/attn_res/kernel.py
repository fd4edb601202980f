"""AttnRes combine: softmax mix of snapshots and the running prefix, then the sublayer's RMSNorm.

What it computes for one row, over sources v_i (snapshots, newest last the prefix, to which ``delta`` is added first)::

    logit_i = rmsnorm(v_i, query_norm) . query = (v_i . (query_norm query)) / rms(v_i)
    mix     = sum_i softmax(logit)_i v_i
    out     = rmsnorm(mix, norm_weight)

Three kernels on the same pieces: ``combine`` does all of it; ``snapshot_part`` does the snapshots alone and leaves
their largest logit, the sum of exponentials and the weighted sum (fp32); ``fold_prefix`` merges the prefix into such a
part by the online softmax rule.

Tensors: ``snapshots [rows, up to 8, 7168]``, ``prefix``, ``delta``, ``out`` ``[rows, 7168]`` bf16, the three weights
``[7168]`` bf16, the part's ``stats [rows, 2]`` and ``weighted [rows, 7168]`` fp32.

How data moves: a cluster of 2 or 4 blocks owns a row, a thread 8 consecutive elements of every source, in registers
from the first read to the end, so each source is read once. Sums over the row: a transposing warp reduction leaves one
sum a lane, every warp sends its sums straight to all blocks of the cluster (``st.async`` counted by a barrier in the
receiver), and each warp adds up what arrived. No barrier of a block or cluster is waited for after the start.

``fold_prefix`` needs one such exchange, not two: with a and x the snapshots' sum and the prefix, ``|u a + w x|^2 =
u^2 a.a + 2 u w a.x + w^2 x.x``, so the norm of the mix follows from sums that travel with the logit. For the nine
sources of ``combine`` that would be 45 products; it exchanges twice.

Snapshots, their part and weights are fetched before the wait on the preceding kernel; prefix and delta after it.

Limits: width 7168 = 896 threads x 8 elements, spread over the cluster.

One file, because its three kernels are one thought: sums over a row in one exchange, and what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3sim.kernels.device import ptx, timestamps

HIDDEN = 7168
NORM_EPSILON = 1e-5
VECTOR = 8
ROW_THREADS = HIDDEN // VECTOR
ROW_WARPS = ROW_THREADS // 32


@dataclass(frozen=True, kw_only=True)
class AttnResConfiguration:
    """One compiled kernel. ``kernel``: combine, snapshot_part or fold_prefix; ``cluster``: blocks a row, 2 or 4."""

    kernel: str
    num_snapshots: int
    has_delta: bool
    cluster: int
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads a block."""
        return ROW_THREADS // self.cluster


# ---- small pieces, traced inline ----------------------------------------------------------------------------------


def vector_at(pointer: Any, offset: Any, num: int) -> Any:
    """``num`` consecutive elements, accessed 16 bytes at a time where they are as many."""
    moved = pointer + offset
    alignment = min(16, num * pointer.dtype.width // 8)
    aligned = cute.make_ptr(pointer.dtype, moved.toint(), pointer.memspace, assumed_align=alignment)
    return cute.make_tensor(aligned, cute.make_layout(num))


def load_vector(pointer: Any, offset: Any, num: int) -> Any:
    registers = cute.make_rmem_tensor(num, pointer.dtype)
    cute.autovec_copy(vector_at(pointer, offset, num), registers)
    return registers


def load_fp32(pointer: Any, offset: Any) -> list[Any]:
    loaded = load_vector(pointer, offset, VECTOR)
    return [loaded[i].to(Float32) for i in range(VECTOR)]


def store_vector(pointer: Any, offset: Any, values: list[Any]) -> None:
    registers = cute.make_rmem_tensor(len(values), pointer.dtype)
    for i in range(len(values)):
        registers[i] = values[i].to(pointer.dtype)
    cute.autovec_copy(registers, vector_at(pointer, offset, len(values)))


def dot(a: list[Any], b: list[Any]) -> Any:
    total = a[0] * b[0]
    for i in range(1, VECTOR):
        total = total + a[i] * b[i]
    return total


def choose(condition: Any, yes: Any, no: Any) -> Any:
    return type(yes)(cutlass.select_(condition, yes, no))


def exp(x: Any) -> Any:
    return cute.math.exp(x, fastmath=True)


def rsqrt(x: Any) -> Any:
    return cute.math.rsqrt(x, fastmath=True)


def sums_width(num: int) -> int:
    """Power of two, at least 4, that holds ``num`` sums: an exchange sends 16 bytes at a time."""
    return max(4, 1 << (num - 1).bit_length())


# ---- sums over a row ----------------------------------------------------------------------------------------------


def alloc_exchange(conf: AttnResConfiguration, num: int) -> tuple[Any, Any, Any]:
    """Shared memory of one exchange of ``num`` sums: a line a warp to send from, the arrivals, their barrier."""
    width = sums_width(num)
    return (
        cute.arch.alloc_smem(Float32, conf.threads // 32 * width, 16),
        cute.arch.alloc_smem(Float32, ROW_WARPS * width, 16),
        cute.arch.alloc_smem(Int64, 1, 8),
    )


def prepare(exchange: tuple[Any, Any, Any]) -> None:
    """By one thread, before ``expect``: the barrier that counts what arrives.

    A barrier of the warp belongs between the two: the initialisation is one instruction of the warp and no lane's
    (SASS: a uniform ``SYNCS.EXCH``), which racecheck reports otherwise.
    """
    cute.arch.mbarrier_init(exchange[2], 1)
    cute.arch.mbarrier_init_fence()


def expect(exchange: tuple[Any, Any, Any], num: int) -> None:
    """By one thread, before the cluster barrier: arm the barrier for everything that will arrive."""
    cute.arch.mbarrier_arrive_and_expect_tx(exchange[2], 4 * ROW_WARPS * sums_width(num))


def send_sums(conf: AttnResConfiguration, exchange: tuple[Any, Any, Any], values: list[Any], thread: Any) -> Any:
    """Reduce ``values`` over the warp and stage one line for sending; returns (message, where it goes, to whom)."""
    s_line, s_arrivals, _ = exchange
    width = sums_width(len(values))
    warp, lane = thread // 32, thread % 32
    values = values + [Float32(0.0)] * (width - len(values))
    # Every step halves the lanes that share a value and, while there are several, the values of a lane.
    for offset in (16, 8, 4, 2, 1):
        if len(values) > 1:
            half = len(values) // 2
            upper = (lane & offset) != 0
            kept = [choose(upper, values[half + i], values[i]) for i in range(half)]
            sent = [choose(upper, values[i], values[half + i]) for i in range(half)]
            values = [kept[i] + cute.arch.shuffle_sync_bfly(sent[i], offset) for i in range(half)]
        else:
            values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], offset)]
    lanes = 32 // width
    cute.make_tensor(s_line + (warp * width + lane // lanes), cute.make_layout(1))[0] = values[0]
    cute.arch.sync_warp()
    quads = width // 4
    message = load_vector(s_line, warp * width + 4 * (lane % quads), 4)
    rank = cute.arch.block_idx_in_cluster()
    target = s_arrivals + ((rank * (conf.threads // 32) + warp) * width + 4 * (lane % quads))
    target = cute.make_ptr(Float32, target.toint(), cute.AddressSpace.smem, assumed_align=16)
    return tuple(message[i].bitcast(Int32) for i in range(4)), target, lane // quads


def arrived_sums(exchange: tuple[Any, Any, Any], num: int, lane: Any) -> list[Any]:
    """The ``num`` sums over the row, in every thread, once all warps of the cluster have sent theirs."""
    _, s_arrivals, s_barrier = exchange
    width = sums_width(num)
    cute.arch.mbarrier_wait(s_barrier, 0)
    total = Float32(0.0)
    lines_at_once = 32 // width
    for first in range(0, ROW_WARPS, lines_at_once):
        line = first + lane // width
        if first + lines_at_once <= ROW_WARPS:
            total = total + cute.make_tensor(s_arrivals + (line * width + lane % width), cute.make_layout(1))[0]
        else:
            there = line < ROW_WARPS
            address = choose(there, line, Int32(0)) * width + lane % width
            value = cute.make_tensor(s_arrivals + address, cute.make_layout(1))[0]
            total = total + choose(there, value, Float32(0.0))
    offset = width
    while offset < 32:
        total = total + cute.arch.shuffle_sync_bfly(total, offset)
        offset *= 2
    return [cute.arch.shuffle_sync(total, index) for index in range(num)]


def logit(square_sum: Any, product: Any) -> Any:
    return product * rsqrt(square_sum * (1.0 / HIDDEN) + NORM_EPSILON)


def normalised(mix: list[Any], square_sum: Any, norm_weight: list[Any]) -> list[Any]:
    scale = rsqrt(square_sum * (1.0 / HIDDEN) + NORM_EPSILON)
    return [mix[i] * scale * norm_weight[i] for i in range(VECTOR)]


def squares_and_products(sources: list[list[Any]], query_norm: list[Any], query: list[Any]) -> list[Any]:
    """What a logit of each source is made of: this thread's parts of v . v, of all, then of v . (query_norm query)."""
    probe = [query_norm[i] * query[i] for i in range(VECTOR)]
    return [dot(one, one) for one in sources] + [dot(one, probe) for one in sources]


def softmax(sums: list[Any]) -> tuple[Any, list[Any], Any]:
    """Of the row's sums, as ``squares_and_products`` orders them: largest logit, exponentials, their sum."""
    num_sources = len(sums) // 2
    logits = [logit(sums[s], sums[num_sources + s]) for s in range(num_sources)]
    maximum = logits[0]
    for one in logits[1:]:
        maximum = cute.arch.fmax(maximum, one)
    weights = [exp(one - maximum) for one in logits]
    denominator = weights[0]
    for one in weights[1:]:
        denominator = denominator + one
    return maximum, weights, denominator


def weighted_sum(weights: list[Any], sources: list[Any]) -> list[Any]:
    return [
        sum((weights[s] * sources[s][i] for s in range(1, len(sources))), weights[0] * sources[0][i])
        for i in range(VECTOR)
    ]


def updated_prefix(conf: AttnResConfiguration, prefix: Any, delta: Any, offset: Any) -> list[Any]:
    """Prefix plus delta as it will be stored: rounded once to bf16, then the same values serve as a source."""
    values = load_fp32(prefix.iterator, offset)
    if conf.has_delta:
        added = load_fp32(delta.iterator, offset)
        values = [(values[i] + added[i]).to(BFloat16).to(Float32) for i in range(VECTOR)]
        store_vector(prefix.iterator, offset, values)
    return values


# ---- kernels: grid (cluster, rows) --------------------------------------------------------------------------------


@cute.kernel
def combine_kernel(
    m_snapshots: cute.Tensor, m_prefix: cute.Tensor, m_delta: cute.Tensor, m_query_norm: cute.Tensor,
    m_query: cute.Tensor, m_norm_weight: cute.Tensor, m_out: cute.Tensor, conf: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    num_sources = cutlass.const_expr(conf.num_snapshots + 1)
    logits_exchange = alloc_exchange(conf, 2 * num_sources)
    norm_exchange = alloc_exchange(conf, 1)
    if thread == 0:
        prepare(logits_exchange)
        prepare(norm_exchange)
    cute.arch.sync_warp()
    if thread == 0:
        expect(logits_exchange, 2 * num_sources)
        expect(norm_exchange, 1)
    cute.arch.cluster_arrive_relaxed()
    cute.arch.griddepcontrol_launch_dependents()

    first = (rank * conf.threads + thread) * VECTOR
    query_norm, query = load_fp32(m_query_norm.iterator, first), load_fp32(m_query.iterator, first)
    norm_weight = load_fp32(m_norm_weight.iterator, first)
    snapshot_offset = Int64(row) * m_snapshots.stride[0] + first
    sources = [
        load_vector(m_snapshots.iterator, snapshot_offset + s * HIDDEN, VECTOR) for s in range(conf.num_snapshots)
    ]
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    prefix = updated_prefix(conf, m_prefix, m_delta, row * HIDDEN + first)
    sources = [[one[i].to(Float32) for i in range(VECTOR)] for one in sources] + [prefix]
    values = squares_and_products(sources, query_norm, query)
    message, target, peer = send_sums(conf, logits_exchange, values, thread)
    if peer < conf.cluster:
        cute.arch.store_async_dsmem(target, message, logits_exchange[2], peer)
    sums = arrived_sums(logits_exchange, 2 * num_sources, thread % 32)

    _, weights, denominator = softmax(sums)
    inverse = cute.arch.rcp_approx(denominator)
    mix = weighted_sum([one * inverse for one in weights], sources)

    message, target, peer = send_sums(conf, norm_exchange, [dot(mix, mix)], thread)
    if peer < conf.cluster:
        cute.arch.store_async_dsmem(target, message, norm_exchange[2], peer)
    (square_sum,) = arrived_sums(norm_exchange, 1, thread % 32)
    store_vector(m_out.iterator, row * HIDDEN + first, normalised(mix, square_sum, norm_weight))


@cute.kernel
def snapshot_part_kernel(
    m_snapshots: cute.Tensor, m_query_norm: cute.Tensor, m_query: cute.Tensor, m_stats: cute.Tensor,
    m_weighted: cute.Tensor, conf: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    num_sources = cutlass.const_expr(conf.num_snapshots)
    began = timestamps.now("attn_res")
    exchange = alloc_exchange(conf, 2 * num_sources)
    if thread == 0:
        prepare(exchange)
    cute.arch.sync_warp()
    if thread == 0:
        expect(exchange, 2 * num_sources)
    cute.arch.cluster_arrive_relaxed()
    if cutlass.const_expr(conf.pdl):
        cute.arch.griddepcontrol_launch_dependents()

    first = (rank * conf.threads + thread) * VECTOR
    query_norm, query = load_fp32(m_query_norm.iterator, first), load_fp32(m_query.iterator, first)
    cute.arch.cluster_wait()
    # The newest snapshot may be the preceding kernel's output.
    cute.arch.griddepcontrol_wait()
    released = timestamps.now("attn_res")

    offset = Int64(row) * m_snapshots.stride[0] + first
    sources = [load_vector(m_snapshots.iterator, offset + s * HIDDEN, VECTOR) for s in range(num_sources)]
    sources = [[one[i].to(Float32) for i in range(VECTOR)] for one in sources]
    values = squares_and_products(sources, query_norm, query)
    message, target, peer = send_sums(conf, exchange, values, thread)
    if peer < conf.cluster:
        cute.arch.store_async_dsmem(target, message, exchange[2], peer)
    sums = arrived_sums(exchange, 2 * num_sources, thread % 32)

    maximum, weights, denominator = softmax(sums)
    store_vector(m_weighted.iterator, row * HIDDEN + first, weighted_sum(weights, sources))
    if thread + rank == 0:
        m_stats[row, 0] = maximum
        m_stats[row, 1] = denominator
    if cutlass.const_expr(not conf.pdl):
        # Whoever joins this launch may be let in when its blocks have left, and read early what they stored.
        cute.arch.fence_acq_rel_gpu()
    if cutlass.const_expr(timestamps.on("attn_res")):  # noqa: SIM102 - one is of the build, the other of the thread
        if thread == 0:
            timestamps.record("attn_res.snapshot_part", row * conf.cluster + rank, began, released)


@cute.kernel
def fold_prefix_kernel(
    m_stats: cute.Tensor, m_weighted: cute.Tensor, m_prefix: cute.Tensor, m_delta: cute.Tensor,
    m_query_norm: cute.Tensor, m_query: cute.Tensor, m_norm_weight: cute.Tensor, m_out: cute.Tensor,
    conf: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    exchange = alloc_exchange(conf, 4)
    if thread == 0:
        prepare(exchange)
    cute.arch.sync_warp()
    if thread == 0:
        expect(exchange, 4)
    cute.arch.cluster_arrive_relaxed()
    cute.arch.griddepcontrol_launch_dependents()

    first = (rank * conf.threads + thread) * VECTOR
    query_norm, query = load_fp32(m_query_norm.iterator, first), load_fp32(m_query.iterator, first)
    norm_weight = load_fp32(m_norm_weight.iterator, first)
    weighted = load_fp32(m_weighted.iterator, row * HIDDEN + first)
    part_maximum, part_denominator = m_stats[row, 0], m_stats[row, 1]
    probe = [query_norm[i] * query[i] for i in range(VECTOR)]
    part_square = dot(weighted, weighted)
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()

    prefix = updated_prefix(conf, m_prefix, m_delta, row * HIDDEN + first)
    values = [dot(prefix, prefix), dot(prefix, probe), dot(prefix, weighted), part_square]
    message, target, peer = send_sums(conf, exchange, values, thread)
    if peer < conf.cluster:
        cute.arch.store_async_dsmem(target, message, exchange[2], peer)
    square, product, cross, part_square = arrived_sums(exchange, 4, thread % 32)

    prefix_logit = logit(square, product)
    maximum = cute.arch.fmax(part_maximum, prefix_logit)
    part_weight = exp(part_maximum - maximum)
    prefix_weight = exp(prefix_logit - maximum)
    inverse = cute.arch.rcp_approx(part_weight * part_denominator + prefix_weight)
    part_weight, prefix_weight = part_weight * inverse, prefix_weight * inverse
    square_sum = part_weight * part_weight * part_square + prefix_weight * prefix_weight * square
    square_sum = square_sum + 2.0 * part_weight * prefix_weight * cross
    mix = [part_weight * weighted[i] + prefix_weight * prefix[i] for i in range(VECTOR)]
    # Rounding can leave a sum of squares just below zero where the two terms cancel.
    square_sum = cute.arch.fmax(square_sum, Float32(0.0))
    store_vector(m_out.iterator, row * HIDDEN + first, normalised(mix, square_sum, norm_weight))


def row_launch(conf: AttnResConfiguration, num_rows: Any, stream: Any) -> dict[str, Any]:
    """How all three start: a cluster a row."""
    return {
        "grid": (conf.cluster, num_rows, 1),
        "block": (conf.threads, 1, 1),
        "cluster": (conf.cluster, 1, 1),
        "stream": stream,
        "preferred_smem_carveout": ptx.ALL_SHARED,
        "use_pdl": conf.pdl,
    }


# ---- compilation --------------------------------------------------------------------------------------------------


@cute.jit
def launch_combine(
    m_snapshots: cute.Tensor, m_prefix: cute.Tensor, m_delta: cute.Tensor, m_query_norm: cute.Tensor,
    m_query: cute.Tensor, m_norm_weight: cute.Tensor, m_out: cute.Tensor, stream: Any, conf: cutlass.Constexpr,
) -> None:
    combine_kernel(m_snapshots, m_prefix, m_delta, m_query_norm, m_query, m_norm_weight, m_out, conf).launch(
        **row_launch(conf, m_out.shape[0], stream)
    )


@cute.jit
def launch_snapshot_part(
    m_snapshots: cute.Tensor, m_query_norm: cute.Tensor, m_query: cute.Tensor, m_stats: cute.Tensor,
    m_weighted: cute.Tensor, stream: Any, conf: cutlass.Constexpr,
) -> None:
    snapshot_part_kernel(m_snapshots, m_query_norm, m_query, m_stats, m_weighted, conf).launch(
        **row_launch(conf, m_weighted.shape[0], stream)
    )


@cute.jit
def launch_fold_prefix(
    m_stats: cute.Tensor, m_weighted: cute.Tensor, m_prefix: cute.Tensor, m_delta: cute.Tensor,
    m_query_norm: cute.Tensor, m_query: cute.Tensor, m_norm_weight: cute.Tensor, m_out: cute.Tensor, stream: Any,
    conf: cutlass.Constexpr,
) -> None:
    fold_prefix_kernel(
        m_stats, m_weighted, m_prefix, m_delta, m_query_norm, m_query, m_norm_weight, m_out, conf
    ).launch(
        **row_launch(conf, m_out.shape[0], stream)
    )


def compile_attn_res(conf: AttnResConfiguration) -> Any:
    """Compile ``conf`` for the architecture of this process; takes no tensors and needs no GPU.

    The result takes the tensors of the ``launch_`` function of ``conf.kernel`` and runs on the current stream.
    """
    rows = cute.sym_int32()
    snapshots = make_fake_tensor(
        BFloat16, (rows, cute.sym_int32(), HIDDEN), (cute.sym_int64(divisibility=8), HIDDEN, 1), assumed_align=16
    )
    vector = make_fake_tensor(BFloat16, (HIDDEN,), (1,), assumed_align=16)
    row_bf16 = make_fake_tensor(BFloat16, (rows, HIDDEN), (HIDDEN, 1), assumed_align=16)
    row_fp32 = make_fake_tensor(Float32, (rows, HIDDEN), (HIDDEN, 1), assumed_align=16)
    stats = make_fake_tensor(Float32, (rows, 2), (2, 1), assumed_align=8)
    function, tensors = {
        "combine": (launch_combine, (snapshots, row_bf16, row_bf16, vector, vector, vector, row_bf16)),
        "snapshot_part": (launch_snapshot_part, (snapshots, vector, vector, stats, row_fp32)),
        "fold_prefix": (
            launch_fold_prefix,
            (stats, row_fp32, row_bf16, row_bf16, vector, vector, vector, row_bf16),
        ),
    }[conf.kernel]
    return cute.compile(
        function, *tensors, make_fake_stream(use_tvm_ffi_env_stream=True), conf, options="--enable-tvm-ffi"
    )
