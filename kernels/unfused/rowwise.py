"""Small row-wise kernels of the stock path: RMSNorm, SiTU-GLU, gate multiply, query assembly with cache insertion.

What they compute
    ``norm``             out [B, W] bf16 = RMSNorm(x [B, W] bf16) times weight [W] bf16, for one or two such triples in
                         one launch (the query and the key-value latent of an MLA layer are two parts of one row).
    ``situ``             out [B, W] bf16 = 4 tanh(g / 4) sigmoid(g) 25 tanh(u / 25) of x [B, 2 W] bf16: gate, then up.
    ``gate_multiply``    out [B, W] bf16 = value [B, W] times sigmoid(gate [B, W]), both bf16.
    ``query_and_cache``  query [B, H, 576] bf16 = absorbed [B, H, 512] then extra [B, H, 64]; latent [B, 512] then
                         latent extra [B, 64] go into the paged cache at the row's slot, as bf16 or e4m3 (scale 1,
                         saturated). Tensors, layout and scale of ``mla_prep``, whose fp8 row is rounded once from fp32
                         where this one starts from the norm's bf16.

How data moves
    16 bytes a thread and access; rows at any stride of 16 bytes. ``norm``: one block a row and part, up to four chunks
    a thread, one barrier of the block's warps. The others are one load and one store deep.

Limits
    Widths are multiples of 8, of ``norm`` at most 8192. A cache slot below 0 marks a padding row: nothing is written to
    the cache. Only the norm's weights are read before the dependency wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from k3sim.kernels.device import ptx
from k3sim.kernels.unfused.pieces import block_sum, sigmoid, tanh

CHUNK = 8
EPSILON = 1e-5
MAX_NORM_THREADS = 256
THREADS = 128  # of the element-wise kernels
PAGE_TOKENS = 64
LATENT = 512
EXTRA = 64
ROW = LATENT + EXTRA
QUERY_THREADS = 96  # 72 chunks of a row


@dataclass(frozen=True, kw_only=True)
class NormConfiguration:
    """``widths``: of one or two parts."""

    widths: tuple[int, ...]
    pdl: bool = False

    @property
    def threads(self) -> int:
        """Of a block: whole warps with the same number of chunks a thread, as few as hold the widest part."""
        chunks = max(self.widths) // CHUNK
        each = -(-chunks // MAX_NORM_THREADS)
        return -(-chunks // (32 * each)) * 32


@dataclass(frozen=True, kw_only=True)
class ElementwiseConfiguration:
    """``kernel``: "situ" or "gate_multiply"."""

    kernel: str
    pdl: bool = False


@dataclass(frozen=True, kw_only=True)
class QueryCacheConfiguration:
    heads: int
    fp8: bool
    pdl: bool = False


@cute.jit
def _norm_row(
    mX: Int64, mWeight: Int64, mOut: Int64, sWarps: Int32, tid: Int32, width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    num_chunks = width // CHUNK
    steps = -(-num_chunks // threads)
    # Threads beyond the last chunk repeat it; they add nothing and store nothing.
    places = [Int64(cutlass.min(tid + step * threads, Int32(num_chunks - 1))) * 16 for step in range(steps)]
    weights = [ptx.load_stream(mWeight + place) for place in places]
    cute.arch.griddepcontrol_wait()
    rows = [ptx.widen_bf16(ptx.load_l2(mX + place)) for place in places]
    square = Float32(0.0)
    for step in range_constexpr(steps):
        part = Float32(0.0)
        for value in rows[step]:
            part = part + value * value
        square = square + (part if tid + step * threads < num_chunks else Float32(0.0))
    square = block_sum(square, sWarps, tid, threads // 32)
    factor = cute.math.rsqrt(square * Float32(1.0 / width) + Float32(EPSILON))
    for step in range_constexpr(steps):
        if tid + step * threads < num_chunks:
            scales = ptx.widen_bf16(weights[step])
            values = [value * factor * scale for value, scale in zip(rows[step], scales, strict=True)]
            ptx.store(mOut + places[step], ptx.narrow_bf16(values))


@cute.kernel
def _norm(
    mX: Int64, x_stride: Int64, mWeight: Int64, mOut: Int64, out_stride: Int64, mX2: Int64, x2_stride: Int64,
    mWeight2: Int64, mOut2: Int64, out2_stride: Int64, configuration: cutlass.Constexpr,
) -> None:
    widths, threads = configuration.widths, configuration.threads
    tid, _, _ = cute.arch.thread_idx()
    row, part, _ = cute.arch.block_idx()
    sWarps = Int32(cutlass.memory.SmemAllocator().allocate(4 * (threads // 32), 16).toint())
    cute.arch.griddepcontrol_launch_dependents()
    if part == 0:
        _norm_row(mX + row * x_stride, mWeight, mOut + row * out_stride, sWarps, tid, widths[0], threads)
    if const_expr(len(widths) > 1):  # noqa: SIM102 - one test is of compile time, the other is not
        if part == 1:
            _norm_row(mX2 + row * x2_stride, mWeight2, mOut2 + row * out2_stride, sWarps, tid, widths[1], threads)


def _situ(gate: Float32, up: Float32) -> Float32:
    return Float32(100.0) * tanh(gate * Float32(0.25)) * sigmoid(gate) * tanh(up * Float32(1 / 25))


@cute.kernel
def _elementwise(
    mFirst: Int64, first_stride: Int64, mSecond: Int64, second_stride: Int64, mOut: Int64, width: Int32,
    configuration: cutlass.Constexpr,
) -> None:
    """``situ`` of gate and up, or the first operand times the sigmoid of the second; ``mOut`` contiguous."""
    tid, _, _ = cute.arch.thread_idx()
    block, row, _ = cute.arch.block_idx()
    column = (block * THREADS + tid) * CHUNK
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if column < width:
        first = ptx.widen_bf16(ptx.load_l2(mFirst + row * first_stride + column * 2))
        second = ptx.widen_bf16(ptx.load_l2(mSecond + row * second_stride + column * 2))
        if const_expr(configuration.kernel == "situ"):
            values = [_situ(gate, up) for gate, up in zip(first, second, strict=True)]
        else:
            values = [value * sigmoid(gate) for value, gate in zip(first, second, strict=True)]
        ptx.store(mOut + (Int64(row) * width + column) * 2, ptx.narrow_bf16(values))


@cute.kernel
def _query_and_cache(
    mAbsorbed: Int64, absorbed_row: Int64, absorbed_head: Int64, mExtra: Int64, extra_row: Int64, extra_head: Int64,
    mLatent: Int64, latent_row: Int64, mLatentExtra: Int64, latent_extra_row: Int64, mSlots: Int64, mQuery: Int64,
    mCache: Int64, page_bytes: Int64, configuration: cutlass.Constexpr,
) -> None:
    """Blocks of a row: one a head of the query, and one for the cache."""
    heads = configuration.heads
    tid, _, _ = cute.arch.thread_idx()
    head, row, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if tid < ROW // CHUNK:
        in_latent = tid < LATENT // CHUNK
        extra_at = (tid - LATENT // CHUNK) * 16
        if head < heads:
            gLatent = mAbsorbed + row * absorbed_row + head * absorbed_head + tid * 16
            gExtra = mExtra + row * extra_row + head * extra_head + extra_at
            words = ptx.load_l2(gLatent if in_latent else gExtra)
            ptx.store(mQuery + ((Int64(row) * heads + head) * ROW + tid * CHUNK) * 2, words)
        else:
            slot = ptx.load_long(mSlots + Int64(row) * 8)
            gLatent = mLatent + row * latent_row + tid * 16
            gExtra = mLatentExtra + row * latent_extra_row + extra_at
            words = ptx.load_l2(gLatent if in_latent else gExtra)
            if slot >= 0:
                row_bytes = ROW if configuration.fp8 else 2 * ROW
                gCache = mCache + slot // PAGE_TOKENS * page_bytes + slot % PAGE_TOKENS * row_bytes
                if const_expr(configuration.fp8):
                    ptx.store_pair(gCache + tid * 8, ptx.narrow_e4m3(ptx.widen_bf16(words)))
                else:
                    ptx.store(gCache + tid * 16, words)


def compile_norm(configuration: NormConfiguration) -> Any:
    """Function of twice (x, its row stride, weight, out, its row stride), rows, stream; strides in bytes."""

    @cute.jit
    def launch(
        mX: Int64, x_stride: Int64, mWeight: Int64, mOut: Int64, out_stride: Int64, mX2: Int64, x2_stride: Int64,
        mWeight2: Int64, mOut2: Int64, out2_stride: Int64, rows: Int32, stream: CUstream,
    ) -> None:
        _norm(
            mX, x_stride, mWeight, mOut, out_stride, mX2, x2_stride, mWeight2, mOut2, out2_stride, configuration
        ).launch(
            grid=[rows, len(configuration.widths), 1],
            block=[configuration.threads, 1, 1],
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=configuration.pdl,
        )

    return cute.compile(launch, *[Int64(0)] * 10, Int32(1), cute.runtime.make_fake_stream())


def compile_elementwise(configuration: ElementwiseConfiguration) -> Any:
    """Function of (first, its row stride, second, its row stride, out, width, blocks a row, rows, stream)."""

    @cute.jit
    def launch(
        mFirst: Int64, first_stride: Int64, mSecond: Int64, second_stride: Int64, mOut: Int64, width: Int32,
        blocks: Int32, rows: Int32, stream: CUstream,
    ) -> None:
        _elementwise(mFirst, first_stride, mSecond, second_stride, mOut, width, configuration).launch(
            grid=[blocks, rows, 1], block=[THREADS, 1, 1], stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED, use_pdl=configuration.pdl,
        )

    zero, one = Int64(0), Int32(1)
    return cute.compile(launch, zero, zero, zero, zero, zero, one, one, one, cute.runtime.make_fake_stream())


def compile_query_and_cache(configuration: QueryCacheConfiguration) -> Any:
    """Function of (absorbed, its row and head strides, extra, its row and head strides, latent, its row stride, latent
    extra, its row stride, slots, query, cache, page bytes, rows, stream); strides in bytes."""

    @cute.jit
    def launch(
        mAbsorbed: Int64, absorbed_row: Int64, absorbed_head: Int64, mExtra: Int64, extra_row: Int64,
        extra_head: Int64, mLatent: Int64, latent_row: Int64, mLatentExtra: Int64, latent_extra_row: Int64,
        mSlots: Int64, mQuery: Int64, mCache: Int64, page_bytes: Int64, rows: Int32, stream: CUstream,
    ) -> None:
        _query_and_cache(
            mAbsorbed, absorbed_row, absorbed_head, mExtra, extra_row, extra_head, mLatent, latent_row, mLatentExtra,
            latent_extra_row, mSlots, mQuery, mCache, page_bytes, configuration,
        ).launch(
            grid=[configuration.heads + 1, rows, 1],
            block=[QUERY_THREADS, 1, 1],
            stream=stream,
            preferred_smem_carveout=ptx.ALL_SHARED,
            use_pdl=configuration.pdl,
        )  # fmt: skip

    return cute.compile(launch, *[Int64(0)] * 14, Int32(1), cute.runtime.make_fake_stream())
