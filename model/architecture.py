"""What the model is: shapes of Kimi K3 and its family, as ``config_file.py`` reads them from a ``config.json``.

The tensor list that follows from them (``checkpoint.py``) reproduces the released checkpoint to the byte.

Sources: config.json of https://huggingface.co/moonshotai/Kimi-K3; residual scheme and the meaning of the mixers from
``vllm/models/kimi_k3/nvidia`` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from k3sim.model.draft import Draft
from k3sim.model.weight_formats import BF16, MXFP4, WeightFormat

Mixer = Literal["kda", "mla", "gqa"]
Ffn = Literal["dense", "moe"]


def usual_format(part: str) -> WeightFormat:
    """Format of a matrix in the release of Kimi K3."""
    return MXFP4 if part.startswith("moe.expert_") else BF16


@dataclass(frozen=True, kw_only=True)
class KdaShape:
    """Kimi Delta Attention: linear attention with a recurrent state ``[num_heads, head_dim_k, head_dim_v]``.

    ``conv_width`` is the width of the short causal convolution on q, k and v; ``decay_rank`` the inner
    width of the low-rank decay gate (hidden -> decay_rank -> keys). The output gate is full rank, or goes through
    ``gate_rank``. No heads: a model without KDA.
    """

    num_heads: int
    head_dim_k: int
    head_dim_v: int
    conv_width: int
    decay_rank: int
    gate_rank: int = 0  # 0: full rank

    @property
    def key_width(self) -> int:
        """Channels of q, and of k, over all heads."""
        return self.num_heads * self.head_dim_k

    @property
    def value_width(self) -> int:
        """Channels of v, and of the output gate, over all heads."""
        return self.num_heads * self.head_dim_v

    @property
    def conv_channels(self) -> int:
        """Channels that pass the short convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Multi-head latent attention. In K3 it has an output gate, and the "rope" dimensions are never rotated.

    ``index_heads``, ``index_dim`` and ``index_top_k``: of an indexer that chooses which cached rows are attended to.
    """

    num_heads: int
    q_lora_rank: int  # 0: the query comes from one matrix
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    has_gate: bool = True
    has_rope: bool = False
    index_heads: int = 0  # 0: attention to all rows
    index_dim: int = 0
    index_top_k: int = 0

    @property
    def cache_width(self) -> int:
        """Values of one KV-cache row: the latent and the shared extra key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Channels of the attention output, and of its gate, over all heads."""
        return self.num_heads * self.v_head_dim


@dataclass(frozen=True, kw_only=True)
class GqaShape:
    """Grouped-query attention: query heads in groups that share a key and a value head. No heads: a model without."""

    num_heads: int = 0
    num_key_heads: int = 0
    head_dim: int = 0
    has_norms: bool = False  # of each head of query and key

    @property
    def query_width(self) -> int:
        """Channels of the query, and of the attention output, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of the key, and of the value, over all heads."""
        return self.num_key_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Latent mixture of experts: hidden -> latent once, experts in the latent, latent -> hidden once.

    Shared experts read the full hidden state and are one MLP of width ``shared_intermediate``. Routed
    experts are MXFP4: ``weight_bits``-bit codes with one ``scale_bits``-bit scale per ``scale_group``
    weights along the depth.
    """

    num_experts: int
    top_k: int
    latent_size: int  # 0: experts read the hidden state
    expert_intermediate: int
    num_shared_experts: int
    shared_intermediate: int
    first_moe_layer: int
    num_groups: int = 1  # of experts, of which a row takes ``top_k_groups``
    top_k_groups: int = 1
    has_correction: bool = True  # a bias of each expert's score
    weight_bits: int = 4
    scale_bits: int = 8
    scale_group: int = 32

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of one routed-expert weight, its share of the scale included: 4.25 for MXFP4."""
        return self.weight_bits + self.scale_bits / self.scale_group

    def matrix_bytes(self, num_outputs: int, depth: int) -> int:
        """Bytes of codes and scales of a routed-expert matrix; the depth is whole scale groups."""
        assert depth % self.scale_group == 0, f"depth {depth} is not in groups of {self.scale_group}"
        num_weights = num_outputs * depth
        return num_weights * self.weight_bits // 8 + num_weights // self.scale_group * self.scale_bits // 8


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Vision tower and projector: never run in decode, but part of the checkpoint's total."""

    hidden_size: int
    qkv_size: int
    intermediate_size: int
    num_layers: int
    patch_size: int
    position_rows: int
    position_columns: int
    merged_size: int  # width after the spatial merge, the projector's input


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of one model of the Kimi K3 family. Layers count from zero."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    kda: KdaShape
    mla: MlaShape
    attn_res_block_size: int  # 0: a plain residual
    moe: MoeShape
    dense_intermediate: int
    vision: VisionShape | None = None
    gqa_layers: tuple[int, ...] = ()
    gqa: GqaShape = GqaShape()
    formats: tuple[tuple[str, WeightFormat], ...] = ()  # of matrices that are not in the format of a release of K3
    state_bytes_per_value: int = 4  # of KDA's recurrent state
    unused_bytes: int = 0  # that a checkpoint holds and nothing reads
    num_mtp_layers: int = 0  # that predict further tokens: in memory, and no work without speculation
    draft: Draft | None = None  # that proposes tokens for it to verify
    notes: tuple[str, ...] = ()  # what was assumed or left out when the config was read; stands in every output

    def weight_format(self, part: str) -> WeightFormat:
        """Format of a matrix by its name in ``layout.rank_matrices``; shards have that of the whole."""
        name = part.removesuffix("_shard")
        return dict(self.formats).get(name, usual_format(name))

    @property
    def expert_depth(self) -> int:
        """Width that the routed experts read and write: the latent, or the hidden state."""
        return self.moe.latent_size or self.hidden_size

    @property
    def num_dense_layers(self) -> int:
        return self.moe.first_moe_layer

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.moe.first_moe_layer

    @property
    def tables(self) -> tuple[str, ...]:
        """Kinds of sublayers that there are, and what is before and behind the layers: the tables of a path."""
        kinds = {"kda": self.kda_layers, "mla": self.mla_layers, "gqa": self.gqa_layers, "dense": self.num_dense_layers,
                 "moe": self.num_moe_layers}  # fmt: skip
        return ("start", *(kind for kind, count in kinds.items() if count), "head")

    def mixer(self, layer: int) -> Mixer:
        """Token mixer of a layer."""
        self._check_layer(layer)
        return "mla" if layer in self.mla_layers else "gqa" if layer in self.gqa_layers else "kda"

    def ffn(self, layer: int) -> Ffn:
        """Feed-forward part of a layer."""
        self._check_layer(layer)
        return "moe" if layer >= self.moe.first_moe_layer else "dense"

    def is_snapshot(self, layer: int) -> bool:
        """Whether the layer stores the running residual and restarts it from its mixer's output."""
        self._check_layer(layer)
        return bool(self.attn_res_block_size) and layer % self.attn_res_block_size == 0

    def attn_res_sources(self, layer: int, before: Literal["mixer", "ffn"]) -> int:
        """Vectors that the attention residual before a sublayer mixes: snapshots so far plus the running
        residual.

        Before the mixer the layer's own snapshot is not yet taken (only the embedding exists at layer 0);
        before the FFN it is. ``layer == num_layers`` with ``"mixer"`` is the final call, in front of the LM
        head.
        """
        if not self.attn_res_block_size:
            return 0
        if before == "mixer" and layer == self.num_layers:
            return math.ceil(layer / self.attn_res_block_size) + 1
        self._check_layer(layer)
        if before == "mixer":
            return math.ceil(layer / self.attn_res_block_size) + 1
        return layer // self.attn_res_block_size + 2

    def attn_res_total_sources(self) -> int:
        """Vectors read by all attention residuals of one decode step and one row: 1003 for K3."""
        before_mixer = sum(self.attn_res_sources(layer, "mixer") for layer in range(self.num_layers + 1))
        before_ffn = sum(self.attn_res_sources(layer, "ffn") for layer in range(self.num_layers))
        return before_mixer + before_ffn

    def _check_layer(self, layer: int) -> None:
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
