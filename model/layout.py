"""How the model is spread over GPUs: matrices and state of one rank.

Tensor parallelism cuts heads, FFN widths and the vocabulary; router, latent projections and the MLA down
projections are full copies unless a path shards them, so both forms are listed. Expert parallelism groups
the ranks of one replica: each group of ``tp / ep`` ranks owns ``num_experts / ep`` experts and cuts them
among itself.

Source of the split: ``vllm/models/kimi_k3/nvidia`` of https://github.com/vllm-project/vllm; its tuned GEMM
table (``low_latency_gemm.py``) lists the same local shapes at TP8 and TP16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture

KvDtype = Literal["fp8", "bf16"]
KV_DTYPE_BYTES: dict[KvDtype, int] = {"fp8": 1, "bf16": 2}

MAX_TP = 32
MAX_DP = 1024
MAX_CONCURRENCY = 4096

BF16_BYTES = 2
FP32_BYTES = 4
_EXPERT_PAD = 128
_IN_PROJ_PAD = 16
_DTYPES = {"bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout: ``tp`` ranks a replica, ``dp`` replicas, experts over ``ep`` groups, KV cache over
    ``dcp``.

    ``pad_experts`` rounds each expert slice up to a multiple of 128, as vLLM's TRT-LLM MXFP4 backend does:
    nothing at TP8 (384), 192 to 256 at TP16.
    """

    tp: int = 16
    ep: int = 1
    dp: int = 1
    dcp: int = 1
    pad_experts: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp

    @property
    def tag(self) -> str:
        """Short name such as ``tp16ep1dcp1``, or ``tp8dp2ep1dcp1`` with more than one replica."""
        dp = f"dp{self.dp}" if self.dp > 1 else ""
        return f"tp{self.tp}{dp}ep{self.ep}dcp{self.dcp}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded: ``concurrency`` requests over all replicas, ``context`` cached tokens each."""

    concurrency: int = 1
    context: int = 8192
    kv_dtype: KvDtype = "fp8"

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one value of the KV cache."""
        return KV_DTYPE_BYTES[self.kv_dtype]


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
    kda_state_bytes: int  # recurrent state, fp32, read and written each step
    kda_conv_state_bytes: int  # past samples of q, k and v, bf16, read and written each step
    kda_conv_weight_bytes: int  # fp32
    kda_vector_bytes: int  # decay bias, per-head decay and output norm, fp32
    experts_owned: int
    expert_ranks: int  # ranks that share one expert


def accepted_tp(arch: Architecture) -> tuple[int, ...]:
    """Tensor-parallel sizes that fit the model: powers of two up to 32 that divide every cut width."""
    widths = _cut_widths(arch).values()
    return tuple(tp for tp in _divisors(MAX_TP) if all(width % tp == 0 for width in widths))


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        UserError: tp is not a power of two up to 32 that divides heads, vocabulary and FFN widths; ep does
            not divide tp (experts shared across data-parallel replicas are not modelled); dcp does not
            divide tp; dp is not at least 1.
    """
    for name, value in (("tp", layout.tp), ("ep", layout.ep), ("dp", layout.dp), ("dcp", layout.dcp)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{name}={value!r} is not an integer; give a whole number of at least 1")
    accepted = accepted_tp(arch)
    if layout.tp not in accepted:
        raise UserError(
            f"tp={layout.tp} on {arch.name}: {_why_not_tp(arch, layout.tp)}; "
            f"accepted: {', '.join(map(str, accepted))}"
        )
    if layout.ep not in _divisors(layout.tp):
        raise UserError(
            f"ep={layout.ep} at tp={layout.tp}: experts lie on the ranks of one replica (sharing them across "
            f"data-parallel replicas is not modelled), so ep divides tp; accepted: "
            f"{', '.join(map(str, _divisors(layout.tp)))}"
        )
    if layout.dcp not in _divisors(layout.tp):
        raise UserError(
            f"dcp={layout.dcp} at tp={layout.tp}: the KV cache is cut over one replica's ranks; accepted: "
            f"{', '.join(map(str, _divisors(layout.tp)))}"
        )
    if not 1 <= layout.dp <= MAX_DP:
        raise UserError(f"dp={layout.dp} replicas; 1 to {MAX_DP} are accepted")


def check_workload(arch: Architecture, workload: Workload) -> None:
    """Refuse a workload outside the model or the simulator.

    Raises:
        UserError: concurrency outside 1..4096, context outside 1..max_position_embeddings, unknown kv_dtype.
    """
    for name, value, limit in (
        ("concurrency", workload.concurrency, MAX_CONCURRENCY),
        ("context", workload.context, arch.max_position_embeddings),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(
                f"{name}={value!r} is not an integer; a whole number from 1 to {limit} is accepted"
            )
        if not 1 <= value <= limit:
            raise UserError(f"{name}={value}; a whole number from 1 to {limit} is accepted")
    if workload.kv_dtype not in get_args(KvDtype):
        raise UserError(f"kv_dtype={workload.kv_dtype!r}; {' or '.join(get_args(KvDtype))} is accepted")


def expert_slice(arch: Architecture, layout: Layout) -> int:
    """Intermediate width of one expert on one rank, padding included."""
    width = arch.moe.expert_intermediate // (layout.tp // layout.ep)
    return _round_up(width, _EXPERT_PAD) if layout.pad_experts else width


def rank_matrices(arch: Architecture, layout: Layout) -> dict[str, Matrix]:
    """Weight matrices of one rank, one layer each. Experts are given as ONE expert's slice.

    ``_shard`` names are the column-sharded form of a matrix that the plain path replicates.

    Raises:
        UserError: the layout does not divide the model (see ``check_layout``).
    """
    check_layout(arch, layout)
    hidden, tp = arch.hidden_size, layout.tp
    matrices = [
        *_kda_matrices(arch, tp),
        *_mla_matrices(arch, tp),
        *_moe_matrices(arch, layout),
        _matrix(arch, "dense.gate_up", 2 * arch.dense_intermediate // tp, hidden),
        _matrix(arch, "dense.down", hidden, arch.dense_intermediate // tp),
        _matrix(arch, "lm_head", arch.vocab_size // tp, hidden),
        _matrix(arch, "embedding", arch.vocab_size // tp, hidden),
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


def _moe_matrices(arch: Architecture, layout: Layout) -> list[Matrix]:
    moe, hidden, tp = arch.moe, arch.hidden_size, layout.tp
    if not moe.num_experts:
        return []
    width, depth = expert_slice(arch, layout), arch.expert_depth
    unpadded = moe.expert_intermediate // (tp // layout.ep)
    return [
        _matrix(arch, "moe.router", moe.num_experts, hidden, replicated=True),
        _matrix(arch, "moe.router_shard", moe.num_experts // tp, hidden),
        _matrix(arch, "moe.latent_down", moe.latent_size, hidden, replicated=True),
        _matrix(arch, "moe.latent_down_shard", moe.latent_size // tp, hidden),
        _matrix(arch, "moe.expert_w13", 2 * width, depth, unpadded=2 * unpadded),
        _matrix(arch, "moe.expert_w2", depth, width),
        _matrix(arch, "moe.shared_gate_up", 2 * moe.shared_intermediate // tp, hidden),
        _matrix(arch, "moe.shared_down", hidden, moe.shared_intermediate // tp),
        _matrix(arch, "moe.latent_up", hidden, moe.latent_size, replicated=True),
        _matrix(arch, "moe.latent_up_shard", hidden // tp, moe.latent_size),
    ]


def rank_shapes(arch: Architecture, layout: Layout) -> RankShapes:
    """Heads, experts and state sizes of one rank.

    Raises:
        UserError: the layout does not divide the model (see ``check_layout``).
    """
    check_layout(arch, layout)
    kda, tp = arch.kda, layout.tp
    kda_heads = kda.num_heads // tp
    conv_channels = kda.conv_channels // tp
    return RankShapes(
        kda_heads=kda_heads,
        mla_heads=arch.mla.num_heads // tp,
        kda_state_bytes=kda_heads * kda.head_dim_k * kda.head_dim_v * arch.state_bytes_per_value,
        kda_conv_state_bytes=(kda.conv_width - 1) * conv_channels * BF16_BYTES,
        kda_conv_weight_bytes=kda.conv_width * conv_channels * FP32_BYTES,
        kda_vector_bytes=(kda.key_width // tp + kda_heads + kda.head_dim_v) * FP32_BYTES,
        experts_owned=arch.moe.num_experts // layout.ep,
        expert_ranks=tp // layout.ep,
    )


def kv_bytes_per_token(arch: Architecture, kv_dtype: KvDtype) -> int:
    """Bytes of one token in one MLA layer's cache: latent and extra key, the same row on every TP rank.

    Decode context parallelism divides the tokens, not the row.
    """
    return arch.mla.cache_width * KV_DTYPE_BYTES[kv_dtype]


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


def _cut_widths(arch: Architecture) -> dict[str, int]:
    """Everything that tensor parallelism divides, by the name that an error shows."""
    stored = arch.weight_format("moe.expert_w2")
    scale_group = stored.group or max(1, stored.block[1])
    return {
        "KDA heads": arch.kda.num_heads,
        "attention heads": arch.mla.num_heads,
        "vocabulary": arch.vocab_size,
        "hidden size": arch.hidden_size,
        "latent size": arch.moe.latent_size,
        "experts (router rows)": arch.moe.num_experts,
        "dense intermediate": arch.dense_intermediate,
        "shared-expert intermediate": arch.moe.shared_intermediate,
        "scale groups of the expert intermediate": arch.moe.expert_intermediate // scale_group,
    }


def _why_not_tp(arch: Architecture, tp: int) -> str:
    if not 1 <= tp <= MAX_TP or tp & (tp - 1):
        return f"not a power of two from 1 to {MAX_TP}"
    blocked = [f"{width} {name}" for name, width in _cut_widths(arch).items() if width % tp]
    return "it does not divide " + ", ".join(blocked)


def _divisors(tp: int) -> list[int]:
    """Divisors of a power of two."""
    return [2**power for power in range(tp.bit_length())]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
