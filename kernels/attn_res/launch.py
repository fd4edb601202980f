"""Public calls of the AttnRes combine: checks, choice of a configuration, launch. They allocate nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import compiled_kernel

if TYPE_CHECKING:
    import torch

HIDDEN = 7168
MAX_ROWS = 256
MAX_SNAPSHOTS = 8
# Rows up to which four blocks share a row; above, two do, which leaves enough blocks for every SM.
FOUR_BLOCKS_MAX_ROWS = 33


def _kernel(kernel: str, num_snapshots: int, has_delta: bool, rows: int, pdl: bool) -> Any:
    return compiled_kernel(
        "attn_res.kernel",
        "compile_attn_res",
        kernel=kernel,
        num_snapshots=num_snapshots,
        has_delta=has_delta,
        cluster=chosen_cluster(rows),
        pdl=pdl,
    )


def chosen_cluster(rows: int) -> int:
    """Blocks a row: 4 for few rows, 2 for many."""
    return 4 if rows <= FOUR_BLOCKS_MAX_ROWS else 2


def _check_snapshots(snapshots: torch.Tensor, num_snapshots: int, rows: int, fewest: int, like: torch.Tensor) -> None:
    import torch

    check_one_of("num_snapshots", num_snapshots, range(fewest, MAX_SNAPSHOTS + 1))
    check_tensor(
        "snapshots", snapshots, dtypes=(torch.bfloat16,), shape=(rows, None, HIDDEN), like=like, contiguous=False
    )
    if snapshots.shape[1] < num_snapshots:
        raise refuse("snapshots.shape[1]", snapshots.shape[1], f"{num_snapshots} or more")
    if snapshots.shape[1] > 1 and snapshots.stride(1) != HIDDEN:
        raise refuse("snapshots.stride", snapshots.stride(), f"stride {HIDDEN} from one snapshot to the next")


def _check_vectors(like: torch.Tensor, **vectors: torch.Tensor) -> None:
    import torch

    for name, vector in vectors.items():
        check_tensor(name, vector, dtypes=(torch.bfloat16,), shape=(HIDDEN,), like=like)


def _check_rows(prefix: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor) -> int:
    import torch

    check_tensor("prefix", prefix, dtypes=(torch.bfloat16,), shape=(None, HIDDEN))
    rows = int(prefix.shape[0])
    check_one_of("prefix.shape[0]", rows, range(1, MAX_ROWS + 1))
    if delta is not None:
        check_tensor("delta", delta, dtypes=(torch.bfloat16,), shape=(rows, HIDDEN), like=prefix)
    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(rows, HIDDEN), like=prefix)
    return rows


def attn_res(
    snapshots: torch.Tensor, prefix: torch.Tensor, delta: torch.Tensor | None, query_norm: torch.Tensor,
    query: torch.Tensor, norm_weight: torch.Tensor, out: torch.Tensor,
    *,
    num_snapshots: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Mix the first ``num_snapshots`` (0 to 8) snapshots and the prefix, apply the sublayer's RMSNorm; returns ``out``.

    ``snapshots [rows, >= num_snapshots, 7168]``, ``prefix``, ``delta``, ``out`` ``[rows, 7168]``, the weights
    ``[7168]``, all bf16; 1 to 256 rows. ``delta``, the newest sublayer's output, is first added to ``prefix`` in place;
    None where there is none. With ``pdl`` the snapshots and weights are read before the preceding kernel has ended:
    no kernel that may still run on the stream may write them.

    Raises UserError (a ValueError) for an argument that does not fit, before any launch.
    """
    rows = _check_rows(prefix, delta, out)
    _check_snapshots(snapshots, num_snapshots, rows, 0, prefix)
    _check_vectors(prefix, query_norm=query_norm, query=query, norm_weight=norm_weight)
    check_on_gpu("prefix", prefix)
    _kernel("combine", num_snapshots, delta is not None, rows, pdl)(
        snapshots, prefix, prefix if delta is None else delta, query_norm, query, norm_weight, out
    )
    return out


def snapshot_part(
    snapshots: torch.Tensor, query_norm: torch.Tensor, query: torch.Tensor, stats: torch.Tensor,
    weighted: torch.Tensor,
    *,
    num_snapshots: int,
    pdl: bool = False,
) -> None:
    """Share of the first ``num_snapshots`` (1 to 8) snapshots in the softmax, for ``fold_prefix``.

    Writes ``stats [rows, 2]`` (largest logit, sum of exponentials) and ``weighted [rows, 7168]``, both fp32. It depends
    on the call site's weights and on the snapshots only, so it may run long before the prefix is known.

    Raises UserError (a ValueError) for an argument that does not fit, before any launch.
    """
    import torch

    check_tensor("weighted", weighted, dtypes=(torch.float32,), shape=(None, HIDDEN))
    rows = weighted.shape[0]
    check_one_of("weighted.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_tensor("stats", stats, dtypes=(torch.float32,), shape=(rows, 2), like=weighted, alignment_bytes=8)
    _check_snapshots(snapshots, num_snapshots, rows, 1, weighted)
    _check_vectors(weighted, query_norm=query_norm, query=query)
    check_on_gpu("weighted", weighted)
    _kernel("snapshot_part", num_snapshots, False, rows, pdl)(snapshots, query_norm, query, stats, weighted)


def fold_prefix(
    stats: torch.Tensor, weighted: torch.Tensor, prefix: torch.Tensor, delta: torch.Tensor | None,
    query_norm: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Merge the prefix into the snapshots' part and apply the sublayer's RMSNorm; same result as ``attn_res``.

    ``stats`` and ``weighted`` as ``snapshot_part`` left them for the same ``query_norm`` and ``query``; the others as
    in ``attn_res``. With ``pdl`` the part and the weights are read before the preceding kernel has ended.

    Raises UserError (a ValueError) for an argument that does not fit, before any launch.
    """
    import torch

    rows = _check_rows(prefix, delta, out)
    check_tensor("stats", stats, dtypes=(torch.float32,), shape=(rows, 2), like=prefix, alignment_bytes=8)
    check_tensor("weighted", weighted, dtypes=(torch.float32,), shape=(rows, HIDDEN), like=prefix)
    _check_vectors(prefix, query_norm=query_norm, query=query, norm_weight=norm_weight)
    check_on_gpu("prefix", prefix)
    _kernel("fold_prefix", 0, delta is not None, rows, pdl)(
        stats, weighted, prefix, prefix if delta is None else delta, query_norm, query, norm_weight, out
    )
    return out
