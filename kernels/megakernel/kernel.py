"""One persistent kernel that runs an instruction list: one block an SM, its queue in order, counters in L2.

What it computes
    The instructions of ``instructions.Opcode`` at one row, hidden width 7168, as ``reference`` has them.

How data moves
    A block has eight computing warps and one that loads. That one walks the queue ahead of the others and copies every
    stage of every stream (weights, KDA states) into a ring of 15 stages of shared memory by bulk copies. It waits for
    free stages only, never for a counter, so HBM is read while the computing warps wait for other SMs: up to 215 KB an
    SM, 28 MB of the GPU, 6.2 us of its read rate.

    Of that ring at most ``window`` stages are under way while a product reads it, else ``narrow_window``. More would
    queue in front of everything else that passes L2: with 14 of them, 200 KB an SM, words that an SM had pushed to
    itself came back after 8 us, with four after 2 (H200, 2026-12-01, docs/journal/2026-12-01-megakernel.md). A product
    says so in shared memory from its input on until ``narrow_rows`` rows are left, whose stages have been asked for. A
    rule by how many stages are unread took 42.3 us a layer instead of 40.4 to 41.0: it is narrow where a product has
    just begun.

    A stage of a product holds whole rows. Seven warps take a part of each, with their part of the input in registers;
    sums of two rows are folded over the lanes together and meet in shared memory by warp. Rows of pushed products are
    short: there a stage belongs to one warp, and the warps take turns. A warp a row, with the input in shared memory,
    lost: it reads three bytes of shared memory for one of weights.

    The residual's mix and norm are no instruction: REDUCE leaves four sums an SM (x.x, x.probe, a.x, a.a, with a the
    snapshots' part), and every product that needs the normalised row folds it itself, with what does not depend on the
    residual loaded before the wait. It is ready 0.1 us after the residual is there.

Hand-overs
    By words that are their own flags, everywhere but at the end. An output of a product or a head is a word: its bf16
    value above a tag, which tells a version from the one before, so nobody empties it. Exchanges between ranks, also of
    a loopback fabric, know only that a word has arrived (``device.lamport``); the eighth warp polls, adds, and frees
    the slots of the exchange before, while the others have gone on to the next product. The new residual goes to all
    SMs in the same way, a line of 128 bytes an SM. With counters in place of all flags but those of exchanges a layer
    took 46.1 us, with counters for outputs 44.8, with none 42.3 (H200, 2026-12-01): a release waits until what was
    stored before it is visible, and then counter and data are two trips. The one counter left says that all is over. It
    is never reset: its target is that of a launch times the number of launches, which the last instruction counts.

    A wait of more than ``watchdog_ns`` writes down its instruction and counter and is given up, by all blocks: the
    kernel ends with wrong results and a record (``launch.Megakernel.check``), not with a hung GPU. Polls for exchanges
    and the residual, which begin early, may take twice as long, so that of a chain of waits one near the cause is
    named.

Limits
    One row, hidden width 7168, KDA heads of 128, depths of pushed products that are multiples of 8 up to 4,096, fewer
    than 8,191 calls a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr, select_
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx
from k3sim.kernels.device.kernel_class import ConfiguredKernel, thread_place
from k3sim.kernels.device.lamport import EMPTY
from k3sim.kernels.device.sums import lane_sum
from k3sim.kernels.megakernel.instructions import Opcode
from k3sim.kernels.megakernel.list_builder import (
    COLUMNS,
    LINE_BYTES,
    MAX_WINDOW,
    PACKETS,
    PRODUCT_WARPS,
    PUSHED,
    RING_STAGES,
    STAGE_BYTES,
    pushed_rows_per_stage,
)
from k3sim.kernels.megakernel.record import (
    ADDRESSES,
    COUNT,
    FIRST,
    NUMBER,
    OPCODE,
    PACKET,
    RECORD_BYTES,
    RESTARTS,
    SIGNAL,
    STAGES_OF,
    STREAM,
    TARGET,
    VARIANT,
    VERSION,
    WAIT,
)

HIDDEN = 7168
HEAD_DIM = 128
WARPS = 8  # that compute
THREADS = 32 * WARPS
EXCHANGE_WARP = PRODUCT_WARPS  # the last one sums exchanges meanwhile
CHUNK = 8  # bf16 values in 16 bytes
THREAD_CHUNKS = HIDDEN // CHUNK // (32 * PRODUCT_WARPS)
THREAD_VALUES = CHUNK * THREAD_CHUNKS
ROW_GROUP = 2  # rows whose sums are folded together; with four a layer took 41.0 us, not 40.6 (H200, 2026-12-01)
MAX_ROWS = 64  # of a product on an SM, pairs counted twice
L2_EPSILON = 1e-6
NORM_EPSILON = 1e-5
DECAY_BOUND = -5.0
NUM_PARTS = HIDDEN // COLUMNS  # SMs that reduce
PACKET_BYTES = NUM_PARTS * LINE_BYTES
GATE_STAGES, STATE_STAGES, STATE_ROWS = 4, 8, 16  # of a head: 32 rows of the gate weight, 16 of the state a stage
# Shared memory: ring, full and empty barriers, sums of a product by warp, what the threads of a head share.
BARRIERS = RING_STAGES * STAGE_BYTES
SCRATCH = BARRIERS + 16 * RING_STAGES
HEAD = SCRATCH + 4 * PRODUCT_WARPS * MAX_ROWS
INPUT = HEAD + 4096 + 32  # of a pushed product, bf16
MAX_DEPTH = 4096
BUSY = INPUT + 2 * MAX_DEPTH  # whether a product is reading the ring
SMEM_BYTES = BUSY + 16
TAG_STEP = 8191  # of a launch; more than a list has calls
POLLS_BETWEEN_CHECKS = 1024
STAMPS_BYTES = 48  # of an instruction: fetched, let go, done; of some its input or output ready, 16 rows done
TRAP_NS = 3_000_000_000


@dataclass(frozen=True, kw_only=True)
class MegakernelConfiguration:
    """What the machine code depends on. ``depths``: of pushed products, in the order of a record's variant.

    ``window``: stages that are under way while a product reads the ring, at most; ``narrow_window``: else.
    ``narrow_rows``: rows of a product of the residual that are left when it turns narrow.
    """

    num_sms: int
    ranks: int
    heads: int
    depths: tuple[int, ...]
    window: int
    narrow_window: int
    narrow_rows: int
    timestamps: bool = False
    watchdog_ns: int = 1_000_000_000


def _load_acquire(address: Int64) -> Int32:
    return inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def _load_relaxed(address: Int64) -> Uint32:
    return inline_ptx("ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def _load4_relaxed(address: Int64) -> Any:
    return inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def _store_relaxed(address: Int64, word: Uint32) -> None:
    inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def _add_release(address: Int64) -> None:
    inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[address])


def _swap(address: Int64, expected: Int32, value: Int32) -> Int32:
    return inline_ptx(
        "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[address, expected, value],
    )


def _long(low: Int32, high: Int32) -> Int64:
    return inline_ptx("mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high])


def _sigmoid(value: Float32) -> Float32:
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-value, fastmath=True))


def _tanh(value: Float32) -> Float32:
    return Float32(1.0) - Float32(2.0) / (cute.math.exp(value * Float32(2.0), fastmath=True) + Float32(1.0))


def _rsqrt(value: Float32) -> Float32:
    return cute.math.rsqrt(value, fastmath=True)


def _half(address: Int64) -> Float32:
    """A bf16 value from L2."""
    return ptx.low_bf16(ptx.load_half_l2(address))


def _store_bf16(address: Int64, value: Float32) -> None:
    ptx.store_half(address, ptx.pack_bf16(value, Float32(0.0)))


def _tag(launch: Int32, version: Int32) -> Uint32:
    """The lower half of an output's word: which writing of it this is. Of two that follow each other they differ."""
    return Uint32((launch * TAG_STEP + version) & 0xFFFF)


