"""One to 16 rows times bf16 weights, fp32 sums: ``out[M, O] = epilogue(x[M, K] @ w[N, K].T)``.

What it computes
    mX [M, K] bf16, mW [N, K] bf16, both row-major; mOut [M, O] bf16 or fp32. ``Epilogue`` says what happens to the
    sums: nothing, an operand mOperand [M, O] bf16 added, an operand multiplied by the sum's sigmoid, SiTU-GLU on
    paired rows (row i of w is a gate, row N/2 + i its up; O = N/2), or a store to every peer instead of mOut.

How data moves
    The time is the weight stream, so everything serves it. Each thread copies by cp.async, 16 bytes at a time, exactly
    the weights that it will multiply itself, into slots of shared memory that no other thread touches. The ring thus
    has no barrier: waiting for one's own copies is enough, and the number of bytes in flight is chosen freely (shared
    memory) instead of being what registers leave. All stages are requested before the dependency wait of programmatic
    dependent launch, because weights depend on nothing; the trigger for the next kernel is given at once, so that its
    ring fills while this kernel drains. Two generations fit an SM when a block takes at most 113 KB an SM.

    ``fma`` (few rows): a group of threads spans K, each thread keeps its slice of x in registers as fp32 for the whole
    kernel and multiplies every output row of the group. Sums are folded across the warp a stage at a time and left in
    shared memory by warp; one barrier at the end. Output rows are dealt to blocks one by one, so the grid is always
    one wave and blocks differ by one row of weights.

    ``mma`` (more rows): weights are operand A of mma.sync m16n8k16, x is operand B. A and B may permute K in any way
    that both follow, so a thread takes 16 contiguous bytes of a row as its share of two instructions: the same private
    slots, no ldmatrix, no swizzle. Warps take turns along K; their accumulators are added up in shared memory.

    Split K: a cluster of ``split`` blocks shares the output rows, each takes a slice of K, the others store their sums
    into the first one's shared memory.

    A polled push is the front of the experts divided over the ranks: rows [router shard; latent down shard] of one
    matrix, 280 x 7168 at TP16, 560 x 7168 at TP8, each output one fp32 word to every peer. The word is its own flag: no
    sum gives the NaN of all ones bits that stands for "not arrived" (``router_topk.gather_topk`` receives it).

Why this shape
    On an H200 (2026-11-29, cold, in a chain; h200.json has every number): a ring of 200 KB, hence one block an SM, wins
    where a block streams more than 300 KB (6288 x 7168: 20.0 us against 20.6 with 104 KB and two generations); below
    that the successor's early ring is worth more (2112 x 7168: 7.3 against 7.9). Two blocks an SM win where all of a
    block's rows fit its ring (448 x 7168: 2.1 against 2.4) and lose where they refill it (6288 x 7168: 26.8).
    One row on tensor cores lost everywhere (2112 x 7168: 11.0 against 7.3); from three rows on FMAs lose. In the
    ``mma`` form half a ring costs a third of the speed (6288 x 7168, 8 rows: 27.2 against 21.0), four or fourteen warps
    instead of eight one to three per cent.
    Shapes that no table lists (2026-12-01, docs/journal/2026-12-01-skinny-gemv.md): tensor-core blocks with half an SM
    lose where they are fewer than the SMs (2048 x 7168, 3 rows: 9.9 us, with all of an SM 8.3), and pairs of blocks
    that share K and have twice the outputs read half of x (12 rows: 12.5 to 9.3). On CUDA cores two blocks an SM with
    104 KB each win where it reads 240 KB or more of rows of 4096 or 8192 (4096 x 4096: 7.8 against 8.2).
    Not built: bulk copies by one thread, which need a full and an empty barrier a stage; weights landing in registers,
    which hold 64 KB an SM only without a second generation.

Limits
    K a multiple of 8 (``fma``, at most four rows) or of 32 (``mma``), 16-byte aligned tensors, M at most 16, at most 16
    peers. What is neither goes to cuBLAS (``launch.py``).

One file, because both forms are one thought: the same ring of private slots in front of two ways to multiply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr, select_
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx, timestamps
from k3sim.kernels.skinny_gemv.configuration import CHUNK, WARP, Epilogue, GemvConfiguration


def _copy_async(s_address: Int32, g_address: Int64, wanted: Boolean | bool) -> None:
    if wanted is False:
        return
    inline_ptx(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[s_address, g_address, Int64(ptx.EVICT_FIRST)],
        predicate=None if wanted is True else wanted,
    )


def _both(one: Boolean | bool, other: Boolean | bool) -> Boolean | bool:
    """Conjunction that stays a Python value where it can, because PTX takes no constant for a predicate."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    return one & other


