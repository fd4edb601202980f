"""What precedes MLA attention, in one launch: q and kv norms, q_b, absorption into the latent, cache write.

What it computes
    mLatents [B, 1536 + 512 + 64] bf16 (query latent, key-value latent, extra; any row stride, so that they may be the
    front of rows that one product gives together with the output gate: 2880 at TP16, 3648 at TP8). RMSNorm of the query
    latent times mQueryUp [H x 192, 1536]; the first 128 values of a head times mKeyUp [H, 128, 512] give the absorbed
    query, the other 64 follow it: mQuery [B, H, 576] bf16. RMSNorm of the key-value latent and the extra values go as
    one row of 576 into the paged cache, e4m3 (saturated, scale 1) or bf16, at the row's slot.

How data moves
    A cluster of eight blocks a head. A block projects 24 of the head's 192 query values (74 KB of weights) and later
    absorbs into 64 of the 512 latent dimensions (16 KB): all its weights are in registers before the dependency wait.
    Each block normalises the query latent itself (3 KB a row), one warp a row, into shared memory as operand B of
    mma.sync m16n8k16; the warps share K. Query values are stored into the shared memory of all eight blocks; after one
    cluster barrier they are operand A, and W_UK, whose pairs along K lie in different rows, becomes operand B by byte
    permutes in registers. One more cluster only writes the cache, beside the others.

What it reaches (H200, 2026-11-30; h200.json beside this file)
    One row, weights cold: 12 heads 3.9 us (8.7 MB), 6 heads 2.4 us; 12 heads 8 rows 5.3 us, 16 rows 7.5 us.

Limits
    1 to 16 rows. A slot below 0 marks a padding row: nothing is written to the cache. Slots may lie beyond 2^31 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.device.sums import lane_sum

WARPS = 8
THREADS = 32 * WARPS
CLUSTER = 8
QUERY_LATENT = 1536
LATENT = 512
EXTRA = 64
NOPE = 128
HEAD_DIM = NOPE + EXTRA
ROW = LATENT + EXTRA
SHARE = HEAD_DIM // CLUSTER  # query values of a block
SLICE = LATENT // CLUSTER  # latent dimensions of a block
BLOCKS_K = QUERY_LATENT // (32 * WARPS)  # 32-wide blocks along K of a warp
X_STRIDE = 2 * QUERY_LATENT + 64  # bytes; 4 units of 16 modulo 8
PAGE_TOKENS = 64
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class MlaPrepConfiguration:
    carve_out_percent: ClassVar[int] = ptx.REGISTER_LOAD_CARVE_OUT

    rows: int
    heads: int
    fp8: bool


def _inverse_norm(values: list[Float32], width: int) -> Float32:
    """1 / root mean square of a warp's values."""
    total = Float32(0.0)
    for value in values:
        total = total + value * value
    total = lane_sum(total)
    return cute.math.rsqrt(total * Float32(1.0 / width) + Float32(EPSILON))


@cute.jit
def _write_cache(
    mLatents: Int64, latents_stride: Int64, mKvNorm: Int64, mSlots: Int64, mCache: Int64, page_bytes: Int64,
    row: Int32, lane: Int32, configuration: cutlass.Constexpr,
) -> None:
    """One warp: the cache row of one token."""
    row_bytes = ROW if configuration.fp8 else 2 * ROW
    weights = [ptx.widen_bf16(ptx.load_cached(mKvNorm + lane * 32 + part * 16)) for part in range(2)]
    ptx.prefetch(mSlots + Int64(row) * 8)  # last used by the MLA layer before
    cute.arch.griddepcontrol_wait()
    slot = ptx.load_long(mSlots + Int64(row) * 8)
    gRow = mLatents + Int64(row) * latents_stride + QUERY_LATENT * 2
    values = [ptx.widen_bf16(ptx.load_cached(gRow + lane * 32 + part * 16)) for part in range(2)]
    extra = ptx.load_cached(gRow + LATENT * 2 + (lane % 8) * 16)
    scale = _inverse_norm(values[0] + values[1], LATENT)
    if slot >= 0:
        gCache = mCache + slot // PAGE_TOKENS * page_bytes + slot % PAGE_TOKENS * row_bytes
        scaled = [
            [value * scale * weight for value, weight in zip(values[part], weights[part], strict=True)]
            for part in range(2)
        ]
        if const_expr(configuration.fp8):
            ptx.store(gCache + lane * 16, [word for part in scaled for word in ptx.narrow_e4m3(part)])
            if lane < 8:
                narrowed = ptx.narrow_e4m3(ptx.widen_bf16(extra))
                ptx.store_pair(gCache + LATENT + lane * 8, narrowed)
        else:
            for part in range_constexpr(2):
                ptx.store(gCache + lane * 32 + part * 16, ptx.narrow_bf16(scaled[part]))
            if lane < 8:
                ptx.store(gCache + LATENT * 2 + lane * 16, extra)