def _store_tagged(address: Int64, value: Float32, tag: Uint32) -> None:
    """An output as one word: its bf16 value above its tag."""
    _store_relaxed(address, (ptx.pack_bf16(value, Float32(0.0)) << 16) | tag)


def _is_missing(word: Uint32, tag: Uint32) -> Boolean:
    return (word & Uint32(0xFFFF)) != tag


def _value(word: Uint32) -> Float32:
    return ptx.high_bf16(word)


def _word(record: Int32, index: int) -> Int32:
    """A word of the record, whose 32 words are the lanes'."""
    return cute.arch.shuffle_sync(record, index)


def _address(record: Int32, index: int) -> Int64:
    return _long(_word(record, ADDRESSES + 2 * index), _word(record, ADDRESSES + 2 * index + 1))


def _floats(words: Any) -> list[Float32]:
    return [ptx.bits_as_float(word) for word in words]


def _spread(values: list[Float32], lane: Int32) -> Float32:
    """Sums of 2^n values over the warp: each ends in 32 / 2^n neighbouring lanes, in order."""
    offset = 16
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = [select_(upper, values[half + j], values[j]) for j in range(half)]
        sent = [select_(upper, values[j], values[half + j]) for j in range(half)]
        pairs = zip(kept, sent, strict=True)
        values = [one + cute.arch.shuffle_sync_bfly(other, offset=offset) for one, other in pairs]
        offset //= 2
    total = values[0]
    while offset > 0:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        offset //= 2
    return total


def _slot(s_base: Int32, turn: Any) -> Int32:
    """Address of the stage with running number ``turn``."""
    return s_base + turn % RING_STAGES * STAGE_BYTES


def _full(s_base: Int32, turn: Any) -> Int32:
    return s_base + BARRIERS + turn % RING_STAGES * 8


def _empty(s_base: Int32, turn: Any) -> Int32:
    return s_base + BARRIERS + 8 * RING_STAGES + turn % RING_STAGES * 8


def _phase_is_over(s_barrier: Int32, parity: Any, instruction: str = "try_wait") -> Int32:
    """1 if it is; ``try_wait`` lets the thread sleep for a while first, ``test_wait`` does not."""
    return inline_ptx(
        f"{{ .reg .pred p; mbarrier.{instruction}.parity.shared::cta.b64 p, [{{$r0}}], {{$r1}};"
        " selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[s_barrier, parity],
    )


@cute.jit
def _await_phase(s_barrier: Int32, parity: Int32) -> None:
    """Until a phase is over; a trap after three seconds, which no copy takes, so that a fault ends the kernel."""
    over = _phase_is_over(s_barrier, parity)
    if over == 0:
        began = cute.arch.globaltimer()
        while over == 0:
            over = _phase_is_over(s_barrier, parity)
            if (over == 0) & (cute.arch.globaltimer() - began > TRAP_NS):
                inline_ptx("trap;")


