"""Public call of the LM head shard with its local top-k: the product, then the selection.

    lm_head(x, weight, logits, top, ids, first_id=rank * weight.shape[0])

The first call of a configuration compiles: make it before a graph capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

MAX_ROWS = 16
MAX_CANDIDATES = 64
MIN_OUTPUTS, MAX_OUTPUTS = 1024, 20480


def lm_head(
    x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, top: torch.Tensor, ids: torch.Tensor,
    *,
    first_id: int = 0,
) -> torch.Tensor:
    """``logits [B, N]`` fp32 = ``x [B, D]`` bf16 times ``weight [N, D]`` bf16, transposed, and its ``top_k``.

    1 <= B <= 16; N a multiple of 16 between 1024 and 20480; D as ``skinny_gemv`` takes it. ``weight`` is read before
    the first launch waits for the one before it. Returns ``logits``. Raises UserError before any launch.
    """
    import torch

    from k3sim.kernels.skinny_gemv.launch import skinny_gemv

    bf16 = (torch.bfloat16,)
    check_tensor("weight", weight, dtypes=bf16, shape=(None, None))
    check_tensor("x", x, dtypes=bf16, shape=(None, weight.shape[1]), like=weight)
    check_tensor("logits", logits, dtypes=(torch.float32,), shape=(x.shape[0], weight.shape[0]), like=weight)
    _check_top_k(logits, top, ids)
    skinny_gemv(x, weight, logits)
    top_k(logits, top, ids, first_id=first_id)
    return logits


def top_k(logits: torch.Tensor, top: torch.Tensor, ids: torch.Tensor, *, first_id: int = 0) -> None:
    """The largest k of each row of ``logits [B, N]`` fp32 into ``top [B, k]`` fp32 and ``ids [B, k]`` int32.

    In falling order, equal ones by rising id, NaN as -infinity; ids counted from ``first_id``; k up to 64. Raises
    UserError before any launch.
    """

    _check_top_k(logits, top, ids)
    check_on_gpu("logits", logits)
    compiled_kernel("lm_head.kernel", "compile_top_k", num_outputs=logits.shape[1], k=top.shape[1])(
        logits.data_ptr(),
        top.data_ptr(),
        ids.data_ptr(),
        first_id,
        logits.shape[0],
        current_stream(logits),
    )


def _check_top_k(logits: torch.Tensor, top: torch.Tensor, ids: torch.Tensor) -> None:
    import torch

    check_tensor("logits", logits, dtypes=(torch.float32,), shape=(None, None))
    rows, num_outputs = logits.shape
    check_one_of("rows", rows, range(1, MAX_ROWS + 1))
    if num_outputs % 16 or not MIN_OUTPUTS <= num_outputs <= MAX_OUTPUTS:
        raise refuse("outputs", num_outputs, f"multiples of 16 between {MIN_OUTPUTS} and {MAX_OUTPUTS}")
    check_tensor("top", top, dtypes=(torch.float32,), shape=(rows, None), like=logits, alignment_bytes=4)
    check_one_of("top.shape[1]", top.shape[1], range(1, MAX_CANDIDATES + 1))
    check_tensor("ids", ids, dtypes=(torch.int32,), shape=tuple(top.shape), like=logits, alignment_bytes=4)
