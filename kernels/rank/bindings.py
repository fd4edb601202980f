"""``stage/operator`` of a call -> the function that runs it, for both backends, and what their calls have in common.

``kernel_*`` and ``reference_*`` hold the functions, ``call_table`` says which runs what; a program with a call that the
table does not name cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from k3sim.kernels.rank.state import Rank
from k3sim.model.program import Call, Program

if TYPE_CHECKING:
    import torch

    KdaOperands = tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
        torch.Tensor,
    ]  # fmt: skip

# A function that yields has two halves: all ranks finish the first (the push) before any begins the second (the poll).
CallFunction = Callable[[Rank, Call], Iterator[None] | None]


def key(call: Call) -> str:
    return f"{call.stage}/{call.operator}"


def functions_of(program: Program, table: dict[str, CallFunction], backend: str) -> list[CallFunction]:
    """The function of every call, in program order. A call that ``backend`` does not know is a programmer's mistake."""
    missing = sorted({key(call) for call in program.calls} - table.keys())
    assert not missing, f"the {backend} backend has no binding for {', '.join(missing)}"
    return [table[key(call)] for call in program.calls]


def site_of(call: Call) -> str:
    """Call site of an attention residual: ``mixer``, ``ffn`` or ``head``."""
    if call.stage == "head.attn_res":
        return "head"
    return "ffn" if call.stage == "attn_res.ffn" else "mixer"


def site_weights(rank: Rank, layer: int, site: str) -> tuple[str, str, str]:
    """Names of query norm, query and the sublayer's norm."""
    name = "head.attn_res" if layer == rank.architecture.num_layers else f"attn_res.{site}"
    return f"{name}.query_norm", f"{name}.query", f"{name}.norm"


def prepared_site(rank: Rank, call: Call) -> tuple[int, str, str]:
    """(layer, site, buffer) that a snapshot part is prepared for: this layer's FFN, or the mixer or head behind it."""
    if call.stage == "attn_res.part_ffn":
        return call.layer, "ffn", "ffn"
    return following_layer(rank, call.layer), "mixer", "mixer"


def following_layer(rank: Rank, layer: int) -> int:
    """The layer after ``layer``, or the head's number."""
    layers = rank.program.layers
    position = layers.index(layer) + 1
    return layers[position] if position < len(layers) else rank.architecture.num_layers


def preceding_layer(rank: Rank, layer: int) -> int:
    """The layer before ``layer`` (or before the head), -1 for the embedding."""
    layers = rank.program.layers
    position = layers.index(layer) if layer in layers else len(layers)
    return layers[position - 1] if position else -1


def restarts_at(rank: Rank, call: Call) -> bool:
    """Whether the prefix before this FFN is the mixer's output alone: the layer has taken a snapshot."""
    return rank.architecture.is_snapshot(call.layer)


def pending_delta(rank: Rank, call: Call) -> bool:
    """Whether a stock attention residual has a reduced sublayer output to add to the prefix first."""
    if site_of(call) == "ffn":
        return not restarts_at(rank, call)
    before = preceding_layer(rank, call.layer)
    return before >= 0 and rank.architecture.ffn(before) == "dense"


def adds_prefix(rank: Rank, call: Call) -> bool:
    """Whether a fused consume adds what arrived to the prefix, instead of starting it."""
    if site_of(call) == "ffn":
        return not restarts_at(rank, call)
    return preceding_layer(rank, call.layer) >= 0


def prefix_of(rank: Rank, call: Call) -> torch.Tensor:
    """Where a fused consume writes the new prefix: the buffer, or the place of the snapshot that the layer takes."""
    if keeps_snapshot(rank, call):
        return rank.buffers["snapshots"][:, snapshot_index(rank, call)]
    return rank.buffers["prefix"]


def snapshot_index(rank: Rank, call: Call) -> int:
    return call.layer // rank.architecture.attn_res_block_size


def reduced_into(rank: Rank, call: Call) -> str:
    """Buffer of an all-reduce's result: the prefix itself where it starts or restarts."""
    if call.stage == "embed.all_reduce":
        return "prefix"
    return "prefix" if call.stage != "dense.all_reduce" and restarts_at(rank, call) else "delta"


