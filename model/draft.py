"""The draft model of speculation: its sizes, its matrices on a rank, and what rows of its tables name."""

from __future__ import annotations

from dataclasses import dataclass

#: Tables of a path that run after the head: cached context, one layer, logits, and one position of the Markov head.
DRAFT_CONTEXT, DRAFT_LAYER, DRAFT_HEAD, DRAFT_POSITION = "draft_context", "draft_layer", "draft_head", "draft_position"
MAX_DRAFTS = 15


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft model of latent attention with rotary keys, bf16, and how many tokens it drafts."""

    num_drafts: int
    num_layers: int = 5
    num_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    intermediate: int = 14336
    num_taps: int = 5  # layers of the target whose outputs it reads
    markov_rank: int = 256

    @property
    def rows_per_user(self) -> int:
        """Rows of a user in the target: the last accepted token, and every draft."""
        return 1 + self.num_drafts

    @property
    def cache_width(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    def matrix_sizes(self, hidden: int, vocab: int, ranks: int) -> dict[str, tuple[int, int, bool]]:
        """Outputs, depth and whether every rank has all of it, by name; vLLM's split (``dspark_mla.py``)."""
        heads = self.num_heads // ranks
        return {
            "draft_context.projection": (hidden, self.num_taps * hidden, True),
            "draft_context.kv": (self.num_layers * self.cache_width, hidden, True),
            "draft_layer.qkv_a": (self.q_lora_rank + self.cache_width, hidden, True),
            "draft_layer.q_b": (heads * (self.nope_dim + self.rope_dim), self.q_lora_rank, False),
            "draft_layer.w_uk": (heads * self.kv_lora_rank, self.nope_dim, False),
            "draft_layer.w_uv": (heads * self.v_dim, self.kv_lora_rank, False),
            "draft_layer.o_proj": (hidden, heads * self.v_dim, False),
            "draft_layer.gate_up": (2 * self.intermediate // ranks, hidden, False),
            "draft_layer.down": (hidden, self.intermediate // ranks, False),
            "draft.w1": (vocab, self.markov_rank, True),
            "draft_position.w2": (vocab // ranks, self.markov_rank, False),
        }

    def dimensions(self, ranks: int, users: int) -> dict[str, int]:
        """What rows of the draft's tables name."""
        heads = self.num_heads // ranks
        return {
            "draft_rows": users * self.num_drafts,
            "draft_layers": self.num_layers,
            "draft_heads": heads,
            "draft_query_heads": heads * self.num_drafts,
            "draft_rope_width": heads * self.rope_dim,
            "draft_context_width": self.num_layers * self.rope_dim,
            "draft_kv_norm_width": self.num_layers * self.kv_lora_rank,
            "draft_q_norm_width": self.q_lora_rank,
            "draft_width": self.intermediate // ranks,
            "markov_rank": self.markov_rank,
        }
