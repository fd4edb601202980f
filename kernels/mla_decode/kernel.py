"""NoPE latent attention of one query token a row over a paged cache, and the merge of partial outputs.

What it computes
    mQuery [B, H, 576] bf16 (absorbed), cache pages of 64 rows of 576 values, e4m3 (scale 1) or bf16, mPages [B, P]
    int32, mTokens [B] int32 -> mOut [B, H, 512] bf16 and mLogSum [B, H] fp32 (natural). softmax(q . row x 192^-0.5)
    over the row's tokens, times the first 512 values of each row. A row without tokens gives 0 and -infinity, the
    neutral element of ``lse_merge``, so the same launch serves a rank's share of a context.

How data moves
    Blocks of a cluster of eight, and clusters, take pages in turn. cp.async brings a page into a ring, each warp the
    eight rows that it will score itself, so that scores wait for no other warp. Rows are padded in shared memory (608
    B for e4m3, 1184 B for bf16), which makes every fragment load below free of bank conflicts. Bulk copies lost: the
    padding needs one a row, the instruction takes uniform operands, so a warp issues its lanes' copies one by one (64
    by one warp: 100 us at 128k tokens, 16 clusters; 8 by each of eight: 64 us; H200, 2026-11-29). A byte of the
    cache is read from shared memory twice and converted in registers; it is never written back in another format,
    which is what lets a block keep up: an e4m3 to bf16 tile in shared memory would cost 4.5 KB of shared-memory
    traffic a token, twice the time of HBM.

    Scores: a warp takes 8 tokens of the page as the n8 of mma.sync m16n8k16, 16 heads as m16, and holds the query as
    operand A in registers (128 of them; the last steps read it from shared memory). The order of the 576 dimensions
    inside the products is free, so a thread takes 16 contiguous bytes of its token. Row maxima meet in shared memory;
    probabilities go there in the order in which operand A of the second product wants them. The next page's scores
    are computed right after this page's output products, with no barrier between: either would leave the tensor cores
    idle for its latency (0.95 us a page one after the other, without copies). Output: a warp takes 64 of the 512
    dimensions for all 64 tokens. Operand B needs pairs of tokens in one register: byte permutes do the transposition
    that ldmatrix cannot do on bytes. e4m3 is exact in f16, so that form multiplies in f16 (queries beyond 65504 would
    overflow); the bf16 form multiplies in bf16.

Merge
    Warp w of each block owns dimensions 64 w to 64 w + 63 and stores them into block w of the cluster, so one cluster
    barrier gives every block one slice from all eight. With more clusters a row, each block leaves its slice in the
    workspace and counts; of the blocks with the same slice the last one merges them. The counter wraps to zero by
    itself (replay needs no host). Merging all splits in one last block would let one SM read 3 MB at 8k tokens: 28 us.

Where it stands
    Not yet run on a GPU in this form. The form before it (one page after the other, copies by the copy engine) is
    checked: 8k tokens 9.1 us, 128k tokens 36.2 us (H200, 2026-11-29; h200.json beside this file).

Limits
    Heads in tiles of 16 (6 and 12 pad to one; tiles of more heads share the cache through L2). Context length is not
    limited; pages may lie beyond 2^31 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels import ptx

THREADS = 256
WARPS = 8
CLUSTER = 8
TILE_TOKENS = 64  # one page
HEAD_TILE = 16
ROW = 576
LATENT = 512
SLICE = LATENT // CLUSTER  # output dimensions that one block of a cluster merges
K_STEPS = ROW // 16
P_STRIDE = 160  # bytes between heads of the probability tile
SCALE_LOG2 = 192**-0.5 * 1.4426950408889634
LN2 = 0.6931471805599453
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, kw_only=True)
class MlaDecodeConfiguration:
    """``clusters`` of eight blocks share a row's pages. ``settled_cache``: all rows of the cache but each sequence's
    newest were written before the previous launch began, so their copies may start before the dependency wait."""

    heads: int
    fp8: bool
    clusters: int
    settled_cache: bool

    @property
    def row_bytes(self) -> int:
        return ROW if self.fp8 else 2 * ROW

    @property
    def row_stride(self) -> int:
        """In shared memory: an even number of 16-byte units, 6 (e4m3) or 2 (bf16) modulo 8."""
        return self.row_bytes + 32

    @property
    def stage_bytes(self) -> int:
        return TILE_TOKENS * self.row_stride

    @property
    def stages(self) -> int:
        return 4 if self.fp8 else 2

    @property
    def shared_query_steps(self) -> int:
        """Steps of the score product with the query in shared memory: with all 36 in registers the loop spills."""
        if self.fp8:
            return 4
        return 8 if self.heads <= HEAD_TILE else 12

    @property
    def head_tiles(self) -> int:
        return -(-self.heads // HEAD_TILE)

    @property
    def workspace_floats(self) -> int:
        """Of one row: every cluster's slices, then their maxima and sums."""
        return self.head_tiles * CLUSTER * self.clusters * HEAD_TILE * (SLICE + 2)


