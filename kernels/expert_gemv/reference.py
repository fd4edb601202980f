"""The selected experts in plain torch: w1, w3, SiTU-GLU, w2, weighted sum in the latent.

Shapes: R rows, S selected experts a row, L latent, W width of the rank's slice, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.kernels.expert_gemv.mxfp4 import decode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Make = Callable[..., torch.Tensor]

GATE_BOUND = 4.0
UP_BOUND = 25.0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """MXFP4 weights as a checkpoint stores them, uint8: codes two a byte, one scale for 32 columns."""

    gate: torch.Tensor  # w1 [E, W, L / 2]
    gate_scales: torch.Tensor  # [E, W, L / 32]
    up: torch.Tensor  # w3, as w1
    up_scales: torch.Tensor
    down: torch.Tensor  # w2 [E, L, W / 2]
    down_scales: torch.Tensor  # [E, L, W / 32]

    @classmethod
    def made_of(cls, codes: Make, scales: Make, *, count: int, width: int, latent: int) -> Experts:
        """``count`` experts, whose tensors two functions of a shape make, in the order of the fields."""
        return cls(
            gate=codes(count, width, latent // 2),
            gate_scales=scales(count, width, latent // 32),
            up=codes(count, width, latent // 2),
            up_scales=scales(count, width, latent // 32),
            down=codes(count, latent, width // 2),
            down_scales=scales(count, latent, width // 32),
        )


def situ_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """4 tanh(g / 4) x sigmoid(g) x 25 tanh(u / 25): a bounded SwiGLU."""
    bounded_gate = GATE_BOUND * (gate / GATE_BOUND).tanh() * gate.sigmoid()
    return bounded_gate * UP_BOUND * (up / UP_BOUND).tanh()


def expert_gemv(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Partial latent [R, L] of this rank's slice, in the dtype of ``weights`` (fp32 or fp64).

    ``x`` [R, L]; ``ids`` [R, S]; ``weights`` [R, S]. An id outside 0 .. E - 1 contributes nothing.
    """
    import torch

    dtype = weights.dtype
    out = torch.zeros_like(x, dtype=dtype)
    num_experts = experts.gate.shape[0]
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            if not 0 <= expert < num_experts:
                continue
            gate = decode(experts.gate[expert], experts.gate_scales[expert], dtype) @ x[row].to(dtype)
            up = decode(experts.up[expert], experts.up_scales[expert], dtype) @ x[row].to(dtype)
            hidden = weight * situ_glu(gate, up)
            out[row] += decode(experts.down[expert], experts.down_scales[expert], dtype) @ hidden
    return out