def _await_stage(s_base: Int32, turn: Any) -> None:
    """Until the stage with running number ``turn`` is there.

    A barrier tells a phase from the next alone. So whoever waits for a stage knows that what its slot held before had
    come: rows of a product are waited for one by one, and of a pushed product, whose stages warps take in turn, one
    seven stages back, behind which ``window`` has let no older one be missing.
    """
    _await_phase(_full(s_base, turn), turn // RING_STAGES & 1)


def _leave_stage(s_base: Int32, turn: Any, thread: Int32, arrivals: int) -> None:
    """By thread 0 of those that have read a stage: it is free after ``PRODUCT_WARPS`` arrivals."""
    inline_ptx(
        "{ .reg .pred p; setp.eq.s32 p, {$r1}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{$r0}], {$r2}; }",
        read_only_args=[_empty(s_base, turn), thread, Int32(arrivals)],
    )


def _all_computing_warps() -> None:
    cute.arch.barrier(barrier_id=1, number_of_threads=THREADS)


def _all_product_warps() -> None:
    cute.arch.barrier(barrier_id=2, number_of_threads=32 * PRODUCT_WARPS)


class MegakernelProgram(ConfiguredKernel[MegakernelConfiguration]):
    """The kernel; everything it needs besides its arguments stands in the records."""

    @cute.jit
    def __call__(
        self, records: Int64, lengths: Int64, counters: Int64, control: Int64, peers: Int64, stamps: Int64,
        capacity: Int32, stream: CUstream,
    ) -> None:
        self.device(records, lengths, counters, control, peers, stamps, capacity).launch(
            grid=(self.config.num_sms, 1, 1),
            block=(THREADS + 32, 1, 1),
            smem=SMEM_BYTES,
            preferred_smem_carveout=ptx.ALL_SHARED,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def device(
        self, records: Int64, lengths: Int64, counters: Int64, control: Int64, peers: Int64, stamps: Int64,
        capacity: Int32,
    ) -> None:
        tid, warp, lane = thread_place()
        sm, _, _ = cute.arch.block_idx()
        s_base = cute.arch.get_dyn_smem(Uint8, alignment=128).toint().to(Int32)
        if tid == 0:
            for stage in range_constexpr(RING_STAGES):
                ptx.barrier_init(_full(s_base, stage), 1)
                ptx.barrier_init(_empty(s_base, stage), PRODUCT_WARPS)
            ptx.shared_store_int(s_base + BUSY, Int32(0))
            ptx.barrier_init_fence()
        cute.arch.sync_threads()
        length = ptx.load_int(lengths + (sm * 4).to(Int64))
        first = (sm * capacity).to(Int64)
        queue = records + first * RECORD_BYTES
        if warp == WARPS:
            self._load(queue, length, lane, s_base)
        else:
            g_stamps = stamps + first * STAMPS_BYTES
            self._compute(queue, length, counters, control, peers, g_stamps, sm, tid, warp, lane, s_base)

    @cute.jit
    def _load(self, queue: Int64, length: Int32, lane: Int32, s_base: Int32) -> None:
        """The loading warp: all streams of the queue, as far ahead as the ring has room."""
        record = ptx.load_int(queue + (lane * 4).to(Int64))
        turn = Int32(0)
        for place in cutlass.range(length, unroll=1):
            coming = ptx.load_int(queue + ((place + 1) * RECORD_BYTES + lane * 4).to(Int64))
            for part in range_constexpr(2):
                count = _word(record, STAGES_OF + 3 * part)
                num_bytes = _word(record, STAGES_OF + 3 * part + 1)
                last_bytes = _word(record, STAGES_OF + 3 * part + 2)
                g_stage = _long(_word(record, STREAM + 2 * part), _word(record, STREAM + 2 * part + 1))
                for number in cutlass.range(count, unroll=1):
                    _await_phase(_empty(s_base, turn), (turn // RING_STAGES & 1) ^ 1)
                    if turn >= self.config.window:
                        _await_stage(s_base, turn - self.config.window)
                    if (turn >= self.config.narrow_window) & (ptx.shared_load_int(s_base + BUSY) == 0):
                        _await_stage(s_base, turn - self.config.narrow_window)
                    if lane == 0:
                        size = Int32(select_(number == count - 1, last_bytes, num_bytes))
                        ptx.barrier_expect(_full(s_base, turn), size)  # type: ignore[arg-type]
                        ptx.bulk_copy(_slot(s_base, turn), g_stage, size, _full(s_base, turn))  # type: ignore[arg-type]
                    g_stage = g_stage + num_bytes.to(Int64)
                    turn += 1
            record = coming

    @cute.jit
    def _compute(
        self, queue: Int64, length: Int32, counters: Int64, control: Int64, peers: Int64, stamps: Int64, sm: Int32,
        tid: Int32, warp: Int32, lane: Int32, s_base: Int32,
    ) -> None:
        config = self.config
        launch = ptx.load_int(control) + 1  # number of this launch
        g_peer = ptx.load_long(peers + (cutlass.min(lane, config.ranks - 1) * 8).to(Int64))
        record = ptx.load_int(queue + (lane * 4).to(Int64))
        turn = Int32(0)
        for place in cutlass.range(length, unroll=1):
            coming = ptx.load_int(queue + ((place + 1) * RECORD_BYTES + lane * 4).to(Int64))
            opcode = _word(record, OPCODE)
            g_stamp = stamps + (place * STAMPS_BYTES).to(Int64)
            exchanges = opcode >= Opcode.REDUCE.value
            leads = tid == Int32(select_(exchanges, 32 * EXCHANGE_WARP, 0))
            self._stamp(leads, g_stamp, 0)
            if exchanges:
                if warp == EXCHANGE_WARP:
                    if opcode == Opcode.REDUCE.value:
                        self._reduce(record, counters, control, g_stamp, leads, lane)
                    else:
                        self._finish(record, opcode, launch, counters, control, leads, lane)
            elif opcode == Opcode.KDA_HEAD.value:
                self._kda_head(record, turn, launch, counters, control, g_stamp, tid, warp, lane, s_base)
            elif warp < PRODUCT_WARPS:
                if opcode == Opcode.GEMV_PUSH.value:
                    for variant in range_constexpr(len(config.depths)):
                        if _word(record, VARIANT) == variant:
                            depth = config.depths[variant]
                            self._tagged_input(record, launch, control, warp, lane, s_base, depth)
                            self._stamp(leads, g_stamp, 1)
                            _all_product_warps()
                            self._set_busy(s_base, leads, int(pushed_rows_per_stage(depth) < PUSHED))
                            self._gemv_push(record, turn, g_peer, warp, lane, s_base, depth)
                            self._set_busy(s_base, leads, 0)
                else:
                    self._fold_gemv(record, opcode, turn, launch, counters, control, g_stamp, tid, warp, lane, s_base)
            self._stamp(leads, g_stamp, 2)
            turn += _word(record, STAGES_OF) + _word(record, STAGES_OF + 3)
            record = coming

    # ---- hand-overs -------------------------------------------------------------------------------------------------

    @cute.jit
    def _stamp(self, leads: Boolean, g_stamp: Int64, number: cutlass.Constexpr) -> None:
        if const_expr(self.config.timestamps):  # noqa: SIM102 - one is of the build, the other of the thread
            if leads:
                now = cute.arch.globaltimer()
                inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[g_stamp + 8 * number, now])

    @cute.jit
    def _set_busy(self, s_base: Int32, chosen: Boolean, busy: cutlass.Constexpr) -> None:
        """Tell the loading warp whether a product reads the ring."""
        if chosen:
            ptx.shared_store_int(s_base + BUSY, Int32(busy))

    @cute.jit
    def _await(self, record: Int32, launch: Int32, counters: Int64, control: Int64, leads: Boolean) -> None:
        """One thread polls the instruction's counter; a barrier for the others is the caller's."""
        offset, number = _word(record, WAIT), _word(record, NUMBER)
        target = _word(record, TARGET) * launch
        if leads & (offset >= 0):
            g_counter = counters + offset.to(Int64)
            missing = target - _load_acquire(g_counter)
            polls = Int32(0)
            began = cute.arch.globaltimer()
            while missing > 0:
                missing = target - _load_acquire(g_counter)
                polls += 1
                if (missing > 0) & (polls % POLLS_BETWEEN_CHECKS == 0):
                    late = cute.arch.globaltimer() - began > self.config.watchdog_ns
                    if late:
                        self._write_down(control, number, offset, missing)
                    if late | (_load_acquire(control + 4) != 0):
                        missing = Int32(0)

    @cute.jit
    def _write_down(self, control: Int64, number: Int32, offset: Int32, missing: Int32) -> None:
        """Of the first wait that is given up: instruction, counter (-1: words of an exchange), signals missing."""
        if _swap(control + 4, Int32(0), Int32(1)) == 0:
            ptx.store_int(control + 8, number)
            ptx.store_int(control + 12, offset)
            ptx.store_int(control + 16, missing)

    @cute.jit
    def _signal(self, record: Int32, counters: Int64, chosen: Boolean) -> None:
        """By one thread, once all others of the block, or of its warp, are behind a barrier."""
        offset = _word(record, SIGNAL)
        if chosen & (offset >= 0):
            _add_release(counters + offset.to(Int64))

    # ---- products of the residual -----------------------------------------------------------------------------------

    @cute.jit
    def _fold_gemv(
        self, record: Int32, opcode: Int32, turn: Int32, launch: Int32, counters: Int64, control: Int64, g_stamp: Int64,
        tid: Int32, warp: Int32, lane: Int32, s_base: Int32,
    ) -> None:
        """All product warps take a part of every row; their sums meet in shared memory, in the order of the warps."""
        x = cute.make_rmem_tensor(THREAD_VALUES, Float32)
        self._fold(record, launch, counters, control, g_stamp, tid, warp, lane, s_base, x)
        self._stamp(tid == 0, g_stamp, 3)
        first, count = _word(record, FIRST), _word(record, COUNT)
        paired = opcode == Opcode.FOLD_GEMV_SITU.value
        num_rows = Int32(select_(paired, 2 * count, count))
        s_part = s_base + SCRATCH + warp * (MAX_ROWS * 4)
        self._set_busy(s_base, tid == 0, 1)
        for group in cutlass.range(0, num_rows, ROW_GROUP, unroll=1):
            self._set_busy(s_base, (tid == 0) & (group + self.config.narrow_rows >= num_rows), 0)
            if const_expr(self.config.timestamps):
                self._stamp((tid == 0) & (group == 16), g_stamp, 4)
            total = _spread(self._some_rows(turn, group, num_rows, x, warp, lane, s_base), lane)
            if lane % (32 // ROW_GROUP) == 0:
                ptx.shared_store_float(s_part + (group + lane // (32 // ROW_GROUP)) * 4, total)
        _all_product_warps()
        if warp == 0:
            g_out = _address(record, 4) + (first * 4).to(Int64)
            tag = _tag(launch, _word(record, VERSION))
            for row in cutlass.range(lane, count, 32, unroll=1):
                s_sum = s_base + SCRATCH + row * 4
                value = self._over_warps(s_sum)
                if paired:
                    up = self._over_warps(s_sum + count * 4)
                    value = 100.0 * _tanh(value * 0.25) * _sigmoid(value) * _tanh(up * (1 / 25))
                _store_tagged(g_out + (row * 4).to(Int64), value, tag)

    def _over_warps(self, s_sum: Int32) -> Float32:
        total = ptx.shared_load_float(s_sum)
        for other in range(1, PRODUCT_WARPS):
            total = total + ptx.shared_load_float(s_sum + other * (MAX_ROWS * 4))
        return total

    def _some_rows(
        self, turn: Int32, group: Int32, num_rows: Int32, x: cute.Tensor, warp: Int32, lane: Int32, s_base: Int32
    ) -> list[Float32]:
        """This thread's share of ``ROW_GROUP`` rows; the warp is then done with their stages.

        Past the end is the last row.
        """
        stages = [turn + cutlass.min(group + row, num_rows - 1) for row in range(ROW_GROUP)]
        for stage in stages:
            _await_stage(s_base, stage)
        s_part = s_base + (warp * (32 * THREAD_CHUNKS) + lane) * 16
        words = [
            [ptx.shared_load4(_slot(s_part, stage) + i * 512) for i in range(THREAD_CHUNKS)] for stage in stages
        ]
        cute.arch.sync_warp()
        for row, stage in enumerate(stages):
            leaves = Int32(select_(group + row < num_rows, lane, 1))
            _leave_stage(s_base, stage, leaves, 1)
        sums = []
        for row in range(ROW_GROUP):
            halves = [Float32(0.0)] * 2
            for i in range(THREAD_CHUNKS):
                for j, weight in enumerate(ptx.widen_bf16(words[row][i])):
                    halves[j % 2] = cute.math.fma(weight, x[CHUNK * i + j], halves[j % 2])
            sums.append(halves[0] + halves[1])
        return sums

    @cute.jit
    def _fold(
        self, record: Int32, launch: Int32, counters: Int64, control: Int64, g_stamp: Int64, tid: Int32, warp: Int32,
        lane: Int32, s_base: Int32, x: cute.Tensor,
    ) -> None:
        """This thread's share of the normalised mix of residual and snapshots' part, fp32 in registers."""
        g_packet, g_weighted, g_stats, g_norm = (_address(record, i) for i in range(4))
        chunks = [warp * (32 * THREAD_CHUNKS) + 32 * i + lane for i in range(THREAD_CHUNKS)]
        # What no instruction writes, ahead of the wait.
        weighted = [
            [ptx.load_stream(g_weighted + (chunk * 32 + 16 * half).to(Int64)) for half in range(2)] for chunk in chunks
        ]
        norms = [ptx.load_stream(g_norm + (chunk * 16).to(Int64)) for chunk in chunks]
        maximum, denominator = ptx.load_float(g_stats), ptx.load_float(g_stats + 4)
        places, arrived = cute.make_rmem_tensor(4, Int64), cute.make_rmem_tensor(16, Uint32)
        s_weights = s_base + HEAD
        # One warp polls for all: sums come last in their lines, and with all warps polling for lines the traffic of it
        # made 47.5 us of a layer's 44.8 (H200, 2026-12-01).
        if warp == 0:
            for i in range_constexpr(NUM_PARTS // 32):
                places[i] = g_packet + ((lane + 32 * i) * LINE_BYTES + 2 * COLUMNS).to(Int64)
            self._await_fours(places, arrived, record, control)
            part, own = self._mix_weights(arrived, maximum, denominator)
            ptx.shared_store_float(s_weights, part)
            ptx.shared_store_float(s_weights + 4, own)
        _all_product_warps()
        for i in range_constexpr(THREAD_CHUNKS):
            places[i] = g_packet + (chunks[i] // PRODUCT_WARPS * LINE_BYTES + chunks[i] % PRODUCT_WARPS * 16).to(Int64)
        self._await_fours(places, arrived, record, control)
        self._stamp(tid == 0, g_stamp, 1)
        part_weight, own_weight = ptx.shared_load_float(s_weights), ptx.shared_load_float(s_weights + 4)
        residual = [tuple(arrived[4 * i + j] for j in range(4)) for i in range(THREAD_CHUNKS)]
        for i in range_constexpr(THREAD_CHUNKS):
            one, norm = ptx.widen_bf16(residual[i]), ptx.widen_bf16(norms[i])
            other = _floats(weighted[i][0]) + _floats(weighted[i][1])
            for j in range_constexpr(CHUNK):
                x[CHUNK * i + j] = (part_weight * other[j] + own_weight * one[j]) * norm[j]

    def _mix_weights(
        self, arrived: cute.Tensor, maximum: Float32, denominator: Float32
    ) -> tuple[Float32, Float32]:
        """What snapshots' part and residual are multiplied by: softmax and norm of their mix, from all SMs' sums."""
        totals = [Float32(0.0)] * 4
        for line in range(NUM_PARTS // 32):
            part = _floats(arrived[4 * line + i] for i in range(4))
            totals = [one + other for one, other in zip(totals, part, strict=True)]
        square, product, cross, part_square = (lane_sum(one) for one in totals)
        logit = product * _rsqrt(square * (1.0 / HIDDEN) + NORM_EPSILON)
        largest = ptx.maximum(maximum, logit)
        part_weight = cute.math.exp(maximum - largest, fastmath=True)
        own_weight = cute.math.exp(logit - largest, fastmath=True)
        inverse = Float32(1.0) / (part_weight * denominator + own_weight)
        part_weight, own_weight = part_weight * inverse, own_weight * inverse
        mix_square = part_weight * part_weight * part_square + own_weight * own_weight * square
        mix_square = ptx.maximum(mix_square + 2.0 * part_weight * own_weight * cross, Float32(0.0))
        scale = _rsqrt(mix_square * (1.0 / HIDDEN) + NORM_EPSILON)
        return part_weight * scale, own_weight * scale

    # ---- exchange ---------------------------------------------------------------------------------------------------

    @cute.jit
    def _tagged_input(
        self, record: Int32, launch: Int32, control: Int64, warp: Int32, lane: Int32, s_base: Int32,
        depth: cutlass.Constexpr,
    ) -> None:
        """The input of a pushed product into shared memory, as it comes: each warp polls for a part of it."""
        num_fours = depth // 4
        count = -(-num_fours // (32 * PRODUCT_WARPS))
        g_x, tag = _address(record, 0), _tag(launch, _word(record, TARGET))
        fours = [Int32(cutlass.min(32 * (warp * count + i) + lane, num_fours - 1)) for i in range(count)]
        arrived = cute.make_rmem_tensor(4 * count, Uint32)
        missing = Boolean(True)
        polls = Int32(0)
        began = cute.arch.globaltimer()
        while missing:
            stale = Boolean(False)
            for i in range_constexpr(count):
                words = _load4_relaxed(g_x + (fours[i] * 16).to(Int64))
                for j in range_constexpr(4):
                    arrived[4 * i + j] = words[j]
                    stale = stale | _is_missing(words[j], tag)
            missing = cute.arch.vote_any_sync(stale)
            polls += 1
            missing = self._goes_on(missing, polls, began, record, control, self.config.watchdog_ns)
        for i in range_constexpr(count):
            s_pair = s_base + INPUT + fours[i] * 8
            for j in range_constexpr(2):
                pair = ptx.select_bytes(arrived[4 * i + 2 * j], arrived[4 * i + 2 * j + 1], 0x7632)
                ptx.shared_store_int(s_pair + 4 * j, Int32(pair))

    @cute.jit
    def _goes_on(
        self, missing: Boolean, polls: Int32, began: Int64, record: Int32, control: Int64, limit_ns: cutlass.Constexpr
    ) -> Boolean:
        """Whether a warp polls on for words: not for ever, and not where another wait was given up."""
        found = missing
        if missing & (polls % POLLS_BETWEEN_CHECKS == 0):
            late = cute.arch.vote_any_sync(cute.arch.globaltimer() - began > limit_ns)
            if late:
                self._write_down(control, _word(record, NUMBER), Int32(-1), Int32(1))
            if late | cute.arch.vote_any_sync(_load_acquire(control + 4) != 0):
                found = Boolean(False)
        return found

    @cute.jit
    def _gemv_push(
        self, record: Int32, turn: Int32, g_peer: Int64, warp: Int32, lane: Int32, s_base: Int32,
        depth: cutlass.Constexpr,
    ) -> None:
        """Eight outputs a warp, as one word of 16 bytes to every rank."""
        rows = pushed_rows_per_stage(depth)
        num_stages = PUSHED // rows
        num_chunks = -(-(depth // CHUNK) // 32)
        g_offset = _address(record, 1)
        first = _word(record, FIRST)
        if warp < PRODUCT_WARPS:
            x = []
            for i in range_constexpr(num_chunks):
                chunk = lane + 32 * i
                if const_expr(depth // CHUNK >= 32 * (i + 1)):
                    x.append(ptx.widen_bf16(ptx.shared_load4(s_base + INPUT + chunk * 16)))
                else:
                    exists = chunk < depth // CHUNK
                    words = ptx.shared_load4(s_base + INPUT + Int32(select_(exists, chunk, 0)) * 16)
                    x.append(ptx.widen_bf16(tuple(select_(exists, word, Uint32(0)) for word in words)))
            kept = Float32(0.0)  # lane l: output number l of the warp
            for turn_of_warps in cutlass.range(num_stages, unroll=1):
                at = turn + turn_of_warps * PRODUCT_WARPS + warp
                _await_stage(s_base, at)
                for row in range_constexpr(rows):
                    s_row = _slot(s_base, at) + row * depth * 2
                    halves = [Float32(0.0)] * 2
                    for i in range_constexpr(num_chunks):
                        # Beyond the row's end: its last chunk, times zero.
                        chunk = Int32(cutlass.min(lane + 32 * i, depth // CHUNK - 1))
                        weights = ptx.widen_bf16(ptx.shared_load4(s_row + chunk * 16))
                        for j in range_constexpr(CHUNK):
                            halves[j % 2] = cute.math.fma(weights[j], x[i][j], halves[j % 2])
                    total = lane_sum(halves[0] + halves[1])
                    kept = Float32(select_(lane == turn_of_warps * rows + row, total, kept))
                _leave_stage(s_base, at, lane, PRODUCT_WARPS)
            if const_expr(num_stages > 1):  # a warp's rows lie apart
                if lane < PUSHED:
                    row = (lane // rows * PRODUCT_WARPS + warp) * rows + lane % rows
                    ptx.shared_store_float(s_base + SCRATCH + row * 4, kept)
                _all_product_warps()
                kept = ptx.shared_load_float(s_base + SCRATCH + (PUSHED * warp + lane % PUSHED) * 4)
            values = [cute.arch.shuffle_sync(kept, j) for j in range(PUSHED)]
            pushed = [ptx.without_negative_zero(word) for word in ptx.narrow_bf16(values)]
            if lane < self.config.ranks:
                ptx.store_to_peer(g_peer + g_offset + ((first + PUSHED * warp) * 2).to(Int64), pushed)

    @cute.jit
    def _reduce(
        self, record: Int32, counters: Int64, control: Int64, g_stamp: Int64, leads: Boolean, lane: Int32,
    ) -> None:
        """One warp: 56 columns, two a lane, of all ranks; the new residual and its parts of the norm's sums."""
        ranks = self.config.ranks
        g_received, g_residual, g_packets, g_query_norm, g_query, g_weighted, g_before = (
            _address(record, i) for i in range(7)
        )
        newest = _word(record, PACKET)
        g_line = g_packets + (_word(record, FIRST) // COLUMNS * LINE_BYTES).to(Int64)
        pair = Int32(cutlass.min(lane, COLUMNS // 2 - 1))
        mine = lane < COLUMNS // 2
        at = ((_word(record, FIRST) + 2 * pair) * 2).to(Int64)
        old = ptx.widen_bf16((_load_relaxed(g_residual + at),))
        probes = [
            ptx.widen_bf16((Uint32(ptx.load_int(address + at)),)) for address in (g_query_norm, g_query)
        ]
        weighted = [ptx.load_float(g_weighted + 2 * at + 4 * i) for i in range(2)]
        arrived = cute.make_rmem_tensor(ranks, Uint32)
        self._await_words(g_received + at, arrived, record, control)
        self._stamp(leads, g_stamp, 1)
        totals = [Float32(0.0)] * 2
        for rank in range_constexpr(ranks):
            part = ptx.widen_bf16((arrived[rank],))
            totals = [one + other for one, other in zip(totals, part, strict=True)]
        kept = Float32(select_(_word(record, RESTARTS) != 0, Float32(0.0), Float32(1.0)))
        word = ptx.without_negative_zero(ptx.pack_bf16(totals[0] + kept * old[0], totals[1] + kept * old[1]))
        x = ptx.widen_bf16((word,))
        zero = Float32(0.0)
        pairs = (
            (x[i] * x[i], x[i] * probes[0][i] * probes[1][i], x[i] * weighted[i], weighted[i] * weighted[i])
            for i in range(2)
        )
        sums = [lane_sum(Float32(select_(mine, one + other, zero))) for one, other in zip(*pairs, strict=True)]
        g_newest = g_line + (newest * PACKET_BYTES).to(Int64)
        if mine:
            _store_relaxed(g_newest + (pair * 4).to(Int64), word)
        if lane == 0:
            ptx.store_to_peer(g_newest + 2 * COLUMNS, [ptx.float_as_bits(one) for one in sums])
        self._stamp(leads, g_stamp, 3)
        if mine:
            ptx.store_int(g_residual + at, Int32(word))
            if g_before != 0:
                self._clear(g_before + at)
        # The line of the version before has been read: behind it came the products whose outputs were pushed.
        g_old = g_line + ((newest + PACKETS - 1) % PACKETS * PACKET_BYTES + lane * 4).to(Int64)
        _store_relaxed(g_old, Uint32(EMPTY))
        cute.arch.fence_acq_rel_gpu()  # whoever has seen the next version finds it empty

    @cute.jit
    def _clear(self, g_words: Int64) -> None:
        for rank in range_constexpr(self.config.ranks):
            ptx.store_int(g_words + rank * 2 * HIDDEN, Int32(EMPTY - (1 << 32)))

    @cute.jit
    def _await_words(self, g_words: Int64, arrived: cute.Tensor, record: Int32, control: Int64) -> None:
        """Poll a word of every rank's slot until none of the warp's is missing."""
        missing = Boolean(True)
        polls = Int32(0)
        began = cute.arch.globaltimer()
        while missing:
            empty = Boolean(False)
            for rank in range_constexpr(self.config.ranks):
                word = _load_relaxed(g_words + rank * 2 * HIDDEN)
                arrived[rank] = word
                empty = empty | (word == Uint32(EMPTY))
            missing = cute.arch.vote_any_sync(empty)
            polls += 1
            missing = self._goes_on(missing, polls, began, record, control, 2 * self.config.watchdog_ns)

    @cute.jit
    def _await_fours(self, places: cute.Tensor, arrived: cute.Tensor, record: Int32, control: Int64) -> None:
        """Poll four places of 16 bytes a lane until no word of the warp's is missing."""
        missing = Boolean(True)
        polls = Int32(0)
        began = cute.arch.globaltimer()
        while missing:
            empty = Boolean(False)
            for place in range_constexpr(4):
                words = _load4_relaxed(places[place])
                for i in range_constexpr(4):
                    arrived[4 * place + i] = words[i]
                    empty = empty | (words[i] == Uint32(EMPTY))
            missing = cute.arch.vote_any_sync(empty)
            polls += 1
            missing = self._goes_on(missing, polls, began, record, control, 2 * self.config.watchdog_ns)

    @cute.jit
    def _finish(
        self, record: Int32, opcode: Int32, launch: Int32, counters: Int64, control: Int64, leads: Boolean, lane: Int32,
    ) -> None:
        """One warp: empty what the last exchange left; or, behind all that, count the launch."""
        g_received, g_packets = _address(record, 0), _address(record, 1)
        first, newest = _word(record, FIRST), _word(record, PACKET)
        at = ((_word(record, FIRST) + 2 * lane) * 2).to(Int64)
        count = _word(record, COUNT)
        self._await(record, launch, counters, control, leads)
        cute.arch.sync_warp()
        if 2 * lane < count:
            self._clear(g_received + at)
        if count > 0:
            g_word = g_packets + (first // COLUMNS * LINE_BYTES + lane * 4).to(Int64)
            word = _load_relaxed(g_word + (newest * PACKET_BYTES).to(Int64))
            for packet in range_constexpr(PACKETS):
                _store_relaxed(g_word + packet * PACKET_BYTES, Uint32(EMPTY) if packet else word)
        if (opcode == Opcode.ADVANCE.value) & (lane == 0):
            ptx.store_int(control, launch)
        cute.arch.sync_warp()
        self._signal(record, counters, lane == 0)

    # ---- KDA --------------------------------------------------------------------------------------------------------

    @cute.jit
    def _kda_head(
        self, record: Int32, turn: Int32, launch: Int32, counters: Int64, control: Int64, g_stamp: Int64, tid: Int32,
        warp: Int32, lane: Int32, s_base: Int32,
    ) -> None:
        """One head: thread t has column t % 128 and every second row of the state, from row t // 128 on."""
        width = HEAD_DIM * self.config.heads
        g_projected, g_out, g_conv, g_past, g_dt_bias, g_a_log, g_norm = (_address(record, i) for i in range(7))
        g_state = _long(_word(record, STREAM + 2), _word(record, STREAM + 3))
        head = _word(record, FIRST)
        column, half = tid % HEAD_DIM, tid // HEAD_DIM
        channels = (half * width + head * HEAD_DIM + column, 2 * width + head * HEAD_DIM + column)
        # In shared memory: q, k and alpha with even rows first, v, partial sums over rows, sums of squares by warp.
        s_q = s_base + HEAD
        s_k, s_alpha, s_v = s_q + 512, s_q + 1024, s_q + 1536
        s_part, s_squares = s_q + 2048, s_q + 4096
        # What no instruction writes, ahead of the wait.
        conv = [_floats(ptx.load_cached(g_conv + (channel * 16).to(Int64))) for channel in channels]
        g_pasts = [g_past + (channel * 2).to(Int64) for channel in channels]
        past = [[_half(g_one + sample * 6 * width) for sample in range(3)] for g_one in g_pasts]
        bias = ptx.load_float(g_dt_bias + ((head * HEAD_DIM + column) * 4).to(Int64))
        rate = cute.math.exp(ptx.load_float(g_a_log + (head * 4).to(Int64)), fastmath=True)
        norm = ptx.load_float(g_norm + (column * 4).to(Int64))
        # q or k, v, beta and gate of this thread, then its eight of f_a.
        singles = (*channels, 4 * width + HEAD_DIM + head, 3 * width + head * HEAD_DIM + column)
        found = cute.make_rmem_tensor(len(singles) + CHUNK, Uint32)
        self._await_projected(g_projected, singles, 4 * width + lane % 16 * CHUNK, found, record, launch, control)
        self._stamp(tid == 0, g_stamp, 1)
        _all_computing_warps()
        now, f_a = [_value(found[i]) for i in range(2)], [_value(found[4 + i]) for i in range(CHUNK)]
        beta, gate = _sigmoid(_value(found[2])), _value(found[3])
        mixed = []
        for i in range_constexpr(2):
            total = conv[i][3] * now[i]
            for sample in range_constexpr(3):
                total = total + conv[i][sample] * past[i][sample]
            mixed.append(total * _sigmoid(total))
        ptx.shared_store_float(s_q + half * 512 + self._even_first(column) * 4, mixed[0])
        ptx.shared_store_float(s_v + column * 4, mixed[1])  # both halves, the same value

        _await_stage(s_base, turn + warp // 2)
        s_gate = _slot(s_base, turn + warp // 2) + warp % 2 * 16 * 256 + lane // 16 * 256 + lane % 16 * 16
        for i in cutlass.range(0, 8, 2, unroll=1):  # two rows of a half warp; loops keep the code short, it is cold
            words = [ptx.shared_load4(s_gate + 512 * i + 512 * n) for n in range(2)]
            logits = [self._product(ptx.widen_bf16(one), f_a) for one in words]
            logits = [lane_sum(one, (8, 4, 2, 1)) for one in logits]
            for n in range_constexpr(2):  # 16 lanes, the same value
                ptx.shared_store_float(s_alpha + (warp * 16 + 2 * i + 2 * n + lane // 16) * 4, logits[n])
        _all_computing_warps()
        logit = ptx.shared_load_float(s_alpha + column * 4)
        alpha = cute.math.exp(DECAY_BOUND * _sigmoid(rate * (logit + bias)), fastmath=True)
        _all_computing_warps()
        ptx.shared_store_float(s_alpha + self._even_first(column) * 4, alpha)  # both halves, the same value
        for stage in range_constexpr(GATE_STAGES):
            _leave_stage(s_base, turn + stage, tid, PRODUCT_WARPS)
        _all_computing_warps()

        quads = [_floats(ptx.shared_load4(s + lane * 16)) for s in (s_q, s_k)]
        kk, qq, kq = (
            lane_sum(self._product(one, other))
            for one, other in ((quads[1], quads[1]), (quads[0], quads[0]), (quads[1], quads[0]))
        )
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        s_column = half * 512 + column * 4
        for stage in cutlass.range(STATE_STAGES, unroll=1):
            _await_stage(s_base, turn + GATE_STAGES + stage)
            s_rows = _slot(s_base, turn + GATE_STAGES + stage) + s_column
            q, k, alphas = (self._rows_of_half(s, half, stage) for s in (s_q, s_k, s_alpha))
            elements = [ptx.shared_load_float(s_rows + 1024 * i) for i in range(STATE_ROWS // 2)]
            sums[0] = sums[0] + self._product([one * other for one, other in zip(alphas, k, strict=True)], elements)
            sums[1] = sums[1] + self._product([one * other for one, other in zip(alphas, q, strict=True)], elements)
        for i in range_constexpr(2):
            ptx.shared_store_float(s_part + i * 1024 + half * 512 + column * 4, sums[i])
        _all_computing_warps()
        with_k, with_q = (
            ptx.shared_load_float(s_part + i * 1024 + column * 4)
            + ptx.shared_load_float(s_part + i * 1024 + 512 + column * 4)
            for i in range(2)
        )
        k_factor = _rsqrt(kk + L2_EPSILON)
        q_factor = _rsqrt(qq + L2_EPSILON) * HEAD_DIM**-0.5
        delta = beta * (mixed[1] - k_factor * with_k)
        read = q_factor * (with_q + k_factor * kq * delta)
        squares = lane_sum(read * read)
        ptx.shared_store_float(s_squares + warp * 4, squares)
        _all_computing_warps()
        total = Float32(0.0)
        for one in range_constexpr(HEAD_DIM // 32):
            total = total + ptx.shared_load_float(s_squares + one * 4)
        value = read * _rsqrt(total * (1.0 / HEAD_DIM) + NORM_EPSILON) * norm * _sigmoid(gate)
        if half == 0:
            tag = _tag(launch, _word(record, VERSION))
            _store_tagged(g_out + ((head * HEAD_DIM + column) * 4).to(Int64), value, tag)
        self._stamp(tid == 0, g_stamp, 3)
        # What only the next step reads, behind the hand-over.
        g_column = g_state + s_column.to(Int64)
        for stage in cutlass.range(STATE_STAGES, unroll=1):
            s_rows = _slot(s_base, turn + GATE_STAGES + stage) + s_column
            k, alphas = (self._rows_of_half(s, half, stage) for s in (s_k, s_alpha))
            for i in range_constexpr(STATE_ROWS // 2):
                fresh = alphas[i] * ptx.shared_load_float(s_rows + 1024 * i) + k[i] * (k_factor * delta)
                ptx.store_float(g_column + (stage * STATE_ROWS * 512 + 1024 * i).to(Int64), fresh)
        _all_computing_warps()
        for stage in range_constexpr(STATE_STAGES):
            _leave_stage(s_base, turn + GATE_STAGES + stage, tid, PRODUCT_WARPS)
        self._shift(g_pasts[0], past[0], now[0])
        if half == 0:
            self._shift(g_pasts[1], past[1], now[1])

    @cute.jit
    def _await_projected(
        self, g_projected: Int64, singles: tuple[Int32, ...], eight: Int32, found: cute.Tensor, record: Int32,
        launch: Int32, control: Int64,
    ) -> None:
        """Poll for a warp's outputs of the in-projection: some one by one, and eight neighbours."""
        tag = _tag(launch, _word(record, TARGET))
        missing = Boolean(True)
        polls = Int32(0)
        began = cute.arch.globaltimer()
        while missing:
            stale = Boolean(False)
            for i in range_constexpr(len(singles)):
                found[i] = _load_relaxed(g_projected + (singles[i] * 4).to(Int64))
            for half in range_constexpr(2):
                words = _load4_relaxed(g_projected + ((eight + 4 * half) * 4).to(Int64))
                for j in range_constexpr(4):
                    found[len(singles) + 4 * half + j] = words[j]
            for i in range_constexpr(len(singles) + CHUNK):
                stale = stale | _is_missing(found[i], tag)
            missing = cute.arch.vote_any_sync(stale)
            polls += 1
            missing = self._goes_on(missing, polls, began, record, control, self.config.watchdog_ns)

    def _even_first(self, row: Int32) -> Int32:
        """Where q, k and alpha of a row lie: rows of one half of the threads are neighbours."""
        return row % 2 * (HEAD_DIM // 2) + row // 2

    def _rows_of_half(self, s_vector: Int32, half: Int32, stage: Int32) -> list[Float32]:
        """Of q, k or alpha what belongs to a stage's rows of this half of the threads."""
        s_first = s_vector + half * 256 + stage * (STATE_ROWS * 2)
        return _floats(ptx.shared_load4(s_first)) + _floats(ptx.shared_load4(s_first + 16))

    def _product(self, one: list[Float32], other: list[Float32]) -> Float32:
        halves = [Float32(0.0)] * 2
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            halves[i % 2] = cute.math.fma(a, b, halves[i % 2])
        return halves[0] + halves[1]

    def _shift(self, g_past: Int64, past: list[Float32], now: Float32) -> None:
        width = HEAD_DIM * self.config.heads
        for sample, value in enumerate((past[1], past[2], now)):
            _store_bf16(g_past + sample * 6 * width, value)


def compile_megakernel(configuration: MegakernelConfiguration) -> Any:
    """The kernel as a callable of six addresses, the records a queue holds, and a CUstream; needs no GPU."""
    assert 0 < configuration.narrow_window <= configuration.window <= MAX_WINDOW, "see _await_stage"
    zero = Int64(0)
    return cute.compile(
        MegakernelProgram(configuration), zero, zero, zero, zero, zero, zero, Int32(0), CUstream(0)
    )
