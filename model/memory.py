"""Memory of one GPU: what decoding holds for its whole time, whether it fits, and how much more would.

Weights follow from the rank's matrices (``model/matrices.py``); activations and workspace are an upper estimate. With
pipeline stages it is the fullest stage that counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.layout import MAX_TP, KvDtype, Layout, Workload, accepted_tp, check_workload, stage_layers
from k3sim.model.matrices import (
    BF16_BYTES,
    FP32_BYTES,
    Matrix,
    RankShapes,
    expert_slice,
    gqa_bytes_per_token,
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


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a GPU holds, and what would fit: users with the context of the question, and cached tokens in all for
    those that it has (None where no layer caches tokens)."""

    resident: ResidentMemory
    capacity: int
    users: int
    tokens: int | None

    def to_dict(self) -> dict[str, int | None]:
        """As JSON; docs/json.md describes it."""
        held = self.resident
        return {
            "weights_bytes": held.weights,
            "kv_cache_bytes": held.kv_cache,
            "kda_state_bytes": held.kda_state,
            "activations_and_workspace_bytes": held.activations_and_workspace,
            "total_bytes": held.total,
            "capacity_bytes": self.capacity,
            "users_that_fit": self.users,
            "tokens_that_fit": self.tokens,
        }


def resident_bytes(
    arch: Architecture, layout: Layout, *, concurrency: int, context: int, kv_dtype: KvDtype
) -> ResidentMemory:
    """Memory of the fullest GPU: weights, KV cache, KDA state, and an estimate of the rest.

    The vision tower is left out (a decode rank does not run it). ``activations_and_workspace`` is one row a request
    of attention-residual buffers, the widest products, expert partial rows and gathered fp32 logits, plus
    ``RUNTIME_RESERVE_BYTES``, which is an assumption.

    Raises:
        UserError: the layout does not divide the model, or the workload is outside its limits.
    """
    check_workload(arch, Workload(concurrency=concurrency, context=context, kv_dtype=kv_dtype))
    stages = _stages(arch, layout, concurrency=concurrency, context=context, kv_dtype=kv_dtype)
    return max(stages, key=lambda stage: stage.total)


