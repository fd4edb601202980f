"""One rank's share of the LM head, and the largest k of its logits, in one launch.

What it computes
    mX [B, D] bf16 times mWeight [N, D] bf16 -> mLogits [B, N] fp32, and per row the k largest (falling; equal logits
    by rising id, NaN as -infinity) as mTop [B, k] fp32 and mIds [B, k] int32 with the rank's first id added.
    Candidates of all ranks, merged, are the exact top k of the vocabulary; only they need to travel.

How data moves
    At most two blocks an SM walk tiles of 16 vocabulary rows. A warp owns an eighth of D and keeps seven 32-wide blocks
    of its 16 rows on the way, straight into the registers of operand A of mma.sync m16n8k16 (any order of D serves both
    operands, so 16 contiguous bytes of a row are a thread's share of two products). The ring runs on over the end of a
    tile. x is operand B, from L1: 14 KB a row. The eight warps' sums meet in shared memory, two buffers in turn, one
    barrier a tile.

Top k
    Every block counts itself done; the first B blocks wait until all are, and each takes one row (the last to leave
    resets the count). They hold B slots of the GPU while they wait, the others need none of them. Keys are 64 bits,
    logit and inverted id, so no two are equal. A thread takes every 256th group of four and finds its largest; the k-th
    largest of those 256 is a bound that at least k keys reach, and only k threads hold any that do, so the list of
    survivors is bounded by k x N / 256 whatever the logits are. Survivors are ranked by counting. One last block for
    all rows lost: 8 us a row, 178 instead of 50 us at 16 rows (H200, 2026-11-29).

Where it stands
    Not yet run on a GPU in this form (rows side by side, logits kept in registers between the two looks).

Limits
    D a multiple of 1792, N a multiple of 16 between 1024 and 20480, B at most 16, k at most 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from k3sim.kernels import ptx

WARPS = 8
THREADS = 32 * WARPS
TILE = 16
DEPTH_UNIT = 32 * WARPS  # of D that one 32-wide block of every warp covers
RING = 7


@dataclass(frozen=True, kw_only=True)
class LmHeadConfiguration:
    """``k`` 0: logits only. ``num_blocks``: at most two an SM, such that tiles divide evenly."""

    rows: int
    depth: int
    num_outputs: int
    k: int
    num_blocks: int

    @property
    def groups_per_thread(self) -> int:
        """Groups of four logits that a thread looks at."""
        return -(-self.num_outputs // (4 * THREADS))

    @property
    def max_survivors(self) -> int:
        return self.k * 4 * self.groups_per_thread


def _key(logit: Float32, index: Int32) -> Int64:
    """Order of (logit, lower index first) as a signed 64-bit number; NaN as -infinity, -0 as +0."""
    return ptx.inline_ptx(
        "{ .reg .pred nan; .reg .f32 f; .reg .b32 b, s, low;"
        " setp.nan.f32 nan, {$r0}, {$r0}; selp.f32 f, 0fFF800000, {$r0}, nan; add.f32 f, f, 0f00000000;"
        " mov.b32 b, f; shr.s32 s, b, 31; and.b32 s, s, 0x7fffffff; xor.b32 b, b, s;"
        " not.b32 low, {$r1}; mov.b64 {$w0}, {low, b}; }",
        write_only_types=[Int64],
        read_only_args=[logit, index],
    )


def _logit_of(key: Int64) -> Float32:
    return ptx.inline_ptx(
        "{ .reg .b32 b, s, low; mov.b64 {low, b}, {$r0}; shr.s32 s, b, 31; and.b32 s, s, 0x7fffffff;"
        " xor.b32 b, b, s; mov.b32 {$w0}, b; }",
        write_only_types=[Float32],
        read_only_args=[key],
    )


def _index_of(key: Int64) -> Int32:
    return ptx.inline_ptx(
        "{ .reg .b32 high, low; mov.b64 {low, high}, {$r0}; not.b32 {$w0}, low; }",
        write_only_types=[Int32],
        read_only_args=[key],
    )


def _shared_key(s_address: Int32) -> Int64:
    return ptx.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[s_address])


def _store_key(s_address: Int32, key: Int64) -> None:
    ptx.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[s_address, key])


@cute.jit
def _count_greater(sKeys: Int32, count: Int32, key: Int64) -> Int32:
    greater = Int32(0)
    for other in cutlass.range(count, unroll=8):
        greater = greater + (Int32(1) if _shared_key(sKeys + other * 8) > key else Int32(0))
    return greater


@cute.kernel
def _lm_head(
    mX: Int64,
    mWeight: Int64,
    mLogits: Int64,
    mTop: Int64,
    mIds: Int64,
    mCounters: Int64,
    first_id: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    rows, depth, num_outputs, k = (
        configuration.rows, configuration.depth, configuration.num_outputs, configuration.k
    )  # fmt: skip
    num_tiles, tiles_n = num_outputs // TILE, -(-rows // 8)
    blocks_k = depth // DEPTH_UNIT
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    num_blocks = configuration.num_blocks
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    group, quad = lane // 4, lane % 4
    allocator = cutlass.memory.SmemAllocator()
    sum_bytes = WARPS * tiles_n * 8 * TILE * 4
    sSums = Int32(allocator.allocate(2 * sum_bytes, 128).toint())  # [turn, warp, row, output] fp32

    along = Int64((warp * blocks_k * 32 + quad * 8) * 2)
    gWeight = mWeight + Int64(group) * (2 * depth) + along
    tile_bytes = TILE * 2 * depth
    rRing = cute.make_rmem_tensor((RING * 8,), Uint32)
    for at in range_constexpr(RING):
        for half in range_constexpr(2):
            words = ptx.load_stream(gWeight + Int64(block) * tile_bytes + half * (16 * depth) + at * 64)
            for i in range_constexpr(4):
                rRing[8 * at + 4 * half + i] = words[i]
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    turn = Int32(0)
    for tile in cutlass.range(block, num_tiles, num_blocks, unroll=1):
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(tiles_n)]
        gTile = gWeight + Int64(tile) * tile_bytes
        # The last tile's ring runs into itself: loaded again, from L2, and not used.
        following = tile + num_blocks
        gNext = gWeight + Int64(following if following < num_tiles else tile) * tile_bytes
        for at in range_constexpr(blocks_k):
            slot = 8 * (at % RING)
            for n in range_constexpr(tiles_n):
                row = cutlass.min(group + 8 * n, Int32(rows - 1))
                x = ptx.load_cached(mX + Int64(row) * (2 * depth) + along + at * 64)
                for part in range_constexpr(2):
                    a = [rRing[slot + 4 * half + 2 * part + i] for i in range(2) for half in range(2)]
                    sums[n][part] = ptx.mma(sums[n][part], a, (x[2 * part], x[2 * part + 1]), operand="bf16")
            gAhead = gTile + (at + RING) * 64 if at + RING < blocks_k else gNext + (at + RING - blocks_k) * 64
            for half in range_constexpr(2):
                words = ptx.load_stream(gAhead + half * (16 * depth))
                for i in range_constexpr(4):
                    rRing[slot + 4 * half + i] = words[i]
        sTurn = sSums + turn * sum_bytes
        for n in range_constexpr(tiles_n):
            for i in range_constexpr(4):
                row, output = n * 8 + quad * 2 + i % 2, group + 8 * (i // 2)
                ptx.shared_store_float(
                    sTurn + ((warp * tiles_n * 8 + row) * TILE + output) * 4, sums[n][0][i] + sums[n][1][i]
                )
        cute.arch.sync_threads()
        if tid < rows * TILE:
            logit = Float32(0.0)
            for part in range_constexpr(WARPS):
                logit = logit + ptx.shared_load_float(sTurn + part * (tiles_n * 8 * TILE * 4) + tid * 4)
            at_row, output = tid // TILE, tid % TILE
            ptx.store_float(mLogits + (Int64(at_row) * num_outputs + tile * TILE + output) * 4, logit)
        turn = 1 - turn

    if const_expr(k > 0):
        sKeys = Int32(allocator.allocate(THREADS * 8, 16).toint())  # every thread's largest
        sSurvivors = Int32(allocator.allocate(configuration.max_survivors * 8, 16).toint())
        sBound = Int32(allocator.allocate(8, 8).toint())
        sCount = Int32(allocator.allocate(8, 8).toint())
        cute.arch.sync_threads()
        if tid == 0:
            ptx.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[mCounters])
        if block < rows:
            if tid == 0:
                ptx.shared_store_int(sCount, Int32(0))
                arrived = Int32(0)
                while arrived < num_blocks:
                    arrived = ptx.inline_ptx(
                        "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];",
                        write_only_types=[Int32],
                        read_only_args=[mCounters],
                    )
            cute.arch.sync_threads()
            _top_k(
                mLogits + Int64(block) * (num_outputs * 4),
                mTop + Int64(block) * (k * 4),
                mIds + Int64(block) * (k * 4),
                sKeys, sSurvivors, sBound, sCount, first_id, tid, configuration,
            )  # fmt: skip
            if tid == 0:  # noqa: SIM102 - `and` would count in every thread
                if ptx.count_wrapping(mCounters + 4, Int32(rows - 1)) == rows - 1:
                    ptx.store_int(mCounters, Int32(0))


@cute.jit
def _top_k(
    mLogits: Int64,
    mTop: Int64,
    mIds: Int64,
    sKeys: Int32,
    sSurvivors: Int32,
    sBound: Int32,
    sCount: Int32,
    first_id: Int32,
    tid: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    """One block: the k largest of one row."""
    k, num_groups, groups = configuration.k, configuration.num_outputs // 4, configuration.groups_per_thread
    rLogits = cute.make_rmem_tensor((4 * groups,), Uint32)
    rLogits.fill(Uint32(0x7FC00000))  # NaN: below every key of a logit but another NaN's, and those have lower indices
    for turn in range_constexpr(groups):
        at = turn * THREADS + tid
        if at < num_groups:
            words = ptx.load_l2(mLogits + Int64(at) * 16)
            for i in range_constexpr(4):
                rLogits[4 * turn + i] = words[i]
    largest = Int64(-(2**63))
    for turn in range_constexpr(groups):
        for i in range_constexpr(4):
            key = _key(ptx.bits_as_float(rLogits[4 * turn + i]), 4 * (turn * THREADS + tid) + i)
            largest = cutlass.max(largest, key)
    _store_key(sKeys + tid * 8, largest)
    cute.arch.sync_threads()
    if _count_greater(sKeys, Int32(THREADS), largest) == k - 1:
        _store_key(sBound, largest)
    cute.arch.sync_threads()
    bound = _shared_key(sBound)
    if largest >= bound:
        for turn in range_constexpr(groups):
            for i in range_constexpr(4):
                key = _key(ptx.bits_as_float(rLogits[4 * turn + i]), 4 * (turn * THREADS + tid) + i)
                if key >= bound:
                    place = ptx.inline_ptx(
                        "atom.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[sCount]
                    )
                    _store_key(sSurvivors + place * 8, key)
    cute.arch.sync_threads()
    count = ptx.shared_load_int(sCount)
    for one in cutlass.range(tid, count, THREADS, unroll=1):
        key = _shared_key(sSurvivors + one * 8)
        place = _count_greater(sSurvivors, count, key)
        if place < k:
            ptx.store_float(mTop + Int64(place) * 4, _logit_of(key))
            ptx.store_int(mIds + Int64(place) * 4, _index_of(key) + first_id)


def compile_lm_head(configuration: LmHeadConfiguration) -> Any:
    """Function of (x, weight, logits, top, ids, counter, first_id, stream)."""

    @cute.jit
    def launch(
        mX: Int64,
        mWeight: Int64,
        mLogits: Int64,
        mTop: Int64,
        mIds: Int64,
        mCounters: Int64,
        first_id: Int32,
        stream: CUstream,
    ) -> None:
        _lm_head(mX, mWeight, mLogits, mTop, mIds, mCounters, first_id, configuration).launch(
            grid=[configuration.num_blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, zero, zero, zero, Int32(0), cute.runtime.make_fake_stream())
