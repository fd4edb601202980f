"""What ``skinny_gemv`` computes, in fp32 and in the order of the mathematics.

Shapes: M rows, K depth, N weight rows, O output columns (N, or N / 2 for SiTU-GLU).
"""

from __future__ import annotations

import torch

from k3sim.kernels.skinny_gemv.configuration import Epilogue


def situ_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Kimi K3's activation: both factors saturate, the gate's at 4 and the linear one's at 25."""
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (25.0 * torch.tanh(up / 25.0))


def skinny_gemv(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    operand_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """The outputs [M, O] in fp32. ``operand_MO``: what is added, or what the sigmoid gates."""
    y_MN = x_MK.float() @ w_NK.float().T
    if epilogue is Epilogue.SITU_GLU:
        gate_MO, up_MO = y_MN.chunk(2, dim=1)
        return situ_glu(gate_MO, up_MO)
    if epilogue is Epilogue.ADD:
        assert operand_MO is not None
        return y_MN + operand_MO.float()
    if epilogue is Epilogue.SIGMOID_GATE:
        assert operand_MO is not None
        return operand_MO.float() * torch.sigmoid(y_MN)
    return y_MN
