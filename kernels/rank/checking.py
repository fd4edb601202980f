"""Kernels against references inside a step: every call on the inputs that it really has.

Two ranks with the same weights take one step side by side, one by its kernels, one by the references of the same
bindings. After each call their buffers and states are compared, and the kernels' rank continues from the references'
values: a deviation is reported at the call that makes it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.kernels.rank.bindings import functions_of, key
from k3sim.kernels.rank.call_table import KERNEL_CALLS, REFERENCE_CALLS
from k3sim.kernels.rank.state import Rank

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """What differs behind a call: norm of the difference over the norm of the reference (infinite for NaN)."""

    layer: int
    call: str
    tensor: str
    relative: float


def tensors_of(rank: Rank) -> dict[str, torch.Tensor]:
    """Everything that a call may change and the next one reads, but what is on its way between ranks."""
    named = dict(rank.buffers)
    for name, group in (("cache", rank.caches), ("conv state", rank.conv_states), ("state", rank.states)):
        named |= {f"{name} {layer}": tensor for layer, tensor in group.items()}
    for name in ("tokens", "num_tokens", "cache_slots"):
        named[name] = getattr(rank.sequence, name)
    return named


def deviations(by_kernels: Rank, by_references: Rank, *, tolerance: float) -> Iterator[Deviation]:
    """Run one step of both, call by call; yield what differs by more than ``tolerance``.

    Both ranks are in loop-back (``connect_kernels`` and ``connect_reference``) with equal contents. Local candidates
    are compared where the token that they give is.
    """
    import torch

    launches = functions_of(by_kernels.program, KERNEL_CALLS, "kernel")
    references = functions_of(by_references.program, REFERENCE_CALLS, "reference")
    mine, theirs = tensors_of(by_kernels), tensors_of(by_references)
    for call, launch, compute in zip(by_kernels.program.calls, launches, references, strict=True):
        for function, rank in ((launch, by_kernels), (compute, by_references)):
            halves = function(rank, call)
            for _ in halves or ():
                pass
        torch.cuda.synchronize()
        for name, wanted in theirs.items():
            if name in ("head.top", "head.ids", "head.all_logits"):
                continue
            got = mine[name]
            relative = _relative(got, wanted)
            if relative > tolerance:
                yield Deviation(layer=call.layer, call=key(call), tensor=name, relative=relative)
            if relative > 0:
                got.view(_bytes(got)).copy_(wanted.view(_bytes(wanted)))


def _bytes(tensor: torch.Tensor) -> torch.dtype:
    """A dtype of the same width that copies bits."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    import torch

    if torch.equal(got.view(_bytes(got)), wanted.view(_bytes(wanted))):
        return 0.0
    difference = (got.double() - wanted.double()).norm()
    relative = float(difference / wanted.double().norm().clamp_min(1e-30))
    return relative if relative == relative else float("inf")