def room(
    arch: Architecture, layout: Layout, *, concurrency: int, context: int, kv_dtype: KvDtype, capacity: int
) -> Room:
    """What fits into ``capacity`` bytes a GPU, over all replicas and attention groups.

    Raises UserError as ``resident_bytes``.
    """

    def stages(users: int) -> list[ResidentMemory]:
        return _stages(arch, layout, concurrency=users, context=context, kv_dtype=kv_dtype)

    # One user more in every group adds as much each time.
    one, two = stages(1), stages(1 + layout.num_groups)
    users = min(
        1 + (capacity - first.total) // (second.total - first.total) if first.total <= capacity else 0
        for first, second in zip(one, two, strict=True)
    )
    tokens = []
    for position, stage in enumerate(stages(concurrency)):
        layers = stage_layers(arch.num_layers, layout.pp)[position]
        token_bytes = _token_bytes(arch, layout, layers, kv_dtype)
        if token_bytes:
            free = capacity - stage.total + stage.kv_cache
            tokens.append(max(0, free) // token_bytes * layout.dcp)
    return Room(
        resident=max(stages(concurrency), key=lambda stage: stage.total),
        capacity=capacity,
        users=users * layout.num_groups,
        tokens=min(tokens) * layout.num_groups if tokens else None,
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
) -> None:
    """Refuse what does not fit into a GPU's memory.

    Raises:
        UserError: by how many GB it does not fit, and which tensor-parallel sizes or other choices would.
    """

    def needed(candidate: Layout) -> ResidentMemory:
        return resident_bytes(arch, candidate, concurrency=concurrency, context=context, kv_dtype=kv_dtype)

    def fits(candidate: Layout) -> bool:
        return needed(candidate).total <= hbm_capacity_bytes

    resident = needed(layout)
    if resident.total <= hbm_capacity_bytes:
        return
    others = [_with_attention_tp(layout, tp) for tp in accepted_tp(arch) if tp > layout.attention_tp]
    fitting = [f"tp={other.tp}" for other in others if fits(other)]
    if not layout.shard_all and arch.moe.num_experts and fits(replace(layout, shard_all=True)):
        fitting.append("shard-all")
    advice = (
        f"{' or '.join(fitting)} would fit"
        if fitting
        else f"no tp up to {MAX_TP} fits: lower concurrency or context, or raise dcp or dp"
    )
    raise UserError(
        f"{layout.tag} needs {resident.total / 1e9:.1f} GB a GPU, {(resident.total - hbm_capacity_bytes) / 1e9:.1f} GB "
        f"more than the {hbm_capacity_bytes / 1e9:.1f} GB of {machine_name} (weights {resident.weights / 1e9:.1f} GB, "
        f"concurrency {concurrency}, context {context}, {kv_dtype} KV cache); {advice}"
    )


def _stages(
    arch: Architecture, layout: Layout, *, concurrency: int, context: int, kv_dtype: KvDtype
) -> list[ResidentMemory]:
    """Memory of a GPU of each pipeline stage."""
    matrices, shapes = rank_matrices(arch, layout), rank_shapes(arch, layout)
    num_requests = layout.rows(concurrency)
    cached_tokens = -(-context // layout.dcp)
    state_bytes = shapes.kda_state_bytes + shapes.kda_conv_state_bytes
    kda_layers = frozenset(arch.kda_layers)
    positions = arch.draft.rows_per_user if arch.draft else 1  # each of which has a state, and rows in flight
    return [
        ResidentMemory(
            weights=_weight_bytes(arch, layout, matrices, shapes, layers),
            kv_cache=num_requests * cached_tokens * _token_bytes(arch, layout, layers, kv_dtype),
            kda_state=num_requests * len(kda_layers.intersection(layers)) * state_bytes * positions,
            activations_and_workspace=num_requests * positions * _row_bytes(arch, layout) + RUNTIME_RESERVE_BYTES,
        )
        for layers in stage_layers(arch.num_layers, layout.pp)
    ]


def _token_bytes(arch: Architecture, layout: Layout, layers: range, kv_dtype: KvDtype) -> int:
    """Bytes of one cached token in all of a stage's layers."""
    mla, gqa = (sum(1 for layer in layers if layer in kind) for kind in (arch.mla_layers, arch.gqa_layers))
    mla += arch.draft.num_layers if arch.draft else 0  # whose cache has rows of the same width
    return mla * kv_bytes_per_token(arch, kv_dtype) + gqa * gqa_bytes_per_token(arch, layout, kv_dtype)


def _weight_bytes(
    arch: Architecture, layout: Layout, matrices: dict[str, Matrix], shapes: RankShapes, layers: range
) -> int:
    hidden, moe = arch.hidden_size, arch.moe

    def sizes(*names: str) -> int:
        return sum(matrices[name].num_bytes for name in names if name in matrices)

    kda = sizes("kda.in_proj", "kda.g_a", "kda.g_b", "kda.f_b", "kda.o_proj")
    kda += shapes.kda_conv_weight_bytes + shapes.kda_vector_bytes
    mla = sum(one.num_bytes for name, one in matrices.items() if name.startswith("mla."))
    mla += (arch.mla.q_lora_rank + arch.mla.kv_lora_rank) * BF16_BYTES
    shared = "_shard" if layout.shard_all else ""
    moe_layer = sizes(*(f"moe.{name}{shared}" for name in ("router", "latent_down", "latent_up")))
    moe_layer += sizes("moe.shared_gate_up", "moe.shared_down")
    moe_layer += shapes.experts_owned * sizes("moe.expert_w13", "moe.expert_w2")
    moe_layer += moe.num_experts * FP32_BYTES * moe.has_correction + moe.latent_size * BF16_BYTES
    gqa = sizes("gqa.qkv", "gqa.o_proj") + (2 * arch.gqa.head_dim * BF16_BYTES if arch.gqa.has_norms else 0)
    num_mla, num_gqa = (len(frozenset(kind).intersection(layers)) for kind in (arch.mla_layers, arch.gqa_layers))
    num_dense = sum(1 for layer in layers if arch.ffn(layer) == "dense")
    # A layer has two norms and two attention residuals (norm, query); one of each follows the last layer.
    residual = (6 * len(layers) + (3 if layers.stop == arch.num_layers else 0)) * hidden * BF16_BYTES
    return (
        (len(layers) - num_mla - num_gqa) * kda
        + num_mla * mla
        + num_gqa * gqa
        + num_dense * sizes("dense.gate_up", "dense.down")
        + (len(layers) - num_dense) * moe_layer
        + residual
        + (sizes("embedding") if layers.start == 0 else 0)
        + _draft_bytes(arch, matrices)
        + (sizes("lm_head") if layers.stop == arch.num_layers else 0)
    )


def _draft_bytes(arch: Architecture, matrices: dict[str, Matrix]) -> int:
    """Weights of the draft on a rank; embedding and LM head are the target's."""
    if arch.draft is None:
        return 0
    each = {"draft_layer": arch.draft.num_layers}
    return sum(
        one.num_bytes * each.get(name.partition(".")[0], 1)
        for name, one in matrices.items()
        if name.startswith("draft")
    )


def _row_bytes(arch: Architecture, layout: Layout) -> int:
    """Activations that live at once for one request: an upper estimate, every buffer held separately."""
    moe, tp = arch.moe, layout.attention_tp
    snapshots = arch.attn_res_sources(arch.num_layers, "mixer") * arch.hidden_size
    sublayer = 4 * arch.hidden_size + 2 * (2 * arch.kda.key_width + 2 * arch.kda.value_width) // tp
    # Of all groups' tokens where they are gathered or dispatched.
    tokens = layout.attn_dp
    experts = tokens * moe.top_k * (arch.expert_depth + 2 * expert_slice(arch, layout)) + 2 * moe.latent_size
    logits_bytes = arch.vocab_size * FP32_BYTES + arch.vocab_size // tp * BF16_BYTES
    return (snapshots + sublayer + experts) * BF16_BYTES + logits_bytes


def _with_attention_tp(layout: Layout, tp: int) -> Layout:
    """The same layout with attention groups of ``tp``; experts that were spread over all ranks stay so."""
    whole = layout.ep == layout.tp > 1
    return replace(layout, tp=tp * layout.attn_dp, ep=tp * layout.attn_dp if whole else layout.ep)