def arrives_in_parts(rank: Rank, call: Call) -> bool:
    """Whether a fused consume sums partial rows of a projection, instead of taking a row that peers gathered."""
    if site_of(call) == "ffn":
        return True
    before = preceding_layer(rank, call.layer)
    return before >= 0 and rank.architecture.ffn(before) == "dense"


def keeps_snapshot(rank: Rank, call: Call) -> bool:
    """Whether a fused consume leaves the new prefix at a snapshot's place: the FFN's consume then restarts it."""
    return call.stage == "attn_res.mixer" and restarts_at(rank, call)


def kept(rank: Rank, name: str, build: Callable[[], Any]) -> Any:
    """A workspace of the rank, built at its first use."""
    if name not in rank.workspaces:
        rank.workspaces[name] = build()
    return rank.workspaces[name]


def shares_gpu(rank: Rank) -> bool:
    """Whether several ranks run on this GPU: a launch that waits for them must then not let its successor in."""
    return bool(rank.exchange.shared_gpu)


def latent_parts(rank: Rank, latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query latent, cached latent, the part without position, and what lies behind them (the gate, or nothing)."""
    shape = rank.architecture.mla
    parts = (shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim)
    return tuple(latents.split((*parts, latents.shape[1] - sum(parts)), dim=1))


def by_head(rank: Rank, call: Call, name: str, num_rows: int) -> torch.Tensor:
    """A half of kv_b as [heads, rows of a head, 512]."""
    return rank.weight(call.layer, name).view(-1, num_rows, rank.architecture.mla.kv_lora_rank)


def kda_operands(rank: Rank, call: Call) -> KdaOperands:
    """Of a KDA step in one, in the order of the call: projections, weights, slots, both states."""
    layer = call.layer
    return (
        rank.buffers["kda.projected"],
        rank.weight(layer, "kda.f_b"),
        rank.weight(layer, "kda.conv"),
        rank.weight(layer, "kda.dt_bias"),
        rank.weight(layer, "kda.a_log"),
        rank.weight(layer, "kda.norm"),
        rank.sequence.state_slots,
        rank.conv_states[layer],
        rank.states[layer],
    )


def queries(rank: Rank, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every head the part that is absorbed, and the rest."""
    shape = rank.architecture.mla
    nope, extra = q.unflatten(1, (-1, shape.qk_head_dim)).split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
    return nope, extra


# Plain products: stage -> (input, weight, output) of the cuBLAS and the skinny form.
PRODUCTS = {
    "kda.in_proj": ("x", "kda.in_proj", "kda.projected"),
    "kda.o_proj": ("kda.out", "kda.o_proj", "partial"),
    "mla.gate": ("x", "mla.gate", "mla.gate"),
    "mla.qkv_a": ("x", "mla.qkv_a", "mla.latents"),
    "mla.qkv_a_gate": ("x", "mla.qkv_a_gate", "mla.latents_gate"),
    "mla.q_b": ("mla.query_latent", "mla.q_b", "mla.q"),
    "mla.o_proj": ("mla.out", "mla.o_proj", "partial"),
    "dense.gate_up": ("x", "dense.gate_up", "dense.gate_up"),
    "dense.down": ("dense.hidden", "dense.down", "partial"),
    "moe.router": ("x", "moe.router", "moe.logits"),
    "moe.latent_down": ("x", "moe.latent_down", "moe.latent"),
    "moe.shared_gate_up": ("x", "moe.shared_gate_up", "moe.shared_gate_up"),
    "moe.shared_down": ("moe.shared_hidden", "moe.shared_down", "moe.shared"),
    "head.lm_head": ("x", "lm_head", "head.logits"),
}
# Gate and up in one product whose epilogue is SiTU: stage -> output of the skinny form.
SITU_OUTPUT = {"dense.gate_up": "dense.hidden", "moe.shared_gate_up": "moe.shared_hidden"}
