"""Reference of what precedes MLA attention: norms, query up-projection, absorption of W_UK, cache row, in torch.

Shape legend: B rows, H heads, L = 1536 query latent, V = 512 key-value latent, P = 64 position-free extra dimensions,
N = 128 query dimensions that are absorbed into the latent, D = V + P = 576.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

QUERY_LATENT = 1536
LATENT = 512
EXTRA = 64
NOPE = 128
NORM_EPSILON = 1e-5


class Prepared(NamedTuple):
    """Absorbed query ``[B, H, D]`` and the row ``[B, D]`` that goes into the cache."""

    query_BHD: torch.Tensor
    row_BD: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt() * weight.float()


def mla_prep(
    latents: torch.Tensor,
    query_norm_L: torch.Tensor,
    kv_norm_V: torch.Tensor,
    query_up: torch.Tensor,
    key_up_HNV: torch.Tensor,
    *,
    carry: torch.dtype = torch.float32,
) -> Prepared:
    """``latents [B, L + V + P]``: query latent, key-value latent, extra. ``query_up [H (N + P), L]``: 128, 64 a head.

    Score of a cached row c with latent part u and extra part e is q_nope . (W_UK u) + q_extra . e, which equals
    (q_nope W_UK) . u + q_extra . e: the query moves into the latent and keys are never formed. Nothing is rotated.

    ``carry``: dtype in which the normalised query latent and the query values pass from one step to the next (bf16
    where they are separate operators, and in the kernel).
    """
    heads = key_up_HNV.shape[0]
    query_latent_BL, kv_BV, extra_BP, *_ = latents.float().split((QUERY_LATENT, LATENT, EXTRA), dim=-1)
    query_BHQ = (rms_norm(query_latent_BL, query_norm_L).to(carry).float() @ query_up.float().T).to(carry).float()
    query_BHQ = query_BHQ.unflatten(-1, (heads, NOPE + EXTRA))
    absorbed_BHV = torch.einsum("bhn,hnv->bhv", query_BHQ[..., :NOPE], key_up_HNV.float())
    row_BD = torch.cat([rms_norm(kv_BV, kv_norm_V), extra_BP], dim=-1)
    return Prepared(torch.cat([absorbed_BHV, query_BHQ[..., NOPE:]], dim=-1), row_BD)
