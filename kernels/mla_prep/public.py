"""Cost of what precedes MLA attention in a public engine whose code is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.mla_prep.cost import fused
from k3sim.kernels.work import Unit, Work
from k3sim.model.program import Weight


def public_fused(weights: Sequence[Weight], *, rows: int, heads: int, kv_row_bytes: int) -> Work:
    """``fused`` of an engine whose code is not known: weights through a ring of 48 KB, beside the input, and products
    on CUDA cores as in ``skinny_gemv``.
    """
    q_b, w_uk = weights
    work = fused(weights, rows=rows, heads=heads, kv_row_bytes=kv_row_bytes)
    project, absorb = work.passes
    passes = (
        replace(
            project, unit=Unit.CUDA_CORE, flops=2.0 * (1 + 3.5 * rows) * q_b.num_outputs * q_b.depth,
            num_dependent_mmas=0, num_dependent_loads=1,
        ),
        replace(absorb, unit=Unit.CUDA_CORE, flops=(rows + 1) * float(w_uk.num_bytes)),
    )  # fmt: skip
    return replace(
        work, passes=passes, bytes_in_flight_per_block=48 * 1024, register_loads=False, serial_instructions=0
    )
