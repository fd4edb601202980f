"""Memory of one GPU: what decoding holds for its whole time, and whether it fits.

Weights follow from the rank's matrices (``model/layout.py``); activations and workspace are an upper estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.layout import (
    BF16_BYTES,
    FP32_BYTES,
    MAX_TP,
    KvDtype,
    Layout,
    RankShapes,
    Workload,
    accepted_tp,
    check_workload,
    expert_slice,
    kv_bytes_per_token,
    rank_matrices,
    rank_shapes,
)

# CUDA context, communication buffers, split-K and attention workspaces, graph pools. An assumption: no public
# breakdown for this model was found.
RUNTIME_RESERVE_BYTES = 3 * 10**9


@dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes that one GPU must hold for the whole of decoding."""

    weights: int
    kv_cache: int
    kda_state: int
    activations_and_workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.kda_state + self.activations_and_workspace


def resident_bytes(
    arch: Architecture,
    layout: Layout,
    *,
    concurrency: int,
    context: int,
    kv_dtype: KvDtype,
    sharded_latent: bool = False,
) -> ResidentMemory:
    """Memory of the fullest GPU: weights, KV cache, KDA state, and an estimate of the rest.

    ``sharded_latent`` holds the latent projections in their column-sharded form instead of as full copies.
    The vision tower is left out (a decode rank does not run it). ``activations_and_workspace`` is one row a
    request of attention-residual buffers, the widest products, expert partial rows and gathered fp32
    logits, plus ``RUNTIME_RESERVE_BYTES``, which is an assumption.

    Raises:
        UserError: the layout does not divide the model, or the workload is outside its limits.
    """
    check_workload(arch, Workload(concurrency=concurrency, context=context, kv_dtype=kv_dtype))
    shapes = rank_shapes(arch, layout)
    num_requests = math.ceil(concurrency / layout.dp)
    cache_bytes = math.ceil(context / layout.dcp) * kv_bytes_per_token(arch, kv_dtype)
    state_bytes = shapes.kda_state_bytes + shapes.kda_conv_state_bytes
    return ResidentMemory(
        weights=_weight_bytes(arch, layout, shapes, sharded_latent),
        kv_cache=num_requests * len(arch.mla_layers) * cache_bytes,
        kda_state=num_requests * len(arch.kda_layers) * state_bytes,
        activations_and_workspace=num_requests * _row_bytes(arch, layout) + RUNTIME_RESERVE_BYTES,
    )


def check_fits(
    arch: Architecture,
    layout: Layout,
    *,
    hbm_capacity_bytes: int,
    machine_name: str,
    concurrency: int,
    context: int,
    kv_dtype: KvDtype,
    sharded_latent: bool = False,
) -> None:
    """Refuse what does not fit into a GPU's memory.

    Raises:
        UserError: by how many GB it does not fit, and which tensor-parallel sizes would.
    """

    def needed(candidate: Layout) -> int:
        return resident_bytes(
            arch,
            candidate,
            concurrency=concurrency,
            context=context,
            kv_dtype=kv_dtype,
            sharded_latent=sharded_latent,
        ).total

    total = needed(layout)
    if total <= hbm_capacity_bytes:
        return
    others = [_with_tp(layout, tp) for tp in accepted_tp(arch) if tp > layout.tp]
    fitting = [f"tp={other.tp}" for other in others if needed(other) <= hbm_capacity_bytes]
    advice = (
        f"{' or '.join(fitting)} would fit"
        if fitting
        else f"no tp up to {MAX_TP} fits: lower concurrency or context, or raise dcp or dp"
    )
    raise UserError(
        f"{layout.tag} needs {total / 1e9:.1f} GB a GPU, {(total - hbm_capacity_bytes) / 1e9:.1f} GB more "
        f"than the {hbm_capacity_bytes / 1e9:.1f} GB of {machine_name} (concurrency {concurrency}, "
        f"context {context}, {kv_dtype} KV cache); {advice}"
    )


def _weight_bytes(arch: Architecture, layout: Layout, shapes: RankShapes, sharded_latent: bool) -> int:
    matrices = rank_matrices(arch, layout)
    hidden, moe = arch.hidden_size, arch.moe

    def sizes(*names: str) -> int:
        return sum(matrices[name].num_bytes for name in names if name in matrices)

    kda = sizes("kda.in_proj", "kda.g_a", "kda.g_b", "kda.f_b", "kda.o_proj")
    kda += shapes.kda_conv_weight_bytes + shapes.kda_vector_bytes
    mla = sum(one.num_bytes for name, one in matrices.items() if name.startswith("mla."))
    mla += (arch.mla.q_lora_rank + arch.mla.kv_lora_rank) * BF16_BYTES
    latent = (
        ("moe.latent_down_shard", "moe.latent_up_shard")
        if sharded_latent
        else ("moe.latent_down", "moe.latent_up")
    )
    moe_layer = sizes("moe.router", *latent, "moe.shared_gate_up", "moe.shared_down")
    moe_layer += shapes.experts_owned * sizes("moe.expert_w13", "moe.expert_w2")
    moe_layer += moe.num_experts * FP32_BYTES + moe.latent_size * BF16_BYTES
    # A layer has two norms and two attention residuals (norm, query); one of each follows the last layer.
    residual = (6 * arch.num_layers + 3) * hidden * BF16_BYTES
    return (
        len(arch.kda_layers) * kda
        + len(arch.mla_layers) * mla
        + arch.num_dense_layers * sizes("dense.gate_up", "dense.down")
        + arch.num_moe_layers * moe_layer
        + residual
        + sizes("embedding", "lm_head")
    )


def _row_bytes(arch: Architecture, layout: Layout) -> int:
    """Activations that live at once for one request: an upper estimate, every buffer held separately."""
    moe = arch.moe
    snapshots = arch.attn_res_sources(arch.num_layers, "mixer") * arch.hidden_size
    sublayer = 4 * arch.hidden_size + 2 * (2 * arch.kda.key_width + 2 * arch.kda.value_width) // layout.tp
    experts = moe.top_k * (arch.expert_depth + 2 * expert_slice(arch, layout)) + 2 * moe.latent_size
    logits_bytes = arch.vocab_size * FP32_BYTES + arch.vocab_size // layout.tp * BF16_BYTES
    return (snapshots + sublayer + experts) * BF16_BYTES + logits_bytes


def _with_tp(layout: Layout, tp: int) -> Layout:
    """The same layout with other tp; experts that were spread over all ranks stay so."""
    return replace(layout, tp=tp, ep=tp if layout.ep == layout.tp > 1 else layout.ep)
