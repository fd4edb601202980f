"""Cost of cuBLAS's products in public engines, on Blackwell: as ``cost.py`` has them, less one set-up where K is split.

The second set-up of a split product is what an H200 showed. Public tables of bf16 products on GB200 and GB300
(AIConfigurator 2026-08; 315 rows of up to 16 rows by 4,224 outputs and depths from 2,048) are predicted 15 % too slow
with it, at the median, and within 7 and 11 % without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.cublas.cost import gemm
from k3sim.kernels.work import Work
from k3sim.model.program import Weight


def public_gemm(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in bf16, one matrix or several stacked to one."""
    work = gemm(weights, rows=rows)
    first, *rest = work.passes
    return replace(work, passes=(replace(first, num_tensor_core_setups=1), *rest))
