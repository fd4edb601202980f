"""Costs of public engines' products of one to a few rows and bf16 weights.

Two forms. ``column_pair`` is the public low-latency GEMV: a block of 224 threads owns two outputs, weights go
straight to registers, nothing is loaded before the dependency wait (vllm-project/vllm 47712, 53534).
``ring`` keeps a shared-memory ring per block that is filled before the dependency wait, and splits K over a
cluster where the outputs alone cannot occupy the chip and the rings do not hold the matrix.

Beyond ``MAX_CUDA_CORE_ROWS`` rows fp32 FMAs cost more than the stream: ``ring`` uses tensor cores, ``column_pair``
leaves the product to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.cublas.public import public_gemm
from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES, fma_flops, reads
from k3sim.kernels.work import Barrier, Pass, Unit, Work, block_work
from k3sim.model.program import Weight

MAX_CUDA_CORE_ROWS = 2  # from three rows on the tensor-core form is level or ahead (TokenSpeed's table, GB300)
# A small matrix stays there for more rows, as long as its slots take no longer than a tensor core's fixed cost: 1152 x
# 1536 at three to eight rows on GB200 (2.10 to 2.72 us, same table).
MAX_CUDA_CORE_SLOTS = 52e6
RING_BYTES = 32 * 1024  # two blocks an SM: 64 KiB in flight, 95 % of HBM on Blackwell; more only costs co-residency
SPLIT_TARGET_BLOCKS = 256  # below this the ring form splits K, so that every SM has bytes in flight


def _on_cuda_cores(weights: Sequence[Weight], rows: int) -> bool:
    return rows <= MAX_CUDA_CORE_ROWS or fma_flops(weights, rows) <= 2.0 * MAX_CUDA_CORE_SLOTS


def _tensor_core(weights: Sequence[Weight], rows: int, *, early: bool, sent_bytes_per_peer: int) -> Work:
    """64-output tiles, split over K until about 128 blocks run; the last block of a tile sums the parts."""
    num_tiles = sum(-(-one.num_outputs // 64) for one in weights)
    split = max(1, min(128 // num_tiles, weights[0].depth // 1024))
    passes = Pass(
        num_dependent_loads=1 + (2 if split > 1 else 0),
        activation_bytes_per_block=rows * weights[0].depth * BF16_BYTES // split,
        reads=reads(weights, early=early),
        flops=sum(2.0 * max(rows, 16) * one.num_outputs * one.depth for one in weights),
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_block_reductions=1 if split > 1 else 0,
        # A cluster barrier before and after the parts of a tile are added up.
        barrier=Barrier.CLUSTER if split > 1 else Barrier.NONE,
        num_barriers=2 if split > 1 else 0,
    )
    return block_work(
        num_tiles * split,
        passes,
        block=PUBLIC["tensor_core"],
        in_flight_kib=96,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def column_pair(weights: Sequence[Weight], *, rows: int) -> Work:
    """The public form: ``[rows, K] x [N, K]``, outputs in bf16, weights read after the wait.

    A public engine's table of such kernels ends where cuBLAS is level: from three rows on its products are cuBLAS's,
    split over K with a launch that adds up (k3opt README: "cuBLAS split-K + reduce" at 3 to 16 rows; vLLM's table
    keeps an entry that beats cuBLAS by 5 %).
    """
    if not _on_cuda_cores(weights, rows):
        return public_gemm(weights, rows=rows)
    return block_work(
        sum(-(-one.num_outputs // 2) for one in weights),
        Pass(
            num_dependent_loads=1,
            activation_bytes_per_block=rows * weights[0].depth * BF16_BYTES,
            reads=reads(weights, early=False),
            flops=fma_flops(weights, rows),
            num_block_reductions=1,
        ),
        block=PUBLIC["column_pair"],
        in_flight_kib=2 * 4 * 16 * 224 // 1024,  # two outputs, unroll 4, 16-byte loads
    )


TINYGEMM_OUTPUTS, TINYGEMM_ROWS = 16, 8  # of a block
TINYGEMM_SLOTS, TINYGEMM_SLOT_DEPTH = 16, 256  # of its ring


def tinygemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """FlashInfer's ``tinygemm2`` (2026-09): 16 outputs and eight rows a block, no split over K.

    Four warps take every fourth slot of a ring of 128 KB of weights, which is filled before the wait; the input comes
    slot by slot beside it. The sums of the warps are added up at the end.
    """
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    slot_bytes = TINYGEMM_OUTPUTS * TINYGEMM_SLOT_DEPTH * BF16_BYTES
    input_bytes = min(rows, TINYGEMM_ROWS) * depth * BF16_BYTES
    slots = -(-depth // TINYGEMM_SLOT_DEPTH)
    return Work(
        num_blocks=-(-num_outputs // TINYGEMM_OUTPUTS) * -(-rows // TINYGEMM_ROWS),
        threads_per_block=384,
        smem_bytes_per_block=TINYGEMM_SLOTS * slot_bytes * 3 // 2,
        bytes_in_flight_per_block=TINYGEMM_SLOTS * slot_bytes,
        ring_slots=TINYGEMM_SLOTS,
        max_blocks_per_sm=1,
        registers_per_thread=168,  # at most, by its launch bounds
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=input_bytes // slots,
                streamed_activation_bytes_per_block=input_bytes - input_bytes // slots,
                reads=reads(weights, early=True),
                flops=2.0 * TINYGEMM_ROWS * -(-rows // TINYGEMM_ROWS) * num_outputs * depth,
                unit=Unit.BF16,
                num_dependent_mmas=-(-slots // 4) * TINYGEMM_SLOT_DEPTH // 16,
                num_block_reductions=1,
            ),
        ),
    )


def low_latency(weights: Sequence[Weight], *, rows: int) -> Work:
    """The fastest public kernel for the shape, weights read after the wait: ``column_pair``, or split-K tiles."""
    if not _on_cuda_cores(weights, rows):
        return _tensor_core(weights, rows, early=False, sent_bytes_per_peer=0)
    return column_pair(weights, rows=rows)


def ring(weights: Sequence[Weight], *, rows: int, sent_bytes_per_peer: int = 0) -> Work:
    """The low-batch-kernels form; ``sent_bytes_per_peer`` is what its epilogue pushes to each peer."""
    if not _on_cuda_cores(weights, rows):
        return _tensor_core(weights, rows, early=True, sent_bytes_per_peer=sent_bytes_per_peer)
    num_outputs = sum(one.num_outputs for one in weights)
    outputs_per_block = 8 if num_outputs >= 8 * SPLIT_TARGET_BLOCKS else 4
    num_blocks = -(-num_outputs // outputs_per_block)
    # A matrix that the rings hold whole is there before the wait however few blocks it has: a barrier would only cost
    # (up-projection of the tail with its push: 1.7 us on GB200, k3opt design plan 2026-09).
    held = sum(one.num_bytes for one in weights) <= num_blocks * RING_BYTES
    split = 1 if held else max(1, -(-SPLIT_TARGET_BLOCKS // num_blocks))
    return block_work(
        num_blocks * split,
        Pass(
            num_dependent_loads=1,
            activation_bytes_per_block=rows * weights[0].depth * BF16_BYTES // split,
            reads=reads(weights, early=True),
            flops=fma_flops(weights, rows),
            num_block_reductions=1,
            barrier=Barrier.CLUSTER if split > 1 else Barrier.NONE,
            num_barriers=1 if split > 1 else 0,
        ),
        block=PUBLIC["ring_push" if sent_bytes_per_peer else "ring"],
        in_flight_kib=RING_BYTES // 1024,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def ring_push(weights: Sequence[Weight], *, rows: int, sent_bytes_per_row: int) -> Work:
    """``ring`` whose epilogue pushes its outputs to every peer."""
    return ring(weights, rows=rows, sent_bytes_per_peer=rows * sent_bytes_per_row)


def resident(weights: Sequence[Weight], *, rows: int, sent_bytes_per_row: int = 0) -> Work:
    """``ring`` as tasks of a persistent program, which owns nearly all shared memory: three times the ring."""
    work = ring(weights, rows=rows, sent_bytes_per_peer=rows * sent_bytes_per_row)
    if rows > MAX_CUDA_CORE_ROWS:
        return work
    return replace(work, smem_bytes_per_block=3 * RING_BYTES, bytes_in_flight_per_block=3 * RING_BYTES)


def resident_after_combine(weights: Sequence[Weight], *, rows: int, hidden: int) -> Work:
    """``resident`` whose blocks each finish the attention residual themselves, so that no hand-over is needed.

    A block reads the arrived row, the prefix and the prepared snapshot part; a logit and an RMSNorm are the two
    reductions. Repeating this on every SM costs three rows of L2 reads, less than one counter.
    """
    work = resident(weights, rows=rows)
    combine = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=3 * rows * hidden * BF16_BYTES,
        num_block_reductions=2,
    )
    multiply = replace(work.passes[0], num_dependent_loads=0, activation_bytes_per_block=0)
    return replace(work, passes=(combine, multiply, *work.passes[1:]))
