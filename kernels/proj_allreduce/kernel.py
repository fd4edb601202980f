"""Output projection whose epilogue is the push half of a one-shot all-reduce, and the launch that consumes it.

What it computes
    ``produce``: mX [B, K] bf16 times mWeight [D, K] bf16, rounded to bf16 and stored into slot ``rank`` of every peer's
    buffer (its own too). ``consume``: the sum of all slots in rank order in fp32 plus the residual, rounded once to
    bf16, is the new prefix; a softmax mix with the snapshots' share (prepared: maximum, denominator, weighted sum) and
    RMSNorm give the next sublayer's input. All ranks add the same numbers in the same order: their results are
    bit-equal, as the residual streams must be.

How data moves
    ``produce``: a block owns 16 outputs, each of its four warps a quarter of K (six or twelve warps share the dense
    layer's deeper one). A thread requests all its weights before the dependency wait, straight into the registers in
    which mma.sync m16n8k16 wants operand A: the order of K is free, so 16 contiguous bytes of a row are a thread's
    share of two products. All D/16 blocks are resident at once (four an SM at 128 registers), hence the whole matrix is
    in flight at once and there is no loop. Rows of x are operand B; up to 8 cost the same as 1. The sums of the warps
    are added up in shared memory; then a thread stores one 16-byte chunk (8 outputs) to one peer.
    ``consume``: a cluster of eight blocks a row; a thread polls its chunk in all slots at once. Both reductions of
    the layer (the prefix's logit, the root mean square of the mix) come from four sums that are known before the
    softmax (v.v, v.q, v.s, s.s with s the snapshots' sum: |a s + b v|^2 = a^2 s.s + 2 a b s.v + b^2 v.v), so one
    exchange over the cluster is enough. Parameters, residual and snapshot part are loaded before polling.

Protocol (Lamport's; TensorRT-LLM's one-shot all-reduce uses the same)
    A slot word that reads -0, -0 has not arrived; senders turn -0 into +0. Three buffers rotate: calls use one after
    the other, and a consumer clears the buffer of the call before while it waits. No peer can still write it: it may
    do so two calls later, after it has consumed this rank's next push, which follows the clearing. The buffer in use
    is a number in this rank's memory that ``consume`` advances, so graphs replay without the host. Stores are unicast
    and 16 bytes; the check is by 4-byte word, the size that is certain to arrive whole.

The gathered form (``consume_gathered``)
    In front of a mixer and of the head the newest sum is not in parts: ``latent_tail.up`` of every rank stores its
    columns of the finished row into ``gathered`` of every rank, and the embedding's owner stores the whole row there.
    One slot is polled instead of ``ranks``; a word that reads all ones has not arrived. All else is ``consume``. It
    takes the place of ``latent_tail.collect`` and ``attn_res.fold_prefix``, so it also empties the tail's slots: each
    thread puts its 16 bytes of ``gathered`` back to all ones after it has taken them; the slots of latents and shared
    parts, which every block of ``up`` reads, are emptied by blocks of their own once ``up`` has ended, beside the
    others' polling. One set of slots is enough, because between two uses of a slot lies an exchange that needs this
    rank, after its emptying:

    * ``gathered``, between layers l and l + 1. A peer stores there in ``up`` of layer l + 1, after it has summed the
      latents of all ranks, this one's among them. This rank's ``send`` of layer l + 1 follows the consumer that
      emptied ``gathered`` on its stream. The embedding of the next step is stored after a peer has seen this rank's
      candidates for the token, which follow the head's consumer.
    * latent and shared slots, between layers l and l + 1. A peer stores there in ``send`` of layer l + 1, which follows
      its ``consume`` after the attention of layer l + 1, which polls the partial rows of all ranks. This rank's
      ``produce`` of that layer stores them after its dependency wait, hence after the end of every launch before it on
      the stream, the emptying included (each of those launches waits for the one before it, at its end at the latest).
    * A store that empties and a peer's later one to the same word meet in this GPU's L2 in that order: the first was
      performed when its launch ended, before this rank sent what the peer waited for.

    The launch before it on the stream must let it start only after its own dependency wait, as ``produce`` does and
    ``latent_tail.up`` with ``release_late``: the residual and the snapshots' part are read, and prefix and out are
    written, before that launch has ended.

What it reaches (H200, 2026-11-29; h200.json beside this file; weights cold, 8 slots on the one GPU, no link)
    ``produce`` one row, K 1536 / 768: 7.5 / 4.3 us (cuBLAS without push 8.3 / 5.4). With ``consume``, since its loads
    have L1 (2026-11-30, calibrate/data/h200-kernels-l1.json): 7.8 / 5.9 us; over NVLink, two GPUs for eight ranks, 8.1.

Limits
    K a multiple of 128 up to 1536, 2112 or 4224 (dense layer at TP16 and TP8), D = 64 x threads of ``consume`` (at most
    8192), at most 16 rows and 16 ranks. ``consume`` must be the launch that follows ``produce`` on its stream: it
    starts early and reads its operands before ``produce`` has ended, which is safe because ``produce`` lets it start
    only after its own dependency wait.
    A peer that never sends stops the consumer by a trap after about ten seconds.

One file, because the pushing and the polling launch are one thought: the two ends of one protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.device.lamport import BUFFERS, CHUNK, CONTROL_ROWS, EMPTY, await_slots, sum_slots, turn_buffer
from k3sim.kernels.device.sums import lane_sum, line_sums

MAX_BLOCKS_K = 12  # 32-wide blocks along K whose weights a thread holds
TILE = 16  # outputs of a block of ``produce``
LATENT = 3584  # of the tail's slots, which the gathered form empties
CLUSTER = 8
EMPTY_GATHERED = 0xFFFFFFFF  # of the tail's slots: two NaN that no conversion gives
EPSILON = 1e-5
LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class ProduceConfiguration:
    """``max_rows``: rows a slot has room for. ``release_early``: the consumer may start before this launch's wait is
    over, and then polls when data arrives; it reads the residual and the number of the buffer at once, so whatever
    writes these must have ended by then, which the caller knows.
    """

    carve_out_percent: ClassVar[int] = ptx.REGISTER_LOAD_CARVE_OUT

    rows: int
    depth: int
    hidden: int
    ranks: int
    max_rows: int
    release_early: bool = False

    @property
    def warps(self) -> int:
        """Warps that share K: four, or as few as can hold a deeper K."""
        blocks = self.depth // 32
        return next(one for one in (4, 6, 8, 12) if blocks % one == 0 and blocks // one <= MAX_BLOCKS_K)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def x_stride(self) -> int:
        """Bytes between rows of x in shared memory: 4 units of 16 modulo 8, so that a load phase has no conflict."""
        return 2 * self.depth + 64


@dataclass(frozen=True, kw_only=True)
class ConsumeConfiguration:
    """``release_next``: the launch after this one may start while this one waits for peers.

    ``gathered``: one slot that peers fill by columns; ``empties``: then also the tail's other slots are emptied.
    ``prefix_stride``: values between rows of the prefix, 0 for ``hidden``. ``paired_stats``: largest logit and
    denominator lie side by side, ``[rows, 2]``.
    """

    rows: int
    hidden: int
    ranks: int
    max_rows: int
    residual: bool
    snapshots: bool
    release_next: bool
    gathered: bool = False
    empties: bool = False
    prefix_stride: int = 0
    paired_stats: bool = False

    @property
    def threads(self) -> int:
        return -(-self.hidden // (CLUSTER * CHUNK * 32)) * 32

    @property
    def slots(self) -> int:
        """Rows to sum."""
        return 1 if self.gathered else self.ranks

    @property
    def empty(self) -> int:
        """A word that has not arrived."""
        return EMPTY_GATHERED if self.gathered else EMPTY


@cute.kernel
def _produce(
    mX: Int64, mWeight: Int64, mPeers: Int64, mControl: Int64, rank: Int32, configuration: cutlass.Constexpr
) -> None:
    rows, depth, hidden, ranks = configuration.rows, configuration.depth, configuration.hidden, configuration.ranks
    warps, threads = configuration.warps, configuration.threads
    blocks_k = depth // (32 * warps)  # 32-wide blocks along K of one warp
    tiles_n = -(-rows // 8)
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    group, quad = lane // 4, lane % 4
    allocator = cutlass.memory.SmemAllocator()
    sX = Int32(allocator.allocate(rows * configuration.x_stride, 128).toint())
    sSums = Int32(allocator.allocate(warps * tiles_n * 8 * TILE * 4, 128).toint())  # [warp, row, output] fp32

    began = timestamps.now("proj_allreduce")
    along = (warp * blocks_k * 32 + quad * 8) * 2
    gWeight = mWeight + (Int64(block) * TILE + group) * (2 * depth) + along
    weights = []
    for at in range_constexpr(blocks_k):
        weights.append((ptx.load_weights(gWeight + at * 64), ptx.load_weights(gWeight + 8 * 2 * depth + at * 64)))
    # What the end needs was last used a layer ago: the trips to HBM are made now. The number of the buffer may still be
    # that of the exchange before, so its line is fetched and the number read behind the wait.
    items = [tid + step * threads for step in range(-(-2 * rows * ranks // threads))]
    gPeers = [ptx.load_long(mPeers + Int64(cutlass.min(item // (2 * rows), ranks - 1)) * 8) for item in items]
    if tid == 0:
        ptx.prefetch(mControl)
    # Behind the loads, where a thread gets when L1 has taken them. In front of them the kernels that follow ask for
    # their weights before these are there (13 layers, one row: 619 us, so 601).
    if const_expr(configuration.release_early):
        cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if const_expr(not configuration.release_early):
        cute.arch.griddepcontrol_launch_dependents()
    released = timestamps.now("proj_allreduce")

    row_chunks = depth // CHUNK
    for step in range_constexpr(-(-rows * row_chunks // threads)):
        chunk = tid + step * threads
        if chunk < rows * row_chunks:
            row = chunk // row_chunks
            ptx.copy_async(sX + row * configuration.x_stride + (chunk % row_chunks) * 16, mX + chunk * 16)
    buffer = ptx.load_int(mControl)
    ptx.copy_async_wait()
    cute.arch.sync_threads()

    # Two chains a row tile: consecutive products do not wait for one another.
    sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(tiles_n)]
    for at in range_constexpr(blocks_k):
        upper, lower = weights[at]
        for tile in range_constexpr(tiles_n):
            # Rows beyond the last repeat it; what they give is never read.
            row = cutlass.min(group + 8 * tile, Int32(rows - 1))
            x = ptx.shared_load4(sX + row * configuration.x_stride + along + at * 64)
            for part in range_constexpr(2):
                sums[tile][part] = ptx.mma(
                    sums[tile][part],
                    (upper[2 * part], lower[2 * part], upper[2 * part + 1], lower[2 * part + 1]),
                    (x[2 * part], x[2 * part + 1]),
                    operand="bf16",
                )
    for tile in range_constexpr(tiles_n):
        for i in range_constexpr(4):
            row, output = tile * 8 + quad * 2 + i % 2, group + 8 * (i // 2)
            ptx.shared_store_float(
                sSums + ((warp * tiles_n * 8 + row) * TILE + output) * 4, sums[tile][0][i] + sums[tile][1][i]
            )
    cute.arch.sync_threads()

    # One thread: 8 outputs of one row to one peer.
    slot = (Int64(buffer) * ranks + rank) * configuration.max_rows
    for step in range_constexpr(len(items)):
        item = items[step]
        if item < 2 * rows * ranks:
            half, row = item % 2, (item // 2) % rows
            values = [Float32(0.0)] * CHUNK
            for part in range_constexpr(warps):
                for at in range_constexpr(2):
                    words = ptx.shared_load4(sSums + ((part * tiles_n * 8 + row) * TILE + half * CHUNK + at * 4) * 4)
                    for i in range_constexpr(4):
                        values[4 * at + i] = values[4 * at + i] + ptx.bits_as_float(words[i])
            packed = [ptx.without_negative_zero(ptx.pack_bf16(values[2 * i], values[2 * i + 1])) for i in range(4)]
            ptx.store_to_peer(gPeers[step] + ((slot + row) * hidden + block * TILE + half * CHUNK) * 2, packed)
    if const_expr(timestamps.on("proj_allreduce")):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:
            timestamps.record(f"proj_allreduce.produce {hidden}x{depth}", block, began, released)


@cute.jit
def _consume_row(
    mReceived: Int64, mControl: Int64, mResidual: Int64, mLargest: Int64, mDenominator: Int64, mWeighted: Int64,
    mQueryNorm: Int64, mQuery: Int64, mNormWeight: Int64, mPrefix: Int64, mOut: Int64, tid: Int32, rank: Int32,
    row: Int32, configuration: cutlass.Constexpr,
) -> None:
    """One block of a row's cluster."""
    rows, hidden, slots = configuration.rows, configuration.hidden, configuration.slots
    share = hidden // (CLUSTER * CHUNK)  # chunks of a block
    warps = configuration.threads // 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    allocator = cutlass.memory.SmemAllocator()
    sWarps = Int32(allocator.allocate(warps * 16, 16).toint())  # [warp, sum] fp32
    sBlocks = Int32(allocator.allocate(CLUSTER * 16, 16).toint())  # [block of the cluster, sum] fp32
    began = timestamps.now("proj_allreduce")
    ptx.cluster_arrive()  # answered before the first store to another block
    if const_expr(configuration.release_next):
        cute.arch.griddepcontrol_launch_dependents()

    # Lanes beyond the share repeat its last chunk, so that whole warps poll; they add nothing and store nothing.
    active = tid < share
    column = Int64(rank * share + cutlass.min(tid, Int32(share - 1))) * CHUNK
    at = Int64(row) * hidden + column
    if const_expr(not configuration.gathered):
        buffer = ptx.load_int(mControl)
        before = (buffer + BUFFERS - 1) % BUFFERS
        rows_before = ptx.load_int(mControl + CONTROL_ROWS + before * 4)
    gamma = ptx.widen_bf16(ptx.load_cached(mNormWeight + column * 2))
    if const_expr(configuration.residual):
        residual = ptx.widen_bf16(ptx.load_cached(mResidual + at * 2))
    if const_expr(configuration.snapshots):
        norm, query = (ptx.widen_bf16(ptx.load_cached(m + column * 2)) for m in (mQueryNorm, mQuery))
        weighted = [ptx.bits_as_float(word) for part in (0, 16) for word in ptx.load_cached(mWeighted + at * 4 + part)]
        stats_bytes = 8 if configuration.paired_stats else 4
        largest = ptx.load_float(mLargest + Int64(row) * stats_bytes)
        denominator = ptx.load_float(mDenominator + Int64(row) * stats_bytes)

    slot_bytes = configuration.max_rows * hidden * 2
    gSlots = mReceived + at * 2
    if const_expr(not configuration.gathered):
        # The call before this one: nobody reads or writes its buffer now.
        buffer_bytes = Int64(configuration.ranks * configuration.max_rows) * hidden * 2
        if active:
            for old in cutlass.range(row, rows_before, rows, unroll=1):
                gOld = mReceived + before * buffer_bytes + (Int64(old) * hidden + column) * 2
                for slot in range_constexpr(slots):
                    ptx.store(gOld + slot * slot_bytes, [Uint32(EMPTY)] * 4)
        gSlots = mReceived + buffer * buffer_bytes + at * 2
    rArrived = cute.make_rmem_tensor((slots * 4,), Uint32)
    await_slots(gSlots, rArrived, slots, slot_bytes, configuration.empty)
    arrived = timestamps.now("proj_allreduce")
    total = sum_slots(rArrived, slots)
    if const_expr(configuration.residual):
        total = [one + other for one, other in zip(total, residual, strict=True)]
    prefix = ptx.narrow_bf16(total)
    gPrefix = mPrefix + at * 2
    if const_expr(configuration.prefix_stride):
        gPrefix = mPrefix + (Int64(row) * configuration.prefix_stride + column) * 2
    if const_expr(not configuration.gathered):  # noqa: SIM102 - one is of the build, the other of the thread
        if active:
            ptx.store(gPrefix, prefix)
    value = ptx.widen_bf16(tuple(prefix))

    zero = Float32(0.0)
    sums = [zero] * 4  # v.v, v.q, v.s, s.s
    for i in range_constexpr(CHUNK):
        sums[0] = sums[0] + value[i] * value[i]
        if const_expr(configuration.snapshots):
            sums[1] = sums[1] + value[i] * (norm[i] * query[i])
            sums[2] = sums[2] + value[i] * weighted[i]
            sums[3] = sums[3] + weighted[i] * weighted[i]
    for i in range_constexpr(4):
        sums[i] = lane_sum(sums[i] if active else zero)
    if tid % 32 == 0:
        ptx.shared_store4(sWarps + warp * 16, [ptx.float_as_bits(one) for one in sums])
    cute.arch.sync_threads()
    ptx.cluster_wait()
    if tid < CLUSTER:
        block_sums = line_sums(sWarps, warps)
        ptx.peer_store4(ptx.peer_shared(sBlocks, tid) + rank * 16, [ptx.float_as_bits(one) for one in block_sums])
    ptx.cluster_arrive()
    ptx.cluster_wait()
    square, dot, cross, snapshot_square = line_sums(sBlocks, CLUSTER)

    mixed = value
    mean_square = square * Float32(1.0 / hidden)
    if const_expr(configuration.snapshots):
        logit = dot * cute.math.rsqrt(mean_square + Float32(EPSILON))
        maximum = ptx.maximum(largest, logit)
        old = ptx.exp2((largest - maximum) * Float32(LOG2E))
        new = ptx.exp2((logit - maximum) * Float32(LOG2E))
        inverse = Float32(1.0) / (old * denominator + new)
        old, new = old * inverse, new * inverse
        mixed = [old * s + new * v for s, v in zip(weighted, value, strict=True)]
        mean_square = (old * old * snapshot_square + Float32(2.0) * old * new * cross + new * new * square) * Float32(
            1.0 / hidden
        )
        mean_square = ptx.maximum(mean_square, Float32(0.0))  # rounding of a mix that cancels
    scale = cute.math.rsqrt(mean_square + Float32(EPSILON))
    if active:
        ptx.store(mOut + at * 2, ptx.narrow_bf16([one * scale * g for one, g in zip(mixed, gamma, strict=True)]))
        if const_expr(configuration.gathered):
            # Last, for the release of the cluster barrier would wait for them. The warp left the polling loop together,
            # so lanes that repeat this chunk have read it too.
            ptx.store(gPrefix, prefix)
            ptx.store(gSlots, [Uint32(EMPTY_GATHERED)] * 4)

    # The last block to arrive turns to the next buffer; every block has read this one's number by then.
    if const_expr(not configuration.gathered):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:
            turn_buffer(mControl, buffer, before, rows, CLUSTER * rows)
    # Launches that wait for this one rely on everything before it, ``produce`` included.
    cute.arch.griddepcontrol_wait()
    if const_expr(timestamps.on("proj_allreduce")):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:  # released by what it polls for
            name = "consume_gathered" if configuration.gathered else "consume"
            timestamps.record(f"proj_allreduce.{name}", row * CLUSTER + rank, began, arrived)


