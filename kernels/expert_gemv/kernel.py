"""The selected MXFP4 experts at 1 to 16 rows, one persistent launch: ``out = sum_s w_s W2_s SiTU(W1_s x, W3_s x)``.

What it computes
    mX [R, 3584] bf16, mIds [R, 16] int32 and mWeights [R, 16] fp32 from the router, packed weights of all resident
    experts (mxfp4.py: tiles of 16 outputs in MMA fragment order, scales inside), mOut [R, 3584] bf16 or fp32: this
    rank's partial latent. Workspace: two hidden vectors [max R, 16, W] f16, and which of them is this launch's turn.

How data moves
    All weight bytes of a row are known as soon as the ids are, and nothing that this kernel computes decides an
    address. So one producer warp streams the block's share of w1 and w3 and then of w2 through one ring of bulk
    copies, without regard to the dependency between the two products: while the last sums of the first add up, w2 fills
    the ring (TP8: 104 KB a block; TP16: 53 KB; the ring holds 122 KB). A slot of the ring arrives in pieces with a
    barrier each, so that the last tile is multiplied while it arrives.
    128 blocks: each has 1 of the 16 experts and 1/8 of its gate/up tiles (6 of 48 at TP8, 3 of 24 at TP16) in the
    first product; in the second, 112 blocks own 32 outputs each over all experts, so that no sum crosses blocks and
    the order of every sum is fixed. 16 warps multiply: in the first product 14 of them split K (256 columns each,
    operand B stays in registers for the whole row), in the second they split expert and K.

    Weights are operand A of mma.sync m16n8k16 (f16, fp32 sums). A code becomes f16 by shift and mask, 11 integer
    instructions for eight weights with the sign, no multiplication: the value times 2**-14, exact. The eight columns
    of operand B, of which one row of x would use one, hold eight blocks of 32 columns of K: the MMA for block j sees
    x in column j and zero elsewhere, so one accumulator keeps eight blocks apart and the E8M0 scales are applied to
    the accumulator with four FMAs for 16 MMAs, each lane owning exactly its four scales.

    x enters as f16: exact for magnitudes from 2**-14 to 65504, with an absolute error of 2**-25 below. The hidden
    vector carries the router weight and a factor of 2**8 (at most 100 x 2**8) and is rounded to f16 once.

Why this shape
    fp32 FMAs need four instructions a weight and are bound by issue before HBM. Decoding to bf16 costs a further
    multiplication, since its exponent does not leave room for the factor. Two launches would refill the ring after
    the boundary. Between the products there is no grid barrier (2.9 us from the last sum to the first product under
    load, H200 2026-11-29: fence, counter, poll and load in series) but the hidden vector itself: words of all ones
    bits until it is written, read again until they are not. Launches alternate between two vectors; each clears
    the one it does not use, so a replay is like a first run.

    ``num_peers``: every block stores its 32 columns of each row straight into the latent tail's slots of all ranks,
    where ``latent_tail.up`` polls them; no conversion to bf16 gives the slots' empty word.

    ``part`` makes two launches of it, for a path of separate kernels: the first leaves one hidden vector [R, 16, W] in
    memory, the second (112 blocks) starts its stream when the first has ended. Same sums in the same order.

Limits
    Latent 3584, width 192 or 384, 16 experts a row. One launch for both products needs 128 SMs whose blocks can be
    resident at once: nothing else that waits for this kernel may occupy them. Rows are computed one by one, so an
    expert chosen by two rows is read twice (from L2 if soon). A scale of 0 to 254 is exact; products of a scale of 0
    lie below fp32's normal range and keep its subnormal precision. Ids outside the resident experts contribute nothing.

What compute-sanitizer says of it, and why it stays
    racecheck: copies into a slot against the reads of its last turn. A warp's lanes meet, and lane 0 alone arrives for
    all 32 (``sync_warp``, then ``barrier_arrive``); the tool credits the arrival to lane 0. With all lanes arriving
    (count 32 times as large) it reports nothing; that costs registers (96 for 87) and 31 more arrivals a warp.
    synccheck: "divergent threads", since the warps that split K and the two that close a row meet at barrier 1 from
    different instructions, and a "missing wait" of the producer, which completes pieces that a slot has no use for.

One file, because both products live on one ring: its producer, its decoding and its sums are one thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.device.kernel_class import ConfiguredKernel, thread_place
from k3sim.kernels.expert_gemv.mxfp4 import PLACES

LATENT = 3584
TOP_K = 16
NUM_BLOCKS = 128
NUM_DOWN_BLOCKS = LATENT // 32
NUM_WARPS = 16  # that multiply; one more warp issues the copies
NUM_THREADS = (NUM_WARPS + 1) * 32
K_WARPS = LATENT // 256  # warps that split K in the first product; the other two close each row
UNIT_BYTES = 4 * 512 + 128
TILE_BYTES = K_WARPS * UNIT_BYTES  # one gate/up tile, and one slot of the ring
DOWN_UNIT_BYTES = 3 * 512 + 128
NUM_SLOTS = 4  # 122 KB in flight feed HBM, and what is left of an SM takes a block of the launch behind
PIECES = 8  # of a slot that arrive, and are waited for, one by one
PIECE_BYTES = 2 * UNIT_BYTES  # of a gate/up tile: two warps' units, so seven pieces and an empty one
EMPTY = 0xFFFFFFFF  # two f16 NaN of all ones, which no conversion produces
HIDDEN_SCALE = 2.0**8
FROM_DECODED = 2.0**14  # a decoded f16 is the weight times 2**-14
MAGNITUDE = 0x0E000E00
SIGN = 0x80008000


@dataclass(frozen=True, kw_only=True)
class ExpertConfiguration:
    """What changes the machine code. ``width``: 384 (TP8) or 192 (TP16).

    ``part``: "both" products, or a launch each for "gate_up" and "down". ``num_peers``: the sum goes to the latent
    tail's slots of that many ranks instead of to memory of this one.
    """

    width: int
    fp32_out: bool
    part: str = "both"
    num_peers: int = 0

    @property
    def num_blocks(self) -> int:
        return NUM_DOWN_BLOCKS if self.part == "down" else NUM_BLOCKS

    @property
    def register_threads(self) -> int:
        """Threads that ptxas is told of, which bounds the registers of the one launch: 72 at width 192, 80 at 384.

        Registers lie in four parts of an SM, of which one has five of a block's 17 warps. With 80 that part has room
        for one warp of the tail (four of 96), with 72 for three of the shared experts' down-projection (14 of 40).
        """
        if self.part != "both":
            return NUM_THREADS
        return 896 if self.width == 192 else 768

    @property
    def tiles_per_block(self) -> int:
        return self.width // 64  # of one expert's width / 8 tiles, an eighth

    @property
    def units_per_expert(self) -> int:
        return self.width // 192

    @property
    def experts_per_slot(self) -> int:
        return 8 // self.units_per_expert

    @property
    def down_slots(self) -> int:
        return TOP_K // self.experts_per_slot

    @property
    def down_bytes(self) -> int:
        """w2 of one expert for 32 outputs."""
        return 2 * self.units_per_expert * DOWN_UNIT_BYTES

    @property
    def partial_bytes(self) -> int:
        """Sums by warp of one row in the first product; two such buffers alternate."""
        return self.tiles_per_block * K_WARPS * 16 * 4

    @property
    def smem_bytes(self) -> int:
        barriers = NUM_SLOTS * (PIECES + 1) * 8
        return NUM_SLOTS * TILE_BYTES + 2 * self.partial_bytes + 2 * 2 * NUM_WARPS * 16 * 4 + barriers + 16


def _publish(g_address: Int64, pair: Uint32) -> None:
    """Two f16 of the hidden vector to L2, where other blocks are waiting for them."""
    inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[g_address, pair])


def _or_zero(word: Uint32, condition: Boolean) -> Uint32:
    return inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; selp.b32 {$w0}, {$r0}, 0, p; }",
        write_only_types=[Uint32],
        read_only_args=[word, condition.to(Uint32)],
    )


def _half_from_bf16(pair: Uint32) -> Uint32:
    return ptx.pack_f16(ptx.low_bf16(pair), ptx.high_bf16(pair))


def _decode(word: Uint32) -> list[Uint32]:
    """Eight codes as four f16 pairs, each the value times 2**-14."""
    pairs = []
    for shift, sign_shift in PLACES:
        if shift == sign_shift:
            pairs.append((word << Uint32(shift)) & Uint32(MAGNITUDE | SIGN))
        else:
            pairs.append(((word << Uint32(shift)) & Uint32(MAGNITUDE)) | ((word << Uint32(sign_shift)) & Uint32(SIGN)))
    return pairs


def _scale(byte: Uint32) -> Float32:
    """2**(byte - 127) for a byte at bits 23 to 30; the maximum turns 0, which would mean zero, into 2**-127."""
    return inline_ptx("max.u32 {$w0}, {$r0}, 0x400000;", write_only_types=[Float32], read_only_args=[byte])


def _scales(word: Uint32) -> list[Float32]:
    exponents = (word << Uint32(23), word << Uint32(15), word << Uint32(7), word >> Uint32(1))
    return [_scale(one & Uint32(0x7F800000)) for one in exponents]


def _read_unit(s_unit: Int32, num_blocks: int, lane: Int32) -> tuple[list[ptx.Words], list[Float32]]:
    """The lane's words of a unit, four for two blocks, and its four scales."""
    words = [ptx.shared_load4(s_unit + pair * 512 + lane * 16) for pair in range(num_blocks // 2)]
    return words, _scales(ptx.shared_load_int(s_unit + num_blocks // 2 * 512 + lane * 4).to(Uint32))


def _fragments(words: Sequence[Sequence[Uint32]]) -> list[list[Uint32]]:
    """Operand A of each block: registers of the first MMA, then of the second."""
    result = []
    for four in words:
        for half in range(2):
            low, high = _decode(four[2 * half]), _decode(four[2 * half + 1])
            result.append([low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]])
    return result


def _multiply(
    tiles: Sequence[Sequence[Sequence[Uint32]]], halves: Sequence[Uint32], lane: Int32
) -> list[list[Float32]]:
    """Accumulators of the tiles' fragments. ``halves``: the lane's eight values of x, of block lane / 4, as f16."""
    even: list[Sequence[Float32]] = [[Float32(0.0)] * 4 for _ in tiles]
    odd: list[Sequence[Float32]] = [[Float32(0.0)] * 4 for _ in tiles]
    for block in range(len(tiles[0])):
        mine = (lane >> 2) == block
        b = [_or_zero(one, mine) for one in halves]
        for tile, fragments in enumerate(tiles):
            # Two chains of MMAs, whose latency is long; both keep the blocks in the same columns.
            even[tile] = ptx.mma(even[tile], fragments[block][:4], b[:2], operand="f16")
            odd[tile] = ptx.mma(odd[tile], fragments[block][4:], b[2:], operand="f16")
    return [[x + y for x, y in zip(one, other, strict=True)] for one, other in zip(even, odd, strict=True)]


def _scaled(sums: Sequence[Float32], scales: Sequence[Float32]) -> list[Float32]:
    return [one * scale for one, scale in zip(sums, scales, strict=True)]


def _load_early(g_address: Int64) -> tuple[Uint32, ...]:
    """16 bytes of the hidden vector, arrived or not."""
    return inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_address],
    )


def _arrived(g_address: Int64, words: tuple[Uint32, ...]) -> tuple[Uint32, ...]:
    """``words``, a first reading of ``g_address``, or a later one of which no word is EMPTY."""
    # Registers of its own: an output may share one with an input that is still needed.
    checks = " ".join(f"setp.eq.u32 p, w{i}, {EMPTY:#x}; @p bra again;" for i in range(4))
    enter = " ".join(f"mov.b32 w{i}, {{$r{i + 1}}};" for i in range(4))
    leave = " ".join(f"mov.b32 {{$w{i}}}, w{i};" for i in range(4))
    return inline_ptx(
        "{ .reg .pred p; .reg .b32 w0, w1, w2, w3; " + enter + " bra check; "
        "again: ld.relaxed.gpu.global.v4.b32 {w0, w1, w2, w3}, [{$r0}]; check: " + checks + " " + leave + " }",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_address, *words],
    )


