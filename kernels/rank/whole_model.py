"""The whole model that ranks are parts of: cut for emulated ranks, or what one looped-back rank stands for.

Shape legend: L latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3sim.kernels.expert_gemv.reference import Experts
from k3sim.kernels.rank.weights import (
    EXPERT_MATRICES,
    MERGED,
    RankWeights,
    allocate,
    matrices_of,
    random_experts,
    vectors,
)
from k3sim.model.architecture import Architecture
from k3sim.model.layout import Layout
from k3sim.model.matrices import rank_matrices
from k3sim.model.program import Program

if TYPE_CHECKING:
    import torch



def _selected(stored: Experts, latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    import torch

    from k3sim.kernels.rank.reference import mxfp4, situ_glu

    out = torch.zeros_like(latent)
    for row in range(latent.shape[0]):
        for one, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate = mxfp4(stored.gate[one], stored.gate_scales[one]) @ latent[row]
            up = mxfp4(stored.up[one], stored.up_scales[one]) @ latent[row]
            hidden = situ_glu(torch.cat([gate, up]))
            out[row] += weight * (mxfp4(stored.down[one], stored.down_scales[one]) @ hidden)
    return out


class WholeModel:
    """Weights of all ranks together, small enough to be cut for several emulated ranks.

    Matrices carry their name of ``rank_matrices`` at one rank; the fused input projection is kept in its parts.
    """

    def __init__(self, architecture: Architecture, *, seed: int = 0, lm_head_scale: float = 1.0) -> None:
        import torch

        self.architecture = architecture
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}
        self.experts: dict[int, Experts] = {}
        one = Layout(tp=1)
        matrices = rank_matrices(architecture, one)
        kda, mla, hidden = architecture.kda, architecture.mla, architecture.hidden_size

        def matrix(layer: int, name: str, num_outputs: int, depth: int, scale: float = 1.0) -> None:
            values = torch.randn((num_outputs, depth), generator=self.generator) * (scale * depth**-0.5)
            self.tensors[layer, name] = values.bfloat16()

        matrix(-1, "embedding", architecture.vocab_size, hidden, hidden**0.5)
        for layer in range(architecture.num_layers):
            if architecture.mixer(layer) == "kda":
                for part, width in (
                    ("q", kda.key_width), ("k", kda.key_width), ("v", kda.value_width), ("gate", kda.value_width),
                    ("f_a", kda.decay_rank), ("beta", kda.num_heads),
                ):  # fmt: skip
                    matrix(layer, f"kda.{part}", width, hidden)
                names: tuple[str, ...] = ("kda.f_b", "kda.o_proj")
            else:
                matrix(layer, "mla.w_uk", mla.num_heads * mla.qk_nope_head_dim, mla.kv_lora_rank)
                matrix(layer, "mla.w_uv", mla.num_heads * mla.v_head_dim, mla.kv_lora_rank)
                names = ("mla.qkv_a", "mla.gate", "mla.q_b", "mla.o_proj")
            if architecture.ffn(layer) == "dense":
                names += ("dense.gate_up", "dense.down")
            else:
                names += ("moe.router", "moe.latent_down", "moe.latent_up", "moe.shared_gate_up", "moe.shared_down")
                experts = random_experts(architecture, one, self.generator, "cpu", packed=False)
                assert isinstance(experts, Experts)
                self.experts[layer] = experts
            for name in names:
                matrix(layer, name, matrices[name].num_outputs, matrices[name].depth)
        matrix(architecture.num_layers, "lm_head", architecture.vocab_size, hidden, lm_head_scale)
        for layer in range(architecture.num_layers + 1):
            for name, vector in vectors(architecture, one, layer).items():
                values = torch.randn(vector.shape, generator=self.generator) * vector.deviation + vector.mean
                self.tensors[layer, name] = values if vector.fp32 else values.bfloat16()

    def selected_experts(
        self, layer: int, latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum [B, L] of the experts ``ids`` of each row, in fp32."""
        return _selected(self.experts[layer], latent, ids, weights)

    def cut(self, program: Program, layout: Layout, rank: int, dtype: torch.dtype | None = None) -> RankWeights:
        """What ``rank`` of ``layout.tp`` holds for ``program``; matrices and norms in ``dtype`` (bf16)."""
        import torch

        dtype = torch.bfloat16 if dtype is None else dtype
        weights = RankWeights()
        for layer, names in matrices_of(program).items():
            cuts = {name: self._matrix(layer, name, layout, rank) for name in names if name not in EXPERT_MATRICES}
            shapes = {name: (one.shape[0], one.shape[1]) for name, one in cuts.items()}
            for name, tensor in allocate(shapes, dtype, "cpu").items():
                weights.tensors[layer, name] = tensor
                if name not in MERGED:
                    tensor.copy_(cuts[name])
            if any(name in EXPERT_MATRICES for name in names):
                weights.experts[layer] = self._experts(layer, layout, rank)
        for layer in (*program.layers, self.architecture.num_layers):
            for name, vector in vectors(self.architecture, layout, layer).items():
                values = self._vector(layer, name, layout, rank)
                weights.tensors[layer, name] = values.contiguous() if vector.fp32 else values.to(dtype).contiguous()
        return weights

    def _matrix(self, layer: int, name: str, layout: Layout, rank: int) -> torch.Tensor:
        import torch

        tp = layout.tp

        def rows(one: str, parts: int = 1) -> torch.Tensor:
            """This rank's share of the outputs, of each of ``parts`` matrices that lie one behind the other."""
            whole = self.tensors[layer, one]
            return torch.cat([part.chunk(tp)[rank] for part in whole.chunk(parts)])

        def columns(one: str) -> torch.Tensor:
            return self.tensors[layer, one].chunk(tp, dim=1)[rank]

        if name == "kda.in_proj":
            packed = [rows(f"kda.{part}") for part in ("q", "k", "v", "gate")]
            packed += [self.tensors[layer, "kda.f_a"], rows("kda.beta")]
            whole = torch.cat(packed)
            padding = rank_matrices(self.architecture, layout)[name].num_outputs - whole.shape[0]
            return torch.cat([whole, whole.new_zeros(padding, whole.shape[1])])
        if name in ("kda.o_proj", "mla.o_proj", "dense.down", "moe.shared_down"):
            return columns(name)
        if name in ("dense.gate_up", "moe.shared_gate_up"):
            return rows(name, parts=2)
        if name in ("mla.qkv_a", "moe.router", "moe.latent_down"):
            return self.tensors[layer, name]
        return rows(name.removesuffix("_shard"))

    def _vector(self, layer: int, name: str, layout: Layout, rank: int) -> torch.Tensor:
        import torch

        whole = self.tensors[layer, name]
        if name == "kda.conv":
            return torch.cat([part.chunk(layout.tp)[rank] for part in whole.chunk(3)])
        return whole.chunk(layout.tp)[rank] if name in ("kda.dt_bias", "kda.a_log") else whole

    def _experts(self, layer: int, layout: Layout, rank: int) -> Experts:
        whole, tp = self.experts[layer], layout.tp
        return Experts(
            gate=whole.gate.chunk(tp, 1)[rank],
            gate_scales=whole.gate_scales.chunk(tp, 1)[rank],
            up=whole.up.chunk(tp, 1)[rank],
            up_scales=whole.up_scales.chunk(tp, 1)[rank],
            down=whole.down.chunk(tp, 2)[rank],
            down_scales=whole.down_scales.chunk(tp, 2)[rank],
        )


