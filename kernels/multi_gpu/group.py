"""The processes of a check, one a GPU: their place, their block of memory, their barrier.

Environment variables say which process this is, as ``processes.py`` and torchrun set them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.multi_gpu.symmetric import SharedBlock, local_block, symmetric_block

if TYPE_CHECKING:
    import torch


class Group:
    """The processes of a check, joined; alone it is a group of one."""

    def __init__(self) -> None:
        import torch

        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.device = f"cuda:{torch.cuda.current_device()}"
        if self.size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl", device_id=torch.device(self.device))

    def block(self, num_bytes: int) -> SharedBlock:
        import torch

        if self.size == 1:
            return local_block(num_bytes, self.device)
        return symmetric_block(num_bytes, self.device, torch.distributed.group.WORLD)

    def barrier(self) -> None:
        """Wait until this GPU is idle, and then for the other processes."""
        import torch

        torch.cuda.synchronize()
        if self.size > 1:
            torch.distributed.barrier()

    def total(self, value: int) -> int:
        import torch

        found = torch.tensor(value, dtype=torch.int64, device=self.device)
        if self.size > 1:
            torch.distributed.all_reduce(found)
        return int(found)

    def differing(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes in which any GPU's tensors differ from those of the first."""
        import torch

        if self.size == 1:
            return 0
        mine = torch.cat([one.contiguous().view(torch.uint8).flatten() for one in tensors])
        first = mine.clone()
        torch.distributed.broadcast(first, 0)
        return self.total(int((mine != first).sum()))
