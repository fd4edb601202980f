"""Costs of small separate kernels that only public engines' stock paths run."""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Barrier, Pass, Read, Work
from k3sim.model.program import Weight


def quantise(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """MXFP8 of ``[rows, width]``: a maximum over each 32 elements, within a warp."""
    return small(num_blocks=-(-rows * width // 2048), activation_bytes_per_block=2048 * BF16_BYTES, reductions=1)


def routing(weights: Sequence[Weight], *, rows: int, experts: int) -> Work:
    """Sigmoid, bias and top-16: selection rounds, then the renormalisation."""
    return small(
        num_blocks=rows, loads=2, activation_bytes_per_block=experts * 4, reductions=8 + 1, selection_rounds=8
    )


def permutation(weights: Sequence[Weight], *, rows: int, experts: int) -> Work:
    """Tokens grouped by expert for the grouped GEMMs: the second and the third kernel of the public routing.

    With 896 experts the public routing takes three launches (FlashInfer's, as xiaguan/kern-k3-pp-prefill counts them,
    2026-10): selection, then counts and indices, which are priced alike.

    One cluster of eight blocks: counts by expert, a prefix sum over them, and the indices, a cluster barrier after
    each (NVIDIA/TensorRT-LLM's routing launches its selection and its cluster index kernel one after the other).
    """
    sweep = Pass(num_block_reductions=1, barrier=Barrier.CLUSTER, num_barriers=1)
    return small(
        num_blocks=8, loads=2, activation_bytes_per_block=rows * 16 * 8, reductions=1, then=(sweep, sweep, sweep)
    )


def batched_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """One small matrix a head: absorption of W_UK, or lift by W_UV."""
    (one,) = weights
    blocks = max(1, one.num_bytes // (16 * 1024))
    return small(
        num_blocks=blocks,
        activation_bytes_per_block=rows * 1024,
        reads=(Read(region=one.region, num_bytes=one.num_bytes),),
        flops=(rows + 1) * float(one.num_bytes),
        reductions=1,
    )


def query_gather(weights: Sequence[Weight], *, rows: int, heads: int, kv_row_bytes: int) -> Work:
    """Context parallel: pushes this rank's quantised heads to the ranks that hold the other tokens, and polls."""
    return small(
        num_blocks=rows * heads,
        activation_bytes_per_block=kv_row_bytes,
        sent_bytes_per_peer=rows * heads * kv_row_bytes,
        then=(Pass(num_dependent_loads=1),),
    )


def poll(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """Copies arrived data out of the receive buffer, which is the wait of whoever needs all of it."""
    return small(num_blocks=-(-rows * width // 2048), activation_bytes_per_block=2048 * BF16_BYTES)
