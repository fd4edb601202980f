"""Reference of NoPE latent attention over a paged cache, and of the merge of partial outputs, in torch.

Shape legend: B rows, H heads, D = 576 latent and position-free dimensions, V = 512 latent dimensions, T tokens,
R ranks, P pages of 64 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3sim.kernels.mla_decode.cache import LATENT, PAGE_TOKENS

SOFTMAX_SCALE = 192**-0.5


class Partial(NamedTuple):
    """Attention output ``[B, H, V]`` over some tokens and the natural log-sum-exp ``[B, H]`` of its scores."""

    output_BHV: torch.Tensor
    log_sum_exp_BH: torch.Tensor


def gather_row(cache_PTD: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Cached rows ``[num_tokens, D]`` of one sequence in fp32, out of its pages."""
    num_pages = -(-num_tokens // PAGE_TOKENS)
    return cache_PTD[pages[:num_pages].long()].flatten(0, 1)[:num_tokens].float()


def mla_decode(
    query_BHD: torch.Tensor, cache_PTD: torch.Tensor, pages_BP: torch.Tensor, num_tokens_B: torch.Tensor
) -> Partial:
    """Scores are query . row over all 576 values times 192^-0.5; values are the first 512. No tokens: 0 and -inf."""
    outputs, log_sums = [], []
    for query_HD, pages, num_tokens in zip(query_BHD.float(), pages_BP, num_tokens_B.tolist(), strict=True):
        keys_TD = gather_row(cache_PTD, pages, num_tokens)
        scores_HT = query_HD @ keys_TD.T * SOFTMAX_SCALE
        log_sum_H = scores_HT.logsumexp(-1)
        weights_HT = (scores_HT - log_sum_H.nan_to_num(neginf=0.0)[:, None]).exp()
        outputs.append(weights_HT @ keys_TD[:, :LATENT])
        log_sums.append(log_sum_H)
    return Partial(torch.stack(outputs), torch.stack(log_sums))


def lse_merge(outputs_RBHV: torch.Tensor, log_sum_exp_RBH: torch.Tensor) -> Partial:
    """Attention over the union of the ranks' tokens. A rank without tokens (log-sum-exp -inf) does not count."""
    largest_BH = log_sum_exp_RBH.amax(0)
    weights_RBH = (log_sum_exp_RBH - largest_BH.nan_to_num(neginf=0.0)).exp()
    total_BH = weights_RBH.sum(0)
    weighted_RBHV = torch.where(weights_RBH[..., None] > 0, weights_RBH[..., None] * outputs_RBHV.float(), 0.0)
    output_BHV = weighted_RBHV.sum(0) / total_BH.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return Partial(output_BHV, largest_BH + total_BH.log())


def lift_gate(latent_BHV: torch.Tensor, value_up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``[B, H x 128]``: each head's latent output lifted by its ``value_up [H, 128, V]``, times sigmoid of ``gate``."""
    lifted = torch.einsum("bhv,hnv->bhn", latent_BHV.float(), value_up.float())
    return lifted.flatten(1) * gate.float().sigmoid()
