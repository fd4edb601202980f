"""The whole model in plain torch, fp32, one token a row and step: what both paths of the engine must agree with.

Written from the architecture alone: whole matrices, no ranks, no paths, no kernels' references, so that a mistake of
wiring or of cutting cannot be in both. Sources: the Kimi K3 report and ``vllm/models/kimi_k3/nvidia``.

Shape legend: B rows, D hidden, H heads, K and V key and value dimensions of a head, C latent of MLA, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.model.architecture import Architecture

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.rank.whole_model import LoopedModel, WholeModel

EPSILON = 1e-5
L2_EPSILON = 1e-6
DECAY_BOUND = -5.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def situ_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """Both factors of the gated unit saturate, at 4 and at 25."""
    gate, up = gate_up.chunk(2, dim=-1)
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of two codes a byte, low nibble first, with one power-of-two scale for 32 of them."""
    import torch

    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    magnitude = torch.tensor(E2M1, device=codes.device)[nibbles & 7]
    signed = torch.where(nibbles > 7, -magnitude, magnitude)
    return signed * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)


class WholeModelDecoder:
    """Decodes ``rows`` sequences of ``model``, all states from zero.

    ``cache_dtype``: what a KV row is rounded to when it is kept (None: nothing).
    """

    def __init__(self, model: WholeModel | LoopedModel, *, rows: int, cache_dtype: torch.dtype | None = None) -> None:
        import torch

        self.model, self.rows, self.cache_dtype = model, rows, cache_dtype
        self.architecture: Architecture = model.architecture
        kda = self.architecture.kda
        like = model.tensors[-1, "embedding"]
        self.kv: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.architecture.mla_layers}
        self.conv = {
            layer: torch.zeros((rows, kda.conv_width - 1, kda.conv_channels), device=like.device)
            for layer in self.architecture.kda_layers
        }
        self.state = {
            layer: torch.zeros((rows, kda.num_heads, kda.head_dim_k, kda.head_dim_v), device=like.device)
            for layer in self.architecture.kda_layers
        }

    def weight(self, layer: int, name: str) -> torch.Tensor:
        return self.model.tensors[layer, name].float()

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, vocabulary]`` fp32 of the token after ``tokens_B``.

        ``least_margin_B`` is then the smallest lead over the layers of the last expert chosen over the next one.
        """
        import torch

        self.least_margin_B = torch.full((self.rows,), torch.inf, device=tokens_B.device)
        prefix_BD = self.weight(-1, "embedding")[tokens_B.long()]
        snapshots: list[torch.Tensor] = []
        for layer in range(self.architecture.num_layers):
            x_BD = self._residual(layer, "attn_res.mixer", snapshots, prefix_BD)
            mixed_BD = self._kda(layer, x_BD) if self.architecture.mixer(layer) == "kda" else self._mla(layer, x_BD)
            if self.architecture.is_snapshot(layer):
                snapshots.append(prefix_BD)
                prefix_BD = mixed_BD
            else:
                prefix_BD = prefix_BD + mixed_BD
            x_BD = self._residual(layer, "attn_res.ffn", snapshots, prefix_BD)
            dense = self.architecture.ffn(layer) == "dense"
            prefix_BD = prefix_BD + (self._mlp(layer, "dense", x_BD) if dense else self._moe(layer, x_BD))
        last = self.architecture.num_layers
        return self._residual(last, "head.attn_res", snapshots, prefix_BD) @ self.weight(last, "lm_head").T

    def _residual(
        self, layer: int, site: str, snapshots: list[torch.Tensor], prefix_BD: torch.Tensor
    ) -> torch.Tensor:
        import torch

        sources_BND = torch.stack([*snapshots, prefix_BD], dim=1)
        keys_BND = rms_norm(sources_BND, self.weight(layer, f"{site}.query_norm"))
        share_BN = (keys_BND @ self.weight(layer, f"{site}.query")).softmax(-1)
        return rms_norm((share_BN[..., None] * sources_BND).sum(1), self.weight(layer, f"{site}.norm"))

    def _kda(self, layer: int, x_BD: torch.Tensor) -> torch.Tensor:
        import torch

        kda = self.architecture.kda
        mixed = torch.cat([x_BD @ self.weight(layer, f"kda.{part}").T for part in ("q", "k", "v")], dim=1)
        window = torch.cat([self.conv[layer], mixed[:, None]], dim=1)
        self.conv[layer] = window[:, 1:]
        convolved = (window * self.weight(layer, "kda.conv").T).sum(1)
        convolved = convolved * convolved.sigmoid()
        widths = (kda.key_width, kda.key_width, kda.value_width)
        q_BHK, k_BHK, v_BHV = (one.unflatten(1, (kda.num_heads, -1)) for one in convolved.split(widths, dim=1))
        q_BHK = q_BHK / (q_BHK.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() * kda.head_dim_k**-0.5
        k_BHK = k_BHK / (k_BHK.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt()
        decay = (x_BD @ self.weight(layer, "kda.f_a").T) @ self.weight(layer, "kda.f_b").T
        decay_BHK = (decay + self.weight(layer, "kda.dt_bias")).unflatten(1, (kda.num_heads, -1))
        rate = self.weight(layer, "kda.a_log")[: kda.num_heads].exp()
        alpha_BHK = (DECAY_BOUND * (rate[:, None] * decay_BHK).sigmoid()).exp()
        beta_BH = (x_BD @ self.weight(layer, "kda.beta").T).sigmoid()
        state = self.state[layer] * alpha_BHK[..., None]
        seen_BHV = (k_BHK[..., None] * state).sum(2)
        state = state + k_BHK[..., None] * (beta_BH[..., None] * (v_BHV - seen_BHV))[:, :, None]
        self.state[layer] = state
        read_BHV = rms_norm((q_BHK[..., None] * state).sum(2), self.weight(layer, "kda.norm"))
        gate = (x_BD @ self.weight(layer, "kda.gate").T).sigmoid()
        return (read_BHV.flatten(1) * gate) @ self.weight(layer, "kda.o_proj").T

    def _mla(self, layer: int, x_BD: torch.Tensor) -> torch.Tensor:
        import torch

        mla = self.architecture.mla
        latents = x_BD @ self.weight(layer, "mla.qkv_a").T
        query, latent, extra = latents.split((mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim), dim=1)
        q = rms_norm(query, self.weight(layer, "mla.query_norm")) @ self.weight(layer, "mla.q_b").T
        row = torch.cat([rms_norm(latent, self.weight(layer, "mla.kv_norm")), extra], dim=1)
        self.kv[layer].append(row if self.cache_dtype is None else row.to(self.cache_dtype).float())
        cached_BTC = torch.stack(self.kv[layer], dim=1)
        latent_BTC, extra_BTR = cached_BTC.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=2)
        up_k = self.weight(layer, "mla.w_uk").view(mla.num_heads, mla.qk_nope_head_dim, mla.kv_lora_rank)
        up_v = self.weight(layer, "mla.w_uv").view(mla.num_heads, mla.v_head_dim, mla.kv_lora_rank)
        # Keys and values are formed here, token by token: the engine never forms them.
        keys = torch.einsum("btc,hnc->bthn", latent_BTC, up_k)
        values = torch.einsum("btc,hvc->bthv", latent_BTC, up_v)
        q_nope, q_extra = q.unflatten(1, (mla.num_heads, -1)).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        scores = torch.einsum("bhn,bthn->bht", q_nope, keys) + torch.einsum("bhr,btr->bht", q_extra, extra_BTR)
        share = (scores * mla.qk_head_dim**-0.5).softmax(-1)
        attended = torch.einsum("bht,bthv->bhv", share, values).flatten(1)
        return (attended * (x_BD @ self.weight(layer, "mla.gate").T).sigmoid()) @ self.weight(layer, "mla.o_proj").T

    def _mlp(self, layer: int, part: str, x_BD: torch.Tensor) -> torch.Tensor:
        names = ("dense.gate_up", "dense.down") if part == "dense" else ("moe.shared_gate_up", "moe.shared_down")
        return situ_glu(x_BD @ self.weight(layer, names[0]).T) @ self.weight(layer, names[1]).T

    def _moe(self, layer: int, x_BD: torch.Tensor) -> torch.Tensor:
        scores = (x_BD @ self.weight(layer, "moe.router").T).sigmoid()
        top_k = self.architecture.moe.top_k
        best = (scores + self.weight(layer, "moe.bias")).topk(top_k + 1, dim=-1)
        ids = best.indices[:, :top_k]
        self.least_margin_B = self.least_margin_B.minimum(best.values[:, -2] - best.values[:, -1])
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        latent = self.model.selected_experts(layer, x_BD @ self.weight(layer, "moe.latent_down").T, ids, weights)
        up = rms_norm(latent, self.weight(layer, "moe.latent_norm")) @ self.weight(layer, "moe.latent_up").T
        return up + self._mlp(layer, "shared", x_BD)
