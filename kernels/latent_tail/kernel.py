"""LatentMoE tail over T ranks, three small launches of one rank: send, up, collect.

What it computes
    out = prefix + W_up RMSNorm(sum over ranks of latent) + sum over ranks of shared, [R, 7168] bf16 on every rank,
    where W_up is sharded by rows: rank r computes outputs [r N, (r + 1) N), N = 7168 / T.

    send     latent [R, 3584] (bf16 or fp32) and shared [R, 7168] bf16, this rank's parts: the latent is stored into
             slot ``rank`` of every rank's latent slots [T, R, 3584] bf16, shared columns [p N, (p + 1) N) into slot
             ``rank`` of rank p's shared slots [T, R, N] bf16.
    up       sums the arrived slots in the order of the ranks, in fp32; norm, W_up [N, 3584] bf16, shared slots added;
             stored as bf16 into columns [rank N, (rank + 1) N) of every rank's gathered [R, 7168].
    collect  gathered (plus prefix [R, 7168] bf16 where there is one) to out; empties all slots. In a chain of layers
             ``proj_allreduce.consume_gathered`` does this together with the attention residual.

How data moves
    Between ranks by stores to the peers' addresses, 16 bytes each. Data is its own flag: a reader rereads 16 bytes
    until no 32-bit word of them is EMPTY (all bits set: two bf16 NaN that no conversion produces; send replaces them,
    should its input hold any). ``collect`` writes EMPTY back, so a replay is like a first run and nothing counts
    epochs. Every rank sums the same bf16 values in the same order and so has the same bits.
    ``up`` asks for its weights before the dependency wait, all of them, 57 KB a block for 8 outputs, so what remains
    after the last slot arrives is a chain of latencies. Eight blocks form a cluster: each sums 448 columns, rounds
    (sum x norm weight) to bf16 and stores it into the shared memory of all eight; the norm's factor is applied to the
    finished product, so one cluster barrier is enough.

Why this shape
    Without the cluster every block would read all slots: 57 KB x 112 blocks at TP8. A launch for sum and norm alone
    costs a further boundary (0.45 us measured with PDL). The product is mma.sync m16n8k16, the weights operand A with
    half of its rows unused: they stay in the registers they were loaded to, for any number of rows; a
    form with fp32 FMAs, one output a warp, took 3 us a row more (H200, 2026-11-29).

Limits
    Latent 3584, hidden 7168, T = 1, 2, 4, 8, 16; R from 1 to 16. Between two uses of a set of slots each rank must
    have received something sent by every other after its ``collect``, as the next all-reduce ensures; two sets that
    alternate make that hold for any order of exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.device.kernel_class import ConfiguredKernel, thread_place
from k3sim.kernels.device.lamport import await4, await_slots, sum_slots
from k3sim.kernels.device.sums import lane_sum

LATENT = 3584
HIDDEN = 7168
CLUSTER = 8
OUTPUTS = 8  # of a block of ``up``
UP_WARPS = 4  # that split K
UP_THREADS = UP_WARPS * 32
WARP_COLUMNS = LATENT // UP_WARPS
STEPS = WARP_COLUMNS // 32
ROW_BYTES = LATENT * 2 + 64  # of x and of weights in shared memory: rows read together must not share a bank
UP_BLOCKS_PER_SM = 5  # bounds the registers: 128 threads must fit beside a block of the experts
COPY_THREADS = 224
CHUNK = 8  # bf16 values of one 16-byte access
LATENT_CHUNKS = LATENT // CHUNK
HIDDEN_CHUNKS = HIDDEN // CHUNK
PART = LATENT // CLUSTER  # columns that one block of a cluster sums
HALF_CHUNKS = PART // CHUNK // 2  # a warp sums half of them: 28 lanes
EMPTY = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class TailConfiguration:
    """What changes the machine code. ``fp32_latent``: of ``send``. ``prefix``: whether ``collect`` adds one.
    ``shared_only``: ``send`` moves the shared expert's columns alone.

    ``release_late``: ``up`` lets the next launch start only after its own dependency wait.
    """

    ranks: int
    max_rows: int = 1  # shared memory of ``up``: 1, 4 or 16
    fp32_latent: bool = False
    prefix: bool = False
    release_late: bool = False
    shared_only: bool = False

    @property
    def outputs(self) -> int:
        return HIDDEN // self.ranks

    @property
    def up_smem_bytes(self) -> int:
        by_row = ROW_BYTES + 2 * CLUSTER * 4 + self.ranks * OUTPUTS * 2 + OUTPUTS * 2
        partial_bytes = (self.max_rows + 7) // 8 * UP_WARPS * 8 * OUTPUTS * 4
        return OUTPUTS * ROW_BYTES + self.max_rows * by_row + partial_bytes + 8  # the barrier


def not_empty(word: Uint32) -> Uint32:
    """Two bf16 NaN of all ones become the usual ones."""
    sendable: Uint32 = inline_ptx(
        f"{{ .reg .pred p; setp.eq.u32 p, {{$r0}}, {EMPTY:#x}; selp.b32 {{$w0}}, 0x7fff7fff, {{$r0}}, p; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )
    return sendable


def _add_pairs(totals: list[Float32], words: ptx.Words) -> list[Float32]:
    return [total + value for total, value in zip(totals, ptx.widen_bf16(words), strict=True)]


class TailSend(ConfiguredKernel[TailConfiguration]):
    """Push this rank's parts; blocks 0 and 1 of a row move the latent, four more the shared expert's columns."""

    @cute.jit
    def __call__(
        self, latent: Int64, shared: Int64, latent_slots: Int64, shared_slots: Int64, rank: Int32, rows: Int32,
        stream: CUstream,
    ) -> None:
        self.device(latent, shared, latent_slots, shared_slots, rank, rows).launch(
            grid=(4 if self.config.shared_only else 6, rows, 1),
            block=(COPY_THREADS, 1, 1),
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=True,
        )

    @cute.kernel
    def device(
        self, latent: Int64, shared: Int64, latent_slots: Int64, shared_slots: Int64, rank: Int32, rows: Int32
    ) -> None:
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        part, row, _ = cute.arch.block_idx()
        if const_expr(c.shared_only):
            part = part + 2
        cute.arch.griddepcontrol_launch_dependents()
        if part < 2:
            chunk = part * COPY_THREADS + tid
            place = Int64((rank * rows + row) * LATENT_CHUNKS + chunk) * 16
            peers = [ptx.load_long(latent_slots + Int64(8 * peer)) for peer in range(c.ranks)]
            cute.arch.griddepcontrol_wait()
            if const_expr(c.fp32_latent):
                g_mine = latent + Int64(row * LATENT_CHUNKS + chunk) * 32
                floats = [
                    ptx.bits_as_float(word) for half in range(2) for word in ptx.load_l2(g_mine + Int64(16 * half))
                ]
                words = ptx.narrow_bf16(floats)
            else:
                words = list(ptx.load_l2(latent + Int64(row * LATENT_CHUNKS + chunk) * 16))
            words = [not_empty(word) for word in words]
            for peer in range_constexpr(c.ranks):
                ptx.store_to_peer(peers[peer] + place, words)
        else:
            chunk = (part - 2) * COPY_THREADS + tid
            per_rank = c.outputs // CHUNK
            peer = chunk // per_rank
            base = ptx.load_long(shared_slots + Int64(peer * 8))
            cute.arch.griddepcontrol_wait()
            words = [not_empty(word) for word in ptx.load_l2(shared + Int64(row * HIDDEN_CHUNKS + chunk) * 16)]
            ptx.store_to_peer(base + Int64((rank * rows + row) * per_rank + chunk % per_rank) * 16, words)


class TailUp(ConfiguredKernel[TailConfiguration]):
    """Sum, norm, sharded up-projection, shared-expert add, push to every rank."""

    @cute.jit
    def __call__(
        self, latent_slots: Int64, shared_slots: Int64, norm_weight: Int64, up: Int64, gathered: Int64, rank: Int32,
        rows: Int32, eps: Float32, stream: CUstream,
    ) -> None:
        self.device(latent_slots, shared_slots, norm_weight, up, gathered, rank, rows, eps).launch(
            grid=(self.config.outputs // OUTPUTS, 1, 1),
            block=(UP_THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            smem=self.config.up_smem_bytes,
            min_blocks_per_mp=UP_BLOCKS_PER_SM,
            preferred_smem_carveout=ptx.ALL_SHARED,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(
        self, latent_slots: Int64, shared_slots: Int64, norm_weight: Int64, up: Int64, gathered: Int64, rank: Int32,
        rows: Int32, eps: Float32,
    ) -> None:
        c = self.config
        tid, warp, lane = thread_place()
        block, _, _ = cute.arch.block_idx()
        member = block & (CLUSTER - 1)
        s_weights = cute.arch.get_dyn_smem(Uint8, alignment=128).toint().to(Int32)  # [8, 3584] bf16, padded
        s_x = s_weights + OUTPUTS * ROW_BYTES  # [max rows, 3584] bf16, padded
        s_squares = s_x + c.max_rows * ROW_BYTES  # [max rows, 16] fp32
        s_shared = s_squares + c.max_rows * 2 * CLUSTER * 4  # [max rows, ranks, 8] bf16
        s_parts = s_shared + c.max_rows * c.ranks * OUTPUTS * 2  # [rows / 8, warp, row, output] fp32
        s_y = s_parts + (c.max_rows + 7) // 8 * UP_WARPS * 8 * OUTPUTS * 4  # [max rows, 8] bf16
        s_barrier = s_y + c.max_rows * OUTPUTS * 2

        began = timestamps.now("latent_tail")
        # No peer may be stored to before it runs.
        ptx.cluster_arrive()
        if tid == 0:
            ptx.barrier_init(s_barrier, 1)
            ptx.barrier_init_fence()
        cute.arch.sync_threads()
        if tid == 0:  # behind the barrier, as the initialisation may be another lane's
            ptx.barrier_expect(s_barrier, OUTPUTS * LATENT * 2)
        if tid < OUTPUTS:
            g_row = up + Int64(block * OUTPUTS + tid) * (LATENT * 2)
            ptx.bulk_copy(s_weights + tid * ROW_BYTES, g_row, LATENT * 2, s_barrier)
        # Lane (g, t) takes columns 32 j + 8 t .. 8 t + 7 of output g, an order of K that operand B follows.
        group, t = lane >> 2, lane & 3
        first_column = warp * WARP_COLUMNS + t * CHUNK
        half = warp & 1
        summing = lane < HALF_CHUNKS
        chunk = member * (PART // CHUNK) + half * HALF_CHUNKS + cutlass.min(lane, HALF_CHUNKS - 1)
        norm = ptx.load_cached(norm_weight + Int64(chunk * 16))
        # Addresses of the peers, at the end, are a trip to HBM: it is made now.
        turns = -(-c.max_rows * c.ranks // UP_THREADS)
        items = [tid + turn * UP_THREADS for turn in range(turns)]
        bases = [ptx.load_long(gathered + Int64(item % c.ranks * 8)) for item in items]
        ptx.cluster_wait()
        if const_expr(not c.release_late):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if const_expr(c.release_late):
            cute.arch.griddepcontrol_launch_dependents()
        released = timestamps.now("latent_tail")

        # A few rows at a time, two warps each: this block's columns of the sum, to every block of the cluster.
        for first in cutlass.range(0, rows, UP_WARPS // 2, unroll=1):
            row = first + (warp >> 1)
            if row < rows:
                r_arrived = cute.make_rmem_tensor((c.ranks * 4,), Uint32)
                g_slots = latent_slots + Int64(row * LATENT_CHUNKS + chunk) * 16
                await_slots(g_slots, r_arrived, c.ranks, Int64(rows * (LATENT * 2)), EMPTY)
                totals = sum_slots(r_arrived, c.ranks)
                squares = Float32(0.0)
                for i in range_constexpr(CHUNK):
                    squares = squares + totals[i] * totals[i]
                squares = lane_sum(squares if summing else Float32(0.0))
                scale = ptx.widen_bf16(norm)
                packed = ptx.narrow_bf16([total * one for total, one in zip(totals, scale, strict=True)])
                for peer in range_constexpr(CLUSTER):
                    if summing:
                        ptx.peer_store4(ptx.peer_shared(s_x + row * ROW_BYTES + chunk * 16, Int32(peer)), packed)
                    if lane == 0:
                        s_place = s_squares + (row * (2 * CLUSTER) + member * 2 + half) * 4
                        ptx.peer_store_float(ptx.peer_shared(s_place, Int32(peer)), squares)
        # One thread a rank and row asks for the shared expert's part of the block's outputs, and judges it later.
        asked = [item // c.ranks < rows for item in items]
        g_shared = [
            shared_slots
            + Int64(
                ((item % c.ranks * rows + cutlass.min(item // c.ranks, rows - 1)) * c.outputs + block * OUTPUTS) * 2
            )
            for item in items
        ]
        shared = [ptx.load_from_peer(place) for place in g_shared]
        ptx.barrier_wait(s_barrier, Int32(0))
        ptx.cluster_arrive()
        ptx.cluster_wait()

        # Eight outputs fill half of operand A's rows; columns of operand B without a row of x repeat the last one.
        zero = Uint32(0)
        for half_rows in range_constexpr((c.max_rows + 7) // 8):
            sums: Any = [Float32(0.0)] * 4
            others: Any = [Float32(0.0)] * 4
            s_row = s_x + cutlass.min(half_rows * 8 + group, rows - 1) * ROW_BYTES + first_column * 2
            s_weight = s_weights + group * ROW_BYTES + first_column * 2
            for j in range_constexpr(STEPS):
                x = ptx.shared_load4(s_row + 64 * j)
                w = ptx.shared_load4(s_weight + 64 * j)
                sums = ptx.mma(sums, [w[0], zero, w[1], zero], x[:2], operand="bf16")
                others = ptx.mma(others, [w[2], zero, w[3], zero], x[2:], operand="bf16")
            # Accumulators 0 and 1: output g, rows 2t and 2t + 1 of these eight.
            s_place = s_parts + (((half_rows * UP_WARPS + warp) * 8 + 2 * t) * OUTPUTS + group) * 4
            ptx.shared_store_float(s_place, sums[0] + others[0])
            ptx.shared_store_float(s_place + OUTPUTS * 4, sums[1] + others[1])
        for turn in range_constexpr(turns):
            if asked[turn]:
                ptx.shared_store4(s_shared + items[turn] * 16, _arrived(g_shared[turn], shared[turn]))
        cute.arch.sync_threads()

        row, output = tid // OUTPUTS, tid % OUTPUTS
        if row < rows:
            squares = Float32(0.0)
            for i in range_constexpr(2 * CLUSTER // 4):
                parts = ptx.shared_load4(s_squares + row * (2 * CLUSTER * 4) + i * 16)
                for word in range_constexpr(4):
                    squares = squares + ptx.bits_as_float(parts[word])
            product = Float32(0.0)
            for part in range_constexpr(UP_WARPS):
                s_place = s_parts + ((((row >> 3) * UP_WARPS + part) * 8 + (row & 7)) * OUTPUTS + output) * 4
                product = product + ptx.shared_load_float(s_place)
            y = product * cute.math.rsqrt(squares * Float32(1.0 / LATENT) + eps)
            for peer in range_constexpr(c.ranks):
                half_word = ptx.shared_load_half(s_shared + (row * c.ranks + peer) * 16 + output * 2)
                y = y + ptx.low_bf16(half_word)
            ptx.shared_store_half(s_y + (row * OUTPUTS + output) * 2, ptx.pack_bf16(y, Float32(0.0)))
        cute.arch.sync_threads()
        for turn in range_constexpr(turns):
            if asked[turn]:
                taken = items[turn] // c.ranks
                place = Int64(taken * HIDDEN + rank * c.outputs + block * OUTPUTS) * 2
                ptx.store_to_peer(bases[turn] + place, ptx.shared_load4(s_y + taken * (OUTPUTS * 2)))
        if const_expr(timestamps.on("latent_tail")):  # noqa: SIM102 - one is of the build, the other of the thread
            if tid == 0:
                timestamps.record("latent_tail.up", block, began, released)


def _arrived(g_address: Int64, words: ptx.Words) -> ptx.Words:
    """``words``, a first reading of ``g_address``, or a later one that is complete."""
    # Registers of its own: an output may share one with an input that is still needed.
    checks = " ".join(f"setp.eq.u32 p, w{i}, {EMPTY:#x}; @p bra again;" for i in range(4))
    enter = " ".join(f"mov.b32 w{i}, {{$r{i + 1}}};" for i in range(4))
    leave = " ".join(f"mov.b32 {{$w{i}}}, w{i};" for i in range(4))
    arrived: ptx.Words = inline_ptx(
        "{ .reg .pred p; .reg .b32 w0, w1, w2, w3; " + enter + " bra check; "
        "again: ld.volatile.global.v4.b32 {w0, w1, w2, w3}, [{$r0}]; check: " + checks + " " + leave + " }",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_address, *words],
    )
    return arrived


class TailCollect(ConfiguredKernel[TailConfiguration]):
    """Gathered outputs to ``out``; every slot is emptied for its next use. Five blocks a row, two that only empty."""

    @cute.jit
    def __call__(
        self, gathered: Int64, latent_slots: Int64, shared_slots: Int64, prefix: Int64, out: Int64, rows: Int32,
        stream: CUstream,
    ) -> None:
        self.device(gathered, latent_slots, shared_slots, prefix, out, rows).launch(
            grid=(6, rows, 1), block=(COPY_THREADS, 1, 1), stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=True,
        )

    @cute.kernel
    def device(
        self, gathered: Int64, latent_slots: Int64, shared_slots: Int64, prefix: Int64, out: Int64, rows: Int32
    ) -> None:
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        part, row, _ = cute.arch.block_idx()
        empty = [Uint32(EMPTY)] * 4
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if part < 4:
            place = Int64(row * HIDDEN_CHUNKS + part * COPY_THREADS + tid) * 16
            if const_expr(c.prefix):
                before = ptx.load_l2(prefix + place)
            words: Any = await4(gathered + place, EMPTY)
            ptx.store(gathered + place, empty)
            if const_expr(c.prefix):
                totals = _add_pairs(_add_pairs([Float32(0.0)] * CHUNK, words), before)
                words = ptx.narrow_bf16(totals)
            ptx.store(out + place, words)
        else:
            # The slots were read by the launch before this one, which has ended.
            first = (row * 2 + part - 4) * COPY_THREADS + tid
            step = rows * 2 * COPY_THREADS
            for chunk in cutlass.range(first, c.ranks * rows * LATENT_CHUNKS, step, unroll=1):
                ptx.store(latent_slots + Int64(chunk) * 16, empty)
            for chunk in cutlass.range(first, c.ranks * rows * (c.outputs // CHUNK), step, unroll=1):
                ptx.store(shared_slots + Int64(chunk) * 16, empty)


def compile_send(configuration: TailConfiguration) -> Any:
    """``(latent, shared, latent_slots, shared_slots, rank, rows, stream)``; slots are tables of ranks' addresses."""
    zero = Int64(0)
    return cute.compile(TailSend(configuration), zero, zero, zero, zero, Int32(0), Int32(1), CUstream(0))


def compile_up(configuration: TailConfiguration) -> Any:
    """``(latent_slots, shared_slots, norm_weight, up, gathered, rank, rows, eps, stream)``; gathered is a table."""
    zero = Int64(0)
    return cute.compile(
        TailUp(configuration), zero, zero, zero, zero, zero, Int32(0), Int32(1), Float32(1e-5), CUstream(0)
    )


def compile_collect(configuration: TailConfiguration) -> Any:
    """``(gathered, latent_slots, shared_slots, prefix, out, rows, stream)``, all this rank's own."""
    zero = Int64(0)
    return cute.compile(TailCollect(configuration), zero, zero, zero, zero, zero, Int32(1), CUstream(0))