def _sum_columns(sums: list[Float32]) -> tuple[Float32, Float32]:
    """Rows g and g + 8 of a tile, summed over the eight accumulator columns; the same in the four lanes of g."""
    low, high = sums[0] + sums[1], sums[2] + sums[3]
    for offset in (1, 2):
        low = low + cute.arch.shuffle_sync_bfly(low, offset=offset)
        high = high + cute.arch.shuffle_sync_bfly(high, offset=offset)
    return low, high


def _tanh(value: Float32) -> Float32:
    return Float32(1.0) - Float32(2.0) / (cute.math.exp(value * Float32(2.0), fastmath=True) + Float32(1.0))


def _situ_glu(gate: Float32, up: Float32) -> Float32:
    sigmoid = Float32(1.0) / (Float32(1.0) + cute.math.exp(-gate, fastmath=True))
    return Float32(4.0) * _tanh(gate * Float32(0.25)) * sigmoid * Float32(25.0) * _tanh(up * Float32(0.04))


@cute.jit
def _next_slot(slot: Int32, parity: Int32) -> tuple[Int32, Int32]:
    """The ring's slot after ``slot``, and the parity of its phase."""
    slot = slot + 1
    if slot == NUM_SLOTS:
        slot = Int32(0)
        parity = parity ^ 1
    return slot, parity


