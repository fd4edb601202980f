"""The end of a decode step on the device: the next token of each row, and the counters of the next replay.

What they compute
    ``sample``   tokens [B] int32 out of every rank's candidates, values [T, B, 64] fp32 and ids [T, B, 64] int32.
                 Greedy: the largest value, equal ones to the lower id. Drawn: of the 64 largest of all, softmax at the
                 row's temperature; the fewest best ones that together reach the row's share top_p stay; one of them is
                 drawn by the row's uniform number. Temperature 0 is greedy. NaN counts as -infinity.
    ``advance``  num_tokens [B] int32 grows by one and slots [B] int64 become the cache slots of the token to come,
                 64 pages[b, n // 64] + n % 64 with n the old length. A row of slot below 0 is padding and stays. A row
                 whose next page its table does not have becomes padding.

How data moves
    ``sample``: one block a row, a thread loads four candidates. A candidate's place among all is the number of larger
    keys, found by binary search in each rank's list (they come in falling order), so nothing is sorted and no rank's
    length of search depends on values. The first warp then has 64 values in order; every lane adds up all 64 in that
    order, so that running sums never fall. ``advance``: one thread a row.

Limits
    1, 2, 4, 8 or 16 ranks, 64 candidates each, distinct ids. Lists in falling order, equal values by rising id, where
    tokens are drawn (as ``lm_head`` leaves them); any order where greedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr, range_constexpr

from k3sim.kernels.device import ptx
from k3sim.kernels.device.ordered_key import exchange_key, larger_key, load_key, ordered_key, store_key
from k3sim.kernels.unfused.pieces import LOG2E

CANDIDATES = 64
PAGE_TOKENS = 64
LOWEST = -3.4028234663852886e38  # finite
MINUS_INFINITY_KEY = 0x007FFFFF00000000


@dataclass(frozen=True, kw_only=True)
class SampleConfiguration:
    """``draw``: by temperature, top_p and a uniform number a row; else greedy."""

    ranks: int
    draw: bool
    pdl: bool = False

    @property
    def threads(self) -> int:
        return max(32, self.ranks * CANDIDATES // 4)


@dataclass(frozen=True, kw_only=True)
class AdvanceConfiguration:
    pdl: bool = False


def _number(key: Uint64) -> Int32:
    """The number that ``ordered_key`` was given."""
    return (Uint32(0xFFFFFFFF) - key.to(Uint32)).to(Int32)


def _value(key: Uint64) -> Float32:
    """The value that ``ordered_key`` was given."""
    return ptx.inline_ptx(
        "{ .reg .b32 s; shr.s32 s, {$r0}, 31; not.b32 s, s; or.b32 s, s, 0x80000000; xor.b32 {$w0}, s, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[(key >> Uint64(32)).to(Uint32)],
    )


@cute.jit
def _place(sKeys: Int32, key: Uint64, ranks: cutlass.Constexpr) -> Int32:
    """How many of all ranks' keys are larger: a binary search in each rank's 64, which fall."""
    larger = Int32(0)
    for rank in cutlass.range(ranks, unroll=1):
        sRank = sKeys + rank * (CANDIDATES * 8)
        count = Int32(0)
        for step in (32, 16, 8, 4, 2, 1, 1):
            beyond = load_key(sRank + (count + (step - 1)) * 8) > key
            count = count + (Int32(step) if beyond else Int32(0))
        larger = larger + count
    return larger


@cute.jit
def _draw(sBest: Int32, temperature: Float32, top_p: Float32, uniform: Float32, lane: Int32) -> Int32:
    """Which of the 64 keys in ``sBest``, best first; by one warp, two keys a lane."""
    best = ptx.maximum(_value(load_key(sBest)), Float32(LOWEST))
    greedy = temperature <= Float32(0.0)
    rate = Float32(LOG2E) / (Float32(1.0) if greedy else temperature)
    total = Float32(0.0)
    before, after = [Float32(0.0)] * 2, [Float32(0.0)] * 2
    for i in range_constexpr(CANDIDATES):
        value = _value(load_key(sBest + i * 8))
        weight = Float32(1.0) if value == best else ptx.exp2((value - best) * rate)
        for mine in range_constexpr(2):
            here = lane * 2 + mine == i
            before[mine] = total if here else before[mine]
            after[mine] = total + weight if here else after[mine]
        total = total + weight
    limit = top_p * total
    # Those kept are a prefix, since the sums never fall.
    num_kept, kept_sum = Int32(0), Float32(0.0)
    for mine in range_constexpr(2):
        kept = before[mine] < limit
        num_kept = num_kept + cute.arch.popc(cute.arch.vote_ballot_sync(kept))
        kept_sum = ptx.maximum(kept_sum, after[mine] if kept else Float32(0.0))
    for offset in (16, 8, 4, 2, 1):
        kept_sum = ptx.maximum(kept_sum, cute.arch.shuffle_sync_bfly(kept_sum, offset=offset))
    target = Float32(0.0) if greedy else uniform * kept_sum
    passed = Int32(0)
    for mine in range_constexpr(2):
        passed = passed + cute.arch.popc(cute.arch.vote_ballot_sync(after[mine] <= target))
    return cutlass.max(cutlass.min(passed, num_kept - 1), Int32(0))


@cute.kernel
def _sample(
    mValues: Int64, mIds: Int64, mTemperature: Int64, mTopP: Int64, mUniform: Int64, mTokens: Int64,
    configuration: cutlass.Constexpr,
) -> None:
    ranks, threads = configuration.ranks, configuration.threads
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    num_rows, _, _ = cute.arch.grid_dim()
    allocator = cutlass.memory.SmemAllocator()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    # With one rank half of the warp has nothing of its own and repeats the first half.
    mine = tid % (ranks * CANDIDATES // 4)
    rank, chunk = mine // (CANDIDATES // 4), mine % (CANDIDATES // 4)
    at = ((Int64(rank) * num_rows + row) * CANDIDATES + chunk * 4) * 4
    values = [ptx.bits_as_float(word) for word in ptx.load_l2(mValues + at)]
    ids = ptx.load_l2(mIds + at)
    keys = []
    for i in range_constexpr(4):
        clean = values[i] + Float32(0.0) if values[i] == values[i] else Float32(float("-inf"))
        keys.append(ordered_key(clean, Int32(ids[i])))
    if const_expr(configuration.draw):
        sKeys = Int32(allocator.allocate(ranks * CANDIDATES * 8, 16).toint())
        sBest = Int32(allocator.allocate(CANDIDATES * 8, 16).toint())
        temperature = ptx.load_float_l2(mTemperature + Int64(row) * 4)
        top_p = ptx.load_float_l2(mTopP + Int64(row) * 4)
        uniform = ptx.load_float_l2(mUniform + Int64(row) * 4)
        for i in range_constexpr(4):
            store_key(sKeys + (mine * 4 + i) * 8, keys[i])
        if tid < 32:
            # Equal keys leave a place free; what stands there must have no weight.
            for half in range_constexpr(2):
                store_key(sBest + (tid + 32 * half) * 8, Uint64(MINUS_INFINITY_KEY))
        cute.arch.sync_threads()
        for i in range_constexpr(4):
            place = _place(sKeys, keys[i], ranks)
            if place < CANDIDATES:
                store_key(sBest + place * 8, keys[i])
        cute.arch.sync_threads()
        if tid < 32:
            chosen = _draw(sBest, temperature, top_p, uniform, tid)
            if tid == 0:
                ptx.store_int(mTokens + Int64(row) * 4, _number(load_key(sBest + chosen * 8)))
    else:
        sWarps = Int32(allocator.allocate(threads // 32 * 8, 16).toint())
        largest = larger_key(larger_key(keys[0], keys[1]), larger_key(keys[2], keys[3]))
        for offset in (16, 8, 4, 2, 1):
            largest = larger_key(largest, exchange_key(largest, offset))
        store_key(sWarps + tid // 32 * 8, largest)
        cute.arch.sync_threads()
        if tid == 0:
            for warp in range_constexpr(threads // 32):
                largest = larger_key(largest, load_key(sWarps + warp * 8))
            ptx.store_int(mTokens + Int64(row) * 4, _number(largest))


@cute.kernel
def _advance(
    mNumTokens: Int64, mPages: Int64, pages_stride: Int64, num_pages: Int32, mSlots: Int64, rows: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    row, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if row < rows:
        gSlot = mSlots + Int64(row) * 8
        gLength = mNumTokens + Int64(row) * 4
        length = ptx.load_int(gLength)
        if ptx.load_long(gSlot) >= 0:
            page_index = length // PAGE_TOKENS
            slot = Int64(-1)
            if page_index < num_pages:
                page = ptx.load_int(mPages + row * pages_stride + Int64(page_index) * 4)
                slot = Int64(page) * PAGE_TOKENS + length % PAGE_TOKENS
                ptx.store_int(gLength, length + 1)
            ptx.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[gSlot, slot])


def compile_sample(configuration: SampleConfiguration) -> Any:
    """Function of (values, ids, temperature, top_p, uniform, tokens, rows, stream); three 0 where greedy."""

    @cute.jit
    def launch(
        mValues: Int64, mIds: Int64, mTemperature: Int64, mTopP: Int64, mUniform: Int64, mTokens: Int64, rows: Int32,
        stream: CUstream,
    ) -> None:
        _sample(mValues, mIds, mTemperature, mTopP, mUniform, mTokens, configuration).launch(
            grid=[rows, 1, 1], block=[configuration.threads, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 6, Int32(1), cute.runtime.make_fake_stream())


def compile_advance(configuration: AdvanceConfiguration) -> Any:
    """Function of (num_tokens, pages, their row stride in bytes, pages a row, slots, rows, stream)."""

    @cute.jit
    def launch(
        mNumTokens: Int64, mPages: Int64, pages_stride: Int64, num_pages: Int32, mSlots: Int64, rows: Int32,
        stream: CUstream,
    ) -> None:
        _advance(mNumTokens, mPages, pages_stride, num_pages, mSlots, rows, configuration).launch(
            grid=[1, 1, 1], block=[32, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, Int32(1), zero, Int32(1), cute.runtime.make_fake_stream())
