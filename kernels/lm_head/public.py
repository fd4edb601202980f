"""Costs of the LM head as public engines run it, with and without the local top-k of distributed sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.skinny_gemv.public import column_pair, ring
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
    merge = Pass(num_dependent_loads=2, num_block_reductions=8, num_selection_rounds=8)
    return replace(work, passes=(*work.passes, merge))
