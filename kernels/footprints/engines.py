"""Footprints of public engines' kernels: threads, registers and shared memory of a block, and where each is from.

Threads, shared memory and launch bounds stand in sources; registers follow from a launch bound where the source has a
tight one, and otherwise have a range: from what the kernel cannot do without to what its launch bound, or its blocks
on an SM, allow. The middle value is argued for in each entry; the ends go into the interval of a prediction
(``Work.drawn``). Sources were read in 2026-11 and -12: vLLM (``csrc/libtorch_stable/kimi_k3``,
``vllm/models/kimi_k3/nvidia/ops``), FlashInfer (``include/flashinfer``), TensorRT-LLM (``trtllmGenKernels``). Of k3opt,
whose kernels are not published but for its AttnRes cluster, threads and shared memory are those of its descriptions.

None of those sources asks for a carve-out of shared memory, so their kernels have the driver's. k3opt's run beside one
another by design (its rings are as deep as still fits two blocks an SM), which the driver's would not let them, as it
does not let the project's own: they are taken to ask for all of an SM's memory, and for nothing in every second draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from k3sim.kernels.work import BLOCK_SLOTS, Block, Unpublished

KIB = 1024


def _engine(
    *,
    threads: int,
    registers: int,
    smem_bytes: int,
    max_per_sm: int = BLOCK_SLOTS,
    between: tuple[int, int] | None = None,
) -> Block:
    """A kernel of a published engine; ``between``: its registers where they are not known."""
    unpublished = None if between is None else Unpublished(registers=between)
    return Block(
        threads=threads, registers=registers, smem_bytes=smem_bytes, max_per_sm=max_per_sm, carve_out_percent=None,
        unpublished=unpublished,
    )  # fmt: skip


def _k3opt(*, threads: int, registers: int, smem_bytes: int, max_per_sm: int, between: tuple[int, int]) -> Block:
    return Block(
        threads=threads, registers=registers, smem_bytes=smem_bytes, max_per_sm=max_per_sm,
        unpublished=Unpublished(registers=between, carve_out_percents=(100, None)),
    )  # fmt: skip


PUBLIC: Mapping[str, Block] = MappingProxyType(
    {
        # vLLM 47712 and 53534: 224 threads, registers capped at 64, partial sums of the warps in shared memory.
        "column_pair": _engine(threads=224, registers=64, smem_bytes=1 * KIB),
        # k3opt: 256 threads and 32 KB, two blocks an SM, which allows 128 registers. The middle is that of the
        # project's ring that is refilled, with a row (``skinny_gemv``: 41 to 43, with 16 peers' addresses 68 to 72).
        "ring": _k3opt(threads=256, registers=48, between=(40, 128), smem_bytes=32 * KIB, max_per_sm=2),
        "ring_push": _k3opt(threads=256, registers=72, between=(56, 128), smem_bytes=32 * KIB, max_per_sm=2),
        # FlashInfer's tgv_gemm.cuh: 8 warps, no launch bound; tiles of 64 x 8 x 128, 18 KB a stage, six of them. A
        # warp of the epilogue holds 16 x 8 sums. Two fit an SM.
        "tensor_core": _engine(threads=256, registers=72, between=(40, 128), smem_bytes=108 * KIB, max_per_sm=2),
        # cuBLAS on Blackwell is not recorded. On an H200 it has 384 threads of 168 registers (``kernels/cublas``), and
        # the sums are in those; Blackwell has sums in tensor memory. Two blocks an SM are taken, of 12 stages 64 deep
        # for 64 outputs and 8 rows; with 168 registers there is one.
        "cublas": _engine(threads=384, registers=80, between=(64, 168), smem_bytes=110_592),
        # vLLM's attn_res_kernel.cu: a producer and 8 consumer warps, launch bound of one block (168 registers); 8 rows
        # of 14 KB, two of the delta, the norm's weights. A thread holds 28 weights and 28 sums in fp32.
        "attn_res": _engine(threads=288, registers=128, between=(96, 168), smem_bytes=155 * KIB, max_per_sm=1),
        # k3opt: as the cluster whose source is published (7 blocks of 128 threads a row, all nine sources of 8 values
        # in fp32 a thread), in two kernels. The middle is what the project's own two take (80; 64 to 128).
        "snapshot_sums": _k3opt(threads=512, registers=64, between=(40, 128), smem_bytes=32 * KIB, max_per_sm=2),
        "consume": _k3opt(threads=256, registers=64, between=(40, 128), smem_bytes=16 * KIB, max_per_sm=4),
        # vLLM's fused_kda_decode_kernel.cu: 256 threads, launch bound of two blocks (128 registers), two chunks of the
        # state of 16 KB, five vectors of 512 bytes, a kilobyte of sums.
        "kda_per_head": _engine(threads=256, registers=96, between=(64, 128), smem_bytes=36_356, max_per_sm=4),
        # TensorRT-LLM's batched GEMMs (KernelMetaInfo.h): 480 to 512 threads and 175,104 bytes with a tile of 128 x 16
        # x 512, one block an SM, so at most 128 registers.
        "expert_gemm": _engine(threads=512, registers=96, between=(64, 128), smem_bytes=175_104, max_per_sm=1),
        # k3opt's MOEBLOCK: a persistent block an SM, 128 KB of rings. 256 threads may have 255 registers; the project's
        # ``expert_gemv`` holds 43,000 of an SM's 65,536, which would be 168.
        "expert_block": _k3opt(threads=256, registers=168, between=(96, 255), smem_bytes=128 * KIB, max_per_sm=1),
        # TensorRT-LLM's MLA decode: one block an SM, 384 threads, at most 168 registers.
        "mla_split": _engine(threads=384, registers=168, between=(128, 168), smem_bytes=200 * KIB, max_per_sm=1),
        # FlashInfer's decode with tensor cores (prefill.cuh): 4 warps, 64 KB of keys and values on their way; the sums
        # of 16 query heads of 128 take 64 registers a thread beside the scores. Two fit an SM.
        "gqa_split": _engine(threads=128, registers=168, between=(128, 255), smem_bytes=96 * KIB, max_per_sm=2),
        # k3opt's TAILATTN: 256 threads, 100 KB, two blocks an SM, so at most 128 registers.
        "mla_fused": _k3opt(threads=256, registers=128, between=(80, 128), smem_bytes=100 * KIB, max_per_sm=2),
        # vLLM's selection: a block a row, whose warps share the experts.
        "routing": _engine(threads=256, registers=40, between=(24, 64), smem_bytes=8 * KIB),
        # TensorRT-LLM's routing (RoutingKernel.cuh): a thread an expert, 1,024 for 896, so at most 64 registers; counts
        # and offsets in shared memory. One block, or a cluster of eight.
        "permutation": _engine(threads=1024, registers=40, between=(24, 64), smem_bytes=8 * KIB),
        # vLLM's and FlashInfer's one-shot kernel: a cluster a row, 8 values and the words of every rank a thread
        # (allreduce_rmsnorm_reduce_scatter_early_exit.py); the project's takes 76 with 16 ranks, 45 with 8.
        "all_reduce": _engine(threads=128, registers=72, between=(40, 128), smem_bytes=1 * KIB),
        # DeepEP's low-latency kernels (internode_ll.cu): a block an SM of 30 to 32 warps, so at most 64 registers.
        "dispatch": _engine(threads=1024, registers=56, between=(40, 64), smem_bytes=8 * KIB, max_per_sm=1),
        # DeepGEMM: a warpgroup that loads, one that multiplies, a block an SM; shared memory by its tile (the cost).
        "deep_gemm": _engine(threads=256, registers=128, between=(96, 232), smem_bytes=100 * KIB, max_per_sm=1),
        # CuTe DSL's and trtllm-gen's block-scaled products: a block an SM, a ring of eight stages.
        "block_scaled_gemm": _engine(threads=192, registers=128, between=(96, 255), smem_bytes=200 * KIB, max_per_sm=1),
        # Triton's fused experts: four warps, tiles of 16 x 128 x 128, three or four stages; two or three fit an SM.
        "triton_experts": _engine(threads=128, registers=128, between=(96, 255), smem_bytes=72 * KIB, max_per_sm=3),
        # Marlin's experts: 256 threads with a launch bound of one block, four stages.
        "marlin_experts": _engine(threads=256, registers=168, between=(128, 255), smem_bytes=96 * KIB, max_per_sm=2),
        # Elementwise kernels and copies: 256 threads, eight blocks an SM fit with 32 registers.
        "elementwise": _engine(threads=256, registers=32, between=(16, 64), smem_bytes=4 * KIB, max_per_sm=8),
    }
)
