"""Costs of small separate kernels that only public engines' stock paths run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.router_topk.cost import SELECTION_ROUNDS
from k3sim.kernels.unfused.cost import BF16_BYTES, conv_update, recurrent_update, small
from k3sim.kernels.work import Barrier, Pass, Read, Work
from k3sim.model.collectives import FORMS, Form
from k3sim.model.program import Weight

BLOCK_ROUTING_ROWS = 4  # FlashInfer's ``BlockKernelMaxNumTokens``
ROW_BLOCKS = 8  # of a one-shot all-reduce, a cluster a row
MOST_BLOCKS = 128  # of all rows together, one an SM


def library_all_reduce(weights: Sequence[Weight], *, rows: int, hidden: int, ranks: int, form: int) -> Work:
    """All-reduce of ``[rows, hidden]`` in the form at position ``form`` of ``FORMS``.

    One-shot: load, push to every peer, poll, sum of every rank's slot; a cluster of eight blocks a row, at most one
    block an SM (NVIDIA/TensorRT-LLM ``allReduceFusionKernels.cu``). The other forms move slices of ``1 / ranks``, which
    come from peers into registers and leave from there, so that no block loads or sums slots of its own memory.
    """
    row_bytes = rows * hidden * BF16_BYTES
    blocks = min(ROW_BLOCKS * rows, MOST_BLOCKS)
    if FORMS[form] is not Form.ONE_SHOT:
        # Of the bytes that are sent ``Peers`` moves slices.
        return small(block=PUBLIC["all_reduce"], num_blocks=blocks, sent_bytes_per_peer=row_bytes)
    return small(
        block=PUBLIC["all_reduce"],
        num_blocks=blocks,
        activation_bytes_per_block=row_bytes // blocks,
        sent_bytes_per_peer=row_bytes,
        then=(Pass(num_dependent_loads=1, activation_bytes_per_block=ranks * row_bytes // blocks),),
    )


def all_reduce_norm(weights: Sequence[Weight], *, rows: int, hidden: int, ranks: int, form: int) -> Work:
    """``library_all_reduce``, the residual and the RMSNorm behind it in one launch (FlashInfer, TensorRT-LLM).

    The residual and the norm's weights are loaded beside the slots; a row's cluster adds up its squares. Where the sum
    is not made in one shot, the norm follows the last hand-over in the same launch.
    """
    work = library_all_reduce(weights, rows=rows, hidden=hidden, ranks=ranks, form=form)
    blocks = work.num_blocks
    row_bytes = rows * hidden * BF16_BYTES
    norm = Pass(
        num_dependent_loads=1 if len(work.passes) == 1 else 0,
        activation_bytes_per_block=2 * row_bytes // blocks,
        num_block_reductions=1,
        barrier=Barrier.CLUSTER,
        num_barriers=1,
    )
    return replace(work, passes=(*work.passes, norm))


def quantise(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """MXFP8 of ``[rows, width]``: a maximum over each 32 elements, within a warp."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=-(-rows * width // 2048),
        activation_bytes_per_block=2048 * BF16_BYTES,
        reductions=1,
    )


def routing(weights: Sequence[Weight], *, rows: int, experts: int) -> Work:
    """Sigmoid, bias and top-16: selection rounds, then the renormalisation. A block a row (vllm-project/vllm 50088)."""
    return small(
        block=PUBLIC["routing"], num_blocks=rows, loads=2, activation_bytes_per_block=experts * 4,
        reductions=SELECTION_ROUNDS + 1, selection_rounds=SELECTION_ROUNDS,
    )  # fmt: skip


def pack(weights: Sequence[Weight], *, rows: int) -> Work:
    """Ids and weights of the chosen experts in one word each, as TRT-LLM's routing takes them (vLLM's own launch)."""
    return small(block=PUBLIC["elementwise"], num_blocks=1, activation_bytes_per_block=rows * 16 * 8)


def permutation(weights: Sequence[Weight], *, rows: int, experts: int, selects: int = 0) -> Work:
    """Tokens grouped by expert for the grouped GEMMs, one launch; ``selects``: it takes the scores and selects too.

    FlashInfer's ``trtllm_fused_moe_routing_common.cu`` (2026-09) starts one block up to four tokens, which counts,
    scans over the experts and writes the indices, and one cluster of eight blocks beyond, with a cluster barrier after
    the counts, the prefix sum and the indices.
    """
    rounds = SELECTION_ROUNDS if selects else 0
    selection = rounds + selects  # the chosen weights' sum
    if rows <= BLOCK_ROUTING_ROWS:
        # Cleared counters, the ids of all tokens, two levels of the scan, and the total: a barrier of the block each.
        return small(
            block=PUBLIC["permutation"], num_blocks=1, loads=2 if selects else 1,
            activation_bytes_per_block=rows * (experts * 4 if selects else 64),
            reductions=selection + 5, selection_rounds=rounds,
        )  # fmt: skip
    sweep = Pass(num_block_reductions=1, barrier=Barrier.CLUSTER, num_barriers=1)
    return small(
        block=PUBLIC["permutation"], num_blocks=8, loads=2,
        activation_bytes_per_block=rows * (experts * 4 // 8 if selects else 16 * 8),
        reductions=selection + 1, selection_rounds=rounds, then=(sweep, sweep, sweep),
    )  # fmt: skip


def conv_update_verified(
    weights: Sequence[Weight], *, users: int, positions: int, conv_state_bytes: int, conv_weight_bytes: int
) -> Work:
    """Convolution of ``positions`` rows a user, one behind the other, with a state for each of them."""
    work = conv_update(weights, rows=users, conv_state_bytes=conv_state_bytes, conv_weight_bytes=conv_weight_bytes)
    (only,) = work.passes
    return replace(work, passes=(replace(only, written_bytes=positions * only.written_bytes),))


def recurrent_update_verified(
    weights: Sequence[Weight], *, users: int, positions: int, heads: int, state_bytes: int, value_bytes: int = 4
) -> Work:
    """Delta rule over ``positions`` rows a user: read S, then one step after the other, each of which writes S.

    On GB300 256 users of eight rows move read S + write 8 S at 6.1 TB/s (AIConfigurator 2026-08, 12 heads, 294.7 us).
    """
    work = recurrent_update(weights, rows=users, heads=heads, state_bytes=state_bytes, value_bytes=value_bytes)
    (first,) = work.passes
    serial = replace(
        first,
        flops=positions * first.flops,
        num_block_reductions=positions * first.num_block_reductions,
        written_bytes=positions * first.written_bytes,
    )
    return replace(work, passes=(serial,))


def batched_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """One small matrix a head: absorption of W_UK, or lift by W_UV."""
    (one,) = weights
    blocks = max(1, one.num_bytes // (16 * 1024))
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=blocks,
        activation_bytes_per_block=rows * 1024,
        reads=(Read(region=one.region, num_bytes=one.num_bytes),),
        flops=(rows + 1) * float(one.num_bytes),
        reductions=1,
    )


def query_gather(weights: Sequence[Weight], *, rows: int, heads: int, kv_row_bytes: int) -> Work:
    """Context parallel: pushes this rank's quantised heads to the ranks that hold the other tokens, and polls."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=rows * heads,
        activation_bytes_per_block=kv_row_bytes,
        sent_bytes_per_peer=rows * heads * kv_row_bytes,
        then=(Pass(num_dependent_loads=1),),
    )


def poll(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """Copies arrived data out of the receive buffer, which is the wait of whoever needs all of it."""
    return small(
        block=PUBLIC["elementwise"], num_blocks=-(-rows * width // 2048), activation_bytes_per_block=2048 * BF16_BYTES
    )