@cute.jit
def _prepare_head(
    mLatents: Int64, latents_stride: Int64, mQueryNorm: Int64, mQueryUp: Int64, mKeyUp: Int64, key_up_stride: Int64,
    mQuery: Int64, head: Int32, rank: Int32, tid: Int32, configuration: cutlass.Constexpr,
) -> None:
    """One block of a head's cluster."""
    rows, heads = configuration.rows, configuration.heads
    tiles_n = -(-rows // 8)
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    group, quad = lane // 4, lane % 4
    allocator = cutlass.memory.SmemAllocator()
    sX = Int32(allocator.allocate(rows * X_STRIDE, 128).toint())
    sQuery = Int32(allocator.allocate(16 * NOPE * 2, 128).toint())  # [row, value] bf16
    sSums = Int32(allocator.allocate(WARPS * tiles_n * 8 * SHARE * 4, 128).toint())  # [warp, row, value] fp32
    sOut = Int32(allocator.allocate(WARPS * rows * SLICE * 4, 128).toint())  # [warp, row, dimension] fp32
    began = timestamps.now("mla_prep")
    ptx.cluster_arrive()  # answered before the first store to a peer

    along = (warp * BLOCKS_K * 32 + quad * 8) * 2
    gUp = mQueryUp + (Int64(head) * HEAD_DIM + rank * SHARE + group) * (2 * QUERY_LATENT) + along
    up = [[ptx.load_weights(gUp + part * (16 * QUERY_LATENT) + at * 64) for part in range(3)] for at in range(BLOCKS_K)]
    gKey = mKeyUp + Int64(head) * key_up_stride + (warp * 16 + quad) * (2 * LATENT) + rank * (2 * SLICE) + group * 16
    key = [ptx.load_weights(gKey + i * (8 * LATENT)) for i in range(4)]
    norm = [ptx.load_cached(mQueryNorm + lane * 16 + at * 512) for at in range(QUERY_LATENT // 256)]
    cute.arch.griddepcontrol_wait()
    released = timestamps.now("mla_prep")

    for turn in range_constexpr(tiles_n):
        row = warp + 8 * turn
        if row < rows:
            gRow = mLatents + Int64(row) * latents_stride + lane * 16
            words = [ptx.load_cached(gRow + at * 512) for at in range(QUERY_LATENT // 256)]
            values = [ptx.widen_bf16(one) for one in words]
            scale = _inverse_norm([value for part in values for value in part], QUERY_LATENT)
            for at in range_constexpr(QUERY_LATENT // 256):
                weights = ptx.widen_bf16(norm[at])
                sPlace = sX + row * X_STRIDE + lane * 16 + at * 512
                scaled = [value * scale * weight for value, weight in zip(values[at], weights, strict=True)]
                ptx.shared_store4(sPlace, ptx.narrow_bf16(scaled))
    cute.arch.sync_threads()

    zero = Uint32(0)
    sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(tiles_n)]
    for at in range_constexpr(BLOCKS_K):
        first, second, third = up[at]
        for n in range_constexpr(tiles_n):
            row = cutlass.min(group + 8 * n, Int32(rows - 1))
            x = ptx.shared_load4(sX + row * X_STRIDE + along + at * 64)
            for part in range_constexpr(2):
                b = (x[2 * part], x[2 * part + 1])
                sums[n][0] = ptx.mma(
                    sums[n][0],
                    (first[2 * part], second[2 * part], first[2 * part + 1], second[2 * part + 1]),
                    b,
                    operand="bf16",
                )
                sums[n][1] = ptx.mma(sums[n][1], (third[2 * part], zero, third[2 * part + 1], zero), b, operand="bf16")
    for n in range_constexpr(tiles_n):
        sRow = sSums + ((warp * tiles_n + n) * 8 + quad * 2) * (SHARE * 4)
        for column in range_constexpr(2):
            sColumn = sRow + column * (SHARE * 4) + group * 4
            ptx.shared_store_float(sColumn, sums[n][0][column])
            ptx.shared_store_float(sColumn + 32, sums[n][0][2 + column])
            ptx.shared_store_float(sColumn + 64, sums[n][1][column])
    cute.arch.sync_threads()

    # One thread: one value of one row to one block of the cluster.
    ptx.cluster_wait()
    for step in range_constexpr(-(-rows * SHARE * CLUSTER // THREADS)):
        item = tid + step * THREADS
        if item < rows * SHARE * CLUSTER:
            peer, value, row = item % CLUSTER, (item // CLUSTER) % SHARE, item // (CLUSTER * SHARE)
            total = Float32(0.0)
            for part in range_constexpr(WARPS):
                total = total + ptx.shared_load_float(sSums + ((part * tiles_n * 8 + row) * SHARE + value) * 4)
            bits = ptx.pack_bf16(total, total)
            at = rank * SHARE + value
            if at < NOPE:
                ptx.peer_store_half(ptx.peer_shared(sQuery + (row * NOPE + at) * 2, peer), bits)
            elif peer == 0:
                ptx.store_half(mQuery + ((Int64(row) * heads + head) * ROW + LATENT - NOPE + at) * 2, bits)
    ptx.cluster_arrive()
    ptx.cluster_wait()

    # Operand A: this warp's 16 query values, tokens of the batch as rows; value quad + 4 i is the thread's i-th.
    sValues = sQuery + (warp * 16 + quad) * 2
    a = []
    for pair in range_constexpr(2):
        for half in range_constexpr(2):
            if const_expr(8 * half < rows):
                sHalf = sValues + (group + 8 * half) * (NOPE * 2) + pair * 16
                a.append(ptx.shared_load_half(sHalf) | (ptx.shared_load_half(sHalf + 8) << Uint32(16)))
            else:
                a.append(zero)
    for word in range_constexpr(4):
        products = []
        for selector in range_constexpr(2):
            b = tuple(
                ptx.select_bytes(key[2 * i][word], key[2 * i + 1][word], 0x7632 if selector else 0x5410)
                for i in range(2)
            )
            products.append(ptx.mma([Float32(0.0)] * 4, a, b, operand="bf16"))
        for i in range_constexpr(4):
            row = group + 8 * (i // 2)
            if row < rows:
                dimension = 8 * (2 * quad + i % 2) + 2 * word
                sPair = sOut + ((warp * rows + row) * SLICE + dimension) * 4
                ptx.shared_store_float(sPair, products[0][i])
                ptx.shared_store_float(sPair + 4, products[1][i])
    cute.arch.sync_threads()
    for step in range_constexpr(-(-rows * SLICE // 2 // THREADS)):
        item = tid + step * THREADS
        if item < rows * SLICE // 2:
            row, pair = item // (SLICE // 2), item % (SLICE // 2)
            totals = [Float32(0.0)] * 2
            for part in range_constexpr(WARPS):
                pair_words = ptx.shared_load2(sOut + ((part * rows + row) * SLICE + 2 * pair) * 4)
                totals = [total + ptx.bits_as_float(word) for total, word in zip(totals, pair_words, strict=True)]
            ptx.store_int(
                mQuery + ((Int64(row) * heads + head) * ROW + rank * SLICE + 2 * pair) * 2,
                Int32(ptx.pack_bf16(totals[0], totals[1])),
            )
    if const_expr(timestamps.on("mla_prep")):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:
            timestamps.record("mla_prep", head * CLUSTER + rank, began, released)


@cute.kernel
def _mla_prep(
    mLatents: Int64, latents_stride: Int64, mQueryNorm: Int64, mKvNorm: Int64, mQueryUp: Int64, mKeyUp: Int64,
    key_up_stride: Int64, mQuery: Int64, mSlots: Int64, mCache: Int64, page_bytes: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    tid, _, _ = cute.arch.thread_idx()
    rank, head, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    if head < configuration.heads:
        _prepare_head(
            mLatents, latents_stride, mQueryNorm, mQueryUp, mKeyUp, key_up_stride, mQuery, head, rank, tid,
            configuration,
        )  # fmt: skip
    else:
        row = rank + CLUSTER * (tid // 32)
        if row < configuration.rows:
            _write_cache(mLatents, latents_stride, mKvNorm, mSlots, mCache, page_bytes, row, tid % 32, configuration)


def compile_mla_prep(configuration: MlaPrepConfiguration) -> Any:
    """Function of (latents, latents_stride, query_norm, kv_norm, query_up, key_up, key_up_stride, query, slots, cache,
    page_bytes, stream); strides in bytes."""

    @cute.jit
    def launch(
        mLatents: Int64, latents_stride: Int64, mQueryNorm: Int64, mKvNorm: Int64, mQueryUp: Int64, mKeyUp: Int64,
        key_up_stride: Int64, mQuery: Int64, mSlots: Int64, mCache: Int64, page_bytes: Int64, stream: CUstream,
    ) -> None:
        _mla_prep(
            mLatents, latents_stride, mQueryNorm, mKvNorm, mQueryUp, mKeyUp, key_up_stride, mQuery, mSlots, mCache,
            page_bytes, configuration,
        ).launch(
            grid=[CLUSTER, configuration.heads + 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            preferred_smem_carveout=configuration.carve_out_percent,
            use_pdl=True,
        )  # fmt: skip

    return cute.compile(launch, *[Int64(0)] * 11, cute.runtime.make_fake_stream())
