"""The largest k of each row of logits: the second launch of the LM head, after ``skinny_gemv`` with fp32 output.

What it computes
    mLogits [B, N] fp32 -> per row the k largest (falling; equal logits by rising id, NaN as -infinity) as mTop [B, k]
    fp32 and mIds [B, k] int32 with the rank's first id added. Candidates of all ranks, merged, are the exact top k of
    the vocabulary; only they need to travel.

How data moves
    One block of 256 threads a row, logits in registers from one read to the end. Keys are 64 bits, logit and inverted
    id, so no two are equal. A thread takes every 256th group of four and finds its largest; the k-th largest of those
    256 is a bound that at least k keys reach, and only k threads hold any that do, so the list of survivors is bounded
    by k x N / 256 whatever the logits are. Survivors are ranked by counting.

Why a launch of its own
    A projection with the selection in its last blocks was slower at every shape (10240 x 7168, one row: 51.5 us, of
    which 44.5 were the product; 16 rows: 55.8 us; H200, 2026-11-29): the register ring that left room for the selection
    reached 3.3 TB/s where ``skinny_gemv`` reaches 4.5.

Limits
    N a multiple of 16 between 1024 and 20480, B at most 16, k at most 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from k3sim.kernels.device import ptx

THREADS = 256


@dataclass(frozen=True, kw_only=True)
class TopKConfiguration:
    num_outputs: int
    k: int

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
def _top_k(mLogits: Int64, mTop: Int64, mIds: Int64, first_id: Int32, configuration: cutlass.Constexpr) -> None:
    k, num_outputs = configuration.k, configuration.num_outputs
    num_groups, groups = num_outputs // 4, configuration.groups_per_thread
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    allocator = cutlass.memory.SmemAllocator()
    sKeys = Int32(allocator.allocate(THREADS * 8, 16).toint())  # every thread's largest
    sSurvivors = Int32(allocator.allocate(configuration.max_survivors * 8, 16).toint())
    sBound = Int32(allocator.allocate(8, 8).toint())
    sCount = Int32(allocator.allocate(8, 8).toint())
    if tid == 0:
        ptx.shared_store_int(sCount, Int32(0))
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    mRow = mLogits + Int64(row) * (num_outputs * 4)
    rLogits = cute.make_rmem_tensor((4 * groups,), Uint32)
    rLogits.fill(Uint32(0x7FC00000))  # NaN: below every key of a logit but another NaN's, and those have lower indices
    for turn in range_constexpr(groups):
        at = turn * THREADS + tid
        if at < num_groups:
            words = ptx.load_l2(mRow + Int64(at) * 16)
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
            ptx.store_float(mTop + (Int64(row) * k + place) * 4, _logit_of(key))
            ptx.store_int(mIds + (Int64(row) * k + place) * 4, _index_of(key) + first_id)


def compile_top_k(configuration: TopKConfiguration) -> Any:
    """Function of (logits, top, ids, first_id, rows, stream)."""

    @cute.jit
    def launch(mLogits: Int64, mTop: Int64, mIds: Int64, first_id: Int32, rows: Int32, stream: CUstream) -> None:
        _top_k(mLogits, mTop, mIds, first_id, configuration).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=True,
        )

    zero = Int64(0)
    return cute.compile(launch, zero, zero, zero, Int32(0), Int32(1), cute.runtime.make_fake_stream())
