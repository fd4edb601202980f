"""References of the stock path's separate kernels in torch and fp32, in the order of the mathematics.

Shape legend: B rows, D hidden width or, in the KDA parts, the 128 of a head, H heads of this rank, N = H x 128, C = 3 N
convolved channels in the order q, k, v, P columns of a projected row (q, k, v, gate, f_a, beta, padding), R ranks, K
candidates, T tokens of a page. ``carry``: dtype in which a result passes to the next kernel.
"""

from __future__ import annotations

import torch

HEAD_DIM = 128
L2_EPSILON = 1e-6
NORM_EPSILON = 1e-5
DECAY_BOUND = -5.0
NULL_SLOT = 0
PAGE_TOKENS = 64
CANDIDATES = 64


def embedding(ids_B: torch.Tensor, table_ND: torch.Tensor, *, first_id: int) -> torch.Tensor:
    """Rows ``[B, D]`` of this rank's part of the vocabulary; 0 where an id is another rank's."""
    local_B = ids_B.long() - first_id
    here_B = (local_B >= 0) & (local_B < table_ND.shape[0])
    rows_BD = table_ND[torch.where(here_B, local_B, 0)]
    return torch.where(here_B[:, None], rows_BD, torch.zeros_like(rows_BD))


def all_reduce(partials_RBD: torch.Tensor) -> torch.Tensor:
    """Sum in rank order in fp32, rounded once to the dtype of the parts. -0 travels as +0, so no result is -0."""
    total_BD = torch.zeros_like(partials_RBD[0], dtype=torch.float32)
    for partial_BD in partials_RBD:
        total_BD = total_BD + partial_BD.float()
    return total_BD.to(partials_RBD.dtype)


