"""Cost of the vocabulary shard of the LM head, with and without the local top-k of distributed sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.skinny_gemv.cost import column_pair, ring
from k3sim.kernels.work import Pass, Work
from k3sim.model.program import Weight

CANDIDATES = 64  # per rank and row: value and index, fp32 and int32


def logits(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, vocab / ranks]`` logits in bf16, sent whole to every peer."""
    work = column_pair(weights, rows=rows)
    return replace(work, sent_bytes_per_peer=rows * weights[0].num_outputs * 2)


def top_k(weights: Sequence[Weight], *, rows: int) -> Work:
    """Logits and their local top candidates in one launch; only the candidates travel."""
    work = ring(weights, rows=rows, sent_bytes_per_peer=rows * CANDIDATES * 8)
    # Blocks keep their best values; the last block to arrive merges them: counter, data, then a selection.
    merge = Pass(num_dependent_loads=2, num_block_reductions=8)
    return replace(work, passes=(*work.passes, merge))


def select(weights: Sequence[Weight], *, rows: int) -> Work:
    """The local top candidates of finished logits, a launch behind the product: one cluster of eight blocks a row."""
    return Work(
        num_blocks=8 * rows,
        threads_per_block=256,
        smem_bytes_per_block=16 * 1024,
        bytes_in_flight_per_block=16 * 1024,
        max_blocks_per_sm=4,
        passes=(Pass(num_dependent_loads=1, activation_bytes_per_block=8192, num_block_reductions=8),),
    )
