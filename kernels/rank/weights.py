"""Weights of one rank: names, shapes and dtypes from ``model.layout``; made at random (``whole_model`` cuts them out).

Matrices that a path reads in one launch lie one behind the other, so that the merged form and its parts are views of
the same bytes: the MLA down-projections and gate, the shards of router and latent down-projection.

Shape legend: H hidden, L latent, E experts, W width of an expert's slice, T ranks, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3sim.kernels.expert_gemv.launch import DOWN_UNIT_BYTES, GATE_UP_TILE_BYTES, PackedExperts
from k3sim.kernels.expert_gemv.reference import Experts
from k3sim.model.architecture import Architecture
from k3sim.model.layout import Layout
from k3sim.model.matrices import Matrix, expert_slice, rank_matrices
from k3sim.model.program import Program

if TYPE_CHECKING:
    import torch

MERGED = {
    "mla.qkv_a_gate": ("mla.qkv_a", "mla.gate"),
    "moe.front": ("moe.router_shard", "moe.latent_down_shard"),
}
EXPERT_MATRICES = ("moe.expert_w13", "moe.expert_w2")
CUT_VECTORS = ("kda.conv", "kda.dt_bias", "kda.a_log")  # by heads; every rank holds the others in full
REPEATED = ("moe.router", "moe.latent_down")  # whole on the stock path, divided by outputs on the fused one
# E8M0 bytes of random scales. The codes' root mean square is 2.93, a weight's then about 1 / sqrt(3584).
SCALES = (119, 121)
CHUNK_ELEMENTS = 1 << 28  # of one random fill


@dataclass
class RankWeights:
    """Tensors by (layer, name); ``num_layers`` is the layer of the head, -1 that of the embedding."""

    tensors: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    experts: dict[int, Experts | PackedExperts] = field(default_factory=dict)

    def __getitem__(self, key: tuple[int, str]) -> torch.Tensor:
        return self.tensors[key]

    def allocated_bytes(self) -> int:
        """Bytes of distinct storages, experts included."""
        storages = {}
        for tensor in (*self.tensors.values(), *_expert_tensors(self.experts.values())):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


def _expert_tensors(experts: Iterable[Experts | PackedExperts]) -> Iterator[torch.Tensor]:
    for one in experts:
        yield from vars(one).values()


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A small tensor beside the matrices; ``deviation`` 0 with ``mean`` 1 is a norm's weight."""

    shape: tuple[int, ...]
    fp32: bool
    mean: float
    deviation: float