def conv_update(
    projected_BP: torch.Tensor,
    conv_weight_C4: torch.Tensor,
    slots_B: torch.Tensor,
    conv_state_S3C: torch.Tensor,
    *,
    carry: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``[B, C]``: silu of the causal convolution over three past samples and this one; the state moves on in place."""
    convolved_BC = torch.zeros(projected_BP.shape[0], conv_weight_C4.shape[0], device=projected_BP.device)
    for row, slot in enumerate(slots_B.tolist()):
        if slot <= NULL_SLOT:
            continue
        now_C = projected_BP[row, : conv_weight_C4.shape[0]]
        window_4C = torch.cat([conv_state_S3C[slot], now_C[None].to(conv_state_S3C.dtype)])
        conv_state_S3C[slot] = window_4C[1:]
        convolved_BC[row] = torch.nn.functional.silu((window_4C.float() * conv_weight_C4.float().T).sum(0))
    return convolved_BC.to(carry)


def recurrent_update(
    convolved_BC: torch.Tensor,
    decay_logits_BN: torch.Tensor,
    projected_BP: torch.Tensor,
    dt_bias_N: torch.Tensor,
    a_log_H: torch.Tensor,
    slots_B: torch.Tensor,
    state_SHDD: torch.Tensor,
    *,
    carry: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Read-out ``[B, N]`` after one step of the gated delta rule; the state ``[slot, head, k, v]`` changes in place."""
    heads = state_SHDD.shape[1]
    width = heads * HEAD_DIM
    read_BN = torch.zeros(convolved_BC.shape[0], width, device=convolved_BC.device)
    for row, slot in enumerate(slots_B.tolist()):
        if slot <= NULL_SLOT:
            continue
        q_HD, k_HD, v_HD = convolved_BC[row].float().view(3, heads, HEAD_DIM)
        q_HD = q_HD * (q_HD.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt() * HEAD_DIM**-0.5
        k_HD = k_HD * (k_HD.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt()
        decay_HD = (decay_logits_BN[row].float() + dt_bias_N).view(heads, HEAD_DIM) * a_log_H[:heads].exp()[:, None]
        alpha_HD = (DECAY_BOUND * decay_HD.sigmoid()).exp()
        beta_at = 4 * width + HEAD_DIM
        beta_H = projected_BP[row, beta_at : beta_at + heads].float().sigmoid()

        state_HDD = state_SHDD[slot].float() * alpha_HD[:, :, None]
        delta_HD = beta_H[:, None] * (v_HD - torch.einsum("hk,hkv->hv", k_HD, state_HDD))
        state_HDD = state_HDD + k_HD[:, :, None] * delta_HD[:, None, :]
        state_SHDD[slot] = state_HDD.to(state_SHDD.dtype)
        read_BN[row] = torch.einsum("hk,hkv->hv", q_HD, state_HDD).flatten()
    return read_BN.to(carry)


def gated_norm(read_BN: torch.Tensor, projected_BP: torch.Tensor, norm_weight_D: torch.Tensor) -> torch.Tensor:
    """``[B, N]``: RMSNorm of every head's 128 values, times the weight, times the sigmoid of the output gate."""
    width = read_BN.shape[1]
    gate_BN = projected_BP[:, 3 * width : 4 * width].float()
    normalised_BHD = rms_norm(read_BN.unflatten(-1, (-1, HEAD_DIM)), norm_weight_D)
    return normalised_BHD.flatten(1) * gate_BN.sigmoid()


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` over its root mean square along the last axis (epsilon 1e-5), times ``weight``."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt() * weight.float()


def situ(gate_up: torch.Tensor) -> torch.Tensor:
    """``[B, W]`` of ``[B, 2 W]``: 4 tanh(g / 4) sigmoid(g) times 25 tanh(u / 25); gate first, then up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (25.0 * torch.tanh(up / 25.0))


def gate_multiply(value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return value.float() * gate.float().sigmoid()


def query_and_cache(
    absorbed_BHV: torch.Tensor,
    extra_BHP: torch.Tensor,
    latent_BV: torch.Tensor,
    latent_extra_BP: torch.Tensor,
    slots_B: torch.Tensor,
    cache_PTD: torch.Tensor,
) -> torch.Tensor:
    """Query ``[B, H, 576]``; each token's latent and extra go into the cache, saturated at 448 where that is fp8."""
    row_BD = torch.cat([latent_BV, latent_extra_BP], dim=-1).float()
    if cache_PTD.dtype == torch.float8_e4m3fn:
        row_BD = row_BD.clamp(-448.0, 448.0)
    for row_D, slot in zip(row_BD, slots_B.tolist(), strict=True):
        if slot >= 0:
            cache_PTD[slot // PAGE_TOKENS, slot % PAGE_TOKENS] = row_D.to(cache_PTD.dtype)
    return torch.cat([absorbed_BHV, extra_BHP], dim=-1)


def greedy(values_RBK: torch.Tensor, ids_RBK: torch.Tensor) -> torch.Tensor:
    """Token ``[B]`` of the largest value over all ranks' candidates; equal values: the lowest id. NaN is -infinity."""
    values_BC = values_RBK.transpose(0, 1).flatten(1)
    values_BC = torch.where(values_BC.isnan(), -torch.inf, values_BC)
    ids_BC = ids_RBK.transpose(0, 1).flatten(1).long()
    is_largest_BC = values_BC == values_BC.amax(-1, keepdim=True)
    return torch.where(is_largest_BC, ids_BC, torch.iinfo(torch.int64).max).amin(-1).int()


def distribution(
    values_RBK: torch.Tensor, ids_RBK: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B, 64]`` of the best candidates in order and the probabilities ``[B, 64]`` of drawing them, float64.

    Softmax at the temperature over the 64 largest, cut to the fewest best ones that reach ``top_p`` together and
    normalised again. Temperature 0 leaves the first.
    """
    ids_BC = ids_RBK.transpose(0, 1).flatten(1).long()
    values_BC = values_RBK.transpose(0, 1).flatten(1).double()
    values_BC = torch.where(values_BC.isnan(), -torch.inf, values_BC)
    by_id = ids_BC.argsort(dim=-1, stable=True)
    order = values_BC.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)[:, :CANDIDATES]
    best_BK = by_id.gather(-1, order)
    values_BK = values_BC.gather(-1, best_BK)
    temperature_B1 = temperature_B.double()[:, None]
    scaled_BK = (values_BK - values_BK[:, :1]) / torch.where(temperature_B1 > 0, temperature_B1, 1.0)
    probabilities_BK = scaled_BK.softmax(-1)
    before_BK = probabilities_BK.cumsum(-1) - probabilities_BK
    kept_BK = before_BK < top_p_B.double()[:, None]
    kept_BK &= temperature_B1 > 0
    kept_BK[:, 0] = True
    probabilities_BK = torch.where(kept_BK, probabilities_BK, 0.0)
    return ids_BC.gather(-1, best_BK), probabilities_BK / probabilities_BK.sum(-1, keepdim=True)


def draw(ids_BK: torch.Tensor, probabilities_BK: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Token ``[B]``: the first whose running sum of probabilities exceeds the row's uniform number."""
    passed_B = (probabilities_BK.cumsum(-1) <= uniform_B.double()[:, None]).sum(-1)
    last_B = (probabilities_BK > 0).sum(-1) - 1
    return ids_BK.gather(-1, torch.minimum(passed_B, last_B)[:, None])[:, 0].int()


def advance(num_tokens_B: torch.Tensor, pages_BP: torch.Tensor, slots_B: torch.Tensor) -> None:
    """Lengths grow by one and slots become those of the next token, in place; rows of slot below 0 stay as they are.

    A row whose page table is used up becomes padding: slot -1, its length unchanged.
    """
    for row, (length, slot) in enumerate(zip(num_tokens_B.tolist(), slots_B.tolist(), strict=True)):
        if slot < 0:
            continue
        if length // PAGE_TOKENS >= pages_BP.shape[1]:
            slots_B[row] = -1
            continue
        num_tokens_B[row] = length + 1
        slots_B[row] = int(pages_BP[row, length // PAGE_TOKENS]) * PAGE_TOKENS + length % PAGE_TOKENS
