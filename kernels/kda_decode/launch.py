"""Public call of the fused KDA decode step: checks, choice of a form, launch. Allocates nothing."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import compiled_kernel

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
HEADS = (6, 12, 24, 48, 96)
MAX_ROWS = 256
# Computing threads a block, by the number of blocks a head; 0: states streamed, one block an SM.
THREADS = {0: 256, 2: 256, 4: 128, 8: 128}
RING_BYTES = 192 * 1024
# Heads of all rows up to which a head is split over few or over 2 blocks; above, states are streamed. Read on an H200,
# cold states, fp32: 4 blocks win at 6 to 24 heads (8 blocks are 0.1 to 0.3 us behind; in bf16 they are 0.25 us ahead at
# 12 heads), 2 blocks from 48 to 192 (9.6 us against 10.0 streamed); at 384 both take 17.7 us, at 1536 streaming 61.5
# and 2 blocks 66.2.
SPLIT_FEW_MAX = 24
SPLIT_2_MAX = 192


def chosen_cluster(rows: int, heads: int, *, bf16_state: bool) -> int:
    """Blocks a head for this many rows: 8, 4, 2, or 0 for the streaming form."""
    if rows * heads <= SPLIT_FEW_MAX:
        return 8 if bf16_state else 4
    return 2 if rows * heads <= SPLIT_2_MAX else 0


def kernel_fields(heads: int, *, bf16_state: bool, cluster: int) -> dict[str, int]:
    """Of a ``KdaConfiguration``, but for ``pdl``; ``cluster`` 0 streams states through one block an SM."""
    state_bytes = HEAD_DIM * HEAD_DIM * (2 if bf16_state else 4)
    return {
        "heads": heads,
        "bf16_state": bf16_state,
        "cluster": cluster,
        "threads": THREADS[cluster],
        "stages": 0 if cluster else RING_BYTES // state_bytes,
    }


@cache
def _num_sms(device_index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def kda_decode(
    projected: torch.Tensor, gate_weight: torch.Tensor, conv_weight: torch.Tensor, dt_bias: torch.Tensor,
    a_log: torch.Tensor, norm_weight: torch.Tensor, slots: torch.Tensor, conv_state: torch.Tensor,
    state: torch.Tensor, out: torch.Tensor,
    *,
    heads: int,
    pdl: bool = False,
    cluster: int | None = None,
) -> torch.Tensor:
    """One decode step of ``heads`` KDA heads for 1 to 256 rows; ``state`` and ``conv_state`` change in place.

    Shapes, with D = 128 and C = 3 heads D channels in the order q, k, v:

    * ``projected [rows, >= 4 heads D + D + heads]`` bf16: q, k, v, output gate, f_a, beta, any padding;
    * ``gate_weight [heads D, D]`` bf16, ``conv_weight [C, 4]``, ``dt_bias [heads D]``, ``a_log [>= heads]`` and
      ``norm_weight [D]`` fp32;
    * ``slots [rows]`` int32, distinct; 0 and less mark padding rows, whose output is 0 and which write nothing else.
      A slot beyond the state is not detected;
    * ``conv_state [slots, 3, C]`` bf16, ``state [slots, heads, D (k), D (v)]`` fp32 or bf16, any slot stride;
    * ``out [rows, heads D]`` bf16, returned.

    ``pdl`` lets the kernel start before its predecessor has ended. It then fetches weights, slots and both states
    early: no kernel that may still run on the stream may write them. ``cluster`` overrides the choice of form: 8, 4
    or 2 blocks a head, 0 for streamed states.

    Raises UserError (a ValueError) for an argument that does not fit, before any launch.
    """
    import torch

    check_one_of("heads", heads, HEADS)
    width = heads * HEAD_DIM
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    check_tensor("projected", projected, dtypes=bf16, shape=(None, None), contiguous=False)
    rows, columns = projected.shape
    check_one_of("projected.shape[0]", rows, range(1, MAX_ROWS + 1))
    needed = 4 * width + HEAD_DIM + heads
    if columns < needed:
        raise refuse("projected.shape[1]", columns, f"{needed} or more for {heads} heads")
    check_tensor("gate_weight", gate_weight, dtypes=bf16, shape=(width, HEAD_DIM), like=projected)
    check_tensor("conv_weight", conv_weight, dtypes=fp32, shape=(3 * width, 4), like=projected)
    check_tensor("dt_bias", dt_bias, dtypes=fp32, shape=(width,), like=projected, alignment_bytes=4)
    check_tensor("a_log", a_log, dtypes=fp32, shape=(None,), like=projected, alignment_bytes=4)
    if a_log.shape[0] < heads:
        raise refuse("a_log.shape[0]", a_log.shape[0], f"{heads} or more")
    check_tensor("norm_weight", norm_weight, dtypes=fp32, shape=(HEAD_DIM,), like=projected, alignment_bytes=4)
    check_tensor("slots", slots, dtypes=(torch.int32,), shape=(rows,), like=projected, alignment_bytes=4)
    num_slots = state.shape[0] if isinstance(state, torch.Tensor) and state.dim() else None
    check_tensor(
        "conv_state", conv_state, dtypes=bf16, shape=(num_slots, 3, 3 * width), like=projected, contiguous=False
    )
    check_tensor(
        "state",
        state,
        dtypes=(torch.float32, torch.bfloat16),
        shape=(None, heads, HEAD_DIM, HEAD_DIM),
        like=projected,
        contiguous=False,
    )
    for name, tensor in (("conv_state", conv_state), ("state", state)):
        if tensor.shape[0] < 1 or not tensor[0].is_contiguous():
            raise refuse(f"{name}.stride", tensor.stride(), "at least one slot, contiguous within a slot")
    check_tensor("out", out, dtypes=bf16, shape=(rows, width), like=projected)
    bf16_state = state.dtype == torch.bfloat16
    cluster = chosen_cluster(rows, heads, bf16_state=bf16_state) if cluster is None else cluster
    check_one_of("cluster", cluster, THREADS)
    check_on_gpu("projected", projected)

    num_blocks = min(rows * heads, _num_sms(projected.device.index))
    fields = kernel_fields(heads, bf16_state=bf16_state, cluster=cluster)
    compiled_kernel("kda_decode.kernel", "compile_kda", **fields, pdl=pdl)(
        projected, gate_weight, conv_weight, dt_bias, a_log, norm_weight, slots, conv_state, state, out, num_blocks
    )
    return out