def vectors(architecture: Architecture, layout: Layout, layer: int) -> dict[str, Vector]:
    """Norm weights, biases and convolutions of one rank's ``layer`` (``num_layers``: the head)."""
    hidden, kda, mla, moe, tp = (
        architecture.hidden_size, architecture.kda, architecture.mla, architecture.moe, layout.tp,
    )  # fmt: skip

    def site(name: str) -> dict[str, Vector]:
        return {
            f"{name}.query_norm": Vector(shape=(hidden,), fp32=False, mean=1.0, deviation=0.1),
            f"{name}.query": Vector(shape=(hidden,), fp32=False, mean=0.0, deviation=hidden**-0.5),
            f"{name}.norm": Vector(shape=(hidden,), fp32=False, mean=1.0, deviation=0.1),
        }

    if layer == architecture.num_layers:
        return site("head.attn_res")
    found = {**site("attn_res.mixer"), **site("attn_res.ffn")}
    if architecture.mixer(layer) == "kda":
        heads = kda.num_heads // tp
        channels = kda.conv_channels // tp
        found |= {
            "kda.conv": Vector(shape=(channels, kda.conv_width), fp32=True, mean=0.25, deviation=0.2),
            # Decay exp(-5 sigmoid(exp(a) (f + b))): means that forget in some ten to a hundred tokens.
            "kda.dt_bias": Vector(shape=(kda.key_width // tp,), fp32=True, mean=-4.0, deviation=0.5),
            "kda.a_log": Vector(shape=(heads,), fp32=True, mean=0.0, deviation=0.1),
            "kda.norm": Vector(shape=(kda.head_dim_v,), fp32=True, mean=1.0, deviation=0.1),
        }
    else:
        found |= {
            "mla.query_norm": Vector(shape=(mla.q_lora_rank,), fp32=False, mean=1.0, deviation=0.1),
            "mla.kv_norm": Vector(shape=(mla.kv_lora_rank,), fp32=False, mean=1.0, deviation=0.1),
        }
    if architecture.ffn(layer) == "moe":
        found |= {
            "moe.bias": Vector(shape=(moe.num_experts,), fp32=True, mean=0.0, deviation=0.05),
            "moe.latent_norm": Vector(shape=(moe.latent_size,), fp32=False, mean=1.0, deviation=0.1),
        }
    return found


def matrices_of(*programs: Program) -> dict[int, tuple[str, ...]]:
    """Names of the matrices that programs read, by layer (-1 holds the embedding table)."""
    found: dict[int, dict[str, None]] = {-1: {"embedding": None}}
    for program in programs:
        for call in program.calls:
            for weight in call.weights:
                layer, name = weight.region.split("/", 1)
                found.setdefault(int(layer), {})[name] = None
    return {layer: tuple(names) for layer, names in sorted(found.items())}


def full_depth(name: str, matrix: Matrix, layout: Layout) -> int:
    """Terms of one output's sum over all ranks: what the random weights' deviation is taken from."""
    row_parallel = name.endswith(".o_proj") or name in ("dense.down", "moe.shared_down")
    return matrix.depth * (layout.tp if row_parallel else 1)


def stored_shape(architecture: Architecture, layout: Layout, matrix: Matrix) -> tuple[int, int]:
    """Rows and columns in memory: outputs by depth, but W_UK as the key half of kv_b lies, head by head [128, 512]."""
    if matrix.name == "mla.w_uk":
        mla = architecture.mla
        return mla.num_heads // layout.tp * mla.qk_nope_head_dim, mla.kv_lora_rank
    return matrix.num_outputs, matrix.depth


def random_weights(
    programs: Program | Sequence[Program],
    architecture: Architecture,
    layout: Layout,
    *,
    seed: int = 0,
    index: int = 0,
    device: torch.device | str = "cuda",
    packed: bool = True,
    resident_experts: int | None = None,
) -> RankWeights:
    """Weights of one rank that a program, or several of the same layers, read; random, made where they stay.

    Matrices are normal with variance one over the length of the sum; MXFP4 codes are uniform, with scales that give
    the same. ``packed``: experts in the order of the expert kernel (widths 192 and 384) instead of as stored.
    ``resident_experts``: how many of a layer there are (all); those that are not contribute nothing. A matrix that is
    there in full and as a shard is the shard repeated, as in a model whose ranks all hold the same. Ranks of other
    ``index`` get other shards, and the same of what every rank holds in full.
    """
    import torch

    every = (programs,) if isinstance(programs, Program) else tuple(programs)
    matrices = rank_matrices(architecture, layout)
    generator = torch.Generator(device=device)
    weights = RankWeights()

    def seeded(layer: int, name: str, everywhere: bool) -> torch.Generator:
        owner = "all" if everywhere else index
        return generator.manual_seed(zlib.crc32(f"{seed}/{layer}/{name}/{owner}".encode()))

    def fill(tensor: torch.Tensor, mean: float, deviation: float, generator: torch.Generator) -> None:
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            flat[start : start + CHUNK_ELEMENTS].normal_(mean, deviation, generator=generator)

    for layer, names in matrices_of(*every).items():
        plain = [name for name in names if name not in EXPERT_MATRICES]
        shapes = {name: stored_shape(architecture, layout, matrices[name]) for name in plain}
        for name, tensor in allocate(shapes, torch.bfloat16, device).items():
            weights.tensors[layer, name] = tensor
            if name not in MERGED:
                # Embedded tokens enter as they are: of the size that sublayers add.
                deviation = 1.0 if name == "embedding" else full_depth(name, matrices[name], layout) ** -0.5
                fill(tensor, 0.0, deviation, seeded(layer, name, matrices[name].replicated))
        for name in REPEATED:
            if (layer, name) in weights.tensors and (layer, f"{name}_shard") in weights.tensors:
                shard = weights.tensors[layer, f"{name}_shard"]
                weights.tensors[layer, name].view(-1, *shard.shape).copy_(shard.expand(layout.tp, -1, -1))
        if any(name in EXPERT_MATRICES for name in names):
            source = seeded(layer, "experts", False)
            weights.experts[layer] = random_experts(
                architecture, layout, source, device, packed=packed, count=resident_experts
            )
    for layer in (*every[0].layers, architecture.num_layers):
        for name, vector in vectors(architecture, layout, layer).items():
            dtype = torch.float32 if vector.fp32 else torch.bfloat16
            tensor = torch.empty(vector.shape, dtype=dtype, device=device)
            fill(tensor, vector.mean, vector.deviation, seeded(layer, name, name not in CUT_VECTORS))
            weights.tensors[layer, name] = tensor
    return weights


def allocate(
    shapes: dict[str, tuple[int, int]], dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """One tensor a name, and those of ``MERGED`` whose parts are all asked for, as views of one."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for merged, parts in MERGED.items():
        if all(part in shapes for part in parts):
            outputs = [shapes[part][0] for part in parts]
            whole = torch.empty((sum(outputs), shapes[parts[0]][1]), dtype=dtype, device=device)
            found[merged] = whole
            found |= dict(zip(parts, whole.split(outputs), strict=True))
    for name, shape in shapes.items():
        if name not in found:
            found[name] = torch.empty(shape, dtype=dtype, device=device)
    return found


def random_experts(
    architecture: Architecture,
    layout: Layout,
    generator: Any,
    device: torch.device | str,
    *,
    packed: bool,
    count: int | None = None,
) -> Experts | PackedExperts:
    import torch

    latent = architecture.moe.latent_size
    count = architecture.moe.num_experts // layout.ep if count is None else count
    width = expert_slice(architecture, layout)

    def codes(*shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.uint8, device=device)
        words = tensor.view(-1).view(torch.int32)
        for start in range(0, words.numel(), CHUNK_ELEMENTS):
            words[start : start + CHUNK_ELEMENTS].random_(-(2**31), 2**31, generator=generator)
        return tensor

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(*SCALES, shape, dtype=torch.uint8, device=device, generator=generator)

    if packed:
        gate_up = codes(count, width // 8, GATE_UP_TILE_BYTES)
        units = gate_up.view(count, width // 8, 14, -1)
        units[..., -128:] = scales(*units.shape[:-1], 128)
        down = codes(count, latent // 32, width // 192 * 2 * DOWN_UNIT_BYTES)
        units = down.view(count, latent // 32, width // 192 * 2, -1)
        units[..., -128:] = scales(*units.shape[:-1], 128)
        return PackedExperts(gate_up=gate_up, down=down)
    return Experts.made_of(codes, scales, count=count, width=width, latent=latent)


def num_snapshots(architecture: Architecture) -> int:
    """Snapshots that a step takes."""
    return math.ceil(architecture.num_layers / architecture.attn_res_block_size)
