"""How close a kernel must be to its reference, and the comparison that says so.

One table, one entry an operator family. Compared is ``|out - ref| <= absolute + relative * |ref|`` element by
element, and the error ratio ``|out - ref| / |ref|`` in the Euclidean norm over the whole tensor: the first finds
a wrong element, the second a small bias everywhere that no single element shows.

References are fp32; inputs are seeded and scaled so that outputs are of order one, which is what the absolute terms
assume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one operator family; ``reason`` says where they come from."""

    absolute: float
    relative: float
    error_ratio: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a comparison found. True in a condition if the output is accepted; prints as one line.

    ``error``: of the whole tensor (error ratio, or number of wrong elements), NaN where there is none; ``bound``: the
    largest that is accepted.
    """

    accepted: bool
    line: str
    error: float = math.nan
    bound: float = math.nan

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        return self.line


# 2**-9 is half a unit in the last place of bf16: the error of one correct rounding.
# Absolute, relative, error ratio.
TOLERANCES: dict[str, Tolerance] = {
    "fp32_sum": Tolerance(
        1e-4, 1e-4, 1e-5,
        "fp32 output of a sum of a few thousand exact bf16 products: only the order of summation differs",
    ),
    "bf16_sum": Tolerance(
        2e-3, 2**-8, 3e-3,
        "the same, rounded once to bf16: a sum near a rounding boundary may land one unit away",
    ),
    "bf16_activation": Tolerance(
        8e-3, 2**-7, 5e-3,
        "sigmoid, tanh or a norm by approximate instructions, then one rounding to bf16",
    ),
    "kda_output": Tolerance(
        2e-2, 3e-2, 1e-2,
        "convolution, norms, recurrence and gated norm on bf16 inputs; the bounds FlashInfer tests with",
    ),
    "kda_state_fp32": Tolerance(
        2e-3, 1e-3, 2e-3,
        "fp32 state: approximate exp and rsqrt, one rank-1 update",
    ),
    "kda_state_bf16": Tolerance(
        8e-3, 2**-7, 5e-3,
        "the same, rounded once to bf16 for storage",
    ),
    "attention_bf16": Tolerance(
        8e-3, 2**-6, 5e-3,
        "probabilities rounded to bf16 for the tensor cores, bf16 output",
    ),
    "attention_fp8": Tolerance(
        2e-2, 2**-5, 1e-2,
        "against the same fp8 cache decoded to fp32; probabilities in bf16, another order of partial sums",
    ),
    "log_sum_exp": Tolerance(
        2e-3, 1e-4, 1e-3,
        "fp32 logarithm of a sum of approximate exponentials of logits from bf16 products",
    ),
    "cache_bf16": Tolerance(
        1e-4, 2**-8, 3e-3,
        "RMSNorm of a cached row by an approximate rsqrt, then one rounding to bf16",
    ),
    "cache_fp8": Tolerance(
        2e-3, 2**-3.9, 4e-2,
        "the same, rounded once to e4m3, whose half unit in the last place is 2**-4",
    ),
    "reduced_bf16": Tolerance(
        4e-2, 2**-7, 5e-3,
        "bf16 partial sums of up to 16 ranks of order one; each, up to 8 in size, may land one unit away",
    ),
    "routing_weight": Tolerance(
        1e-7, 1e-5, 1e-5,
        "sigmoids by approximate exponentials, renormalised by a sum of sixteen, fp32",
    ),
    "expert_bf16": Tolerance(
        2e-2, 2**-6, 1e-2,
        "MXFP4 weights decode exactly; the activation between the two products is rounded to bf16",
    ),
}


def compare(out: torch.Tensor, ref: torch.Tensor, family: str, *, name: str = "output") -> Verdict:
    """Judge ``out`` against ``ref`` (same shape, any dtype) by the table's entry ``family``.

    NaN or infinity in ``out`` where ``ref`` has another value is never accepted; equal infinities are.
    """
    import torch

    tolerance = TOLERANCES[family]
    if tuple(out.shape) != tuple(ref.shape):
        return Verdict(accepted=False, line=f"{name}: shape {tuple(out.shape)}, reference has {tuple(ref.shape)}")
    out64, ref64 = out.detach().double().cpu(), ref.detach().double().cpu()
    if out64.numel() == 0:
        return Verdict(accepted=True, line=f"{name}: empty", error=0.0, bound=tolerance.error_ratio)
    error = torch.where(out64 == ref64, torch.zeros_like(out64), (out64 - ref64).abs())
    finite_ref = torch.where(ref64.isfinite(), ref64, torch.zeros_like(ref64))
    excess = error - (tolerance.absolute + tolerance.relative * finite_ref.abs())
    wrong = ~(excess <= 0)  # a NaN must count as wrong, so the test is for what is right
    norm = float(finite_ref.norm())
    ratio = float(error.norm()) / norm if norm else float(error.norm())
    worst = int(torch.where(excess.isnan(), torch.full_like(excess, torch.inf), excess).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), out64.shape))
    line = (
        f"{name}: error ratio {ratio:.2e} (allowed {tolerance.error_ratio:.0e}), {int(wrong.sum())} of {wrong.numel()} "
        f"outside {tolerance.absolute:.0e} + {tolerance.relative:.1e} x |ref|; worst at {index}: "
        f"{float(out64.flatten()[worst]):.6g}, reference {float(ref64.flatten()[worst]):.6g}"
    )
    accepted = not bool(wrong.any()) and ratio <= tolerance.error_ratio
    return Verdict(accepted=accepted, line=line, error=ratio, bound=tolerance.error_ratio)
