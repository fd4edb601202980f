"""Public call of the bulk L2 prefetch.

regions = make_regions([w_next, w_after])                 # once; keeps addresses, not the tensors
with torch.cuda.stream(side):
    l2_prefetch(regions, budget_bytes=20 << 20)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import architecture, compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

MAX_REGIONS = 4096
ISSUING_BLOCKS = {"sm_90a": 16, "sm_100a": 40, "sm_103a": 40}  # ``kernel.py`` says why


def make_regions(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[R, 2]`` int64 on the tensors' device: address and bytes of each contiguous tensor, in that order."""
    import torch

    check_one_of("number of tensors", len(tensors), range(1, MAX_REGIONS + 1))
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise refuse(f"tensors[{number}].stride", tensor.stride(), "a contiguous tensor")
        if tensor.data_ptr() % 16:
            raise refuse(f"tensors[{number}].data_ptr", hex(tensor.data_ptr()), "multiples of 16 B")
    table = [(one.data_ptr(), one.numel() * one.element_size()) for one in tensors]
    return torch.tensor(table, dtype=torch.int64, device=tensors[0].device)


def l2_prefetch(regions: torch.Tensor, *, budget_bytes: int) -> None:
    """Ask L2 for ``regions [R, 2]`` (address, bytes; multiples of 16) in order, ``budget_bytes`` in all.

    Returns with the requests under way on the current stream; nothing waits for the data. Raises
    UserError before any launch; addresses on the device are not checked.
    """
    import torch

    check_tensor("regions", regions, dtypes=(torch.int64,), shape=(None, 2), alignment_bytes=8)
    check_one_of("regions.shape[0]", regions.shape[0], range(1, MAX_REGIONS + 1))
    if budget_bytes < 0:
        raise refuse("budget_bytes", budget_bytes, "0 or more")
    check_on_gpu("regions", regions)
    compiled_kernel("l2_prefetch.kernel", "compile_prefetch", blocks=ISSUING_BLOCKS[architecture()])(
        regions.data_ptr(),
        regions.shape[0],
        budget_bytes,
        current_stream(regions),
    )
