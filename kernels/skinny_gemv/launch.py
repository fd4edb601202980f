"""The public call of ``skinny_gemv``: arguments checked, tiling chosen, kernel launched on the current stream.

    skinny_gemv(x, w, out)                                                       # out = x @ w.T
    skinny_gemv(x, w, out, epilogue=Epilogue.ADD, operand=residual)
    skinny_gemv_push(x, w, peers)                                                # to every address in peers

What no form takes is cuBLAS's (``configuration.choose_tiling``): ``torch.mm``, launched behind all that came before it.
Call once before a graph capture: the first call of a configuration compiles.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.skinny_gemv.configuration import (
    MAX_FMA_ROWS,
    MAX_PEERS,
    MAX_ROWS,
    Epilogue,
    GemvConfiguration,
    Tiling,
    choose_tiling,
)
from k3sim.kernels.toolchain.compile_cache import compiled, current_stream

CUBLAS_ONLY = (
    f"K a multiple of 32 beyond {MAX_FMA_ROWS} rows; any K as cuBLAS's product: out in bf16, no epilogue, no peers"
)
_WITH_OPERAND = (Epilogue.ADD, Epilogue.SIGMOID_GATE)


@functools.cache
def tiling_on(*, num_outputs: int, depth: int, rows: int, paired: bool, device_index: int) -> Tiling | None:
    """The form on a GPU (``configuration.choose_tiling``); the table is an H200's. None: cuBLAS."""
    properties = torch.cuda.get_device_properties(device_index)
    return choose_tiling(
        num_outputs=num_outputs,
        depth=depth,
        rows=rows,
        paired=paired,
        num_sms=properties.multi_processor_count,
        measured=properties.name == "NVIDIA H200",
    )


@functools.cache
def _function(
    num_outputs: int, depth: int, rows: int, fp32_out: bool, epilogue: Epilogue, num_peers: int, polled: bool,
    tiling: Tiling | None, device_index: int,
) -> Any:
    """The compiled kernel, or None where the product is cuBLAS's."""
    tiling = tiling or tiling_on(
        num_outputs=num_outputs,
        depth=depth,
        rows=rows,
        paired=epilogue is Epilogue.SITU_GLU,
        device_index=device_index,
    )
    if tiling is None:
        return None
    configuration = GemvConfiguration(
        num_outputs=num_outputs,
        depth=depth,
        rows=rows,
        fp32_out=fp32_out,
        epilogue=epilogue,
        num_peers=num_peers,
        polled=polled,
        tiling=tiling,
    ).check()

    def build() -> Any:
        from k3sim.kernels.skinny_gemv.kernel import compile_gemv

        return compile_gemv(configuration)

    return compiled(configuration, build)


def _launch(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None, fp32_out: bool, epilogue: Epilogue,
    operand: torch.Tensor | None, peers: torch.Tensor | None, polled: bool, tiling: Tiling | None,
) -> None:

    function = _function(
        w.shape[0],
        w.shape[1],
        x.shape[0],
        fp32_out,
        epilogue,
        0 if peers is None else peers.shape[0],
        polled,
        tiling,
        x.device.index,
    )
    if function is None:
        if out is None or fp32_out or epilogue is not Epilogue.NONE:
            raise refuse("w.shape", tuple(w.shape), CUBLAS_ONLY)
        torch.mm(x, w.T, out=out)
        return
    with torch.cuda.device(x.device):
        function(
            x.data_ptr(),
            w.data_ptr(),
            0 if out is None else out.data_ptr(),
            0 if operand is None else operand.data_ptr(),
            0 if peers is None else peers.data_ptr(),
            current_stream(x),
        )


def _check(x: torch.Tensor, w: torch.Tensor, epilogue: Epilogue, operand: torch.Tensor | None) -> int:
    """Check what both calls share; the number of output columns."""
    check_tensor("w", w, dtypes=(torch.bfloat16,), shape=(None, None))
    num_outputs, depth = int(w.shape[0]), int(w.shape[1])
    if not num_outputs or not depth or depth % 8:
        raise refuse("w.shape", tuple(w.shape), "N at least 1 and K a positive multiple of 8")
    check_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, depth), like=w)
    check_one_of("x.shape[0]", x.shape[0], range(1, MAX_ROWS + 1))
    if not isinstance(epilogue, Epilogue):
        raise refuse("epilogue", repr(epilogue), ", ".join(str(one) for one in Epilogue))
    if epilogue is Epilogue.SITU_GLU and num_outputs % 2:
        raise refuse("w.shape", tuple(w.shape), "an even N for SITU_GLU: gate rows, then as many up rows")
    width = num_outputs // 2 if epilogue is Epilogue.SITU_GLU else num_outputs
    if (operand is not None) != (epilogue in _WITH_OPERAND):
        raise refuse("operand", "a tensor" if operand is not None else None, "a tensor with ADD and SIGMOID_GATE only")
    if operand is not None:
        check_tensor("operand", operand, dtypes=(torch.bfloat16,), shape=(x.shape[0], width), like=w, alignment_bytes=2)
    return width


def skinny_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    operand: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """``out[M, O] = epilogue(x[M, K] @ w[N, K].T)``, sums in fp32; returns ``out``.

    ``x``, ``w``, ``operand`` [M, O]: bf16, contiguous; 1 <= M <= 16. ``out``: bf16 or fp32, O = N, or N / 2 for
    SITU_GLU. ``w`` is read before the kernel waits for the one before it on the stream, so that one must not write it.
    ``tiling``: instead of the chosen one. Raises UserError for what cannot be honoured, before any launch.
    """
    width = _check(x, w, epilogue, operand)
    check_tensor(
        "out", out, dtypes=(torch.bfloat16, torch.float32), shape=(x.shape[0], width), like=w, alignment_bytes=4
    )
    check_on_gpu("x", x)
    _launch(x, w, out, out.dtype == torch.float32, epilogue, operand, None, False, tiling)
    return out


def skinny_gemv_push(
    x: torch.Tensor,
    w: torch.Tensor,
    peers: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    epilogue: Epilogue = Epilogue.NONE,
    operand: torch.Tensor | None = None,
    polled: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """As ``skinny_gemv``, but the output [M, O] is stored at every address in ``peers`` (int64 [P], on the device).

    Addresses of other GPUs must be mapped for this one (symmetric memory, CUDA IPC). The stores are plain unicast
    ones, complete when the kernel is; who reads them elsewhere needs a signal that is sent after that.

    ``polled`` (fp32 only): readers watch the words themselves, each of which arrives whole, as ``gather_topk`` does.
    The address for peer p is where this rank's block [M, O] starts in that peer's buffer.
    """
    _check(x, w, epilogue, operand)
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(None,), like=w, alignment_bytes=8)
    check_one_of("peers.shape[0]", peers.shape[0], range(1, MAX_PEERS + 1))
    check_one_of("out_dtype", out_dtype, (torch.float32,) if polled else (torch.bfloat16, torch.float32))
    check_on_gpu("x", x)
    _launch(x, w, None, out_dtype == torch.float32, epilogue, operand, peers, polled, tiling)
