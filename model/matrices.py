"""What one rank holds: its matrices, heads, experts and state, as a layout cuts them.

Tensor parallelism cuts heads, FFN widths and the vocabulary over the ranks of an attention group; router, latent
projections and the MLA down projections are full copies unless a path shards them, so both forms are listed. The
experts are shared by all ranks of a replica: each of ``ep`` groups of ``tp / ep`` ranks owns ``num_experts / ep`` of
them and cuts these among itself.

Source of the split: ``vllm/models/kimi_k3/nvidia`` of https://github.com/vllm-project/vllm; its tuned GEMM
table (``low_latency_gemm.py``) lists the same local shapes at TP8 and TP16.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3sim.model.architecture import Architecture
from k3sim.model.layout import KV_DTYPE_BYTES, KvDtype, Layout, check_layout

BF16_BYTES = 2
FP32_BYTES = 4
_EXPERT_PAD = 128
_IN_PROJ_PAD = 16
_DTYPES = {"bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix as a rank holds it: ``num_outputs x depth``, outputs = weights * input.

    ``num_outputs`` includes padding, ``num_outputs_unpadded`` does not; depth padding (``moe.expert_w2``)
    is in ``depth``. ``num_batches`` above one is a batched product, one head each: ``num_outputs`` is then
    the sum over the batches and ``depth`` that of one. ``replicated`` means that every rank holds the same
    full matrix. ``dtype`` is ``"bfloat16"`` or the name of another format; ``num_bytes`` includes the scales.
    """

    name: str
    num_outputs: int
    num_outputs_unpadded: int
    depth: int
    num_bytes: int
    replicated: bool
    dtype: str
    num_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class RankShapes:
    """Heads, experts and state of one rank. Byte sizes are of one layer; states are of one request."""

    kda_heads: int
    mla_heads: int
    gqa_heads: int
    gqa_key_heads: int  # of which ranks hold copies where there are more ranks than heads
    kda_state_bytes: int  # recurrent state, fp32, read and written each step
    kda_conv_state_bytes: int  # past samples of q, k and v, bf16, read and written each step
    kda_conv_weight_bytes: int  # fp32
    kda_vector_bytes: int  # decay bias, per-head decay and output norm, fp32
    experts_owned: int
    expert_ranks: int  # ranks that share one expert


def expert_slice(arch: Architecture, layout: Layout) -> int:
    """Intermediate width of one expert on one rank, padding included."""
    width = arch.moe.expert_intermediate // (layout.tp // layout.ep)
    return _round_up(width, _EXPERT_PAD) if layout.pad_experts else width


def shared_slice(arch: Architecture, layout: Layout) -> int:
    """Intermediate width of the shared experts on one rank; where tokens are dispatched it has all of them."""
    return arch.moe.shared_intermediate // (1 if layout.dispatch else layout.attention_tp)


