"""Public call of what precedes MLA attention.

    mla_prep(latents, query_norm, kv_norm, query_up, key_up, slots, query, cache)

The first call of a configuration compiles: make it before a graph capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.mla_decode.launch import EXTRA, HEADS, LATENT, ROW, check_cache
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream, strided

if TYPE_CHECKING:
    import torch

MAX_ROWS = 16
QUERY_LATENT = 1536
NOPE = 128


def mla_prep(
    latents: torch.Tensor, query_norm: torch.Tensor, kv_norm: torch.Tensor, query_up: torch.Tensor,
    key_up: torch.Tensor, slots: torch.Tensor, query: torch.Tensor, cache: torch.Tensor,
) -> torch.Tensor:
    """Write the absorbed ``query [B, H, 576]`` bf16 and one row a token into ``cache``; returns ``query``.

    * ``latents [B, >= 2112]`` bf16, any row stride: query latent 1536, key-value latent 512, extra 64; B up to 16;
    * ``query_norm [1536]``, ``kv_norm [512]``, ``query_up [H x 192, 1536]`` bf16; ``key_up [H, 128, 512]`` bf16, any
      head stride (the key half of kv_b); H 6, 12, 24, 48 or 96;
    * ``slots [B]`` int64, distinct: 64 x page + offset; below 0 for a padding row. Not checked against the cache;
    * ``cache [P, 64, 576]`` float8_e4m3fn (scale 1, saturated) or bf16, any page stride.

    Weights are read before the kernel waits for the launch before it. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("query", query, dtypes=bf16, shape=(None, None, ROW))
    rows, heads, _ = query.shape
    check_one_of("query.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_one_of("query.shape[1]", heads, HEADS)
    check_tensor("latents", latents, dtypes=bf16, shape=(rows, None), like=query, contiguous=False)
    if latents.shape[1] < QUERY_LATENT + ROW:
        raise refuse("latents.shape[1]", latents.shape[1], f"{QUERY_LATENT + ROW} or more")
    check_tensor("query_norm", query_norm, dtypes=bf16, shape=(QUERY_LATENT,), like=query)
    check_tensor("kv_norm", kv_norm, dtypes=bf16, shape=(LATENT,), like=query)
    check_tensor("query_up", query_up, dtypes=bf16, shape=(heads * (NOPE + EXTRA), QUERY_LATENT), like=query)
    check_tensor("key_up", key_up, dtypes=bf16, shape=(heads, NOPE, LATENT), like=query, contiguous=False)
    if key_up.stride(1) != LATENT:
        raise refuse("key_up.stride", key_up.stride(), f"rows of a head {LATENT} values apart")
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(rows,), like=query, alignment_bytes=8)
    check_cache(cache, query)
    check_on_gpu("query", query)
    fp8 = cache.dtype == torch.float8_e4m3fn
    compiled_kernel("mla_prep.kernel", "compile_mla_prep", rows=rows, heads=heads, fp8=fp8)(
        *strided(latents), query_norm.data_ptr(), kv_norm.data_ptr(), query_up.data_ptr(), *strided(key_up),
        query.data_ptr(), slots.data_ptr(), *strided(cache), current_stream(query),
    )  # fmt: skip
    return query
