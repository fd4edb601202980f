"""Reference of the AttnRes combine in torch, in the order of the mathematics.

Shape legend: B rows, N snapshots (0 to 8), D hidden width. The newest source is always the running prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NORM_EPSILON = 1e-5


class SnapshotPart(NamedTuple):
    """Snapshots' share of the softmax: largest logit, sum of exponentials, both ``[B]``, weighted sum ``[B, D]``."""

    maximum_B: torch.Tensor
    denominator_B: torch.Tensor
    weighted_BD: torch.Tensor


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    """``x`` over its root mean square along the last axis (epsilon 1e-5), times ``weight_D``."""
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt() * weight_D


def add_delta(prefix_BD: torch.Tensor, delta_BD: torch.Tensor) -> None:
    """Add the newest sublayer output to the running prefix, in place, in fp32 with one rounding."""
    prefix_BD.copy_((prefix_BD.float() + delta_BD.float()).to(prefix_BD.dtype))


def snapshot_part(
    snapshots_BND: torch.Tensor,
    query_norm_D: torch.Tensor,
    query_D: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> SnapshotPart:
    """What the snapshots alone contribute; reusable until the next snapshot is taken."""
    v_BND = snapshots_BND.to(dtype)
    logits_BN = rms_norm(v_BND, query_norm_D.to(dtype)) @ query_D.to(dtype)
    maximum_B = logits_BN.max(-1).values
    weights_BN = (logits_BN - maximum_B[:, None]).exp()
    return SnapshotPart(maximum_B, weights_BN.sum(-1), torch.einsum("bn,bnd->bd", weights_BN, v_BND))


def attn_res(
    snapshots_BND: torch.Tensor,
    prefix_BD: torch.Tensor,
    query_norm_D: torch.Tensor,
    query_D: torch.Tensor,
    norm_weight_D: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Input ``[B, D]`` of the next sublayer, in ``dtype``: softmax mix of snapshots and prefix, then RMSNorm.

    The logit of a source is RMSNorm(source, ``query_norm``) . ``query``; the mix is of the raw sources. Source of
    the mathematics: the Kimi K3 report, section on Attention Residuals.
    """
    sources_BND = torch.cat([snapshots_BND, prefix_BD[:, None]], dim=1).to(dtype)
    logits_BN = rms_norm(sources_BND, query_norm_D.to(dtype)) @ query_D.to(dtype)
    mixed_BD = torch.einsum("bn,bnd->bd", logits_BN.softmax(-1), sources_BND)
    return rms_norm(mixed_BD, norm_weight_D.to(dtype))
