"""Public calls of MLA decode: attention over the paged cache, and the merge of several ranks' partial outputs.

    workspace = make_workspace(heads=12, max_rows=16, device="cuda")                       # once
    mla_decode(query, cache, pages, num_tokens, out, log_sum_exp, workspace)
    lse_merge(outputs, log_sum_exps, out)                                                  # context parallel
    lift_gate(out, value_up, gate, values)                                                 # W_UV and the output gate

The first call of a configuration compiles (a configuration: heads, format, the clusters that rows and the width of the
page table lead to): make it before a graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.mla_decode.cost import CLUSTER, HEAD_TILE, MAX_CLUSTERS, PAGE_TOKENS, chosen_clusters
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream, strided

if TYPE_CHECKING:
    import torch

HEADS = (6, 12, 24, 48, 96)
LATENT = 512
EXTRA = 64
ROW = LATENT + EXTRA
MAX_ROWS = 256
MAX_MERGED_RANKS = 32
VALUES = 128
MAX_LIFTED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class MlaWorkspace:
    """Scratch of launches that follow one another: ``slices`` fp32, and ``counters`` int32, zero between launches."""

    slices: torch.Tensor
    counters: torch.Tensor


def _slice_floats(rows: int, heads: int) -> int:
    tiles = -(-heads // HEAD_TILE)
    return rows * tiles * CLUSTER * chosen_clusters(rows, heads) * HEAD_TILE * (LATENT // CLUSTER + 2)


def make_workspace(*, heads: int, max_rows: int, device: torch.device | str = "cuda") -> MlaWorkspace:
    """Workspace for 1 to ``max_rows`` rows."""
    import torch

    check_one_of("heads", heads, HEADS)
    check_one_of("max_rows", max_rows, range(1, MAX_ROWS + 1))
    floats = max(_slice_floats(rows, heads) for rows in range(1, max_rows + 1))
    counters = max_rows * -(-heads // HEAD_TILE) * CLUSTER
    return MlaWorkspace(
        slices=torch.empty(floats, dtype=torch.float32, device=device),
        counters=torch.zeros(counters, dtype=torch.int32, device=device),
    )


def check_cache(cache: torch.Tensor, like: torch.Tensor) -> None:
    """``cache [P, 64, 576]`` float8_e4m3fn or bf16, rows of a page one behind the other. Raises UserError."""
    import torch

    dtypes = (torch.float8_e4m3fn, torch.bfloat16)
    check_tensor("cache", cache, dtypes=dtypes, shape=(None, PAGE_TOKENS, ROW), like=like, contiguous=False)
    if cache.stride(1) != ROW:
        raise refuse("cache.stride", cache.stride(), f"rows of a page {ROW} values apart")


def mla_decode(
    query: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, num_tokens: torch.Tensor, out: torch.Tensor,
    log_sum_exp: torch.Tensor, workspace: MlaWorkspace,
    *,
    settled_cache: bool = False,
    clusters: int | None = None,
) -> torch.Tensor:
    """Attention of one token a row over its cached rows; returns ``out``.

    * ``query [B, H, 576]`` bf16, absorbed, not scaled (192^-0.5 is applied here); H 6, 12, 24, 48 or 96, B up to 256;
    * ``cache [P, 64, 576]`` float8_e4m3fn (scale 1; queries up to 65504) or bf16; any page stride;
    * ``pages [B, >= pages in use]`` int32, rows with any stride; ``num_tokens [B]`` int32. Neither is checked on the
      device: a page number beyond the cache reads foreign memory;
    * ``out [B, H, 512]`` bf16, ``log_sum_exp [B, H]`` fp32, natural: 0 and -infinity for a row without tokens.

    ``settled_cache``: promise that all cached rows but the newest of each sequence, the page table and the lengths
    were written before the previous launch on the stream began; reading then starts before that launch has ended.
    ``clusters`` overrides the split, 1 to 15 clusters of eight blocks a row, which otherwise follows from the rows and
    the width of the page table: give the table the width that is in use.
    """
    import torch

    check_tensor("query", query, dtypes=(torch.bfloat16,), shape=(None, None, ROW))
    rows, heads, _ = query.shape
    check_one_of("query.shape[1]", heads, HEADS)
    check_one_of("query.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_cache(cache, query)
    int32 = (torch.int32,)
    check_tensor("pages", pages, dtypes=int32, shape=(rows, None), like=query, contiguous=False, alignment_bytes=4)
    check_tensor("num_tokens", num_tokens, dtypes=int32, shape=(rows,), like=query, alignment_bytes=4)
    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(rows, heads, LATENT), like=query)
    check_tensor(
        "log_sum_exp", log_sum_exp, dtypes=(torch.float32,), shape=(rows, heads), like=query, alignment_bytes=4
    )
    clusters = chosen_clusters(rows, heads, pages.shape[1]) if clusters is None else clusters
    check_one_of("clusters", clusters, range(1, MAX_CLUSTERS + 1))
    tiles = -(-heads // HEAD_TILE)
    slice_floats = rows * tiles * CLUSTER * clusters * HEAD_TILE * (LATENT // CLUSTER + 2)
    check_tensor("workspace.slices", workspace.slices, dtypes=(torch.float32,), shape=(None,), like=query)
    check_tensor("workspace.counters", workspace.counters, dtypes=int32, shape=(None,), like=query)
    if workspace.slices.numel() < slice_floats:
        raise refuse("workspace.slices", f"{workspace.slices.numel()} floats", f"at least {slice_floats}")
    if workspace.counters.numel() < rows * tiles * CLUSTER:
        raise refuse("workspace.counters", workspace.counters.numel(), f"at least {rows * tiles * CLUSTER}")
    check_on_gpu("query", query)
    fields = {"heads": heads, "fp8": cache.dtype == torch.float8_e4m3fn, "clusters": clusters}
    compiled_kernel("mla_decode.kernel", "compile_mla_decode", **fields, settled_cache=settled_cache)(
        query.data_ptr(), *strided(cache), pages.data_ptr(), pages.stride(0), pages.shape[1], num_tokens.data_ptr(),
        out.data_ptr(), log_sum_exp.data_ptr(), workspace.slices.data_ptr(), workspace.counters.data_ptr(), rows,
        current_stream(query),
    )  # fmt: skip
    return out


def lse_merge(
    outputs: torch.Tensor,
    log_sum_exps: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge ``outputs [R, B, H, 512]`` bf16 of R ranks by ``log_sum_exps [R, B, H]`` fp32 into ``out [B, H, 512]``.

    A rank without tokens (-infinity) does not count, whatever its output holds; if none has any, the result is 0.
    ``log_sum_exp [B, H]`` receives the merged one, if given. 1 <= R <= 32. Raises UserError before any launch.
    """
    import torch

    check_tensor("outputs", outputs, dtypes=(torch.bfloat16,), shape=(None, None, None, LATENT))
    ranks, rows, heads, _ = outputs.shape
    check_one_of("outputs.shape[0]", ranks, range(1, MAX_MERGED_RANKS + 1))
    fp32 = (torch.float32,)
    check_tensor("log_sum_exps", log_sum_exps, dtypes=fp32, shape=(ranks, rows, heads), like=outputs, alignment_bytes=4)
    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(rows, heads, LATENT), like=outputs)
    if log_sum_exp is not None:
        check_tensor("log_sum_exp", log_sum_exp, dtypes=fp32, shape=(rows, heads), like=outputs, alignment_bytes=4)
    check_on_gpu("outputs", outputs)
    compiled_kernel("mla_decode.kernel", "compile_lse_merge", ranks=ranks)(
        outputs.data_ptr(), log_sum_exps.data_ptr(), out.data_ptr(),
        0 if log_sum_exp is None else log_sum_exp.data_ptr(), rows * heads, current_stream(outputs),
    )  # fmt: skip
    return out