class ExpertGemv(ConfiguredKernel[ExpertConfiguration]):
    """The kernel for one configuration; tensors arrive as addresses, so that a call converts nothing."""

    @cute.jit
    def __call__(
        self, x: Int64, ids: Int64, weights: Int64, gate_up: Int64, down: Int64, out: Int64, hidden: Int64,
        phase: Int64, rows: Int32, max_rows: Int32, num_experts: Int32, rank: Int32, stream: CUstream,
    ) -> None:
        self.device(x, ids, weights, gate_up, down, out, hidden, phase, rows, max_rows, num_experts, rank).launch(
            grid=(self.config.num_blocks, 1, 1),
            block=(NUM_THREADS, 1, 1),
            smem=self.config.smem_bytes,
            # Without it ptxas spills in the second launch at width 192, for the sake of blocks that find no room.
            min_blocks_per_mp=1 if self.config.part == "down" else 0,
            max_number_threads=(self.config.register_threads, 1, 1),
            preferred_smem_carveout=ptx.ALL_SHARED,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(
        self, x: Int64, ids: Int64, weights: Int64, gate_up: Int64, down: Int64, out: Int64, hidden: Int64,
        phase: Int64, rows: Int32, max_rows: Int32, num_experts: Int32, rank: Int32,
    ) -> None:
        c = self.config
        tid, warp, lane = thread_place()
        block, _, _ = cute.arch.block_idx()
        s_ring = cute.arch.get_dyn_smem(Uint8, alignment=128).toint().to(Int32)
        s_partial = s_ring + NUM_SLOTS * TILE_BYTES
        s_down_partial = s_partial + 2 * c.partial_bytes
        s_full = s_down_partial + 2 * 2 * NUM_WARPS * 16 * 4
        s_empty = s_full + NUM_SLOTS * PIECES * 8
        s_phase = s_empty + NUM_SLOTS * 8

        if tid == 0:
            for slot in range_constexpr(NUM_SLOTS):
                for piece in range_constexpr(PIECES):
                    ptx.barrier_init(s_full + (slot * PIECES + piece) * 8, 1)
                ptx.barrier_init(s_empty + slot * 8, NUM_WARPS)
            cute.arch.mbarrier_init_fence()
        began = timestamps.now("expert_gemv")
        self._fetch_control(out, hidden, phase, rows, max_rows, block, tid)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        released = timestamps.now("expert_gemv")

        if warp == NUM_WARPS:
            self._stream(ids, gate_up, down, num_experts, rows, block, lane, s_ring, s_full, s_empty)
        else:
            if const_expr(c.part != "down"):
                self._gate_up(
                    x, ids, weights, hidden, phase, num_experts, rows, max_rows, block, warp, lane, s_ring, s_partial,
                    s_full, s_empty, s_phase,
                )  # fmt: skip
            if const_expr(c.part == "both"):
                # Since the last row's barrier every warp of this block finds the phase in shared memory.
                turn = ptx.shared_load_int(s_phase)
                size = max_rows * (TOP_K * c.width * 2)
                if warp >= K_WARPS:
                    # The other vector was read by the launch before this one, which has ended.
                    g_other = hidden + Int64((1 - turn) * size)
                    first = (block * (NUM_WARPS - K_WARPS) + warp - K_WARPS) * 32 + lane
                    for chunk in cutlass.range(first, size // 16, NUM_BLOCKS * (NUM_WARPS - K_WARPS) * 32, unroll=1):
                        ptx.store(g_other + Int64(chunk) * 16, [Uint32(EMPTY)] * 4)
                if block < NUM_DOWN_BLOCKS:
                    g_hidden = hidden + Int64(turn * size)
                    self._down(g_hidden, out, rows, rank, block, warp, lane, s_ring, s_down_partial, s_full, s_empty)
                # Block 0 has seen the hidden vector whole, so every block has read the phase.
                if (block == 0) & (tid == 0):
                    ptx.store_int(phase, 1 - turn)
            if const_expr(c.part == "down"):
                self._down(hidden, out, rows, rank, block, warp, lane, s_ring, s_down_partial, s_full, s_empty)
            if const_expr(timestamps.on("expert_gemv")):  # noqa: SIM102 - one is of the build, the other of the thread
                if tid == 0:
                    timestamps.record(f"expert_gemv {c.part} {c.width}", block, began, released)

    @cute.jit
    def _fetch_control(
        self, out: Int64, hidden: Int64, phase: Int64, rows: Int32, max_rows: Int32, block: Int32, tid: Int32
    ) -> None:
        """Ask for what was last used a layer ago and is needed at a barrier: tables, phase, the vectors between."""
        c = self.config
        if const_expr(c.part == "both"):
            row_lines = TOP_K * c.width * 2 // 128
            line = tid * NUM_BLOCKS + block
            if line < 2 * rows * row_lines:
                turn = line // (rows * row_lines)
                place = turn * (max_rows * row_lines) + line % (rows * row_lines)
                ptx.prefetch(hidden + Int64(place) * 128)
            if (tid == 0) & (block == 0):
                ptx.prefetch(phase)
        if const_expr(c.num_peers):  # noqa: SIM102 - one is of the build, the other of the thread
            if (tid == 0) & (block == 0):
                ptx.prefetch(out)

    @cute.jit
    def _gate_up(
        self, x: Int64, ids: Int64, weights: Int64, hidden: Int64, phase: Int64, num_experts: Int32, rows: Int32,
        max_rows: Int32, block: Int32, warp: Int32, lane: Int32, s_ring: Int32, s_partial: Int32, s_full: Int32,
        s_empty: Int32, s_phase: Int32,
    ) -> None:
        """First product: an eighth of one expert's tiles, K split over the warps."""
        c = self.config
        slot = Int32(0)
        parity = Int32(0)
        for row in cutlass.range(rows, unroll=1):
            s_sums = s_partial + (row & 1) * c.partial_bytes
            if warp < K_WARPS:
                bf16 = ptx.load_l2(x + Int64(row * (LATENT * 2) + warp * 512 + lane * 16))
                halves = [_half_from_bf16(one) for one in bf16]
                for tile in cutlass.range(c.tiles_per_block, unroll=1):
                    ptx.barrier_wait(s_full + (slot * PIECES + (warp >> 1)) * 8, parity)
                    words, scales = _read_unit(s_ring + slot * TILE_BYTES + warp * UNIT_BYTES, 8, lane)
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.barrier_arrive(s_empty + slot * 8)
                    (sums,) = _multiply([_fragments(words)], halves, lane)
                    low, high = _sum_columns(_scaled(sums, scales))
                    if (lane & 3) == 0:
                        s_mine = s_sums + (tile * (K_WARPS * 16) + warp * 16 + (lane >> 2)) * 4
                        ptx.shared_store_float(s_mine, low)
                        ptx.shared_store_float(s_mine + 32, high)
                    slot, parity = _next_slot(slot, parity)
                cute.arch.barrier(barrier_id=1, number_of_threads=NUM_WARPS * 32)
            else:
                # Asked for here, these are there when the tiles are done.
                output = (warp - K_WARPS) * 32 + lane
                at = Int64((row * TOP_K + (block >> 3)) * 4)
                expert = ptx.load_int(ids + at)
                weight = ptx.load_float(weights + at)
                turn = Int32(0)
                if const_expr(c.part == "both"):
                    turn = ptx.load_int(phase)
                    if lane == 0:
                        ptx.shared_store_int(s_phase, turn)
                for _ in cutlass.range(c.tiles_per_block, unroll=1):
                    # Every warp counts in the release of a slot, those that read nothing there too. None may be a turn
                    # of the ring ahead of the others.
                    ptx.barrier_wait(s_full + slot * PIECES * 8, parity)
                    if lane == 0:
                        ptx.barrier_arrive(s_empty + slot * 8)
                    slot, parity = _next_slot(slot, parity)
                cute.arch.barrier(barrier_id=1, number_of_threads=NUM_WARPS * 32)
                s_mine = s_sums + (cutlass.min(output >> 3, c.tiles_per_block - 1) * (K_WARPS * 16) + (output & 7)) * 4
                gate = Float32(0.0)
                up = Float32(0.0)
                for part in range_constexpr(K_WARPS):
                    gate = gate + ptx.shared_load_float(s_mine + part * 64)
                    up = up + ptx.shared_load_float(s_mine + part * 64 + 32)
                if (expert < 0) | (expert >= num_experts):
                    weight = Float32(0.0)
                value = _situ_glu(gate * Float32(FROM_DECODED), up * Float32(FROM_DECODED))
                value = value * weight * Float32(HIDDEN_SCALE)
                pair = ptx.pack_f16(value, cute.arch.shuffle_sync_bfly(value, offset=1))
                if (output < c.tiles_per_block * 8) & ((lane & 1) == 0):
                    index = (turn * max_rows + row) * (TOP_K * c.width) + block * (c.tiles_per_block * 8) + output
                    _publish(hidden + Int64(index * 2), pair)

    @cute.jit
    def _stream(
        self, ids: Int64, gate_up: Int64, down: Int64, num_experts: Int32, rows: Int32, block: Int32, lane: Int32,
        s_ring: Int32, s_full: Int32, s_empty: Int32,
    ) -> None:
        """The producer warp: every copy of this block, in the order in which the other warps use them.

        A slot arrives in eight pieces, one lane each: two units of a gate/up tile, or one expert's w2. A piece that a
        slot has no use for arrives at once, so that all its barriers keep the same parity.
        """
        c = self.config
        slot = Int32(0)
        parity = Int32(1)  # a slot that nobody has used yet counts as released
        piece = lane & (PIECES - 1)
        s_piece = s_full + piece * 8
        if const_expr(c.part != "down"):
            for row in cutlass.range(rows, unroll=1):
                expert = ptx.load_int(ids + Int64((row * TOP_K + (block >> 3)) * 4))
                expert = cutlass.max(cutlass.min(expert, num_experts - 1), 0)
                first = Int64(expert) * (c.width // 8) + Int64((block & 7) * c.tiles_per_block)
                g_piece = gate_up + first * TILE_BYTES + Int64(piece * PIECE_BYTES)
                for tile in cutlass.range(c.tiles_per_block, unroll=1):
                    ptx.barrier_wait(s_empty + slot * 8, parity)
                    if lane < TILE_BYTES // PIECE_BYTES:
                        ptx.barrier_expect(s_piece + slot * (PIECES * 8), PIECE_BYTES)
                        s_place = s_ring + slot * TILE_BYTES + piece * PIECE_BYTES
                        g_place = g_piece + Int64(tile) * TILE_BYTES
                        ptx.bulk_copy(s_place, g_place, PIECE_BYTES, s_piece + slot * (PIECES * 8))
                    elif lane < PIECES:
                        ptx.barrier_arrive(s_piece + slot * (PIECES * 8))
                    slot, parity = _next_slot(slot, parity)
        if const_expr(c.part != "gate_up"):  # noqa: SIM102 - one is of the build, the other of the block
            if block < NUM_DOWN_BLOCKS:
                for row in cutlass.range(rows, unroll=1):
                    for part in cutlass.range(c.down_slots, unroll=1):
                        place = part * c.experts_per_slot + cutlass.min(piece, c.experts_per_slot - 1)
                        expert = ptx.load_int(ids + Int64((row * TOP_K + place) * 4))
                        expert = cutlass.max(cutlass.min(expert, num_experts - 1), 0)
                        ptx.barrier_wait(s_empty + slot * 8, parity)
                        if lane < c.experts_per_slot:
                            ptx.barrier_expect(s_piece + slot * (PIECES * 8), c.down_bytes)
                            g_expert = down + (Int64(expert) * NUM_DOWN_BLOCKS + Int64(block)) * c.down_bytes
                            s_place = s_ring + slot * TILE_BYTES + piece * c.down_bytes
                            ptx.bulk_copy(s_place, g_expert, c.down_bytes, s_piece + slot * (PIECES * 8))
                        elif lane < PIECES:
                            ptx.barrier_arrive(s_piece + slot * (PIECES * 8))
                        slot, parity = _next_slot(slot, parity)

    @cute.jit
    def _down(
        self, hidden: Int64, out: Int64, rows: Int32, rank: Int32, block: Int32, warp: Int32, lane: Int32,
        s_ring: Int32, s_partial: Int32, s_full: Int32, s_empty: Int32,
    ) -> None:
        """Second product: 32 outputs over all experts. Eight warps a slot, one unit of both tiles each."""
        c = self.config
        count = Int32(0)  # slots used so far
        if const_expr(c.part == "both"):
            count = rows * c.tiles_per_block
        slot = count % NUM_SLOTS
        parity = (count // NUM_SLOTS) & 1
        side = warp >> 3
        unit = warp & 7  # of the slot's eight (expert, K) units
        in_expert = (unit % c.units_per_expert) * 192
        tile_bytes = c.units_per_expert * DOWN_UNIT_BYTES
        in_slot = unit // c.units_per_expert  # expert
        s_unit = s_ring + in_slot * c.down_bytes + (unit % c.units_per_expert) * DOWN_UNIT_BYTES
        for row in cutlass.range(rows, unroll=1):
            early = []
            places = []
            for turn in range_constexpr(c.down_slots // 2):
                expert = (turn * 2 + side) * c.experts_per_slot + in_slot
                index = (row * TOP_K + expert) * c.width + in_expert
                # Lanes of blocks 6 and 7, which a unit of this product lacks, read a neighbour's and use none.
                places.append(hidden + Int64(index * 2 + cutlass.min(lane, 23) * 16))
                early.append(_load_early(places[turn]))
            low = [Float32(0.0)] * 4
            high = [Float32(0.0)] * 4
            for turn in range_constexpr(c.down_slots // 2):
                # Eight warps take this slot, the other eight the next; each counts in the release of both.
                following = slot + 1
                following_parity = parity
                if following == NUM_SLOTS:
                    following = Int32(0)
                    following_parity = parity ^ 1
                mine = slot
                my_parity = parity
                if side == 1:
                    mine = following
                    my_parity = following_parity
                ptx.barrier_wait(s_full + (mine * PIECES + in_slot) * 8, my_parity)
                s_mine = s_unit + mine * TILE_BYTES
                words, scales = _read_unit(s_mine, 6, lane)
                # One tile is decoded before the hidden vector is asked for, which may still be on its way.
                fragments = _fragments(words)
                halves = early[turn]
                if const_expr(c.part == "both"):
                    halves = _arrived(places[turn], early[turn])
                cute.arch.sync_warp()
                # One tile after the other: both at once would take more registers than leave room for the tail.
                (one,) = _multiply([fragments], halves, lane)
                other_words, other_scales = _read_unit(s_mine + tile_bytes, 6, lane)
                (other,) = _multiply([_fragments(other_words)], halves, lane)
                low = [old + new for old, new in zip(low, _scaled(one, scales), strict=True)]
                high = [old + new for old, new in zip(high, _scaled(other, other_scales), strict=True)]
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.barrier_arrive(s_empty + slot * 8)
                    ptx.barrier_arrive(s_empty + following * 8)
                slot = following + 1
                parity = following_parity
                if slot == NUM_SLOTS:
                    slot = Int32(0)
                    parity = parity ^ 1
            s_sums = s_partial + (row & 1) * (2 * NUM_WARPS * 16 * 4)
            for tile in range_constexpr(2):
                upper, lower = _sum_columns([low, high][tile])
                if (lane & 3) == 0:
                    s_place = s_sums + (tile * (NUM_WARPS * 16) + warp * 16 + (lane >> 2)) * 4
                    ptx.shared_store_float(s_place, upper)
                    ptx.shared_store_float(s_place + 32, lower)
            cute.arch.barrier(barrier_id=1, number_of_threads=NUM_WARPS * 32)
            if warp == 0:
                total = Float32(0.0)
                s_place = s_sums + ((lane >> 4) * (NUM_WARPS * 16) + (lane & 15)) * 4
                for part in range_constexpr(NUM_WARPS):
                    total = total + ptx.shared_load_float(s_place + part * 64)
                total = total * Float32(FROM_DECODED / HIDDEN_SCALE)
                place = Int64(row * LATENT + block * 32 + lane)
                if const_expr(c.num_peers):
                    self._push(out, total, (rank * rows + row) * LATENT + block * 32, lane)
                elif const_expr(c.fp32_out):
                    cute.make_tensor(cute.make_ptr(Float32, out + place * 4, cute.AddressSpace.gmem), 1)[0] = total
                else:
                    pointer = cute.make_ptr(BFloat16, out + place * 2, cute.AddressSpace.gmem)
                    cute.make_tensor(pointer, 1)[0] = total.to(BFloat16)

    @cute.jit
    def _push(self, peers: Int64, total: Float32, first: Int32, lane: Int32) -> None:
        """A row's 32 outputs, 64 bytes in bf16, to every peer: a lane stores 16 bytes to each eighth one."""
        pair = ptx.pack_bf16(total, cute.arch.shuffle_sync_bfly(total, offset=1))  # in its order in even lanes
        chunk = lane & 3
        words = [cute.arch.shuffle_sync(pair, chunk * 8 + 2 * i) for i in range(4)]
        for turn in range_constexpr(-(-self.config.num_peers // 8)):
            peer = turn * 8 + (lane >> 2)
            if peer < self.config.num_peers:
                base = ptx.load_long(peers + Int64(peer * 8))
                ptx.store_to_peer(base + Int64(first + chunk * 8) * 2, words)


def compile_experts(configuration: ExpertConfiguration) -> Any:
    """The kernel as a callable ``(x, ids, weights, gate_up, down, out, hidden, phase, rows, max_rows, num_experts,
    rank, stream)`` of addresses, four integers and a CUstream; needs no GPU. With peers ``out`` is their table.
    """
    zero = Int64(0)
    return cute.compile(ExpertGemv(configuration), *[zero] * 8, Int32(1), Int32(1), Int32(1), Int32(0), CUstream(0))
