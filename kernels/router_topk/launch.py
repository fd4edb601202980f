"""Exact top-16 of 896 on the current GPU.

router_topk(logits, bias, ids, weights)              # logits [R, 896], or [shards, R, 896 / shards]
router_topk(addresses, bias, ids, weights)           # addresses [shards] int64: one shard's address each
router_topk(shards, bias, ids, weights, poll=True)   # shards that their owners are still pushing

slots = make_front_slots(ranks=16, max_rows=4, device="cuda")            # once a rank
peers = front_peers([address of every rank's slots], rank, slots)        # or front_peers_looped(slots)
skinny_gemv_push(x, w, peers, out_dtype=torch.float32, polled=True)      # w: router shard, then latent down shard
gather_topk(slots, bias, ids, weights, latent)                           # selection, and the whole latent in bf16
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

EXPERTS = 896
TOP_K = 16
MAX_ROWS = 256
LATENT = 3584
MAX_FRONT_ROWS = 16
RANK_COUNTS = (1, 2, 4, 8, 16, 32)
SHARD_COUNTS = (1, 2, 4, 7, 8, 14, 16, 28, 32)


def router_topk(
    logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, poll: bool = False
) -> None:
    """Write the selection of R rows (1 to 256) to ``ids`` [R, 16] int32 and ``weights`` [R, 16] fp32, best first.

    ``logits``: fp32 [R, 896] or [shards, R, 896 / shards], or int64 [shards] with the addresses of shards
    [R, 896 / shards] in fp32, 16-byte aligned, in memory that this GPU can reach. ``bias`` [896] fp32 takes part in the
    selection only. Equal choices go to the lower id; NaN is taken only where fewer than 16 others exist, with weight 0.

    ``poll``: wait for words that are all ones bits (int32 -1) to be overwritten and put them back after use; fill a
    buffer with them once, before its first use. Raises UserError before any launch.
    """
    import torch

    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(None, TOP_K))
    rows = ids.shape[0]
    check_one_of("rows of ids", rows, range(1, MAX_ROWS + 1))
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(rows, TOP_K), like=ids)
    check_tensor("bias", bias, dtypes=(torch.float32,), shape=(EXPERTS,), like=ids)
    if not isinstance(logits, torch.Tensor) or logits.dim() == 0:
        raise refuse("logits", type(logits).__name__, "a torch tensor of one to three axes")
    table = logits.dtype == torch.int64
    num_shards = logits.shape[0] if table or logits.dim() == 3 else 1
    check_one_of("shards of logits", num_shards, SHARD_COUNTS)
    if table:
        check_tensor("logits", logits, dtypes=(torch.int64,), shape=(None,), like=ids, alignment_bytes=8)
    else:
        shape = (num_shards, rows, EXPERTS // num_shards) if logits.dim() == 3 else (rows, EXPERTS)
        check_tensor("logits", logits, dtypes=(torch.float32,), shape=shape, like=ids)
    check_on_gpu("ids", ids)
    run = compiled_kernel("router_topk.kernel", "compile_router", num_shards=num_shards, table=table, poll=poll)
    stream = current_stream(ids)
    run(logits.data_ptr(), bias.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, stream)


def make_front_slots(
    *, ranks: int, max_rows: int = MAX_FRONT_ROWS, device: torch.device | str = "cuda"
) -> torch.Tensor:
    """Empty slots of one rank, fp32 [ranks, max_rows, 4480 / ranks]: block r of R rows is packed at its front.

    Peers store into them: where ranks are processes, allocate the like, all int32 -1, in memory that they can map.
    """
    import torch

    check_one_of("ranks", ranks, RANK_COUNTS)
    check_one_of("max_rows", max_rows, range(1, MAX_FRONT_ROWS + 1))
    shape = (ranks, max_rows, (EXPERTS + LATENT) // ranks)
    return torch.full(shape, -1, dtype=torch.int32, device=device).view(torch.float32)


def _check_slots(slots: torch.Tensor) -> tuple[int, int]:
    """Ranks and rows that the slots have room for."""
    import torch

    check_tensor("slots", slots, dtypes=(torch.float32,), shape=(None, None, None))
    ranks, max_rows, width = slots.shape
    check_one_of("slots.shape[0]", ranks, RANK_COUNTS)
    check_one_of("slots.shape[1]", max_rows, range(1, MAX_FRONT_ROWS + 1))
    if width != (EXPERTS + LATENT) // ranks:
        raise refuse("slots.shape[2]", width, f"{(EXPERTS + LATENT) // ranks} for {ranks} ranks")
    return ranks, max_rows


def front_peers(addresses: Sequence[int], rank: int, slots: torch.Tensor) -> torch.Tensor:
    """Where rank ``rank`` pushes: int64 [ranks] on the device of ``slots``, its block in every rank's slots.

    ``addresses``: of every rank's slots as this GPU sees them, in rank order; ``slots``: this rank's own, for shape.
    """
    import torch

    ranks, max_rows = _check_slots(slots)
    if len(addresses) != ranks:
        raise refuse("addresses", f"{len(addresses)} addresses", f"{ranks}, one a rank")
    check_one_of("rank", rank, range(ranks))
    block_bytes = max_rows * slots.shape[2] * 4
    return torch.tensor([one + rank * block_bytes for one in addresses], dtype=torch.int64, device=slots.device)


def front_peers_looped(slots: torch.Tensor) -> torch.Tensor:
    """For a rank that has no peers: what it sends to rank p lands in its own slots as if rank p had sent it."""
    import torch

    ranks, max_rows = _check_slots(slots)
    block_bytes = max_rows * slots.shape[2] * 4
    return slots.data_ptr() + torch.arange(ranks, dtype=torch.int64, device=slots.device) * block_bytes


def gather_topk(
    slots: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, latent: torch.Tensor,
    *,
    early: bool = False,
    release_next: bool = True,
) -> None:
    """Wait for every rank's front in ``slots``; write ``ids`` [R, 16] int32, ``weights`` [R, 16] fp32, best first, and
    ``latent`` [R, 3584] bf16. The slots are empty again after it. R from 1 to 16; ``bias`` as in ``router_topk``.

    ``early``: do not wait for the end of the launch before. It is a promise that whatever read ``ids``, ``weights`` and
    ``latent`` last had ended before that launch could begin. ``release_next`` lets the next launch on the stream start
    while this one waits. It must be False where several ranks share a GPU: such a launch could fill the SMs that a peer
    needs in order to push. Raises UserError before any launch.
    """
    import torch

    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(None, TOP_K))
    rows = ids.shape[0]
    ranks, max_rows = _check_slots(slots)
    check_one_of("rows of ids", rows, range(1, max_rows + 1))
    check_tensor("slots", slots, dtypes=(torch.float32,), shape=(ranks, max_rows, None), like=ids)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(rows, TOP_K), like=ids)
    check_tensor("latent", latent, dtypes=(torch.bfloat16,), shape=(rows, LATENT), like=ids)
    check_tensor("bias", bias, dtypes=(torch.float32,), shape=(EXPERTS,), like=ids)
    check_on_gpu("ids", ids)
    run = compiled_kernel(
        "router_topk.kernel", "compile_gather", num_shards=ranks, early=early, release_next=release_next
    )
    stream = current_stream(ids)
    run(
        slots.data_ptr(),
        slots.stride(0) * 4,
        bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        latent.data_ptr(),
        rows,
        stream,
    )
