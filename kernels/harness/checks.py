"""Argument checks of the launch functions: one sentence that names the argument, what it was, what is accepted.

Every launch function checks all its arguments before it touches the device:

    check_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, 7168), like=weight)
    check_one_of("rows", x.shape[0], range(1, 17))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from k3sim.errors import UserError

if TYPE_CHECKING:
    import torch


def refuse(name: str, was: object, accepted: object) -> UserError:
    """The error to raise for argument ``name``: ``x: got float16, accepted: bfloat16``."""
    return UserError(f"{name}: got {was}, accepted: {accepted}")


def check_one_of(name: str, value: object, accepted: Iterable[object]) -> None:
    """Raise unless ``value`` is among ``accepted``."""
    if value not in accepted:
        listed = f"{accepted.start} to {accepted.stop - 1}" if isinstance(accepted, range) else list(accepted)
        raise refuse(name, value, listed)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    like: torch.Tensor | None = None,
    contiguous: bool = True,
    alignment_bytes: int = 16,
) -> None:
    """Raise unless ``tensor`` fits.

    ``shape``: None where any length is accepted. ``like``: the tensor whose device it must share. ``contiguous``:
    False asks only that the last axis has stride 1 (a one-row slice may carry any stride on its other axes).
    ``alignment_bytes``: of the first element and, without ``contiguous``, of every row.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise refuse(name, type(tensor).__name__, "a torch tensor")
    if tensor.dtype not in dtypes:
        raise refuse(name, tensor.dtype, " or ".join(str(one) for one in dtypes))
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=False)
    ):
        wanted = ", ".join("any" if one is None else str(one) for one in shape)
        raise refuse(f"{name}.shape", tuple(tensor.shape), f"({wanted})")
    if contiguous and not tensor.is_contiguous():
        raise refuse(f"{name}.stride", tensor.stride(), "a contiguous tensor")
    if not contiguous:
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise refuse(f"{name}.stride", tensor.stride(), "stride 1 on the last axis")
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if length > 1 and stride * tensor.element_size() % alignment_bytes:
                raise refuse(f"{name}.stride", tensor.stride(), f"rows that start at multiples of {alignment_bytes} B")
    if tensor.data_ptr() % alignment_bytes:
        raise refuse(f"{name}.data_ptr", hex(tensor.data_ptr()), f"multiples of {alignment_bytes} B")
    if like is not None and tensor.device != like.device:
        raise refuse(f"{name}.device", tensor.device, like.device)


def check_on_gpu(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` lies on a CUDA device; called last, so that other faults are found on any machine."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU is visible: the kernels run on compute capability 9.0, 10.0 or 10.3")
    if tensor.device.type != "cuda":
        raise refuse(f"{name}.device", tensor.device, "a CUDA device")