def _widen(words: Iterable[Uint32]) -> list[Float32]:
    return [value for word in words for value in (ptx.low_bf16(word), ptx.high_bf16(word))]


def _tanh(value: Float32) -> Float32:
    # By the exponential, not tanh.approx, whose 11 bits would show in a bf16 product of two of them.
    return Float32(1.0) - Float32(2.0) / (cute.math.exp(value * Float32(2.0), fastmath=True) + Float32(1.0))


def _sigmoid(value: Float32) -> Float32:
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-value, fastmath=True))


def _share(num_values: int) -> int:
    """Lanes that end with the same value when ``_fold`` sums that many: their number rounded up to a power of two."""
    return WARP >> (num_values - 1).bit_length()


def _fold(values: list[Float32], lane: Int32) -> Float32:
    """Sum every value over the warp; lane l ends with number l / share, see ``_share``."""
    values = values + [Float32(0.0)] * (WARP // _share(len(values)) - len(values))
    offset = WARP // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = [select_(upper, values[half + j], values[j]) for j in range(half)]
        sent = [select_(upper, values[j], values[half + j]) for j in range(half)]
        values = [
            one + cute.arch.shuffle_sync_bfly(other, offset=offset) for one, other in zip(kept, sent, strict=True)
        ]
        offset //= 2
    total = values[0]
    while offset > 0:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        offset //= 2
    return total


class SkinnyGemv:
    """The kernel for one configuration; tensors arrive as addresses, so that a call converts nothing."""

    def __init__(self, configuration: GemvConfiguration) -> None:
        self.config = configuration.check()

    @cute.jit
    def __call__(self, x: Int64, w: Int64, out: Int64, operand: Int64, peers: Int64, stream: CUstream) -> None:
        config = self.config
        self.device(x, w, out, operand, peers).launch(
            grid=(config.tiling.num_tiles * config.tiling.split, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.tiling.split, 1, 1) if config.tiling.split > 1 else None,
            smem=config.smem_bytes,
            # Every kernel of a chain with the same carve-out: another one would wait for the SM to drain.
            preferred_smem_carveout=ptx.ALL_SHARED,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, x: Int64, w: Int64, out: Int64, operand: Int64, peers: Int64) -> None:
        config = self.config
        split = config.tiling.split
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile = block // split
        rank = block % split
        s_ring = cute.arch.get_dyn_smem(Uint8, alignment=128).toint().to(Int32)

        # Columns of the output [first, first + num_columns) belong to this tile; tiles differ by at most one.
        first = tile * config.out_width // config.tiling.num_tiles
        num_columns = (tile + 1) * config.out_width // config.tiling.num_tiles - first

        if const_expr(split > 1):
            cute.arch.cluster_arrive_relaxed()
        s_partial = s_ring if config.is_mma else s_ring + config.ring_bytes
        r_operand = cute.make_rmem_tensor(config.turns, Float32)
        r_bases = cute.make_rmem_tensor(max(config.num_peers, 1), Int64)
        self._load_bases(out, peers, r_bases)
        if const_expr(config.is_mma):
            self._multiply_mma(x, w, operand, first, num_columns, rank, tid, s_ring, s_partial, r_operand)
        else:
            self._multiply_fma(x, w, operand, first, num_columns, rank, tid, s_ring, s_partial, r_operand)
        cute.arch.sync_threads()
        self._finish(first, num_columns, rank, tid, s_ring, s_partial, r_operand, r_bases)

    def _weight_row(self, w: Int64, first: Int32, local: Int32) -> Int64:
        """Address of the tile's weight row number ``local``; paired rows alternate gate and up."""
        config = self.config
        row = first + local
        if config.paired:
            row = (local & 1) * config.out_width + first + (local >> 1)
        return w + row.to(Int64) * (config.depth * 2)

    def _request_rows(
        self,
        w: Int64,
        first: Int32,
        num_local: Int32,
        group: Int32,
        k_bytes: Int64,
        exists: list[Boolean],
        stage: Int32 | None,
        s_stage: Int32,
    ) -> None:
        """Ask for this thread's weights of one ``fma`` stage; a stage past the end, or None, asks for nothing."""
        config, tiling = self.config, self.config.tiling
        for r in range(0 if stage is None else tiling.rows_per_stage):
            assert stage is not None
            local = (stage * tiling.groups + group) * tiling.rows_per_stage + r
            g_row = self._weight_row(w, first, local) + k_bytes
            for c in range(config.chunks_per_thread):
                wanted = local < num_local
                if not config.fills_threads:
                    wanted = wanted & exists[c]
                slot = (r * config.chunks_per_thread + c) * config.threads * 16
                _copy_async(s_stage + slot, g_row + c * tiling.threads_k * CHUNK * 2, wanted)
        cute.arch.cp_async_commit_group()

    def _refill(self, stage: Int32) -> Int32 | None:
        """The stage that takes the place of ``stage`` in the ring; None where the ring holds all there are."""
        config = self.config
        return stage + config.tiling.stages if config.num_stages > config.tiling.stages else None

    def _request_steps(
        self,
        g_rows: list[Int64],
        rows_exist: list[Boolean | bool],
        start: Int32,
        stage: Int32 | int,
        s_stage: Int32,
        offset: int,
    ) -> None:
        """Ask for this thread's chunks of some rows (of weights or of x) for one ``mma`` stage.

        ``start``: the place in K where this block begins. Blocks that walked K in step would ask the same lines of x
        from L2 at the same moment.
        """
        config, steps = self.config, self.config.tiling.steps_per_stage
        wanted = stage < config.num_stages
        if not isinstance(stage, int) and config.num_stages <= config.tiling.stages:
            return  # the ring holds the whole slice: nothing to refill
        turned = start + stage
        turned = Int32(select_(turned >= config.num_stages, turned - config.num_stages, turned))
        g_stage = (turned * (config.num_parts * steps * 4 * CHUNK * 2)).to(Int64)
        for number, (g_row, exists) in enumerate(zip(g_rows, rows_exist, strict=True)):
            for step in range(steps):
                slot = offset + (number * steps + step) * config.threads * 16
                _copy_async(s_stage + slot, g_row + g_stage + step * 4 * CHUNK * 2, _both(wanted, exists))

    def _total(self, index: Int32, s_from: Int32, count: int) -> Float32:
        # In the order of the parts, whatever arrived first: the same bits every time.
        part_bytes = self.config.rows * self.config.max_local_rows * 4
        value = ptx.shared_load_float(s_from + index * 4)
        for part in range(1, count):
            value = value + ptx.shared_load_float(s_from + index * 4 + part * part_bytes)
        return value

    def _stage_sums(self, s_slot: Int32, r_x: list[list[Float32]], exists: list[Boolean]) -> list[Float32]:
        """This thread's sums of one ``fma`` stage, number ``m * rows_per_stage + r``."""
        config, rows_per_stage = self.config, self.config.tiling.rows_per_stage
        sums = [Float32(0.0)] * (rows_per_stage * config.rows)
        for r in range(rows_per_stage):
            for c in range(config.chunks_per_thread):
                words: Iterable[Uint32] = ptx.shared_load4(
                    s_slot + (r * config.chunks_per_thread + c) * config.threads * 16
                )
                if not config.fills_threads:  # the slot was never written: no NaN may come from there
                    words = [select_(exists[c], word, Uint32(0)) for word in words]
                r_w = _widen(words)
                for m in range(config.rows):
                    at = m * rows_per_stage + r
                    for i in range(CHUNK):
                        sums[at] = cute.math.fma(r_w[i], r_x[m * config.chunks_per_thread + c][i], sums[at])
        return sums

    def _accumulate(self, s_slot: Int32, s_x_offset: int, r_sums: cute.Tensor) -> None:
        """Add one ``mma`` stage to this warp's accumulators, numbered (row tile, column tile, register)."""
        config, steps = self.config, self.config.tiling.steps_per_stage
        slot_bytes = config.threads * 16
        for step in range(steps):
            r_x = [
                ptx.shared_load4(s_slot + s_x_offset + (n * steps + step) * slot_bytes)
                for n in range(config.column_tiles)
            ]
            for t in range(config.tiling.rows_per_stage // 16):
                top = ptx.shared_load4(s_slot + (2 * t * steps + step) * slot_bytes)
                bottom = ptx.shared_load4(s_slot + ((2 * t + 1) * steps + step) * slot_bytes)
                for n in range(config.column_tiles):
                    at = (t * config.column_tiles + n) * 4
                    sums = tuple(r_sums[at + i] for i in range(4))
                    for j in range(2):
                        a = (top[2 * j], bottom[2 * j], top[2 * j + 1], bottom[2 * j + 1])
                        sums = ptx.mma(sums, a, (r_x[n][2 * j], r_x[n][2 * j + 1]), operand="bf16")
                    for i in range(4):
                        r_sums[at + i] = sums[i]

    @cute.jit
    def _multiply_fma(
        self, x: Int64, w: Int64, operand: Int64, first: Int32, num_columns: Int32, rank: Int32, tid: Int32,
        s_ring: Int32, s_partial: Int32, r_operand: cute.Tensor,
    ) -> None:
        config = self.config
        tiling = config.tiling
        num_chunks, stages, rows_per_stage = config.chunks_per_thread, tiling.stages, tiling.rows_per_stage
        stage_bytes = config.slots_per_stage * 16 * config.threads
        num_local = num_columns * (2 if config.paired else 1)
        group = tid // tiling.threads_k
        thread_k = tid % tiling.threads_k
        lane = tid % WARP
        part = thread_k // WARP
        # Byte offset in a row of this thread's chunk 0, and whether a chunk exists (K need not fill the last one).
        k_bytes = ((rank * config.slice_depth + thread_k * CHUNK) * 2).to(Int64)
        exists = [thread_k + c * tiling.threads_k < config.slice_depth // CHUNK for c in range(num_chunks)]
        row_step = tiling.groups * rows_per_stage
        num_stages = (num_local + row_step - 1 - group * rows_per_stage) // row_step

        began = timestamps.now("skinny_gemv")
        s_thread = s_ring + tid * 16
        for stage in range_constexpr(stages):
            if const_expr(stage >= config.early_stages):
                cute.arch.cp_async_wait_group(config.early_stages - 1)
            self._request_rows(
                w, first, num_local, group, k_bytes, exists, Int32(stage), s_thread + stage * stage_bytes
            )
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        released = timestamps.now("skinny_gemv")
        self._load_operand(operand, first, num_columns, tid, r_operand)

        r_x = []
        for m in range_constexpr(config.rows):
            for c in range_constexpr(num_chunks):
                g_x = x + m * config.depth * 2 + k_bytes + c * tiling.threads_k * CHUNK * 2
                if const_expr(config.fills_threads):
                    r_x.append(_widen(ptx.load_cached(g_x)))
                else:
                    # Beyond the end of K any address inside the row will do: its factor is taken as zero.
                    words = ptx.load_cached(select_(exists[c], g_x, x))
                    r_x.append(_widen([select_(exists[c], word, Uint32(0)) for word in words]))

        s_slot = s_thread
        for stage in cutlass.range(num_stages, unroll=1):
            cute.arch.cp_async_wait_group(stages - 1)
            sums = self._stage_sums(s_slot, r_x, exists)
            self._request_rows(w, first, num_local, group, k_bytes, exists, self._refill(stage), s_slot)
            s_slot = s_slot + stage_bytes
            if s_slot == s_thread + stages * stage_bytes:
                s_slot = s_thread
            total = _fold(sums, lane)
            share = _share(rows_per_stage * config.rows)
            value = lane // share
            local = stage * row_step + group * rows_per_stage + value % rows_per_stage
            index = (part * config.rows + value // rows_per_stage) * config.max_local_rows + local
            if (lane % share == 0) & (value < rows_per_stage * config.rows):
                ptx.shared_store_float(s_partial + index * 4, total)
        cute.arch.cp_async_wait_group(0)
        self._stamp(tid, began, released)

    def _stamp(self, tid: Int32, began: Int64, released: Int64) -> None:
        """The end is that of the products: what is left is a barrier of the block and its stores."""
        if timestamps.on("skinny_gemv"):
            self._record(tid, began, released)

    @cute.jit
    def _record(self, tid: Int32, began: Int64, released: Int64) -> None:
        if tid == 0:
            name = f"skinny_gemv {self.config.num_outputs}x{self.config.depth}"
            timestamps.record(name, cute.arch.block_idx()[0], began, released)

    @cute.jit
    def _multiply_mma(
        self, x: Int64, w: Int64, operand: Int64, first: Int32, num_columns: Int32, rank: Int32, tid: Int32,
        s_ring: Int32, s_partial: Int32, r_operand: cute.Tensor,
    ) -> None:
        config = self.config
        tiling = config.tiling
        stages, steps, row_tiles = tiling.stages, tiling.steps_per_stage, tiling.rows_per_stage // 16
        column_tiles = config.column_tiles
        slot_bytes = config.threads * 16
        stage_bytes = config.slots_per_stage * slot_bytes
        s_x_offset = row_tiles * 2 * steps * slot_bytes
        start = cute.arch.block_idx()[0] // tiling.split % config.num_stages
        num_local = num_columns * (2 if config.paired else 1)
        warp = tid // WARP
        lane = tid % WARP
        row_in_tile = lane // 4
        # A warp's steps of one stage are neighbours in K, so that full lines are asked for together.
        k_bytes = ((rank * config.slice_depth + warp * steps * 4 * CHUNK + (lane % 4) * CHUNK) * 2).to(Int64)

        # Rows past the tile's end repeat its last one: their sums are never stored.
        g_rows = [
            self._weight_row(w, first, cutlass.min(row_in_tile + 8 * half, num_local - 1)) + k_bytes
            for half in range(2 * row_tiles)
        ]
        # A lane whose row of x does not exist asks for nothing and multiplies what its slot happens to hold: only
        # its own column of the product, which is never stored, can see that.
        g_x_rows = [x + (row_in_tile + 8 * n).to(Int64) * (config.depth * 2) + k_bytes for n in range(column_tiles)]
        rows_exist = [config.rows >= 8 * (n + 1) or row_in_tile + 8 * n < config.rows for n in range(column_tiles)]
        all_exist = [True] * (2 * row_tiles)

        began = timestamps.now("skinny_gemv")
        s_thread = s_ring + tid * 16
        for stage in range_constexpr(stages):
            self._request_steps(g_rows, all_exist, start, stage, s_thread + stage * stage_bytes, 0)
        cute.arch.cp_async_commit_group()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        released = timestamps.now("skinny_gemv")
        self._load_operand(operand, first, num_columns, tid, r_operand)
        for stage in range_constexpr(stages):
            self._request_steps(g_x_rows, rows_exist, start, stage, s_thread + stage * stage_bytes, s_x_offset)
            cute.arch.cp_async_commit_group()

        r_sums = cute.make_rmem_tensor(row_tiles * column_tiles * 4, Float32)
        r_sums.fill(0.0)
        s_slot = s_thread
        for stage in cutlass.range(config.num_stages, unroll=1):
            cute.arch.cp_async_wait_group(stages - 1)
            self._accumulate(s_slot, s_x_offset, r_sums)
            self._request_steps(g_rows, all_exist, start, stage + stages, s_slot, 0)
            self._request_steps(g_x_rows, rows_exist, start, stage + stages, s_slot, s_x_offset)
            cute.arch.cp_async_commit_group()
            s_slot = s_slot + stage_bytes
            if s_slot == s_thread + stages * stage_bytes:
                s_slot = s_thread

        cute.arch.cp_async_wait_group(0)
        self._stamp(tid, began, released)
        cute.arch.sync_threads()  # the sums go where the ring was
        for t in range_constexpr(row_tiles):
            for n in range_constexpr(column_tiles):
                for i in range_constexpr(4):
                    row = n * 8 + (lane % 4) * 2 + i % 2
                    local = t * 16 + row_in_tile + 8 * (i // 2)
                    index = (warp * config.rows + row) * config.max_local_rows + local
                    if row < config.rows:
                        ptx.shared_store_float(s_partial + index * 4, r_sums[(t * column_tiles + n) * 4 + i])

    def _place(self, first: Int32, num_columns: Int32, index: Int32) -> tuple[Int32, Int32, Boolean, Int64]:
        """Row, column and existence of output number ``index`` of the tile, and its place in the whole output."""
        config = self.config
        columns = config.max_local_rows // (2 if config.paired else 1)
        row, column = index // columns, index % columns
        exists = (row < config.rows) & (column < num_columns)
        return row, column, exists, (row * config.out_width + first + column).to(Int64)

    def _load_operand(
        self, operand: Int64, first: Int32, num_columns: Int32, tid: Int32, r_operand: cute.Tensor
    ) -> None:
        """Ask for the operand of this thread's outputs now: at the end its latency would stand alone."""
        config = self.config
        if config.epilogue in (Epilogue.ADD, Epilogue.SIGMOID_GATE):
            for turn in range(config.turns):
                _, _, exists, place = self._place(first, num_columns, tid + turn * config.threads)
                address = operand + select_(exists, place, Int64(0)) * 2
                pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem)
                r_operand[turn] = cute.make_tensor(pointer, 1)[0].to(Float32)

    def _load_bases(self, out: Int64, peers: Int64, r_bases: cute.Tensor) -> None:
        config = self.config
        r_bases[0] = out
        for peer in range(config.num_peers):
            r_bases[peer] = ptx.load_long(peers + 8 * peer)

    @cute.jit
    def _finish(
        self, first: Int32, num_columns: Int32, rank: Int32, tid: Int32, s_ring: Int32, s_partial: Int32,
        r_operand: cute.Tensor, r_bases: cute.Tensor,
    ) -> None:
        config = self.config
        split, num_sums = config.tiling.split, config.rows * config.max_local_rows
        s_final = s_partial
        if const_expr(split > 1):
            s_final = s_ring + config.smem_bytes - split * num_sums * 4
            cute.arch.cluster_wait()  # the first block has started, so its shared memory may be written
            s_first = ptx.peer_shared(s_final, Int32(0))
            for turn in range_constexpr(-(-num_sums // config.threads)):
                # The last turn's surplus threads repeat the last sum: the same value to the same place.
                index = cutlass.min(tid + turn * config.threads, num_sums - 1)
                value = self._total(index, s_partial, config.num_parts)
                ptx.peer_store_float(s_first + (rank * num_sums + index) * 4, value)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        if rank == 0:
            for turn in range_constexpr(config.turns):
                self._finish_one(first, num_columns, tid + turn * config.threads, s_final, r_operand[turn], r_bases)

    @cute.jit
    def _finish_one(
        self, first: Int32, num_columns: Int32, index: Int32, s_final: Int32, other: Float32, r_bases: cute.Tensor,
    ) -> None:
        """One output: its sum, the epilogue, the store."""
        config = self.config
        row, column, exists, place = self._place(first, num_columns, index)
        if exists:
            at = row * config.max_local_rows + column * (2 if config.paired else 1)
            value = self._value(at, s_final, other)
            dtype = Float32 if config.fp32_out else BFloat16
            for peer in range_constexpr(max(config.num_peers, 1)):
                address = r_bases[peer] + place * (dtype.width // 8)
                if const_expr(config.polled):
                    inline_ptx("st.relaxed.sys.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])
                else:
                    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem)
                    cute.make_tensor(pointer, 1)[0] = value.to(dtype)

    def _value(self, at: Int32, s_final: Int32, other: Float32) -> Float32:
        config = self.config
        count = config.tiling.split if config.tiling.split > 1 else config.num_parts
        y = self._total(at, s_final, count)
        if config.epilogue is Epilogue.SITU_GLU:
            up = self._total(at + 1, s_final, count)
            return 100.0 * _tanh(y * 0.25) * _sigmoid(y) * _tanh(up * (1 / 25))
        if config.epilogue is Epilogue.ADD:
            return y + other
        if config.epilogue is Epilogue.SIGMOID_GATE:
            return other * _sigmoid(y)
        return y


def compile_gemv(configuration: GemvConfiguration) -> Any:
    """The kernel as a callable ``(x, w, out, operand, peers, stream)`` of addresses and a CUstream; needs no GPU."""
    zero = Int64(0)
    return cute.compile(SkinnyGemv(configuration), zero, zero, zero, zero, zero, CUstream(0))