class LoopedModel:
    """The whole model that one rank in loop-back stands for: every rank holds what it holds, and the shared experts'
    outputs are what the exchange makes of them.

    Has what ``WholeModelDecoder`` reads: ``architecture``, ``tensors`` by (layer, name), ``selected_experts``.
    ``experts``: as a checkpoint stores them, by layer.
    """

    def __init__(
        self, architecture: Architecture, layout: Layout, weights: RankWeights, experts: Mapping[int, Experts]
    ) -> None:
        self.architecture, self.num_ranks, self.weights, self.experts = architecture, layout.tp, weights, experts
        self.tensors = _Repeated(self)

    def selected_experts(
        self, layer: int, latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As of ``WholeModel``: equal slices of an expert's width add up to a multiple of one."""
        return self.num_ranks * _selected(self.experts[layer], latent, ids, weights)


def looped(weights: RankWeights, program: Program, layout: Layout) -> RankWeights:
    """``weights`` as one rank in loop-back needs them to be ``LoopedModel``.

    An all-reduce of looked-up rows adds the owner's row once a rank: the table is divided by their number, a power of
    two and so exact. A pushed row arrives once.
    """
    if all(call.stage != "embed.lookup" for call in program.calls):
        return weights
    table = weights[-1, "embedding"] / layout.tp
    return RankWeights(tensors={**weights.tensors, (-1, "embedding"): table}, experts=weights.experts)


class _Repeated(dict[tuple[int, str], Any]):
    """Whole tensors out of a rank's shards, made when asked for."""

    def __init__(self, model: LoopedModel) -> None:
        super().__init__(model.weights.tensors)
        self.model = model

    def __missing__(self, key: tuple[int, str]) -> torch.Tensor:
        layer, name = key
        kda, ranks = self.model.architecture.kda, self.model.num_ranks
        widths = {
            "kda.q": kda.key_width, "kda.k": kda.key_width, "kda.v": kda.value_width, "kda.gate": kda.value_width,
            "kda.f_a": kda.decay_rank * ranks, "kda.beta": kda.num_heads,
        }  # fmt: skip
        start = 0
        for part, width in widths.items():
            if part == name:
                rows = self.model.weights[layer, "kda.in_proj"][start : start + width // ranks]
                return rows if name == "kda.f_a" else rows.repeat(ranks, 1)
            start += width // ranks
        return self.model.weights[layer, f"{name}_shard"].repeat(ranks, 1)

    def __getitem__(self, key: tuple[int, str]) -> torch.Tensor:
        name, ranks = key[1], self.model.num_ranks
        if key not in self:
            return self.__missing__(key)
        held: torch.Tensor = super().__getitem__(key)
        if name in ("kda.o_proj", "mla.o_proj", "dense.down"):
            return held.repeat(1, ranks)
        if name == "moe.shared_down":
            # The owner of some columns gets, in place of its peers' parts of them, this rank's part of each peer's.
            summed = held.float().view(ranks, -1, held.shape[1]).sum(0) / ranks
            return summed.repeat(ranks, ranks)
        if name in ("dense.gate_up", "moe.shared_gate_up"):
            return _repeat_parts(held, 2, ranks)
        if name == "kda.conv":
            return _repeat_parts(held, 3, ranks)
        if name in ("kda.dt_bias", "kda.a_log"):
            return held.repeat(ranks)
        if name in ("kda.f_b", "mla.gate", "mla.q_b", "mla.w_uk", "mla.w_uv", "embedding", "lm_head"):
            return held.repeat(ranks, 1)
        return held


def _repeat_parts(tensor: torch.Tensor, parts: int, ranks: int) -> torch.Tensor:
    import torch

    return torch.cat([part.repeat(ranks, 1) for part in tensor.chunk(parts)])
