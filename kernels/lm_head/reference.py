"""Reference of the LM head shard with its local top-k, and of the merge of all ranks' candidates, in torch.

Shape legend: B rows, D hidden width, N this rank's share of the vocabulary, R ranks, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Candidates(NamedTuple):
    """Largest logits ``[B, K]`` in falling order and their token ids ``[B, K]``; equal logits by rising id."""

    logits_BK: torch.Tensor
    ids_BK: torch.Tensor


def logits(x_BD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    return x_BD.float() @ weight_ND.float().T


def top_k(logits_BN: torch.Tensor, k: int, *, first_id: int = 0) -> Candidates:
    """NaN counts as -infinity. A stable sort keeps the lower id first among equals."""
    clean_BN = logits_BN.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order_BN = clean_BN.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Candidates(clean_BN.gather(-1, order_BN), order_BN + first_id)


def merge(candidates: list[Candidates], k: int) -> Candidates:
    """Top ``k`` of all ranks' candidates, ranks in the order of their ids: the top k of the whole vocabulary."""
    logits_BRK = torch.cat([one.logits_BK for one in candidates], dim=-1)
    ids_BRK = torch.cat([one.ids_BK for one in candidates], dim=-1)
    order_BK = logits_BRK.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Candidates(logits_BRK.gather(-1, order_BK), ids_BRK.gather(-1, order_BK))