class _Shared:
    """Byte offsets in shared memory."""

    def __init__(self, configuration: MlaDecodeConfiguration) -> None:
        self.received = configuration.stages * configuration.stage_bytes  # [source block, head, 64] fp32
        self.stats = self.received + CLUSTER * HEAD_TILE * SLICE * 4  # [source block, head, (maximum, sum)] fp32
        self.probabilities = self.stats + CLUSTER * HEAD_TILE * 8
        self.maxima = self.probabilities + HEAD_TILE * P_STRIDE  # [head, warp] fp32
        self.sums = self.maxima + HEAD_TILE * WARPS * 4  # [head, warp] fp32
        self.query = self.sums + HEAD_TILE * WARPS * 4  # [step, lane] operand A
        self.flag = self.query + configuration.shared_query_steps * 32 * 16
        self.total = self.flag + 16
        assert self.total <= SHARED_BYTES


def _store_probabilities(s_address: Int32, one: Float32, other: Float32, *, fp8: bool) -> None:
    # Tokens two apart in the warp's permuted order are 8 places apart in operand A's order.
    pair = ptx.pack_f16(one, other) if fp8 else ptx.pack_bf16(one, other)
    ptx.shared_store_half(s_address, pair)
    ptx.shared_store_half(s_address + 16, pair >> Uint32(16))


def _value_fragments(s_base: Int32, row_stride: int, *, fp8: bool) -> list[tuple[Uint32, Uint32]]:
    """Operand B of the eight n8 tiles of this warp for 16 tokens; ``s_base`` points at this thread's first token."""
    if fp8:
        rows = [ptx.shared_load2(s_base + 4 * i * row_stride) for i in range(4)]
        fragments = []
        for word in range(2):
            first, second, third, fourth = (row[word] for row in rows)
            for selector in (0x5140, 0x7362):
                low = ptx.e4m3x4_to_f16(ptx.select_bytes(first, second, selector))
                high = ptx.e4m3x4_to_f16(ptx.select_bytes(third, fourth, selector))
                fragments += [(low[0], high[0]), (low[1], high[1])]
        return fragments
    rows = [ptx.shared_load4(s_base + 4 * i * row_stride) for i in range(4)]
    return [
        (
            ptx.select_bytes(rows[0][word], rows[1][word], selector),
            ptx.select_bytes(rows[2][word], rows[3][word], selector),
        )
        for word in range(4)
        for selector in (0x5410, 0x7632)
    ]


