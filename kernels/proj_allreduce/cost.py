"""Cost of an output projection whose epilogue pushes partial rows into every peer's buffer.

The consumer is ``attn_res.consume``: it polls the slots, sums them in rank order, adds the residual, combines
the attention residual and normalises. ``consume_gathered`` is the kernel that polls one row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.attn_res.cost import consume
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES, ring
from k3sim.kernels.work import Work
from k3sim.model.program import Weight


def produce(weights: Sequence[Weight], *, rows: int) -> Work:
    """Row-parallel projection: every rank sends its whole partial ``[rows, N]`` in bf16 to each peer."""
    return ring(weights, rows=rows, sent_bytes_per_peer=rows * weights[0].num_outputs * BF16_BYTES)


def consume_gathered(weights: Sequence[Weight], *, rows: int, hidden: int) -> Work:
    """One gathered row; as many blocks again empty the tail's slots, and one exchange serves logit and norm."""
    work = consume(weights, rows=rows, hidden=hidden, slots=1)
    return replace(work, num_blocks=2 * work.num_blocks, passes=work.passes[:1])
