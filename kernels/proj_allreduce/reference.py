"""Reference of the output projection with all-reduce, residual, AttnRes combine and norm, in torch.

Shape legend: R ranks, B rows, K this rank's slice of the mixer output, D hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NORM_EPSILON = 1e-5


class Consumed(NamedTuple):
    """New running prefix ``[B, D]`` and the next sublayer's normalised input ``[B, D]``."""

    prefix_BD: torch.Tensor
    normalised_BD: torch.Tensor


def produce(x_BK: torch.Tensor, weight_DK: torch.Tensor) -> torch.Tensor:
    """One rank's partial rows ``[B, D]``, rounded to bf16 as they travel; never -0, which means "not yet arrived"."""
    partial_BD = (x_BK.float() @ weight_DK.float().T).bfloat16()
    return torch.where(partial_BD == 0, torch.zeros_like(partial_BD), partial_BD)


def consume(
    partials_RBD: torch.Tensor,
    residual_BD: torch.Tensor | None,
    snapshot_part: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    query_norm_D: torch.Tensor,
    query_D: torch.Tensor,
    norm_weight_D: torch.Tensor,
) -> Consumed:
    """Sum over ranks in rank order, add the residual, round once: the new prefix. Then AttnRes and RMSNorm.

    ``snapshot_part``: largest logit ``[B]``, sum of exponentials ``[B]`` and weighted sum ``[B, D]`` of the snapshots;
    None where there is no snapshot yet, and the mix is the prefix itself.
    """
    total_BD = torch.zeros_like(partials_RBD[0], dtype=torch.float32)
    for partial_BD in partials_RBD:
        total_BD = total_BD + partial_BD.float()
    if residual_BD is not None:
        total_BD = total_BD + residual_BD.float()
    prefix_BD = total_BD.bfloat16()
    mixed_BD = value_BD = prefix_BD.float()
    if snapshot_part is not None:
        largest_B, denominator_B, weighted_BD = snapshot_part
        mean_square_B = value_BD.square().mean(-1)
        logit_B = (value_BD * (query_norm_D.float() * query_D.float())).sum(-1) * (mean_square_B + NORM_EPSILON).rsqrt()
        maximum_B = torch.maximum(largest_B, logit_B)
        old_B, new_B = (largest_B - maximum_B).exp(), (logit_B - maximum_B).exp()
        mixed_BD = old_B[:, None] * weighted_BD + new_B[:, None] * value_BD
        mixed_BD = mixed_BD / (old_B * denominator_B + new_B)[:, None]
    scale_B1 = (mixed_BD.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt()
    return Consumed(prefix_BD, mixed_BD * scale_B1 * norm_weight_D.float())
