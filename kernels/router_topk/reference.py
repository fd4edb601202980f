"""The router's selection in plain torch. Shapes: R rows, E = 896 experts, S = 16 selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOP_K = 16
SUM_FLOOR = 1e-20  # keeps the weights of a row whose scores are all zero at zero


def router_topk(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [R, S] int32 and weights [R, S] of the selected experts, best first.

    ``logits`` [R, E]; ``bias`` [E] takes part in the selection only. The score is the logit's sigmoid; experts are
    ordered by score plus bias, equal ones by id, lower first; NaN comes after everything else and scores 0. Weights
    are the scores of the selected over their sum.
    """
    import torch

    scores = logits.sigmoid()
    choice = scores + bias
    unknown = choice.isnan()
    order = torch.where(unknown, torch.full_like(choice, -torch.inf), choice)
    by_choice = torch.sort(order, dim=-1, descending=True, stable=True).indices
    # NaN stands at minus infinity above: move it behind the experts that are really there.
    last = torch.sort(unknown.gather(-1, by_choice).int(), dim=-1, stable=True).indices
    ids = by_choice.gather(-1, last)[..., :TOP_K]
    chosen = torch.where(unknown, torch.zeros_like(scores), scores).gather(-1, ids)
    return ids.int(), chosen / (chosen.sum(dim=-1, keepdim=True) + SUM_FLOOR)


def gather_front(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, 896] fp32 and latent [R, 3584] bf16 from what T ranks computed, ``blocks`` [T, R, (896 + 3584) / T].

    A rank's block holds its columns of the logits, then its columns of the latent, in fp32; the latent is rounded here.
    """
    import torch

    per_rank = 896 // blocks.shape[0]
    logits = blocks[..., :per_rank].transpose(0, 1).flatten(1)
    latent = blocks[..., per_rank:].transpose(0, 1).flatten(1)
    return logits.contiguous(), latent.to(torch.bfloat16)