def _quad_maximum(value: Float32) -> Float32:
    value = ptx.maximum(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return ptx.maximum(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def _quad_sum(value: Float32) -> Float32:
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


def _eight(s_address: Int32) -> list[Float32]:
    return [ptx.bits_as_float(word) for at in (0, 16) for word in ptx.shared_load4(s_address + at)]


def _finite(value: Float32) -> Float32:
    """0 in place of -infinity, so that the difference of two of them is not a NaN."""
    return ptx.maximum(value, Float32(-1e30))


@cute.jit
def _request(
    rPage: cute.Tensor,
    tile: Int32,
    num_tokens: Int32,
    block: Int32,
    warp: Int32,
    lane: Int32,
    sBase: Int32,
    mCache: Int64,
    page_bytes: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    """Every warp: start the copies of its eight rows of one of this block's tiles; rows without a token become 0."""
    row_bytes, row_units = configuration.row_bytes, configuration.row_bytes // 16
    pad = configuration.row_stride - row_bytes
    first = warp * (TILE_TOKENS // WARPS)
    left = num_tokens - (block + tile * (configuration.clusters * CLUSTER)) * TILE_TOKENS - first
    page = cute.arch.shuffle_sync(rPage[0], tile % 32)
    gRows = mCache + Int64(page) * page_bytes + first * row_bytes + lane * 16
    sRows = (
        sBase + (tile % configuration.stages) * configuration.stage_bytes + first * configuration.row_stride + lane * 16
    )
    for at in range_constexpr(TILE_TOKENS // WARPS * row_units // 32):
        row = (lane + 32 * at) // row_units
        # A row past the end may hold anything, and 0 x NaN would reach the output.
        ptx.copy_async_or_zero(sRows + row * pad + at * 512, gRows + at * 512, Int32(16) if row < left else Int32(0))


@cute.jit
def _score(
    rScore: cute.Tensor,
    rQuery: cute.Tensor,
    sQuery: Int32,
    sKey: Int32,
    first_token: Int32,
    valid: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    """Scores in base-2 units: even and odd column of head ``group``, then of ``group + 8``; -infinity past the end."""
    fp8 = configuration.fp8
    first_shared = K_STEPS - configuration.shared_query_steps
    # Four chains, because one would wait for every product before it.
    chains = [[Float32(0.0)] * 4 for _ in range(4)]
    for at in range_constexpr(configuration.row_bytes // 64):
        words = ptx.shared_load4(sKey + at * 64)
        for part in range_constexpr(4 if fp8 else 2):
            step = at * (4 if fp8 else 2) + part
            fragment = ptx.e4m3x4_to_f16(words[part]) if fp8 else (words[2 * part], words[2 * part + 1])
            query = (
                [rQuery[4 * step + i] for i in range(4)]
                if step < first_shared
                else ptx.shared_load4(sQuery + (step - first_shared) * 512)
            )
            chains[step % 4] = ptx.mma(chains[step % 4], query, fragment, operand="f16" if fp8 else "bf16")
    for i in range_constexpr(4):
        score = ((chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i])) * Float32(SCALE_LOG2)
        rScore[i] = score if first_token + 2 * (i % 2) < valid else -Float32.inf


@cute.kernel
def _mla_decode(
    mQuery: Int64,
    mCache: Int64,
    page_bytes: Int64,
    mPages: Int64,
    pages_stride: Int32,
    pages_width: Int32,
    mTokens: Int64,
    mOut: Int64,
    mLogSum: Int64,
    mWorkspace: Int64,
    mCounters: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    fp8 = configuration.fp8
    stages, row_bytes, row_stride = configuration.stages, configuration.row_bytes, configuration.row_stride
    stage_bytes, clusters, heads = configuration.stage_bytes, configuration.clusters, configuration.heads
    shared = _Shared(configuration)
    operand = "f16" if fp8 else "bf16"

    tid, _, _ = cute.arch.thread_idx()
    block, head_tile, row = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    group, quad = lane // 4, lane % 4  # mma row or column of this thread, and its place among the four on it
    rank, cluster = block % CLUSTER, block // CLUSTER
    splits = clusters * CLUSTER
    sBase = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 128).toint())

    ptx.cluster_arrive()  # answered before the first store to a peer
    cute.arch.griddepcontrol_launch_dependents()
    if const_expr(not configuration.settled_cache):
        cute.arch.griddepcontrol_wait()

    num_tokens = ptx.load_int(mTokens + Int64(row) * 4)
    mMyPages = mPages + (Int64(row) * pages_stride + block) * 4
    rPage = cute.make_rmem_tensor((1,), Int32)  # lane l knows the page of tile 32 i + l
    rPage[0] = Int32(0)
    if block + lane * splits < pages_width:  # not only pages in use: the length is still on its way
        rPage[0] = ptx.load_int(mMyPages + Int64(lane * splits) * 4)

    num_tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    my_tiles = (num_tiles - block + splits - 1) // splits
    copies = (num_tokens, block, warp, lane, sBase, mCache, page_bytes)
    newest = (num_tiles - 1 - block) // splits  # this block's tile number of the newest page, if it is its own
    owns_newest = (num_tiles - 1 - block) % splits == 0
    for tile in range_constexpr(stages):
        first = tile < my_tiles
        if const_expr(configuration.settled_cache):
            first = first & ((not owns_newest) | (tile != newest))
        if first:
            _request(rPage, Int32(tile), *copies, configuration)
        cute.arch.cp_async_commit_group()
    if const_expr(configuration.settled_cache):
        cute.arch.griddepcontrol_wait()
        if owns_newest & (newest >= 0) & (newest < stages):
            _request(rPage, newest, *copies, configuration)
            cute.arch.cp_async_commit_group()

    # Operand A of the scores: this thread's dimensions of heads ``group`` and ``group + 8``.
    rQuery = cute.make_rmem_tensor((K_STEPS * 4,), Uint32)
    rQuery.fill(Uint32(0))
    for half in range_constexpr(2):
        head = head_tile * HEAD_TILE + group + 8 * half
        if head < heads:
            gQuery = mQuery + (Int64(row) * heads + head) * (2 * ROW)
            if const_expr(fp8):
                for at in range_constexpr(ROW // 64):
                    for part in range_constexpr(2):
                        words = ptx.load_cached(gQuery + at * 128 + quad * 32 + part * 16)
                        for word in range_constexpr(4):
                            pair = ptx.pack_f16(ptx.low_bf16(words[word]), ptx.high_bf16(words[word]))
                            step = 4 * at + 2 * part + word // 2
                            rQuery[4 * step + 2 * (word % 2) + half] = pair
            else:
                for at in range_constexpr(ROW // 32):
                    words = ptx.load_cached(gQuery + at * 64 + quad * 16)
                    for word in range_constexpr(4):
                        step = 2 * at + word // 2
                        rQuery[4 * step + 2 * (word % 2) + half] = words[word]

    sQuery = sBase + shared.query + lane * 16
    if warp == 0:
        first_shared = K_STEPS - configuration.shared_query_steps
        for step in range_constexpr(configuration.shared_query_steps):
            ptx.shared_store4(sQuery + step * 512, [rQuery[4 * (first_shared + step) + i] for i in range(4)])
    cute.arch.sync_threads()

    rOut = cute.make_rmem_tensor((32,), Float32)
    rOut.fill(0.0)
    rMax = cute.make_rmem_tensor((2,), Float32)
    rMax.fill(-Float32.inf)
    rSum = cute.make_rmem_tensor((2,), Float32)
    rSum.fill(0.0)

    # Token order inside a warp's eight (0 2 1 3 4 6 5 7): neighbours in a load phase then hit disjoint banks.
    my_token = warp * 8 + (group & 4) + (group & 1) * 2 + ((group >> 1) & 1)
    score_token = warp * 8 + (quad & 1) + (quad & 2) * 2  # token of this thread's even score column; odd: two later
    sKey = sBase + my_token * row_stride + quad * 16
    sValue = sBase + quad * row_stride + warp * (SLICE * row_bytes // ROW) + group * (8 if fp8 else 16)
    sProbabilities = sBase + shared.probabilities
    sScore = sProbabilities + group * P_STRIDE + 2 * (16 * (warp // 2) + 4 * (quad & 1) + 2 * (warp % 2) + quad // 2)
    sMaxima = sBase + shared.maxima + group * (4 * WARPS)

    # A warp scores the rows that it copied itself: its own copies and a warp barrier are all that it waits for.
    rScore = cute.make_rmem_tensor((4,), Float32)
    rScore.fill(0.0)
    if my_tiles > 0:
        if my_tiles == 1:
            cute.arch.cp_async_wait_group(0)
        else:
            cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_warp()
        _score(rScore, rQuery, sQuery, sKey, score_token, num_tokens - block * TILE_TOKENS, configuration)

    for tile in cutlass.range(my_tiles, unroll=1):
        sStage = (tile % stages) * stage_bytes
        scores = [rScore[i] for i in range(4)]
        largest = [_quad_maximum(ptx.maximum(scores[2 * half], scores[2 * half + 1])) for half in range(2)]
        if quad == 0:
            for half in range_constexpr(2):
                ptx.shared_store_float(sMaxima + half * 8 * 4 * WARPS + warp * 4, largest[half])
        cute.arch.sync_threads()

        # Every warp is past the previous tile's values: its slot can be filled again.
        following = tile - 1 + stages
        if (tile > 0) & (following < my_tiles):
            if following % 32 == 0:  # noqa: SIM102 - the same for the whole block, the inner one is not
                if following + lane < my_tiles:
                    rPage[0] = ptx.load_int(mMyPages + Int64((following + lane) * splits) * 4)
            _request(rPage, following, *copies, configuration)
        if tile > 0:
            cute.arch.cp_async_commit_group()

        decay = []
        for half in range_constexpr(2):
            newest_max = rMax[half]
            for value in _eight(sMaxima + half * 8 * 4 * WARPS):
                newest_max = ptx.maximum(newest_max, value)
            decay.append(ptx.exp2(rMax[half] - newest_max))
            rMax[half] = newest_max
            one = ptx.exp2(scores[2 * half] - newest_max)
            other = ptx.exp2(scores[2 * half + 1] - newest_max)
            rSum[half] = rSum[half] * decay[half] + (one + other)
            _store_probabilities(sScore + half * 8 * P_STRIDE, one, other, fp8=fp8)
        for i in range_constexpr(32):
            rOut[i] = rOut[i] * decay[(i // 2) % 2]
        cute.arch.sync_threads()

        for step in range_constexpr(TILE_TOKENS // 16):
            sRow = sProbabilities + group * P_STRIDE + step * 32 + quad * 8
            upper, lower = ptx.shared_load2(sRow), ptx.shared_load2(sRow + 8 * P_STRIDE)
            fragments = _value_fragments(sValue + sStage + step * 16 * row_stride, row_stride, fp8=fp8)
            for n in range_constexpr(8):
                sums = ptx.mma(
                    [rOut[4 * n + i] for i in range(4)],
                    (upper[0], lower[0], upper[1], lower[1]),
                    fragments[n],
                    operand=operand,
                )
                for i in range_constexpr(4):
                    rOut[4 * n + i] = sums[i]

        # The next tile's scores, in the shadow of these products: no barrier lies between.
        coming = tile + 1
        if coming < my_tiles:
            if coming == my_tiles - 1:
                cute.arch.cp_async_wait_group(0)  # the newest page may have been requested after empty groups
            else:
                cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_warp()
            _score(
                rScore,
                rQuery,
                sQuery,
                sKey + (coming % stages) * stage_bytes,
                score_token,
                num_tokens - (block + coming * splits) * TILE_TOKENS,
                configuration,
            )

    # Sums of this block over its warps; the maxima are the same in all of them.
    sSums = sBase + shared.sums + group * (4 * WARPS)
    totals = [_quad_sum(rSum[half]) for half in range(2)]
    if quad == 0:
        for half in range_constexpr(2):
            ptx.shared_store_float(sSums + half * 8 * 4 * WARPS + warp * 4, totals[half])
    cute.arch.sync_threads()

    # This warp's 64 dimensions go to block ``warp`` of the cluster, with this block's maximum and sum.
    ptx.cluster_wait()
    sPeer = ptx.peer_shared(sBase, warp)
    for half in range_constexpr(2):
        head = group + 8 * half
        if head_tile * HEAD_TILE + head < heads:
            slot = rank * HEAD_TILE + head
            for column in range_constexpr(2):
                for part in range_constexpr(2):
                    ptx.peer_store4(
                        sPeer + shared.received + slot * (4 * SLICE) + quad * 64 + column * 32 + part * 16,
                        [rOut[4 * (4 * part + i) + 2 * half + column] for i in range(4)],
                    )
            if quad == 0:
                total = Float32(0.0)
                for value in _eight(sSums + half * 8 * 4 * WARPS):
                    total = total + value
                ptx.peer_store_float(sPeer + shared.stats + slot * 8, rMax[half])
                ptx.peer_store_float(sPeer + shared.stats + slot * 8 + 4, total)
    ptx.cluster_arrive()
    ptx.cluster_wait()

    # One thread: four dimensions of one head.
    head, part = tid // 16, tid % 16
    active = head_tile * HEAD_TILE + head < heads
    rMerged = cute.make_rmem_tensor((6,), Float32)  # four dimensions, maximum, sum
    rMerged.fill(0.0)
    if active:
        sStats = sBase + shared.stats + head * 8
        stats = [ptx.shared_load2(sStats + source * (8 * HEAD_TILE)) for source in range(CLUSTER)]
        values = [
            ptx.shared_load4(sBase + shared.received + (source * HEAD_TILE + head) * (4 * SLICE) + part * 16)
            for source in range(CLUSTER)
        ]
        _merge(rMerged, [[ptx.bits_as_float(word) for word in pair] for pair in stats], values)

    mOutRow = mOut + ((Int64(row) * heads + head_tile * HEAD_TILE + head) * LATENT + rank * SLICE + part * 4) * 2
    mLogSumRow = mLogSum + (Int64(row) * heads + head_tile * HEAD_TILE + head) * 4
    writes_log_sum = (rank == 0) & (part == 0)
    if const_expr(clusters == 1):
        if active:
            _finish(rMerged, mOutRow, mLogSumRow, writes_log_sum)
    else:
        # Slices of all rows, tiles and clusters first, then maxima and sums.
        slot = (Int64(row) * configuration.head_tiles + head_tile) * CLUSTER + rank
        _, _, num_rows = cute.arch.grid_dim()
        mStats = mWorkspace + Int64(num_rows) * (configuration.head_tiles * CLUSTER * clusters * HEAD_TILE * SLICE * 4)
        mSlices = mWorkspace + (slot * clusters * HEAD_TILE + head) * (SLICE * 4) + part * 16
        mStats = mStats + (slot * clusters * HEAD_TILE + head) * 8
        if active:
            ptx.store(mSlices + cluster * (HEAD_TILE * SLICE * 4), [rMerged[i] for i in range(4)])
            if part == 0:
                ptx.store_float(mStats + cluster * (HEAD_TILE * 8), rMerged[4])
                ptx.store_float(mStats + cluster * (HEAD_TILE * 8) + 4, rMerged[5])
        cute.arch.sync_threads()
        if tid == 0:
            ptx.shared_store_int(sBase + shared.flag, ptx.count_wrapping(mCounters + slot * 4, Int32(clusters - 1)))
        cute.arch.sync_threads()
        if (ptx.shared_load_int(sBase + shared.flag) == clusters - 1) & active:
            slice_stats = [
                [ptx.load_float_l2(mStats + one * (HEAD_TILE * 8) + at) for at in (0, 4)] for one in range(clusters)
            ]
            values = [ptx.load_l2(mSlices + one * (HEAD_TILE * SLICE * 4)) for one in range(clusters)]
            _merge(rMerged, slice_stats, values)
            _finish(rMerged, mOutRow, mLogSumRow, writes_log_sum)


def _merge(rMerged: cute.Tensor, stats: list[list[Float32]], values: list[ptx.Words]) -> None:
    """Partial sums over disjoint tokens, each with its maximum (base 2) and sum, into one of the same form."""
    largest = stats[0][0]
    for one in stats[1:]:
        largest = ptx.maximum(largest, one[0])
    sums = [Float32(0.0)] * 5
    for (maximum, total), words in zip(stats, values, strict=True):
        weight = ptx.exp2(maximum - _finite(largest))
        for i in range(4):
            sums[i] = sums[i] + weight * ptx.bits_as_float(words[i])
        sums[4] = sums[4] + weight * total
    for i in range(4):
        rMerged[i] = sums[i]
    rMerged[4] = largest
    rMerged[5] = sums[4]


@cute.jit
def _finish(rMerged: cute.Tensor, mOutRow: Int64, mLogSumRow: Int64, writes_log_sum: cutlass.Boolean) -> None:
    total = rMerged[5]
    inverse = Float32(1.0) / ptx.maximum(total, Float32(1e-30))  # without tokens the four are 0
    ptx.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[
            mOutRow,
            ptx.pack_bf16(rMerged[0] * inverse, rMerged[1] * inverse),
            ptx.pack_bf16(rMerged[2] * inverse, rMerged[3] * inverse),
        ],
    )
    if writes_log_sum:
        ptx.store_float(mLogSumRow, (rMerged[4] + ptx.log2(total)) * Float32(LN2))


def compile_mla_decode(configuration: MlaDecodeConfiguration) -> Any:
    """Function of (query, cache, page_bytes, pages, pages_stride, pages_width, tokens, out, log_sum, workspace,
    counters, rows, stream)."""

    @cute.jit
    def launch(
        mQuery: Int64,
        mCache: Int64,
        page_bytes: Int64,
        mPages: Int64,
        pages_stride: Int32,
        pages_width: Int32,
        mTokens: Int64,
        mOut: Int64,
        mLogSum: Int64,
        mWorkspace: Int64,
        mCounters: Int64,
        num_rows: Int32,
        stream: CUstream,
    ) -> None:
        _mla_decode(
            mQuery,
            mCache,
            page_bytes,
            mPages,
            pages_stride,
            pages_width,
            mTokens,
            mOut,
            mLogSum,
            mWorkspace,
            mCounters,
            configuration,
        ).launch(
            grid=[configuration.clusters * CLUSTER, configuration.head_tiles, num_rows],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    zero = Int64(0)
    return cute.compile(
        launch,
        zero,
        zero,
        zero,
        zero,
        Int32(0),
        Int32(0),
        zero,
        zero,
        zero,
        zero,
        zero,
        Int32(1),
        cute.runtime.make_fake_stream(),
    )


@dataclass(frozen=True, kw_only=True)
class LseMergeConfiguration:
    ranks: int


@cute.kernel
def _lse_merge(mOutputs: Int64, mLogSums: Int64, mOut: Int64, mLogSum: Int64, configuration: cutlass.Constexpr) -> None:
    """A block of two warps a (row, head), 8 dimensions a lane."""
    ranks = configuration.ranks
    tid, _, _ = cute.arch.thread_idx()
    pair, _, _ = cute.arch.block_idx()
    num_pairs, _, _ = cute.arch.grid_dim()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    log_sums = [ptx.load_float(mLogSums + (Int64(rank) * num_pairs + pair) * 4) for rank in range(ranks)]
    at = Int64(pair) * (LATENT * 2) + tid * 16
    words = [ptx.load_cached(mOutputs + Int64(rank) * num_pairs * (LATENT * 2) + at) for rank in range(ranks)]
    largest = log_sums[0]
    for one in log_sums[1:]:
        largest = ptx.maximum(largest, one)
    total = Float32(0.0)
    sums = [Float32(0.0)] * 8
    for rank in range_constexpr(ranks):
        weight = ptx.exp2((log_sums[rank] - _finite(largest)) * Float32(1.0 / LN2))
        total = total + weight
        counts = weight > 0.0
        for i in range_constexpr(4):
            low, high = ptx.low_bf16(words[rank][i]), ptx.high_bf16(words[rank][i])
            # Selected, not multiplied: the output of a rank without tokens may be anything.
            sums[2 * i] = sums[2 * i] + (weight * low if counts else Float32(0.0))
            sums[2 * i + 1] = sums[2 * i + 1] + (weight * high if counts else Float32(0.0))
    inverse = Float32(1.0) / ptx.maximum(total, Float32(1e-30))
    ptx.store(mOut + at, [ptx.pack_bf16(sums[2 * i] * inverse, sums[2 * i + 1] * inverse) for i in range(4)])
    if (tid == 0) & (mLogSum != 0):
        ptx.store_float(mLogSum + Int64(pair) * 4, largest + ptx.log2(total) * Float32(LN2))


def compile_lse_merge(configuration: LseMergeConfiguration) -> Any:
    """Function of (outputs, log_sums, out, log_sum or 0, rows x heads, stream)."""

    @cute.jit
    def launch(
        mOutputs: Int64, mLogSums: Int64, mOut: Int64, mLogSum: Int64, num_pairs: Int32, stream: CUstream
    ) -> None:
        _lse_merge(mOutputs, mLogSums, mOut, mLogSum, configuration).launch(
            grid=[num_pairs, 1, 1], block=[LATENT // 8, 1, 1], stream=stream, use_pdl=True
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, zero, Int32(1), cute.runtime.make_fake_stream())
