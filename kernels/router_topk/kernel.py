"""Exact top-16 of 896 for 1 to 256 rows, one block a row: gather of sharded logits, bias, selection, weights.

What it computes
    ids [R, 16] int32 and weights [R, 16] fp32 from logits in fp32, which lie as ``num_shards`` shards
    [R, 896 / num_shards]: one after the other from one address, or at the addresses of a table (a peer's memory can be
    among them). bias [896] fp32 takes part in the selection only. Order: sigmoid plus bias descending, equal ones by
    lower id, NaN last; best first.

How data moves
    224 threads hold four logits each: one 16-byte load. With ``poll`` a shard is pushed by its owner while this kernel
    may already run: a thread rereads its 16 bytes until no word of them is ``EMPTY`` (all bits set, a NaN that no
    arithmetic instruction produces), then puts EMPTY back for the next use. So data is its own flag, nothing counts
    epochs and a replay is like a first run. The bias is loaded before the dependency wait.

    ``GatherTopk`` is the polled form behind a front that the ranks divide (``skinny_gemv``, polled push): a rank's
    block of a row holds its columns of the logits and its columns of the latent, fp32, [shards, rows, 4480 / shards].
    Beside the block that selects, two blocks a row collect the latent, eight columns a thread, and round it to bf16
    [R, 3584], once. All put EMPTY back. One buffer is enough: a peer pushes the front of layer l + 1 after it has
    consumed the attention's all-reduce of that layer, to which this rank's part was sent by a launch that follows this
    one on its stream, and so after all that this one stored. With ``early`` nothing waits for the end of the rank's own
    front, whose words arrive like those of its peers; the wait comes last. Then ids, weights and latent are written
    before that front has ended, so no launch may still read them: every launch that does must have ended before the
    front could begin, as it has where an all-reduce by ``proj_allreduce`` lies between.

Why this shape
    Latency is all: 3.6 KB a row. A key is 64 bits, score above complemented id, so all keys differ and comparing keys
    is the whole order. The largest keys of 56 groups of 16 are found by two shuffles; the 16th largest of those bounds
    the answer from below, because 16 keys at least reach it, and keys that reach it lie in 16 groups, 256 at most and
    20 as a rule. These few are ranked by counting, spread over all threads. Four block barriers in all, against 16
    rounds of a repeated maximum or eight of a radix search, and no step whose cost depends on the values except the
    last count.

Limits
    896 experts, 16 selected, any number of shards that divides 224 (a thread's four logits lie in one). With ``poll``,
    between two uses of a buffer each owner must have received something that this rank sent after the first use, as
    any all-reduce in between ensures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.device.kernel_class import ConfiguredKernel
from k3sim.kernels.device.lamport import await4
from k3sim.kernels.device.ordered_key import exchange_key, larger_key, load_key, ordered_key, store_key

EXPERTS = 896
TOP_K = 16
THREADS = EXPERTS // 4
GROUPS = EXPERTS // 16
LATENT = 3584
LATENT_BLOCKS = LATENT // (8 * THREADS)  # a thread collects eight columns
COUNT_AT = EXPERTS * 16 + GROUPS * 8 + TOP_K * 8 + 8  # in shared memory, behind candidates, groups, chosen and bound
SMEM_BYTES = COUNT_AT + 24
EMPTY = 0xFFFFFFFF
MAX_POLLS = 20_000_000
# Of both kernels' launches.
BLOCK: dict[str, Any] = {
    "block": (THREADS, 1, 1), "smem": SMEM_BYTES, "preferred_smem_carveout": ptx.ALL_SHARED, "use_pdl": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RouterConfiguration:
    """What changes the machine code. ``table``: shards at the addresses of a table. ``poll``: wait for each word."""

    num_shards: int
    table: bool = False
    poll: bool = False


def _await(g_address: Int64, count: int) -> ptx.Words:
    """``count`` times 16 bytes, once each of their words has arrived; a trap after about ten seconds."""
    loads = " ".join(
        f"ld.relaxed.sys.global.v4.b32 {{{{$w{4 * i}}}, {{$w{4 * i + 1}}}, {{$w{4 * i + 2}}}, {{$w{4 * i + 3}}}}}, "
        f"[{{$r0}}+{16 * i}];"
        for i in range(count)
    )
    checks = " ".join(f"setp.eq.u32 p, {{$w{i}}}, {EMPTY:#x}; @p bra again;" for i in range(4 * count))
    arrived: ptx.Words = inline_ptx(
        "{ .reg .pred p; .reg .b32 polls; mov.b32 polls, 0; again: add.u32 polls, polls, 1; "
        f"setp.gt.u32 p, polls, {MAX_POLLS}; @p trap; " + loads + " " + checks + " }",
        write_only_types=[Uint32] * (4 * count),
        read_only_args=[g_address],
    )
    return arrived


def _zero_if_nan(score: Float32, choice: Float32) -> Float32:
    return inline_ptx(
        "{ .reg .pred p; setp.nan.f32 p, {$r1}, {$r1}; selp.f32 {$w0}, 0f00000000, {$r0}, p; }",
        write_only_types=[Float32],
        read_only_args=[score, choice],
    )


def _one_if(condition: Boolean) -> Int32:
    return condition.to(Int32)


@cute.jit
def _select(
    words: Any, bias_words: Any, ids: Int64, weights: Int64, row: Int32, tid: Int32, s_candidates: Int32
) -> None:
    """The block's selection from each thread's four logits; the counter behind the bound is 0."""
    lane = tid & 31
    s_groups = s_candidates + EXPERTS * 16
    s_chosen = s_groups + GROUPS * 8  # (id, score)
    s_bound = s_chosen + TOP_K * 8
    s_count = s_candidates + COUNT_AT
    scores = []
    keys = []
    for i in range_constexpr(4):
        score = Float32(1.0) / (Float32(1.0) + cute.math.exp(-ptx.bits_as_float(words[i])))
        choice = score + ptx.bits_as_float(bias_words[i])
        keys.append(ordered_key(choice, tid * 4 + i))
        scores.append(_zero_if_nan(score, choice))

    # Largest key of each group of 16: four here, four lanes.
    largest = larger_key(larger_key(keys[0], keys[1]), larger_key(keys[2], keys[3]))
    largest = larger_key(largest, exchange_key(largest, 1))
    largest = larger_key(largest, exchange_key(largest, 2))
    if (lane & 3) == 0:
        store_key(s_groups + (tid >> 2) * 8, largest)
    cute.arch.sync_threads()

    # Rank of each group's key among the 56, counted by the group's four threads; number 15 is the bound.
    above = Int32(0)
    for i in range_constexpr(GROUPS // 4):
        above = above + _one_if(load_key(s_groups + ((lane & 3) * (GROUPS // 4) + i) * 8) > largest)
    above = above + cute.arch.shuffle_sync_bfly(above, offset=1)
    above = above + cute.arch.shuffle_sync_bfly(above, offset=2)
    if ((lane & 3) == 0) & (above == TOP_K - 1):
        store_key(s_bound, largest)
    cute.arch.sync_threads()

    bound = load_key(s_bound)
    for i in range_constexpr(4):
        if keys[i] >= bound:
            place = inline_ptx(
                "atom.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[s_count]
            )
            store_key(s_candidates + place * 16, keys[i])
            ptx.shared_store_float(s_candidates + place * 16 + 8, scores[i])
    cute.arch.sync_threads()

    # Rank of each candidate among the candidates, by four threads each; the order of arrival does not matter.
    count = ptx.shared_load_int(s_count)
    for turn in cutlass.range((count + GROUPS - 1) // GROUPS, unroll=1):
        place = turn * GROUPS + (tid >> 2)
        key = load_key(s_candidates + cutlass.min(place, count - 1) * 16)
        rank = Int32(0)
        for other in cutlass.range(lane & 3, count, 4, unroll=1):
            rank = rank + _one_if(load_key(s_candidates + other * 16) > key)
        cute.arch.sync_warp()
        rank = rank + cute.arch.shuffle_sync_bfly(rank, offset=1)
        rank = rank + cute.arch.shuffle_sync_bfly(rank, offset=2)
        if ((lane & 3) == 0) & (rank < TOP_K) & (place < count):
            ptx.shared_store_int(s_chosen + rank * 8, (Uint32(0xFFFFFFFF) - key.to(Uint32)).to(Int32))
            ptx.shared_store_float(s_chosen + rank * 8 + 4, ptx.shared_load_float(s_candidates + place * 16 + 8))
    cute.arch.sync_threads()

    if tid < 32:
        slot = lane & (TOP_K - 1)
        expert = ptx.shared_load_int(s_chosen + slot * 8)
        score = ptx.shared_load_float(s_chosen + slot * 8 + 4)
        total = score
        for i in range_constexpr(4):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
        if lane < TOP_K:
            place = Int64(row * TOP_K + lane) * 4
            ptx.store_int(ids + place, expert)
            ptx.store_float(weights + place, score / (total + Float32(1e-20)))


class RouterTopk(ConfiguredKernel[RouterConfiguration]):
    """The kernel for one configuration; tensors arrive as addresses, so that a call converts nothing."""

    @cute.jit
    def __call__(self, logits: Int64, bias: Int64, ids: Int64, weights: Int64, rows: Int32, stream: CUstream) -> None:
        self.device(logits, bias, ids, weights, rows).launch(
            grid=(rows, 1, 1), stream=stream, **BLOCK
        )

    @cute.kernel
    def device(self, logits: Int64, bias: Int64, ids: Int64, weights: Int64, rows: Int32) -> None:
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        s_candidates = cute.arch.get_dyn_smem(Uint8, alignment=16).toint().to(Int32)  # (key, score), 16 bytes each

        bias_words = ptx.load_cached(bias + Int64(tid * 16))
        if tid == 0:
            ptx.shared_store_int(s_candidates + COUNT_AT, Int32(0))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        words = self._load_logits(logits, row, rows, tid)
        _select(words, bias_words, ids, weights, row, tid, s_candidates)

    @cute.jit
    def _load_logits(self, logits: Int64, row: Int32, rows: Int32, tid: Int32) -> Any:
        c = self.config
        per_shard = EXPERTS // c.num_shards
        shard = tid * 4 // per_shard
        in_shard = tid * 4 % per_shard
        if const_expr(c.table):
            base = ptx.load_long(logits + Int64(shard * 8))
        else:
            base = logits + Int64(shard) * Int64(rows * (per_shard * 4))
        g_mine = base + Int64(row * per_shard + in_shard) * 4
        if const_expr(c.poll):
            words = await4(g_mine, EMPTY)
            ptx.store(g_mine, [Uint32(EMPTY)] * 4)
        else:
            words = ptx.load_l2(g_mine)
        return words


@dataclass(frozen=True, kw_only=True)
class GatherConfiguration:
    """``early``: poll and write before the launch before has ended. ``release_next``: the next one starts at once."""

    num_shards: int
    early: bool
    release_next: bool


class GatherTopk(ConfiguredKernel[GatherConfiguration]):
    """Logits and latent of every rank: a row has one block that selects, and two that collect the latent."""

    @cute.jit
    def __call__(
        self, slots: Int64, slot_bytes: Int64, bias: Int64, ids: Int64, weights: Int64, latent: Int64, rows: Int32,
        stream: CUstream,
    ) -> None:
        self.device(slots, slot_bytes, bias, ids, weights, latent).launch(
            grid=(1 + LATENT_BLOCKS, rows, 1), stream=stream, **BLOCK
        )

    @cute.kernel
    def device(self, slots: Int64, slot_bytes: Int64, bias: Int64, ids: Int64, weights: Int64, latent: Int64) -> None:
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        part, row, _ = cute.arch.block_idx()
        s_candidates = cute.arch.get_dyn_smem(Uint8, alignment=16).toint().to(Int32)
        experts, columns = EXPERTS // c.num_shards, LATENT // c.num_shards  # of one shard
        g_row = slots + Int64(row * ((experts + columns) * 4))
        began = timestamps.now("router_topk")
        if const_expr(c.release_next):
            cute.arch.griddepcontrol_launch_dependents()
        if part == 0:
            bias_words = ptx.load_cached(bias + Int64(tid * 16))
            if tid == 0:
                ptx.shared_store_int(s_candidates + COUNT_AT, Int32(0))
            if const_expr(not c.early):
                cute.arch.griddepcontrol_wait()
            g_mine = g_row + Int64(tid * 4 // experts) * slot_bytes + Int64(tid * 4 % experts) * 4
            words = _await(g_mine, 1)
            ptx.store(g_mine, [Uint32(EMPTY)] * 4)
            _select(words, bias_words, ids, weights, row, tid, s_candidates)
        else:
            if const_expr(not c.early):
                cute.arch.griddepcontrol_wait()
            first = ((part - 1) * THREADS + tid) * 8
            g_mine = g_row + Int64(first // columns) * slot_bytes + Int64(experts + first % columns) * 4
            words = _await(g_mine, 2)
            for half in range_constexpr(2):
                ptx.store(g_mine + 16 * half, [Uint32(EMPTY)] * 4)
            values = [ptx.bits_as_float(word) for word in words]
            packed = ptx.narrow_bf16(values)
            ptx.store(latent + Int64(row * LATENT + first) * 2, packed)
        if const_expr(c.early):
            # Launches that wait for this one rely on everything before it.
            cute.arch.griddepcontrol_wait()
        if const_expr(timestamps.on("router_topk")):  # noqa: SIM102 - one is of the build, the other of the thread
            if tid == 0:
                timestamps.record("router_topk.gather", row * cute.arch.grid_dim()[0] + part, began)


def compile_router(configuration: RouterConfiguration) -> Any:
    """The kernel as a callable ``(logits, bias, ids, weights, rows, stream)`` of addresses, a number and a CUstream;
    ``logits`` is the address of the first shard or of the table. Needs no GPU.
    """
    zero = Int64(0)
    return cute.compile(RouterTopk(configuration), zero, zero, zero, zero, Int32(1), CUstream(0))


def compile_gather(configuration: GatherConfiguration) -> Any:
    """The kernel as a callable ``(slots, slot_bytes, bias, ids, weights, latent, rows, stream)``; ``slot_bytes`` from
    one shard to the next. Needs no GPU.
    """
    zero = Int64(0)
    return cute.compile(GatherTopk(configuration), *[zero] * 6, Int32(1), CUstream(0))
