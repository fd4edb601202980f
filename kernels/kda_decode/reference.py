"""Reference of one KDA decode step in torch, in the order of the mathematics, in the precision of the state given.

Shape legend: B rows (one token each), H heads of this rank, S state slots, D = 128 (key and value width of a head),
C = 3 * H * D convolved channels, ordered q, k, v.

``projected_BP`` is one row of the fused input projection: q, k, v, gate (H * D each), f_a (D), beta (H), padding.
"""

from __future__ import annotations

import torch

HEAD_DIM = 128
CONV_WIDTH = 4
L2_EPSILON = 1e-6
NORM_EPSILON = 1e-5
DECAY_BOUND = -5.0
NULL_SLOT = 0


def kda_decode(
    projected_BP: torch.Tensor,
    gate_weight_ND: torch.Tensor,
    conv_weight_C4: torch.Tensor,
    dt_bias_N: torch.Tensor,
    a_log_H: torch.Tensor,
    norm_weight_D: torch.Tensor,
    slots_B: torch.Tensor,
    conv_state_S3C: torch.Tensor,
    state_SHDD: torch.Tensor,
    *,
    heads: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Output ``[B, H * D]`` in ``dtype``; ``conv_state`` and ``state`` are updated in place.

    The state is indexed ``[slot, head, k, v]``, the convolution state ``[slot, sample, channel]``, oldest first. Rows
    whose slot is 0 or less are padding: their output is 0 and nothing is written. Source of the mathematics: the
    Kimi K3 report and fla-core's naive KDA.
    """
    width = heads * HEAD_DIM
    out_BN = torch.zeros(projected_BP.shape[0], width, dtype=dtype, device=projected_BP.device)
    for row, slot in enumerate(slots_B.tolist()):
        if slot <= NULL_SLOT:
            continue
        mixed_C = projected_BP[row, : 3 * width]
        gate_HD = projected_BP[row, 3 * width : 4 * width].to(dtype).view(heads, HEAD_DIM)
        low_rank_D = projected_BP[row, 4 * width : 4 * width + HEAD_DIM].to(dtype)
        beta_H = projected_BP[row, 4 * width + HEAD_DIM : 4 * width + HEAD_DIM + heads].to(dtype).sigmoid()

        window_4C = torch.cat([conv_state_S3C[slot], mixed_C[None].to(conv_state_S3C.dtype)])
        conv_state_S3C[slot] = window_4C[1:]
        convolved_C = torch.nn.functional.silu((window_4C.to(dtype) * conv_weight_C4.to(dtype).T).sum(0))
        q_HD, k_HD, v_HD = convolved_C.view(3, heads, HEAD_DIM)
        q_HD = q_HD * (q_HD.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt() * HEAD_DIM**-0.5
        k_HD = k_HD * (k_HD.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt()

        decay_HD = (gate_weight_ND.to(dtype) @ low_rank_D + dt_bias_N.to(dtype)).view(heads, HEAD_DIM)
        decay_HD = decay_HD * a_log_H[:heads].to(dtype).exp()[:, None]
        alpha_HD = (DECAY_BOUND * decay_HD.sigmoid()).exp()

        state_HDD = state_SHDD[slot].to(dtype) * alpha_HD[:, :, None]
        delta_HD = beta_H[:, None] * (v_HD - torch.einsum("hk,hkv->hv", k_HD, state_HDD))
        state_HDD = state_HDD + k_HD[:, :, None] * delta_HD[:, None, :]
        state_SHDD[slot] = state_HDD.to(state_SHDD.dtype)

        read_HD = torch.einsum("hk,hkv->hv", q_HD, state_HDD)
        read_HD = read_HD * (read_HD.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        out_BN[row] = (read_HD * norm_weight_D.to(dtype) * gate_HD.sigmoid()).flatten()
    return out_BN
