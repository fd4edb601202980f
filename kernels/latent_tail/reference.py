"""LatentMoE tail in plain torch, with all ranks at hand.

Shapes: T ranks, R rows, L latent, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EPS = 1e-5


def latent_tail(
    latent: torch.Tensor, shared: torch.Tensor, norm_weight: torch.Tensor, up: torch.Tensor, eps: float = EPS
) -> torch.Tensor:
    """[R, H]: up-projection of the normalised sum of the ranks' latents, plus the sum of their shared-expert parts.

    ``latent`` [T, R, L]; ``shared`` [T, R, H]; ``norm_weight`` [L]; ``up`` [H, L]. In the dtype of ``latent``.
    """
    total = latent.sum(dim=0)
    normalised = total * (total.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * norm_weight
    return normalised @ up.T + shared.sum(dim=0)
