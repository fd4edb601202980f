"""Exact top-16 of 896 on the current GPU.

router_topk(logits, bias, ids, weights)              # logits [R, 896], or [shards, R, 896 / shards]
router_topk(addresses, bias, ids, weights)           # addresses [shards] int64: one shard's address each
router_topk(shards, bias, ids, weights, poll=True)   # shards that their owners are still pushing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.compile_cache import compiled, get_cutlass

if TYPE_CHECKING:
    import torch

EXPERTS = 896
TOP_K = 16
MAX_ROWS = 256
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

    get_cutlass()
    from cuda.bindings.driver import CUstream

    from k3sim.kernels.router_topk.kernel import RouterConfiguration, compile_router

    configuration = RouterConfiguration(num_shards=num_shards, table=table, poll=poll)
    run = compiled(configuration, lambda: compile_router(configuration))
    stream = CUstream(torch.cuda.current_stream(ids.device).cuda_stream)
    run(logits.data_ptr(), bias.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, stream)
