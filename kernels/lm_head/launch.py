"""Public call of the LM head shard with its local top-k.

    lm_head(x, weight, logits, top, ids, counters, first_id=rank * weight.shape[0])

The first call of a configuration compiles: make it before a graph capture.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from k3sim.kernels.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.compile_cache import compiled, get_cutlass

if TYPE_CHECKING:
    import torch

MAX_ROWS = 16
MAX_CANDIDATES = 64
DEPTH_UNIT = 1792
MIN_OUTPUTS, MAX_OUTPUTS = 1024, 20480


@cache
def _num_blocks(device_index: int, num_outputs: int) -> int:
    import torch

    num_sms = int(torch.cuda.get_device_properties(device_index).multi_processor_count)
    tiles = num_outputs // 16
    return -(-tiles // -(-tiles // (2 * num_sms)))


@cache
def _function(rows: int, depth: int, num_outputs: int, k: int, num_blocks: int) -> Any:
    get_cutlass()
    from k3sim.kernels.lm_head.kernel import LmHeadConfiguration, compile_lm_head

    configuration = LmHeadConfiguration(rows=rows, depth=depth, num_outputs=num_outputs, k=k, num_blocks=num_blocks)
    return compiled(configuration, lambda: compile_lm_head(configuration))


def lm_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    top: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    *,
    first_id: int = 0,
) -> torch.Tensor:
    """``logits [B, N]`` fp32 = ``x [B, D]`` bf16 times ``weight [N, D]`` bf16, transposed; returns ``logits``.

    With ``top [B, k]`` fp32, ``ids [B, k]`` int32 and ``counters [2]`` int32 (zero; zero again afterwards): also the k
    largest of each row in falling order, equal ones by rising id, ids counted from ``first_id``; k up to 64. 1 <= B <=
    16, D a multiple of 1792, N a multiple of 16 between 1024 and 20480. ``weight`` is read before the kernel waits for
    the launch before it. Raises UserError before any launch.
    """
    import torch
    from cuda.bindings.driver import CUstream

    bf16 = (torch.bfloat16,)
    check_tensor("weight", weight, dtypes=bf16, shape=(None, None))
    num_outputs, depth = weight.shape
    check_one_of("weight.shape[0]", num_outputs, range(MIN_OUTPUTS, MAX_OUTPUTS + 1, 16))
    if not depth or depth % DEPTH_UNIT:
        raise refuse("weight.shape[1]", depth, f"multiples of {DEPTH_UNIT}")
    check_tensor("x", x, dtypes=bf16, shape=(None, depth), like=weight)
    rows = x.shape[0]
    check_one_of("x.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_tensor("logits", logits, dtypes=(torch.float32,), shape=(rows, num_outputs), like=weight)
    k = 0
    if top is not None:
        check_tensor("top", top, dtypes=(torch.float32,), shape=(rows, None), like=weight, alignment_bytes=4)
        k = top.shape[1]
        check_one_of("top.shape[1]", k, range(1, MAX_CANDIDATES + 1))
        for name, tensor, shape in (("ids", ids, (rows, k)), ("counters", counters, (2,))):
            if tensor is None:
                raise refuse(name, None, "a tensor wherever top is given")
            check_tensor(name, tensor, dtypes=(torch.int32,), shape=shape, like=weight, alignment_bytes=4)
    check_on_gpu("weight", weight)
    _function(rows, depth, num_outputs, k, _num_blocks(weight.device.index, num_outputs))(
        x.data_ptr(),
        weight.data_ptr(),
        logits.data_ptr(),
        *(0 if one is None else one.data_ptr() for one in (top, ids, counters)),
        first_id,
        CUstream(torch.cuda.current_stream(weight.device).cuda_stream),
    )
    return logits