def lift_gate(
    latent: torch.Tensor, value_up: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """``out [B, H x 128]`` bf16: ``latent [B, H, 512]`` times ``value_up [H, 128, 512]``, times the gate's sigmoid.

    ``value_up`` bf16, any head stride (the value half of kv_b), read before the kernel waits for the launch before it;
    ``gate [B, H x 128]`` bf16, any row stride of 16 bytes. H 6, 12, 24, 48 or 96, 1 <= B <= 16. Returns ``out``. Raises
    UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("latent", latent, dtypes=bf16, shape=(None, None, LATENT))
    rows, heads, _ = latent.shape
    check_one_of("latent.shape[0]", rows, range(1, MAX_LIFTED_ROWS + 1))
    check_one_of("latent.shape[1]", heads, HEADS)
    check_tensor("value_up", value_up, dtypes=bf16, shape=(heads, VALUES, LATENT), like=latent, contiguous=False)
    if value_up.stride(1) != LATENT:
        raise refuse("value_up.stride", value_up.stride(), f"rows of a head {LATENT} values apart")
    check_tensor("gate", gate, dtypes=bf16, shape=(rows, heads * VALUES), like=latent, contiguous=False)
    check_tensor("out", out, dtypes=bf16, shape=(rows, heads * VALUES), like=latent)
    check_on_gpu("latent", latent)
    compiled_kernel("mla_decode.lift", "compile_lift_gate", heads=heads, row_tiles=-(-rows // 8), pdl=pdl)(
        latent.data_ptr(), *strided(value_up), *strided(gate), out.data_ptr(), rows, current_stream(latent),
    )  # fmt: skip
    return out
