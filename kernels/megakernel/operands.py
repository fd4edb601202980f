"""What a list runs on: one rank's weights and states at random, by the names of ``schedule``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.attn_res.reference import snapshot_part
from k3sim.kernels.megakernel.reference import Memory
from k3sim.model.architecture import Architecture
from k3sim.model.program import Program

if TYPE_CHECKING:
    import torch

Vector = tuple[tuple[int, ...], float, float, bool]  # shape, deviation, mean, fp32
WHOLE_SUMS = ("kda.o_proj", "dense.down")  # row-parallel: the sum over ranks has the variance of one


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
            terms = weight.depth * (tp if call.stage in WHOLE_SUMS else 1)
            memory[weight.region] = normal((weight.num_outputs, weight.depth), terms**-0.5)
    dim, heads = architecture.kda.head_dim_v, architecture.kda.num_heads // tp
    for layer in program.layers:
        memory[f"{layer}/kda.state"] = normal((heads, dim, dim), 0.3, fp32=True)
        memory[f"{layer}/kda.past"] = normal((3, 3 * heads * dim), 1.0)
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
    return {
        **site("attn_res.mixer"),
        **site("attn_res.ffn"),
        "kda.conv": ((3 * heads * dim, architecture.kda.conv_width), 0.2, 0.25, True),
        "kda.dt_bias": ((heads * dim,), 0.5, -4.0, True),
        "kda.a_log": ((heads,), 0.1, 0.0, True),
        "kda.norm": ((dim,), 0.1, 1.0, True),
    }
