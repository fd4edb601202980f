"""Memory of every GPU of a host that all its processes can store to, and which GPU stands for which rank.

One process a GPU. Each allocates a block of *symmetric memory* of torch, which all of them map; kernels reach the
peers' blocks by their addresses, with unicast stores alone: multicast is switched off before anything is mapped, and a
mapping that has it all the same is refused.

W GPUs can stand for T ranks, W a divisor of T. GPU g then stands for all ranks r with r mod W = g, and computes as rank
g does. What it sends to rank r lands on GPU r mod W, and so that every slot is filled once: slot s of every GPU comes
from GPU s mod W. So a GPU sends as many stores as one of T ranks and polls as many slots; of its T sends (W - 1) T / W
cross NVLink, where (T - 1) of T would. With W = T all of this is what T ranks do, with W = 1 it is loop-back. The sums
are not those of the model, as they hold the parts of W ranks T / W times each, but they are equal on all GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError

if TYPE_CHECKING:
    import torch


def check_standing(num_ranks: int, num_gpus: int, what: str = "tp") -> None:
    """Raise UserError unless ``num_gpus`` processes can stand for ``num_ranks`` ranks."""
    if num_gpus < 1 or num_ranks % num_gpus:
        accepted = ", ".join(str(one) for one in range(1, num_ranks + 1) if num_ranks % one == 0)
        raise UserError(f"processes: got {num_gpus}, accepted with {what}={num_ranks}: {accepted}")


def landing(peer: int, *, rank: int, num_gpus: int) -> tuple[int, int]:
    """(GPU, slot) where what ``rank``, itself below ``num_gpus``, sends to ``peer`` lands."""
    return peer % num_gpus, peer // num_gpus * num_gpus + rank


def sender(slot: int, num_gpus: int) -> int:
    """GPU whose part a slot holds, the same one on every GPU."""
    return slot % num_gpus


@dataclass(frozen=True, kw_only=True)
class SharedBlock:
    """This process's block and those of all processes of the group, itself included, as this GPU sees them.

    ``barrier`` on the current stream: no process passes it before all have reached it, and what they stored before is
    visible.
    """

    own: torch.Tensor  # uint8
    peers: Sequence[torch.Tensor]  # uint8, one a GPU
    addresses: Sequence[int]
    rank: int
    barrier: Callable[[], None]
    keep: Any = None

    @property
    def num_gpus(self) -> int:
        return len(self.addresses)

    def table(
        self, offset: int, slot_bytes: int, num_ranks: int, *, kernel_adds_rank: bool = True
    ) -> torch.Tensor:
        """Addresses that a pushing kernel takes, int64 [ranks] on the device, of slots that begin at ``offset``.

        ``kernel_adds_rank``: the kernel itself adds this rank's number times ``slot_bytes``, as most do.
        """
        import torch

        found = []
        for peer in range(num_ranks):
            gpu, slot = landing(peer, rank=self.rank, num_gpus=self.num_gpus)
            found.append(self.addresses[gpu] + offset + (slot - self.rank * kernel_adds_rank) * slot_bytes)
        return torch.tensor(found, dtype=torch.int64, device=self.own.device)


def local_block(num_bytes: int, device: torch.device | str) -> SharedBlock:
    """The block of a process that is alone: what it sends lands with itself."""
    import torch

    own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return SharedBlock(own=own, peers=(own,), addresses=(own.data_ptr(),), rank=0, barrier=lambda: None)


def symmetric_block(num_bytes: int, device: torch.device | str, group: Any) -> SharedBlock:
    """A block of each process of ``group``; all of them call it, with the same size.

    Raises UserError where torch mapped a multicast object, which this project does not use.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group=group)
    if getattr(handle, "multicast_ptr", 0):
        raise UserError("symmetric memory was mapped with multicast; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    rank = dist.get_rank(group)
    # Where torch takes the block out of a larger allocation, it begins at the same offset in all of them.
    offset = own.data_ptr() - int(handle.buffer_ptrs[rank])
    addresses = tuple(int(one) + offset for one in handle.buffer_ptrs)
    for start in (0, offset):
        peers = tuple(
            handle.get_buffer(peer, (num_bytes,), torch.uint8, storage_offset=start) for peer in range(len(addresses))
        )
        if tuple(one.data_ptr() for one in peers) == addresses:
            break
    else:
        raise UserError(f"symmetric memory: blocks at {[hex(one.data_ptr()) for one in peers]}, not at the pointers")
    return SharedBlock(
        own=own,
        peers=peers,
        addresses=addresses,
        rank=rank,
        barrier=lambda: handle.barrier(channel=0),
        keep=handle,
    )