def rank_matrices(arch: Architecture, layout: Layout) -> dict[str, Matrix]:
    """Weight matrices of one rank, one layer each. Experts are given as ONE expert's slice.

    ``_shard`` names are the column-sharded form of a matrix that the plain path replicates.

    Raises:
        UserError: the layout does not divide the model (see ``check_layout``).
    """
    check_layout(arch, layout)
    hidden, tp = arch.hidden_size, layout.attention_tp
    matrices = [
        *_kda_matrices(arch, tp),
        *_mla_matrices(arch, tp),
        *_gqa_matrices(arch, layout),
        *_moe_matrices(arch, layout),
        _matrix(arch, "dense.gate_up", 2 * arch.dense_intermediate // tp, hidden),
        _matrix(arch, "dense.down", hidden, arch.dense_intermediate // tp),
        _matrix(arch, "lm_head", arch.vocab_size // tp, hidden),
        _matrix(arch, "embedding", arch.vocab_size // tp, hidden),
    ]
    if arch.draft is not None:
        sizes = arch.draft.matrix_sizes(hidden, arch.vocab_size, tp)
        matrices += [
            _matrix(arch, name, outputs, depth, replicated=whole) for name, (outputs, depth, whole) in sizes.items()
        ]
    return {matrix.name: matrix for matrix in matrices if matrix.num_outputs and matrix.depth}


def _kda_matrices(arch: Architecture, tp: int) -> list[Matrix]:
    kda, hidden = arch.kda, arch.hidden_size
    if not kda.num_heads:
        return []
    gate_rows = 0 if kda.gate_rank else kda.value_width // tp
    in_proj_rows = (2 * kda.key_width + kda.value_width) // tp + gate_rows + kda.decay_rank + kda.num_heads // tp
    return [
        # q, k, v, output gate, decay down-projection (a full copy) and beta, packed into one product.
        _matrix(arch, "kda.in_proj", in_proj_rows, hidden, pad=1 if kda.gate_rank else _IN_PROJ_PAD),
        _matrix(arch, "kda.g_a", kda.gate_rank, hidden, replicated=True),
        _matrix(arch, "kda.g_b", kda.value_width // tp if kda.gate_rank else 0, kda.gate_rank),
        _matrix(arch, "kda.f_b", kda.key_width // tp, kda.decay_rank),
        _matrix(arch, "kda.o_proj", hidden, kda.value_width // tp),
    ]


def _mla_matrices(arch: Architecture, tp: int) -> list[Matrix]:
    if not arch.mla.num_heads:
        return []
    mla, hidden = arch.mla, arch.hidden_size
    heads = mla.num_heads // tp
    query = (
        [
            _matrix(arch, "mla.qkv_a", mla.q_lora_rank + mla.cache_width, hidden, replicated=True),
            _matrix(arch, "mla.q_b", heads * mla.qk_head_dim, mla.q_lora_rank),
        ]
        if mla.q_lora_rank
        else [
            _matrix(arch, "mla.q", heads * mla.qk_head_dim, hidden),
            _matrix(arch, "mla.kv_a", mla.cache_width, hidden, replicated=True),
        ]
    )
    return [
        *query,
        _matrix(arch, "mla.gate", mla.value_width // tp if mla.has_gate else 0, hidden),
        # Folded at load, and bf16 whatever the file has.
        _matrix(arch, "mla.w_uk", heads * mla.kv_lora_rank, mla.qk_nope_head_dim, num_batches=heads),
        _matrix(arch, "mla.w_uv", heads * mla.v_head_dim, mla.kv_lora_rank, num_batches=heads),
        _matrix(arch, "mla.o_proj", hidden, mla.value_width // tp),
        # Of the indexer every rank has all heads.
        _matrix(arch, "mla.index_q", mla.index_heads * mla.index_dim, mla.q_lora_rank or hidden, replicated=True),
        _matrix(arch, "mla.index_k", mla.index_heads + mla.index_dim, hidden, replicated=True),
    ]


def _gqa_matrices(arch: Architecture, layout: Layout) -> list[Matrix]:
    gqa, hidden, tp = arch.gqa, arch.hidden_size, layout.attention_tp
    if not gqa.num_heads:
        return []
    width = gqa.query_width // tp
    return [
        _matrix(arch, "gqa.qkv", width + 2 * key_heads(arch, layout) * gqa.head_dim, hidden),
        _matrix(arch, "gqa.o_proj", hidden, width),
    ]


def _moe_matrices(arch: Architecture, layout: Layout) -> list[Matrix]:
    moe, hidden, tp = arch.moe, arch.hidden_size, layout.attention_tp
    if not moe.num_experts:
        return []
    width, depth = expert_slice(arch, layout), arch.expert_depth
    unpadded = moe.expert_intermediate // (layout.tp // layout.ep)
    shared = shared_slice(arch, layout)
    return [
        _matrix(arch, "moe.router", moe.num_experts, hidden, replicated=True),
        _matrix(arch, "moe.router_shard", moe.num_experts // tp, hidden),
        _matrix(arch, "moe.latent_down", moe.latent_size, hidden, replicated=True),
        _matrix(arch, "moe.latent_down_shard", moe.latent_size // tp, hidden),
        _matrix(arch, "moe.expert_w13", 2 * width, depth, unpadded=2 * unpadded),
        _matrix(arch, "moe.expert_w2", depth, width),
        _matrix(arch, "moe.shared_gate_up", 2 * shared, hidden, replicated=layout.dispatch),
        _matrix(arch, "moe.shared_down", hidden, shared, replicated=layout.dispatch),
        _matrix(arch, "moe.latent_up", hidden, moe.latent_size, replicated=True),
        _matrix(arch, "moe.latent_up_shard", hidden // tp, moe.latent_size),
    ]


def key_heads(arch: Architecture, layout: Layout) -> int:
    """Key heads of one rank of grouped-query attention: at least one, of which several ranks then hold a copy."""
    return -(-arch.gqa.num_key_heads // layout.attention_tp)


def gqa_bytes_per_token(arch: Architecture, layout: Layout, kv_dtype: KvDtype) -> int:
    """Bytes of one token in one layer's cache of grouped-query attention on a rank: keys and values of its heads."""
    return 2 * key_heads(arch, layout) * arch.gqa.head_dim * KV_DTYPE_BYTES[kv_dtype]


def held_as(matrix: Matrix, layout: Layout) -> str:
    """What part of a matrix one rank holds: ``whole``, or a fraction of it; of experts, of how many."""
    if matrix.name.startswith("moe.expert_"):
        cut = layout.tp // layout.ep
        slices = f"1/{cut} of each" if cut > 1 else "whole"
        return f"{slices}, 1/{layout.ep} of them" if layout.ep > 1 else slices
    return "whole" if matrix.replicated or layout.attention_tp == 1 else f"1/{layout.attention_tp}"


def rank_shapes(arch: Architecture, layout: Layout) -> RankShapes:
    """Heads, experts and state sizes of one rank.

    Raises:
        UserError: the layout does not divide the model (see ``check_layout``).
    """
    check_layout(arch, layout)
    kda, tp = arch.kda, layout.attention_tp
    kda_heads = kda.num_heads // tp
    conv_channels = kda.conv_channels // tp
    return RankShapes(
        kda_heads=kda_heads,
        mla_heads=arch.mla.num_heads // tp,
        gqa_heads=arch.gqa.num_heads // tp,
        gqa_key_heads=key_heads(arch, layout),
        kda_state_bytes=kda_heads * kda.head_dim_k * kda.head_dim_v * arch.state_bytes_per_value,
        kda_conv_state_bytes=(kda.conv_width - 1) * conv_channels * BF16_BYTES,
        kda_conv_weight_bytes=kda.conv_width * conv_channels * FP32_BYTES,
        kda_vector_bytes=(kda.key_width // tp + kda_heads + kda.head_dim_v) * FP32_BYTES,
        experts_owned=arch.moe.num_experts // layout.ep,
        expert_ranks=layout.tp // layout.ep,
    )


def kv_bytes_per_token(arch: Architecture, kv_dtype: KvDtype) -> int:
    """Bytes of one token in one MLA layer's cache: latent and extra key, the same row on every TP rank.

    Decode context parallelism divides the tokens, not the row. A sparse-attention indexer keeps its key in fp8 and a
    scale in fp32 beside it.
    """
    index_bytes = arch.mla.index_dim + FP32_BYTES if arch.mla.index_heads else 0
    return arch.mla.cache_width * KV_DTYPE_BYTES[kv_dtype] + index_bytes


def _matrix(
    arch: Architecture,
    name: str,
    rows: int,
    depth: int,
    *,
    pad: int = 1,
    unpadded: int | None = None,
    replicated: bool = False,
    num_batches: int = 1,
) -> Matrix:
    """A matrix in its format; one of size zero is left out by the caller."""
    padded = _round_up(rows, pad)
    stored = arch.weight_format(name)
    return Matrix(
        name=name,
        num_outputs=padded,
        num_outputs_unpadded=rows if unpadded is None else unpadded,
        depth=depth,
        num_bytes=stored.matrix_bytes(padded, depth),
        replicated=replicated,
        dtype=_DTYPES.get(stored.name, stored.name),
        num_batches=num_batches,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
