"""NoPE latent attention of one query token a row over a paged cache, and the merge of partial outputs.

What it computes
    mQuery [B, H, 576] bf16 (absorbed), cache pages of 64 rows of 576 values, e4m3 (scale 1) or bf16, mPages [B, P]
    int32, mTokens [B] int32 -> mOut [B, H, 512] bf16 and mLogSum [B, H] fp32 (natural). softmax(q . row x 192^-0.5)
    over the row's tokens, times the first 512 values of each row. A row without tokens gives 0 and -infinity, the
    neutral element of ``lse_merge``, so the same launch serves a rank's share of a context.

How data moves
    Blocks of a cluster of eight, and clusters, take pages in turn. Of the twelve warps of a block (one block an SM, 168
    registers a thread) four score and eight sum values, so that the scores and the softmax of one page run beside the
    products of the page before: with every warp doing both in turn, a page was one chain of loads, barriers and
    exponents of 3,400 cycles, of which the tensor cores worked 830 (H200, 2026-11-29: 35.2 us at 128k tokens, 8 warps,
    issue slots a third busy). Two such blocks an SM lost to reading the query from shared memory (43.7 us).

    cp.async brings a page into a ring. A value warp copies the 64 dimensions that it will sum, so it refills them when
    it alone is done with them, and no barrier says that a slot is free; the score warps were done before they handed
    over the probabilities. Rows are padded in shared memory (608 B for e4m3, 1184 B for bf16), which makes every
    fragment load below free of bank conflicts. Bulk copies lost: the padding needs one a row, the instruction takes
    uniform operands, so a warp issues its lanes' copies one by one (64 by one warp: 100 us at 128k tokens, 16 clusters;
    8 by each of eight: 64 us; H200, 2026-11-29). A byte of the cache is read from shared memory twice and converted in
    registers; it is never written back in another format: an e4m3 to bf16 tile in shared memory would cost 4.5 KB of
    shared-memory traffic a token, twice the time of HBM.

    Scores: a warp takes 16 tokens of the page as two n8 of mma.sync m16n8k16, 16 heads as m16, and holds two thirds of
    the query as operand A in registers (96 of them); the others come from shared memory, once for both n8. The order of
    the 576 dimensions inside the products is free, so a thread takes 16 contiguous bytes of its token; so is the order
    of tokens, so the probabilities that a thread computes are the four that operand A of the second product wants in
    that lane: one store and one load of 16 bytes a step. Row maxima cross in shared memory, with a barrier of the score
    warps alone. The exponents' reference follows the maximum only when it grew much (``LAG``); it is what maxima mean
    below, and the sums and accumulators of a block share it.

    Values: a warp takes 64 of the 512 dimensions for all 64 tokens. Operand B needs pairs of tokens in one register:
    byte permutes do the transposition that ldmatrix cannot do on bytes. e4m3 is exact in f16, so that form multiplies
    in f16 (queries beyond 65504 would overflow); the bf16 form multiplies in bf16.

Who waits for whom (mbarriers; tile t of a block is in ring slot t % stages, its probabilities in slot t % 2)
    filled[stage]   256 arrivals, one by the copies of each value thread; score warps wait before they read keys
    query_there     6 arrivals, one by each value warp that loads a part of the shared query; score warps wait once
    scored[slot]    4 arrivals; value warps wait before they read probabilities and values (whose copies the score warps
                    have seen arrive)
    summed[slot]    8 arrivals; score warps wait before they write the probabilities two tiles on

Merge
    Value warp w of each block owns dimensions 64 w to 64 w + 63 and stores them into block w of the cluster, so one
    cluster barrier gives every block one slice from all eight. With more clusters a row, each block leaves its slice in
    the workspace and counts; of the blocks with the same slice the last one merges them. The counter wraps to zero by
    itself (replay needs no host). Merging all splits in one last block would let one SM read 3 MB at 8k tokens: 28 us.

What it reaches (H200, 2026-11-29; h200.json beside this file)
    12 heads, one row, e4m3: 8k tokens 7.4 us, 128k tokens 29.1 us (55 % of the read bandwidth); bf16: 8.3 and 41.8 us
    (77 %). The form before it, eight warps that score and multiply in turn, took 9.0 and 35.2 us: issue slots one third
    busy, six cycles an instruction, so it waited for its own results. What keeps e4m3 from the bandwidth is not known
    yet; about 4.5 us are spent at any length.

Limits
    Heads in tiles of 16 (6 and 12 pad to one; tiles of more heads share the cache through L2). Context length is not
    limited; pages may lie beyond 2^31 bytes.

What compute-sanitizer says of it, and why it stays
    racecheck: query, probabilities and decays, each written by lanes of a warp of which lane 0 arrives for all 32; the
    tool credits the arrival to lane 0. With all lanes arriving at ``scored`` and ``summed`` their reports are gone, and
    those of the query, whose barrier stayed as it is, remain. Besides, the flag of the last cluster against its reads,
    with a barrier of the whole block between (BAR.SYNC 0 in the machine code): not understood. synccheck: "divergent
    threads", since score and value warps meet at the first barrier of the block from different instructions.

One file, because scores, values and merge are one thought: which warp waits for which, over one ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels.device import ptx, timestamps

SCORE_WARPS = 4
VALUE_WARPS = 8
THREADS = 32 * (SCORE_WARPS + VALUE_WARPS)
CLUSTER = 8
TILE_TOKENS = 64  # one page
WARP_TOKENS = TILE_TOKENS // SCORE_WARPS
HEAD_TILE = 16
ROW = 576
LATENT = 512
SLICE = LATENT // CLUSTER  # output dimensions of one value warp, and those that one block of a cluster merges
K_STEPS = ROW // 16
# Pairs of steps of the score product: the query of these is in shared memory, of the others in registers.
SHARED_PAIRS = tuple(pair for pair in range(K_STEPS // 2) if pair % 3 == 2)
REGISTER_PAIRS = tuple(pair for pair in range(K_STEPS // 2) if pair not in SHARED_PAIRS)
SLOTS = 2  # tiles of probabilities between score and value warps
FRAGMENT = 32 * 16  # bytes of operand A of one step, four words a lane
SCALE_LOG2 = 192**-0.5 * 1.4426950408889634
LN2 = 0.6931471805599453
# The reference of the exponents follows the largest score only when that is this much above it (base 2): powers up to
# 256 are as exact in f16 and bf16 as those up to 1, and the accumulators are rescaled almost never.
LAG = 8.0
SHARED_BYTES = 227 * 1024
SCORE_BARRIER = 1  # named barrier of the score warps


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
    def head_tiles(self) -> int:
        return -(-self.heads // HEAD_TILE)



class _Shared:
    """Byte offsets in shared memory."""

    def __init__(self, configuration: MlaDecodeConfiguration) -> None:
        self.received = configuration.stages * configuration.stage_bytes  # [source block, head, 64] fp32
        self.stats = self.received + CLUSTER * HEAD_TILE * SLICE * 4  # [source block, head, (maximum, sum)] fp32
        self.probabilities = self.stats + CLUSTER * HEAD_TILE * 8  # [slot, score warp, lane] operand A
        self.decays = self.probabilities + SLOTS * SCORE_WARPS * FRAGMENT  # [slot, head % 8, head // 8] fp32
        self.maxima = self.decays + SLOTS * HEAD_TILE * 4  # [slot, head, score warp] fp32
        self.sums = self.maxima + SLOTS * HEAD_TILE * SCORE_WARPS * 4  # [head, score warp] fp32
        self.references = self.sums + HEAD_TILE * SCORE_WARPS * 4  # [head] fp32
        self.query = self.references + HEAD_TILE * 4  # [step, lane] operand A
        self.filled = self.query + 2 * len(SHARED_PAIRS) * FRAGMENT  # a barrier a stage
        self.scored = self.filled + configuration.stages * 8  # a barrier a slot: probabilities are there
        self.summed = self.scored + SLOTS * 8  # a barrier a slot: all value warps have read them
        self.query_there = self.summed + SLOTS * 8
        self.flag = self.query_there + 16
        self.total = self.flag + 16
        assert self.total <= SHARED_BYTES


def _token(place: int | Int32, i: int | Int32) -> int | Int32:
    """Of 16 tokens the one that operand A and B of the value product hold at k = 2 ``place`` + (0, 1, 8, 9)[``i``].

    Tokens of neighbouring ``i`` differ by 2 modulo 4, those of neighbouring ``place`` by 1, which with the padding of
    the rows keeps the loads of keys and of values free of bank conflicts.
    """
    return 4 * i + (place ^ (2 * (i & 1)))


def _value_fragments(s_even: Int32, s_odd: Int32, row_stride: int, *, fp8: bool) -> list[tuple[Uint32, Uint32]]:
    """Operand B of the eight n8 tiles of this warp for 16 tokens; a thread's rows 0, 2 lie 8 rows apart, so 1 and 3."""
    places = [(s_odd if i % 2 else s_even) + 4 * i * row_stride for i in range(4)]
    if fp8:
        rows = [ptx.shared_load2(place) for place in places]
        fragments = []
        for word in range(2):
            first, second, third, fourth = (row[word] for row in rows)
            for selector in (0x5140, 0x7362):
                low = ptx.e4m3x4_to_f16(ptx.select_bytes(first, second, selector))
                high = ptx.e4m3x4_to_f16(ptx.select_bytes(third, fourth, selector))
                fragments += [(low[0], high[0]), (low[1], high[1])]
        return fragments
    rows = [ptx.shared_load4(place) for place in places]
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


