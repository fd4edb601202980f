"""What a list runs on: one rank's weights and states at random, by the names of ``schedule``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res.reference import snapshot_part
from k3sim.kernels.expert_gemv.reference import Experts
from k3sim.kernels.megakernel.reference_words import Memory
from k3sim.kernels.mla_decode.cache import PAGE_TOKENS, ROW
from k3sim.model.architecture import Architecture
from k3sim.model.layout import Layout
from k3sim.model.matrices import expert_slice
from k3sim.model.program import Program

if TYPE_CHECKING:
    import torch

Vector = tuple[tuple[int, ...], float, float, bool]  # shape, deviation, mean, fp32
EXPERT_MATRICES = ("moe.expert_w13", "moe.expert_w2")
SCALES = (119, 121)  # of random codes, whose root mean square is 2.93: weights of about 1 / sqrt(3584)
# Row-parallel: the sum over ranks has the variance of one.
WHOLE_SUMS = ("kda.o_proj", "mla.o_proj", "dense.down", "moe.shared_down")


def random_operands(
    program: Program, architecture: Architecture, *, tp: int, device: torch.device | str, seed: int = 0
) -> Memory:
    """Matrices with variance one over the length of the sum, states, vectors, the residual and snapshots' parts.

    The first layer mixes the embedding alone; every other site has one snapshot, the embedding, which is what the
    residual is at the start.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, ...], deviation: float, mean: float = 0.0, fp32: bool = False) -> torch.Tensor:
        dtype = torch.float32 if fp32 else torch.bfloat16
        found = torch.empty(shape, dtype=dtype, device=device)
        return found.normal_(mean, deviation, generator=generator)

    hidden = architecture.hidden_size
    memory: Memory = {"residual": normal((hidden,), 1.0)}
    for call in program.calls:
        if call.layer not in program.layers:
            continue
        for weight in call.weights:
            if weight.region.split("/")[1] in EXPERT_MATRICES:
                continue
            terms = weight.depth * (tp if call.stage in WHOLE_SUMS else 1)
            memory[weight.region] = normal((weight.num_outputs, weight.depth), terms**-0.5)
    dim, heads = architecture.kda.head_dim_v, architecture.kda.num_heads // tp
    for call in program.calls:
        if call.stage == "mla.attention":
            num_pages = -(-call.shape["context"] // PAGE_TOKENS)
            memory[f"{call.layer}/mla.cache"] = normal((num_pages, PAGE_TOKENS, ROW), 1.0)
    for layer in program.layers:
        if architecture.mixer(layer) == "kda":
            memory[f"{layer}/kda.state"] = normal((heads, dim, dim), 0.3, fp32=True)
            memory[f"{layer}/kda.past"] = normal((3, 3 * heads * dim), 1.0)
        if architecture.ffn(layer) == "moe":
            experts = _random_experts(architecture, tp, generator, device)
            memory |= {f"{layer}/moe.experts.{name}": one for name, one in vars(experts).items()}
    embedding = memory["residual"].clone()
    for layer in (*program.layers, architecture.num_layers):
        for name, (shape, deviation, mean, fp32) in layer_vectors(architecture, layer, heads).items():
            memory[f"{layer}/{name}"] = normal(shape, deviation, mean, fp32)
        sites = ("attn_res.mixer", "attn_res.ffn") if layer < architecture.num_layers else ("head.attn_res",)
        for site in sites:
            part = snapshot_part(
                embedding[None, None], memory[f"{layer}/{site}.query_norm"], memory[f"{layer}/{site}.query"]
            )
            stats, weighted = torch.stack([part.maximum_B[0], part.denominator_B[0]]), part.weighted_BD[0].contiguous()
            if layer == 0 and site == "attn_res.mixer":  # no snapshot yet: a part without weight
                stats, weighted = torch.tensor([-1e30, 0.0], device=device), torch.zeros_like(weighted)
            memory[f"{layer}/{site}.stats"], memory[f"{layer}/{site}.weighted"] = stats, weighted
    return memory


def _random_experts(
    architecture: Architecture, tp: int, generator: torch.Generator, device: torch.device | str
) -> Experts:
    import torch

    def random_bytes(low: int, high: int) -> Callable[..., torch.Tensor]:
        return lambda *shape: torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    count, latent = architecture.moe.num_experts, architecture.moe.latent_size
    width = expert_slice(architecture, Layout(tp=tp))
    return Experts.made_of(random_bytes(0, 256), random_bytes(*SCALES), count=count, width=width, latent=latent)


def layer_vectors(architecture: Architecture, layer: int, heads: int) -> dict[str, Vector]:
    """Norm weights, queries and small vectors of a layer; ``num_layers`` is the head. Means as in ``rank.weights``."""
    hidden, dim = architecture.hidden_size, architecture.kda.head_dim_v

    def site(name: str) -> dict[str, Vector]:
        return {
            f"{name}.query_norm": ((hidden,), 0.1, 1.0, False),
            f"{name}.query": ((hidden,), hidden**-0.5, 0.0, False),
            f"{name}.norm": ((hidden,), 0.1, 1.0, False),
        }

    if layer == architecture.num_layers:
        return site("head.attn_res")
    moe: dict[str, Vector] = {
        "moe.bias": ((architecture.moe.num_experts,), 0.05, 0.0, True),
        "moe.latent_norm": ((architecture.moe.latent_size,), 0.1, 1.0, False),
    }
    mla: dict[str, Vector] = {
        "mla.query_norm": ((architecture.mla.q_lora_rank,), 0.1, 1.0, False),
        "mla.kv_norm": ((architecture.mla.kv_lora_rank,), 0.1, 1.0, False),
    }
    kda: dict[str, Vector] = {
        "kda.conv": ((3 * heads * dim, architecture.kda.conv_width), 0.2, 0.25, True),
        "kda.dt_bias": ((heads * dim,), 0.5, -4.0, True),
        "kda.a_log": ((heads,), 0.1, 0.0, True),
        "kda.norm": ((dim,), 0.1, 1.0, True),
    }
    return {
        **site("attn_res.mixer"),
        **site("attn_res.ffn"),
        **(kda if architecture.mixer(layer) == "kda" else mla),
        **(moe if architecture.ffn(layer) == "moe" else {}),
    }
