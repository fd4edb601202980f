"""Random inputs of the cases, and the poison that outputs hold before a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def generator_on(device: str, seed: int) -> torch.Generator:
    import torch

    return torch.Generator(device=device).manual_seed(seed)


def normal(
    shape: Sequence[int], generator: torch.Generator, *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Normal values, bf16 unless ``dtype`` says otherwise, on the generator's device, with no copy in another type."""
    import torch

    made = torch.empty(tuple(shape), dtype=dtype or torch.bfloat16, device=generator.device)
    return made.normal_(0.0, scale, generator=generator)


def poison(tensor: torch.Tensor) -> None:
    """NaN, or a number that no kernel writes where the type has none."""
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(math.nan)
    else:
        tensor.fill_(-7)
