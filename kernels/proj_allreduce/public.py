"""Cost of the public fused all-reduce: an output projection that pushes partial rows; ``attn_res.consume`` polls."""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.kernels.skinny_gemv.public import ring
from k3sim.kernels.work import Work
from k3sim.model.program import Weight


def produce(weights: Sequence[Weight], *, rows: int) -> Work:
    """Row-parallel projection: every rank sends its whole partial ``[rows, N]`` in bf16 to each peer."""
    return ring(weights, rows=rows, sent_bytes_per_peer=rows * weights[0].num_outputs * BF16_BYTES)