def _floats(words: ptx.Words) -> list[Float32]:
    return [ptx.bits_as_float(word) for word in words]


def _again(value: Int32) -> Int32:
    """The same, hidden from common-subexpression elimination."""
    return ptx.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def _tiles(num_tokens: Int32, block: Int32, splits: int) -> tuple[Int32, Int32]:
    """Tiles of the row, and of this block."""
    num_tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    return num_tiles, (num_tiles - block + splits - 1) // splits


def _query_place(pair: int | Int32, quad: Int32, *, fp8: bool) -> Int32:
    """Byte of a head's query where this thread's eight values of two steps begin: those of its 16 bytes of a token."""
    return pair // 2 * 128 + quad * 32 + pair % 2 * 16 if fp8 else pair * 64 + quad * 16


def _as_operand(pair: Uint32, *, fp8: bool) -> Uint32:
    """Two query values, bf16, in the format of the products."""
    return ptx.pack_f16(ptx.low_bf16(pair), ptx.high_bf16(pair)) if fp8 else pair


def _finite(value: Float32) -> Float32:
    """0 in place of -infinity, so that the difference of two of them is not a NaN."""
    return ptx.maximum(value, Float32(-1e30))


@cute.jit
def _request(
    rPages: cute.Tensor, tile: Int32, num_tokens: Int32, block: Int32, value_warp: Int32, lane: Int32, sBase: Int32,
    mCache: Int64, page_bytes: Int64, configuration: cutlass.Constexpr,
) -> None:
    """A value warp: start its copies of one of this block's tiles; rows without a token become 0.

    It copies the dimensions that it will read itself, so the slot is free when it alone is done with it (the score
    warps were before), and of the last 64 dimensions, which only scores read, eight rows.
    """
    row_bytes, row_stride = configuration.row_bytes, configuration.row_stride
    slice_bytes = row_bytes // (ROW // SLICE)
    units = slice_bytes // 16  # lanes on a row
    rows = 32 // units
    left = num_tokens - (block + tile * (configuration.clusters * CLUSTER)) * TILE_TOKENS
    # Lanes 0 to 7 write rows 0 and 2 (e4m3), which lie in different banks.
    my_row, unit = lane // units, lane % units
    if const_expr(configuration.fp8):
        my_row = (my_row & 4) + (my_row & 1) * 2 + ((my_row >> 1) & 1)
    stage = tile % configuration.stages
    gPage = mCache + Int64(cute.arch.shuffle_sync(rPages[0], tile % 32)) * page_bytes
    at = my_row * row_bytes + unit * 16
    sAt = sBase + stage * configuration.stage_bytes + my_row * row_stride + unit * 16
    for i in range_constexpr(TILE_TOKENS // rows):
        # A row past the end may hold anything, and 0 x NaN would reach the output.
        ptx.copy_async_or_zero(
            sAt + value_warp * slice_bytes + i * rows * row_stride,
            gPage + (at + value_warp * slice_bytes) + i * rows * row_bytes,
            Int32(16) if my_row + i * rows < left else Int32(0),
        )
    first = value_warp * (TILE_TOKENS // VALUE_WARPS)
    for i in range_constexpr(TILE_TOKENS // VALUE_WARPS // rows):
        ptx.copy_async_or_zero(
            sAt + first * row_stride + (VALUE_WARPS * slice_bytes + i * rows * row_stride),
            gPage + (at + first * row_bytes) + (VALUE_WARPS * slice_bytes + i * rows * row_bytes),
            Int32(16) if first + my_row + i * rows < left else Int32(0),
        )
    ptx.barrier_arrive_after_copies(sBase + _Shared(configuration).filled + stage * 8)


@cute.jit
def _write_scores(
    tile: Int32, rQuery: cute.Tensor, rReference: cute.Tensor, rSum: cute.Tensor, valid: Int32, warp: Int32,
    lane: Int32, sBase: Int32, configuration: cutlass.Constexpr,
) -> None:
    """A score warp: probabilities of its 16 tokens of one tile, with the decay of what was summed before."""
    fp8, row_stride = configuration.fp8, configuration.row_stride
    shared = _Shared(configuration)
    group, quad = lane // 4, lane % 4
    slot = tile % SLOTS
    stage = tile % configuration.stages

    my_token = warp * WARP_TOKENS + _token(group >> 1, group & 1)
    sKey = sBase + stage * configuration.stage_bytes + my_token * row_stride + quad * 16
    sQuery = sBase + shared.query + lane * 16
    ptx.barrier_wait(sBase + shared.filled + stage * 8, (tile // configuration.stages) & 1)
    if tile == 0:
        ptx.barrier_wait(sBase + shared.query_there, Int32(0))

    # Two n8 tiles of 8 tokens, and two chains each, because one would wait for every product before it.
    chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
    coming = [ptx.shared_load4(sKey + j * 8 * row_stride) for j in range(2)]
    for at in range_constexpr(configuration.row_bytes // 64):
        words = coming
        if const_expr(at + 1 < configuration.row_bytes // 64):
            coming = [ptx.shared_load4(sKey + j * 8 * row_stride + (at + 1) * 64) for j in range(2)]
        for part in range_constexpr(4 if fp8 else 2):
            step = at * (4 if fp8 else 2) + part
            pair, odd = step // 2, step % 2
            query = (
                [rQuery[4 * (2 * REGISTER_PAIRS.index(pair) + odd) + i] for i in range(4)]
                if pair in REGISTER_PAIRS
                else ptx.shared_load4(sQuery + (2 * SHARED_PAIRS.index(pair) + odd) * FRAGMENT)
            )
            for j in range_constexpr(2):
                key = (
                    ptx.e4m3x4_to_f16(words[j][part])
                    if fp8
                    else (words[j][2 * part], words[j][2 * part + 1])
                )
                chains[j][odd] = ptx.mma(chains[j][odd], query, key, operand="f16" if fp8 else "bf16")

    # scores[2 j + e] of head ``group``, then of ``group + 8``: token _token(quad, 2 j + e) of the warp.
    scores = []
    for half in range_constexpr(2):
        mine = []
        for i in range_constexpr(4):
            score = (chains[i // 2][0][2 * half + i % 2] + chains[i // 2][1][2 * half + i % 2]) * Float32(SCALE_LOG2)
            mine.append(score if warp * WARP_TOKENS + _token(quad, i) < valid else -Float32.inf)
        scores.append(mine)

    sMaxima = sBase + shared.maxima + (slot * HEAD_TILE + group) * (4 * SCORE_WARPS)
    largest = [
        _quad_maximum(ptx.maximum(ptx.maximum(one[0], one[1]), ptx.maximum(one[2], one[3]))) for one in scores
    ]
    if quad == 0:
        for half in range_constexpr(2):
            ptx.shared_store_float(sMaxima + half * 8 * 4 * SCORE_WARPS + warp * 4, largest[half])
    # One barrier a tile will do: who writes the same slot again has passed the barrier between.
    cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=32 * SCORE_WARPS)

    operands = []
    decays = []
    for half in range_constexpr(2):
        others = _floats(ptx.shared_load4(sMaxima + half * 8 * 4 * SCORE_WARPS))
        newest = ptx.maximum(ptx.maximum(others[0], others[1]), ptx.maximum(others[2], others[3]))
        before = rReference[half]
        reference = newest if newest > before + Float32(LAG) else before
        decay = ptx.exp2(before - reference)
        powers = [ptx.exp2(score - reference) for score in scores[half]]
        rReference[half] = reference
        rSum[half] = rSum[half] * decay + ((powers[0] + powers[1]) + (powers[2] + powers[3]))
        pack = ptx.pack_f16 if fp8 else ptx.pack_bf16
        operands.append([pack(powers[0], powers[1]), pack(powers[2], powers[3])])
        decays.append(decay)

    ptx.barrier_wait(sBase + shared.summed + slot * 8, ((tile // SLOTS) & 1) ^ 1)  # the first use waits for nobody
    ptx.shared_store4(
        sBase + shared.probabilities + (slot * SCORE_WARPS + warp) * FRAGMENT + lane * 16,
        [operands[0][0], operands[1][0], operands[0][1], operands[1][1]],
    )
    if (warp == 0) & (quad == 0):
        for half in range_constexpr(2):
            ptx.shared_store_float(sBase + shared.decays + slot * (4 * HEAD_TILE) + group * 8 + half * 4, decays[half])
    cute.arch.sync_warp()
    if lane == 0:
        ptx.barrier_arrive(sBase + shared.scored + slot * 8)


@cute.jit
def _add_values(
    tile: Int32, rOut: cute.Tensor, value_warp: Int32, lane: Int32, sBase: Int32, configuration: cutlass.Constexpr,
) -> None:
    """A value warp: probabilities of one tile times this warp's 64 dimensions of its 64 tokens, added to ``rOut``."""
    fp8, row_stride = configuration.fp8, configuration.row_stride
    shared = _Shared(configuration)
    group, quad = lane // 4, lane % 4
    slot = tile % SLOTS
    sValue = (
        sBase
        + (tile % configuration.stages) * configuration.stage_bytes
        + value_warp * (configuration.row_bytes // (ROW // SLICE))
        + group * (8 if fp8 else 16)
    )
    sEven, sOdd = sValue + quad * row_stride, sValue + (quad ^ 2) * row_stride
    sOperand = sBase + shared.probabilities + slot * (SCORE_WARPS * FRAGMENT) + lane * 16

    ptx.barrier_wait(sBase + shared.scored + slot * 8, (tile // SLOTS) & 1)
    decay = _floats(ptx.shared_load2(sBase + shared.decays + slot * (4 * HEAD_TILE) + group * 8))
    if cute.arch.vote_any_sync((decay[0] != 1.0) | (decay[1] != 1.0)):
        for i in range_constexpr(32):
            rOut[i] = rOut[i] * decay[(i // 2) % 2]
    for step in range_constexpr(TILE_TOKENS // 16):
        probabilities = ptx.shared_load4(sOperand + step * FRAGMENT)
        rows = step * 16 * row_stride
        fragments = _value_fragments(sEven + rows, sOdd + rows, row_stride, fp8=fp8)
        for n in range_constexpr(8):
            sums = ptx.mma(
                [rOut[4 * n + i] for i in range(4)], probabilities, fragments[n], operand="f16" if fp8 else "bf16"
            )
            for i in range_constexpr(4):
                rOut[4 * n + i] = sums[i]
    cute.arch.sync_warp()
    if lane == 0:
        ptx.barrier_arrive(sBase + shared.summed + slot * 8)


@cute.kernel
def _mla_decode(
    mQuery: Int64, mCache: Int64, page_bytes: Int64, mPages: Int64, pages_stride: Int32, pages_width: Int32,
    mTokens: Int64, mOut: Int64, mLogSum: Int64, mWorkspace: Int64, mCounters: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    fp8, stages = configuration.fp8, configuration.stages
    clusters, heads = configuration.clusters, configuration.heads
    shared = _Shared(configuration)

    tid, _, _ = cute.arch.thread_idx()
    block, head_tile, row = cute.arch.block_idx()
    warp, lane = tid // 32, tid % 32
    does_scores = cute.arch.make_warp_uniform(warp) < SCORE_WARPS
    group, quad = lane // 4, lane % 4  # mma row or column of this thread, and its place among the four on it
    splits = clusters * CLUSTER
    value_warp = warp - SCORE_WARPS
    sBase = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 128).toint())

    began = timestamps.now("mla_decode")
    ptx.cluster_arrive_relaxed()  # answered before the first store to a peer
    cute.arch.griddepcontrol_launch_dependents()
    if const_expr(not configuration.settled_cache):
        cute.arch.griddepcontrol_wait()

    rOut = cute.make_rmem_tensor((32,), Float32)
    rOut.fill(0.0)
    # Operand A of the scores: this thread's dimensions of heads ``group`` and ``group + 8``. Places without a head take
    # the last one: their sums go nowhere, and all loads are one round trip.
    gQueries = [
        mQuery + (Int64(row) * heads + cutlass.min(head_tile * HEAD_TILE + group + 8 * half, heads - 1)) * (2 * ROW)
        for half in range(2)
    ]
    if does_scores:
        if tid == 0:
            for stage in range_constexpr(stages):
                ptx.barrier_init(sBase + shared.filled + stage * 8, 32 * VALUE_WARPS)
            for slot in range_constexpr(SLOTS):
                ptx.barrier_init(sBase + shared.scored + slot * 8, SCORE_WARPS)
                ptx.barrier_init(sBase + shared.summed + slot * 8, VALUE_WARPS)
            ptx.barrier_init(sBase + shared.query_there, len(SHARED_PAIRS))
            ptx.barrier_init_fence()
        cute.arch.sync_threads()  # barriers are there
        if const_expr(configuration.settled_cache):
            cute.arch.griddepcontrol_wait()
        rQuery = cute.make_rmem_tensor((8 * len(REGISTER_PAIRS),), Uint32)
        for number in range_constexpr(len(REGISTER_PAIRS)):
            for half in range_constexpr(2):
                words = ptx.load_cached(gQueries[half] + _query_place(REGISTER_PAIRS[number], quad, fp8=fp8))
                for word in range_constexpr(4):
                    rQuery[4 * (2 * number + word // 2) + 2 * (word % 2) + half] = words[word]
        cute.arch.sync_warp()  # keeps the next load here: the compiler waits for a uniform value where it loads it
        num_tokens = ptx.load_int(mTokens + Int64(row) * 4)
        _, my_tiles = _tiles(num_tokens, block, splits)
        for i in range_constexpr(8 * len(REGISTER_PAIRS)):
            rQuery[i] = _as_operand(rQuery[i], fp8=fp8)
        rReference = cute.make_rmem_tensor((2,), Float32)
        rReference.fill(-Float32.inf)
        rSum = cute.make_rmem_tensor((2,), Float32)
        rSum.fill(0.0)
        for tile in cutlass.range(my_tiles, unroll=1):
            valid = num_tokens - (block + tile * splits) * TILE_TOKENS
            _write_scores(tile, rQuery, rReference, rSum, valid, warp, lane, sBase, configuration)
        totals = [_quad_sum(rSum[half]) for half in range(2)]
        if quad == 0:
            for half in range_constexpr(2):
                head = group + 8 * half
                ptx.shared_store_float(sBase + shared.sums + (head * SCORE_WARPS + warp) * 4, totals[half])
                ptx.shared_store_float(sBase + shared.references + head * 4, rReference[half])  # all warps the same
    else:
        mMyPages = mPages + (Int64(row) * pages_stride + block) * 4
        rPages = cute.make_rmem_tensor((2,), Int32)  # lane l knows the pages of tiles 32 i + l and 32 (i + 1) + l
        rPages.fill(0)
        for ahead in range_constexpr(2):
            at = (lane + 32 * ahead) * splits
            if block + at < pages_width:  # not only pages in use: the length is still on its way
                rPages[ahead] = ptx.load_int(mMyPages + Int64(at) * 4)
        cute.arch.sync_threads()  # barriers are there
        num_tokens = ptx.load_int(mTokens + Int64(row) * 4)  # last, as above

        num_tiles, my_tiles = _tiles(num_tokens, block, splits)
        copies = (num_tokens, block, value_warp, lane, sBase, mCache, page_bytes)
        last = my_tiles - 1
        held_back = Int32(0)  # 1 where the row's last page is this block's: the launch before may be writing to it
        if (my_tiles > 0) & (block + last * splits == num_tiles - 1) & configuration.settled_cache:
            held_back = Int32(1)
        for tile in cutlass.range(cutlass.min(my_tiles - held_back, stages), unroll=1):
            _request(rPages, tile, *copies, configuration)
        if const_expr(configuration.settled_cache):
            cute.arch.griddepcontrol_wait()
            if (held_back > 0) & (last < stages):
                _request(rPages, last, *copies, configuration)
        if value_warp < len(SHARED_PAIRS):
            at = _query_place(2 + 3 * value_warp, quad, fp8=fp8)  # SHARED_PAIRS[value_warp]
            halves = [ptx.load_cached(gQuery + at) for gQuery in gQueries]
            for odd in range_constexpr(2):
                ptx.shared_store4(
                    sBase + shared.query + (2 * value_warp + odd) * FRAGMENT + lane * 16,
                    [
                        _as_operand(halves[half][2 * odd + word], fp8=fp8)
                        for word in range(2)
                        for half in range(2)
                    ],
                )
            cute.arch.sync_warp()
            if lane == 0:
                ptx.barrier_arrive(sBase + shared.query_there)
        for tile in cutlass.range(my_tiles, unroll=1):
            _add_values(tile, rOut, value_warp, lane, sBase, configuration)
            following = tile + stages
            if following < my_tiles:
                if following % 32 == 0:
                    rPages[0] = rPages[1]
                    if following + 32 + lane < my_tiles:
                        rPages[1] = ptx.load_int(mMyPages + Int64((following + 32 + lane) * splits) * 4)
                _request(rPages, following, *copies, configuration)
    cute.arch.sync_threads()

    # What is derived from them for the end would live through the loops and be spilled.
    block, head_tile, row = _again(block), _again(head_tile), _again(row)
    rank, cluster = block % CLUSTER, block // CLUSTER
    # The 64 dimensions of a value warp go to the block of that number, with this block's reference and sum.
    ptx.cluster_wait()
    if warp >= SCORE_WARPS:
        sPeer = ptx.peer_shared(sBase, value_warp)
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
                    parts = _floats(ptx.shared_load4(sBase + shared.sums + head * (4 * SCORE_WARPS)))
                    reference = ptx.shared_load_float(sBase + shared.references + head * 4)
                    ptx.peer_store_float(sPeer + shared.stats + slot * 8, reference)
                    ptx.peer_store_float(
                        sPeer + shared.stats + slot * 8 + 4, (parts[0] + parts[1]) + (parts[2] + parts[3])
                    )
    ptx.cluster_arrive()
    ptx.cluster_wait()

    # One thread: four dimensions of one head.
    head, part = tid // 16, tid % 16
    active = (head < HEAD_TILE) & (head_tile * HEAD_TILE + head < heads)
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
    if const_expr(timestamps.on("mla_decode")):  # noqa: SIM102 - one is of the build, the other of the thread
        if tid == 0:
            timestamps.record("mla_decode", block + splits * (head_tile + configuration.head_tiles * row), began)


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
    ptx.store_pair(mOutRow, ptx.narrow_bf16([rMerged[i] * inverse for i in range(4)]))
    if writes_log_sum:
        ptx.store_float(mLogSumRow, (rMerged[4] + ptx.log2(total)) * Float32(LN2))


def compile_mla_decode(configuration: MlaDecodeConfiguration) -> Any:
    """Function of (query, cache, page_bytes, pages, pages_stride, pages_width, tokens, out, log_sum, workspace,
    counters, rows, stream)."""

    @cute.jit
    def launch(
        mQuery: Int64, mCache: Int64, page_bytes: Int64, mPages: Int64, pages_stride: Int32, pages_width: Int32,
        mTokens: Int64, mOut: Int64, mLogSum: Int64, mWorkspace: Int64, mCounters: Int64, num_rows: Int32,
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
            preferred_smem_carveout=ptx.ALL_SHARED,
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
            grid=[num_pairs, 1, 1], block=[LATENT // 8, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=True,
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, zero, Int32(1), cute.runtime.make_fake_stream())
