"""Public calls of a KDA step in three: checks, then one launch on the current stream.

    conv_update(projected, conv_weight, slots, conv_state, convolved, heads=12)
    recurrent_update(convolved, decay_logits, projected, dt_bias, a_log, slots, state, read_out)
    gated_norm(read_out, projected, norm_weight, out, heads=12)

``launch.py`` says what all of them share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.mla_decode.launch import HEADS
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream, strided
from k3sim.kernels.unfused.launch import HEAD_DIM, MAX_ROWS

if TYPE_CHECKING:
    import torch


def _check_projected(projected: torch.Tensor, heads: int, columns: int) -> int:
    """Rows; ``columns``: how many of a projected row are read."""
    import torch

    check_one_of("heads", heads, HEADS)
    check_tensor("projected", projected, dtypes=(torch.bfloat16,), shape=(None, None), contiguous=False)
    check_one_of("projected.shape[0]", projected.shape[0], range(1, MAX_ROWS + 1))
    if projected.shape[1] < columns:
        raise refuse("projected.shape[1]", projected.shape[1], f"{columns} or more for {heads} heads")
    return int(projected.shape[0])


def _check_state(name: str, state: torch.Tensor) -> None:
    if state.shape[0] < 1 or not state[0].is_contiguous():
        raise refuse(f"{name}.stride", state.stride(), "at least one slot, contiguous within a slot")


def conv_update(
    projected: torch.Tensor, conv_weight: torch.Tensor, slots: torch.Tensor, conv_state: torch.Tensor,
    convolved: torch.Tensor,
    *,
    heads: int,
    pdl: bool = False,
) -> torch.Tensor:
    """``convolved [B, C]`` bf16, C = 3 heads 128: silu of the width-4 convolution; ``conv_state`` moves on in place.

    ``projected``, ``conv_weight``, ``slots`` and ``conv_state`` as in ``kda_decode``; only the first C columns of
    ``projected`` are read. Padding rows (slot 0 or less) give 0. Returns ``convolved``. Raises UserError before any
    launch.
    """
    import torch

    channels = 3 * heads * HEAD_DIM
    rows = _check_projected(projected, heads, channels)
    check_tensor("conv_weight", conv_weight, dtypes=(torch.float32,), shape=(channels, 4), like=projected)
    check_tensor("slots", slots, dtypes=(torch.int32,), shape=(rows,), like=projected, alignment_bytes=4)
    bf16 = (torch.bfloat16,)
    check_tensor("conv_state", conv_state, dtypes=bf16, shape=(None, 3, channels), like=projected, contiguous=False)
    _check_state("conv_state", conv_state)
    check_tensor("convolved", convolved, dtypes=bf16, shape=(rows, channels), like=projected)
    check_on_gpu("projected", projected)
    run = compiled_kernel("unfused.recurrence", "compile_conv_update", heads=heads, pdl=pdl)
    run(
        *strided(projected), conv_weight.data_ptr(), slots.data_ptr(), *strided(conv_state), convolved.data_ptr(),
        rows, current_stream(projected),
    )  # fmt: skip
    return convolved


def recurrent_update(
    convolved: torch.Tensor, decay_logits: torch.Tensor, projected: torch.Tensor, dt_bias: torch.Tensor,
    a_log: torch.Tensor, slots: torch.Tensor, state: torch.Tensor, read_out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """One step of the gated delta rule: ``state`` in place, ``read_out [B, heads 128]`` bf16, not yet normalised.

    ``convolved [B, 3 heads 128]`` bf16 from ``conv_update``; ``decay_logits [B, heads 128]`` bf16 or fp32, the low-rank
    gate before its bias; ``projected`` (for beta), ``dt_bias``, ``a_log``, ``slots`` and ``state`` as in
    ``kda_decode``. Padding rows (slot 0 or less) give 0. Returns ``read_out``. Raises UserError before any launch.
    """
    import torch

    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    check_tensor(
        "state",
        state,
        dtypes=(torch.float32, torch.bfloat16),
        shape=(None, None, HEAD_DIM, HEAD_DIM),
        contiguous=False,
    )
    heads = int(state.shape[1])
    check_one_of("state.shape[1]", heads, HEADS)
    _check_state("state", state)
    width = heads * HEAD_DIM
    rows = _check_projected(projected, heads, 4 * width + HEAD_DIM + heads)
    check_tensor("projected", projected, dtypes=bf16, shape=(rows, None), like=state, contiguous=False)
    check_tensor("convolved", convolved, dtypes=bf16, shape=(rows, 3 * width), like=state)
    check_tensor("decay_logits", decay_logits, dtypes=(torch.bfloat16, torch.float32), shape=(rows, width), like=state)
    check_tensor("dt_bias", dt_bias, dtypes=fp32, shape=(width,), like=state, alignment_bytes=4)
    check_tensor("a_log", a_log, dtypes=fp32, shape=(None,), like=state, alignment_bytes=4)
    if a_log.shape[0] < heads:
        raise refuse("a_log.shape[0]", a_log.shape[0], f"{heads} or more")
    check_tensor("slots", slots, dtypes=(torch.int32,), shape=(rows,), like=state, alignment_bytes=4)
    check_tensor("read_out", read_out, dtypes=bf16, shape=(rows, width), like=state)
    check_on_gpu("state", state)
    run = compiled_kernel(
        "unfused.recurrence",
        "compile_recurrent_update",
        heads=heads,
        bf16_state=state.dtype == torch.bfloat16,
        fp32_logits=decay_logits.dtype == torch.float32,
        pdl=pdl,
    )
    run(
        convolved.data_ptr(), decay_logits.data_ptr(), *strided(projected), dt_bias.data_ptr(), a_log.data_ptr(),
        slots.data_ptr(), *strided(state), read_out.data_ptr(), rows, current_stream(state),
    )  # fmt: skip
    return read_out


def gated_norm(
    read_out: torch.Tensor,
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: int,
    pdl: bool = False,
) -> torch.Tensor:
    """``out [B, heads 128]`` bf16: RMSNorm of every head of ``read_out``, times weight, times sigmoid of the gate.

    The gate is columns [3 heads 128, 4 heads 128) of ``projected``; ``norm_weight [128]`` fp32; ``out`` may be
    ``read_out``. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    width = heads * HEAD_DIM
    rows = _check_projected(projected, heads, 4 * width)
    check_tensor("read_out", read_out, dtypes=bf16, shape=(rows, width), like=projected)
    fp32 = (torch.float32,)
    check_tensor("norm_weight", norm_weight, dtypes=fp32, shape=(HEAD_DIM,), like=projected, alignment_bytes=4)
    check_tensor("out", out, dtypes=bf16, shape=(rows, width), like=projected)
    check_on_gpu("projected", projected)
    run = compiled_kernel("unfused.recurrence", "compile_gated_norm", heads=heads, pdl=pdl)
    run(
        read_out.data_ptr(), *strided(projected), norm_weight.data_ptr(), out.data_ptr(), rows,
        current_stream(projected),
    )  # fmt: skip
    return out
