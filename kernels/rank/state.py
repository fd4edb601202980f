"""What a rank keeps between kernels and between steps, every tensor at one address for as long as the rank lives.

Shape legend: B rows, H hidden, L latent, E experts, W width of the KDA heads, C = 3 W convolved channels, T ranks,
V vocabulary of a rank, N snapshots, P pages of 64 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.rank.weights import RankWeights, num_snapshots
from k3sim.model.architecture import Architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.matrices import rank_matrices, rank_shapes
from k3sim.model.program import Program

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 64
CANDIDATES = 64
TOP_K_SLOTS = 16  # experts that the kernels select
NULL_SLOT = 1  # slot 0 of the recurrent states marks padding rows


def activation_shapes(
    architecture: Architecture, layout: Layout, workload: Workload
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every buffer between two kernels: shape, and ``act`` (the activations' dtype), ``fp32`` or ``int32``."""
    rows, tp = -(-workload.concurrency // layout.dp), layout.tp
    hidden, moe, mla, kda = architecture.hidden_size, architecture.moe, architecture.mla, architecture.kda
    matrices, shapes = rank_matrices(architecture, layout), rank_shapes(architecture, layout)
    width, channels = kda.value_width // tp, kda.conv_channels // tp
    heads, values = shapes.mla_heads, mla.value_width // tp
    dense, shared = architecture.dense_intermediate // tp, moe.shared_intermediate // tp
    vocab, candidates = architecture.vocab_size // tp, min(CANDIDATES, architecture.vocab_size // tp)
    latents = mla.q_lora_rank + mla.cache_width
    return {
        "prefix": ((rows, hidden), "act"),
        "x": ((rows, hidden), "act"),
        "delta": ((rows, hidden), "act"),
        "partial": ((rows, hidden), "act"),
        "snapshots": ((rows, num_snapshots(architecture), hidden), "act"),
        **{f"part.{site}.{one}": ((rows, *more), "fp32")
           for site in ("mixer", "ffn") for one, more in (("stats", (2,)), ("weighted", (hidden,)))},
        "kda.projected": ((rows, matrices["kda.in_proj"].num_outputs), "act"),
        "kda.decay": ((rows, width), "act"),
        "kda.convolved": ((rows, channels), "act"),
        "kda.read": ((rows, width), "act"),
        "kda.out": ((rows, width), "act"),
        "mla.latents": ((rows, latents), "act"),
        "mla.gate": ((rows, values), "act"),
        "mla.latents_gate": ((rows, latents + values), "act"),
        "mla.query_latent": ((rows, mla.q_lora_rank), "act"),
        "mla.kv_latent": ((rows, mla.kv_lora_rank), "act"),
        "mla.q": ((rows, heads * mla.qk_head_dim), "act"),
        "mla.absorbed": ((rows, heads, mla.kv_lora_rank), "act"),
        "mla.query": ((rows, heads, mla.cache_width), "act"),
        "mla.attended": ((rows, heads, mla.kv_lora_rank), "act"),
        "mla.log_sum_exp": ((rows, heads), "fp32"),
        "mla.lifted": ((rows, values), "act"),
        "mla.out": ((rows, values), "act"),
        "dense.gate_up": ((rows, 2 * dense), "act"),
        "dense.hidden": ((rows, dense), "act"),
        "moe.logits": ((rows, moe.num_experts), "fp32"),
        "moe.latent": ((rows, moe.latent_size), "act"),
        "moe.ids": ((rows, moe.top_k), "int32"),
        "moe.weights": ((rows, moe.top_k), "fp32"),
        "moe.experts": ((rows, moe.latent_size), "act"),
        "moe.shared_gate_up": ((rows, 2 * shared), "act"),
        "moe.shared_hidden": ((rows, shared), "act"),
        "moe.shared": ((rows, hidden), "act"),
        "head.logits": ((rows, vocab), "fp32"),
        "head.all_logits": ((rows, architecture.vocab_size), "fp32"),
        "head.top": ((rows, candidates), "fp32"),
        "head.ids": ((rows, candidates), "int32"),
    }  # fmt: skip


@dataclass
class Sequence:
    """Positions of the rows, on the device: what a captured step reads anew at every replay."""

    tokens: torch.Tensor  # [B] int32, input of the coming step
    num_tokens: torch.Tensor  # [B] int32, cached rows once the coming step has written its own
    pages: torch.Tensor  # [B, P] int32
    cache_slots: torch.Tensor  # [B] int64, 64 x page + offset of the row that the coming step writes
    state_slots: torch.Tensor  # [B] int32, from 1

    def place(self, num_tokens: int) -> None:
        """Let the coming step be the one that makes ``num_tokens`` cached rows."""
        page, offset = divmod(num_tokens - 1, PAGE_TOKENS)
        self.num_tokens.fill_(num_tokens)
        self.cache_slots.copy_(self.pages[:, page].long() * PAGE_TOKENS + offset)


@dataclass
class Rank:
    """One rank: what it computes, its weights, buffers, caches. ``kernels``: launch them, instead of the references.

    ``dtype``: of activations and norms' inputs between kernels; the kernels need bf16.
    """

    architecture: Architecture
    layout: Layout
    workload: Workload
    program: Program
    index: int
    weights: RankWeights
    buffers: dict[str, torch.Tensor]
    sequence: Sequence
    caches: dict[int, torch.Tensor]  # layer -> [P, 64, 576]
    conv_states: dict[int, torch.Tensor]  # layer -> [B + 1, 3, C]
    states: dict[int, torch.Tensor]  # layer -> [B + 1, heads, 128, 128] fp32
    max_tokens: int
    dtype: torch.dtype
    exchange: Any = None
    workspaces: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.sequence.tokens.shape[0])

    @property
    def device(self) -> torch.device:
        return self.sequence.tokens.device

    @property
    def first_token(self) -> int:
        """First id of this rank's share of the vocabulary."""
        return self.index * (self.architecture.vocab_size // self.layout.tp)

    def weight(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[layer, name]

    def snapshots_before(self, layer: int, site: str) -> int:
        """Snapshots that the attention residual before a sublayer (or the head's, as a mixer) mixes."""
        return self.architecture.attn_res_sources(layer, "ffn" if site == "ffn" else "mixer") - 1

    def state_bytes(self) -> int:
        """Caches and recurrent states."""
        groups = (self.caches, self.conv_states, self.states)
        return sum(one.numel() * one.element_size() for group in groups for one in group.values())


def _repeated(block: torch.Tensor, num_pages: int) -> torch.Tensor:
    """A cache of one block of random rows, repeated: attention reads the same bytes whatever they are."""
    import torch

    cache = torch.empty((num_pages, *block.shape[1:]), dtype=block.dtype, device=block.device)
    for start in range(0, num_pages, block.shape[0]):
        part = cache[start : start + block.shape[0]]
        part.view(torch.uint8).copy_(block[: part.shape[0]].view(torch.uint8))
    return cache


def build_rank(
    architecture: Architecture,
    layout: Layout,
    workload: Workload,
    program: Program,
    weights: RankWeights,
    *,
    index: int = 0,
    max_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
    device: torch.device | str = "cuda",
) -> Rank:
    """Allocate a rank's buffers and states on ``device``; caches hold random rows, recurrent states zeros.

    ``max_tokens``: cached rows a sequence has room for (the context, by default); ``cache_dtype``: as the workload's
    KV type, by default. Raises UserError for a context-parallel or expert-parallel layout, which the engine has not.
    """
    import torch

    if layout.dcp > 1 or layout.ep > 1:
        raise UserError(f"layout {layout.tag}: the engine runs dcp=1 and ep=1")
    if architecture.moe.top_k != TOP_K_SLOTS:
        raise UserError(f"top_k: got {architecture.moe.top_k}, accepted: {TOP_K_SLOTS}, as the kernels are built")
    dtype = torch.bfloat16 if dtype is None else dtype
    rows = -(-workload.concurrency // layout.dp)
    max_tokens = workload.context if max_tokens is None else max_tokens
    kinds = {"act": dtype, "fp32": torch.float32, "int32": torch.int32}
    buffers = {
        name: torch.zeros(shape, dtype=kinds[kind], device=device)
        for name, (shape, kind) in activation_shapes(architecture, layout, workload).items()
    }
    if cache_dtype is None:
        cache_dtype = torch.float8_e4m3fn if workload.kv_dtype == "fp8" else torch.bfloat16
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    pages_of_row = math.ceil(max_tokens / PAGE_TOKENS)
    num_pages = rows * pages_of_row
    order = torch.randperm(num_pages, generator=generator, device=device)
    sequence = Sequence(
        tokens=torch.arange(rows, dtype=torch.int32, device=device),
        num_tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        pages=order.to(torch.int32).view(rows, pages_of_row).contiguous(),
        cache_slots=torch.zeros(rows, dtype=torch.int64, device=device),
        state_slots=torch.arange(NULL_SLOT, rows + NULL_SLOT, dtype=torch.int32, device=device),
    )
    sequence.place(min(workload.context, max_tokens))
    shapes = rank_shapes(architecture, layout)
    kda, mla = architecture.kda, architecture.mla
    conv_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    block = torch.randn((min(num_pages, 64), PAGE_TOKENS, mla.cache_width), generator=generator, device=device)
    block = block.to(cache_dtype)
    caches, conv_states, states = {}, {}, {}
    for layer in program.layers:
        if architecture.mixer(layer) == "mla":
            caches[layer] = _repeated(block, num_pages)
        else:
            conv_states[layer] = torch.zeros(
                (rows + NULL_SLOT, kda.conv_width - 1, kda.conv_channels // layout.tp), dtype=conv_dtype, device=device
            )
            states[layer] = torch.zeros(
                (rows + NULL_SLOT, shapes.kda_heads, kda.head_dim_k, kda.head_dim_v), dtype=torch.float32, device=device
            )
    return Rank(
        architecture=architecture,
        layout=layout,
        workload=workload,
        program=program,
        index=index,
        weights=weights,
        buffers=buffers,
        sequence=sequence,
        caches=caches,
        conv_states=conv_states,
        states=states,
        max_tokens=max_tokens,
        dtype=dtype,
    )


def clear(rank: Rank, num_tokens: int, tokens: torch.Tensor | None = None) -> None:
    """Back to the beginning of a decode: states zero, the coming step makes ``num_tokens`` cached rows."""
    for group in (rank.conv_states, rank.states):
        for state in group.values():
            state.zero_()
    rank.sequence.place(num_tokens)
    if tokens is not None:
        rank.sequence.tokens.copy_(tokens)
