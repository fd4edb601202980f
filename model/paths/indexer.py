"""Rows of the sparse-attention indexer, of DeepSeek-V3.2 and of Kimi K3.1's MLA layers: vLLM's and SGLang's kernels.

They stand between the query latent and the absorption of W_UK; attention then reads the chosen rows alone, which the
dimension ``context`` says.
"""

from __future__ import annotations

from k3sim.model.paths.formats import product
from k3sim.model.step import Row

NEEDS = "indexer"

INDEXER_ROWS: tuple[Row, ...] = (
    *product("mla.index_q", "mla.index_q", needs=NEEDS),
    *product("mla.index_k", "mla.index_k", needs=NEEDS),
    Row(
        stage="mla.index_write", operator="indexer.key_and_query", needs=NEEDS,
        shape={"rows": "rows", "heads": "index_heads", "head_dim": "index_dim", "index_row_bytes": "index_row_bytes"},
    ),
    Row(
        stage="mla.index_scores", operator="indexer.scores", needs=NEEDS,
        shape={
            "rows": "rows", "heads": "index_heads", "head_dim": "index_dim", "cached": "cached",
            "index_row_bytes": "index_row_bytes",
        },
    ),
    Row(
        stage="mla.index_top_k", operator="indexer.top_k", shape={"rows": "rows", "cached": "cached"}, needs=NEEDS
    ),
)  # fmt: skip