@cute.kernel
def _consume(
    mReceived: Int64, mControl: Int64, mResidual: Int64, mLargest: Int64, mDenominator: Int64, mWeighted: Int64,
    mQueryNorm: Int64, mQuery: Int64, mNormWeight: Int64, mPrefix: Int64, mOut: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    tid, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    _consume_row(
        mReceived, mControl, mResidual, mLargest, mDenominator, mWeighted, mQueryNorm, mQuery, mNormWeight, mPrefix,
        mOut, tid, rank, row, configuration,
    )  # fmt: skip


@cute.jit
def _empty_slots(
    mLatentSlots: Int64, mSharedSlots: Int64, thread: Int32, configuration: cutlass.Constexpr
) -> None:
    """What ``up`` has read, as many blocks as poll: nothing here may be stored before ``up`` has ended."""
    rows, ranks, hidden = configuration.rows, configuration.ranks, configuration.hidden
    threads = CLUSTER * rows * configuration.threads
    if const_expr(configuration.release_next):
        cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    for mSlots, chunks in ((mLatentSlots, ranks * rows * LATENT // CHUNK), (mSharedSlots, rows * hidden // CHUNK)):
        for step in range_constexpr(-(-chunks // threads)):
            chunk = thread + step * threads
            if chunk < chunks:
                ptx.store(mSlots + Int64(chunk) * 16, [Uint32(EMPTY_GATHERED)] * 4)


@cute.kernel
def _consume_gathered(
    mGathered: Int64, mLatentSlots: Int64, mSharedSlots: Int64, mResidual: Int64, mLargest: Int64,
    mDenominator: Int64, mWeighted: Int64, mQueryNorm: Int64, mQuery: Int64, mNormWeight: Int64, mPrefix: Int64,
    mOut: Int64, configuration: cutlass.Constexpr,
) -> None:
    tid, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    row_operands = (
        mGathered, Int64(0), mResidual, mLargest, mDenominator, mWeighted, mQueryNorm, mQuery, mNormWeight, mPrefix,
        mOut, tid, rank, row,
    )  # fmt: skip
    if const_expr(configuration.empties):
        if row < configuration.rows:
            _consume_row(*row_operands, configuration)
        else:
            thread = ((row - configuration.rows) * CLUSTER + rank) * configuration.threads + tid
            _empty_slots(mLatentSlots, mSharedSlots, thread, configuration)
    else:
        _consume_row(*row_operands, configuration)


def _cluster_launch(configuration: ConsumeConfiguration, num_rows: int, stream: CUstream) -> dict[str, Any]:
    """How both consumers start: a cluster a row, ``num_rows`` of them."""
    return {
        "grid": [CLUSTER, num_rows, 1],
        "block": [configuration.threads, 1, 1],
        "cluster": [CLUSTER, 1, 1],
        "stream": stream,
        "preferred_smem_carveout": ptx.ALL_SHARED,
        "use_pdl": True,
    }


def compile_produce(configuration: ProduceConfiguration) -> Any:
    """Function of (x, weight, peers, control, rank, stream)."""

    @cute.jit
    def launch(mX: Int64, mWeight: Int64, mPeers: Int64, mControl: Int64, rank: Int32, stream: CUstream) -> None:
        _produce(mX, mWeight, mPeers, mControl, rank, configuration).launch(
            grid=[configuration.hidden // TILE, 1, 1],
            block=[configuration.threads, 1, 1],
            stream=stream,
            preferred_smem_carveout=configuration.carve_out_percent,
            use_pdl=True,
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, zero, Int32(0), cute.runtime.make_fake_stream())


def compile_consume(configuration: ConsumeConfiguration) -> Any:
    """Function of (received, control, residual, largest, denominator, weighted, query_norm, query, norm_weight,
    prefix, out, stream)."""

    @cute.jit
    def launch(
        mReceived: Int64, mControl: Int64, mResidual: Int64, mLargest: Int64, mDenominator: Int64, mWeighted: Int64,
        mQueryNorm: Int64, mQuery: Int64, mNormWeight: Int64, mPrefix: Int64, mOut: Int64, stream: CUstream,
    ) -> None:
        _consume(
            mReceived, mControl, mResidual, mLargest, mDenominator, mWeighted, mQueryNorm,
            mQuery, mNormWeight, mPrefix, mOut, configuration,
        ).launch(**_cluster_launch(configuration, configuration.rows, stream))

    return cute.compile(launch, *[Int64(0)] * 11, cute.runtime.make_fake_stream())


def compile_consume_gathered(configuration: ConsumeConfiguration) -> Any:
    """Function of (gathered, latent_slots, shared_slots, residual, largest, denominator, weighted, query_norm, query,
    norm_weight, prefix, out, stream), all this rank's own."""

    @cute.jit
    def launch(
        mGathered: Int64, mLatentSlots: Int64, mSharedSlots: Int64, mResidual: Int64, mLargest: Int64,
        mDenominator: Int64, mWeighted: Int64, mQueryNorm: Int64, mQuery: Int64, mNormWeight: Int64, mPrefix: Int64,
        mOut: Int64, stream: CUstream,
    ) -> None:
        _consume_gathered(
            mGathered, mLatentSlots, mSharedSlots, mResidual, mLargest, mDenominator, mWeighted,
            mQueryNorm, mQuery, mNormWeight, mPrefix, mOut, configuration,
        ).launch(**_cluster_launch(configuration, configuration.rows * (2 if configuration.empties else 1), stream))

    return cute.compile(launch, *[Int64(0)] * 12, cute.runtime.make_fake_stream())
