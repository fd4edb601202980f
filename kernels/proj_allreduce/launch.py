"""Public calls of the output projection with all-reduce: receive buffers, the pushing launch, the consuming launch.

    buffers = make_receive_buffers(ranks=8, max_rows=16, device="cuda")      # once a rank
    peers = torch.tensor([address of every rank's buffers.received, in rank order], dtype=torch.int64, device="cuda")
    produce(x, weight, peers, buffers, rank=rank)                            # a step, and a graph, repeat these two
    consume(buffers, residual, snapshot_part, query_norm, query, norm_weight, prefix, out)

Both calls of a step go to one stream, ``consume`` right after ``produce``; every rank makes the same calls with the
same number of rows. The first call of a configuration compiles: make it before a graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from k3sim.kernels.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.compile_cache import compiled, get_cutlass

if TYPE_CHECKING:
    import torch

MAX_ROWS = 16
MAX_RANKS = 16
MAX_DEPTH = 1536
MAX_HIDDEN = 8192
BUFFERS = 3
CONTROL_WORDS = 8


@dataclass(frozen=True, kw_only=True)
class ReceiveBuffers:
    """One rank's ``received [3, ranks, max_rows, hidden]`` bf16, which every peer writes, and its own ``control``."""

    received: torch.Tensor
    control: torch.Tensor


def make_receive_buffers(
    *, ranks: int, max_rows: int = MAX_ROWS, hidden: int = 7168, device: torch.device | str = "cuda"
) -> ReceiveBuffers:
    """Buffers in their initial state: all slots "not arrived" (-0). Peers may push once every rank has made its own."""
    import torch

    check_one_of("ranks", ranks, range(1, MAX_RANKS + 1))
    check_one_of("max_rows", max_rows, range(1, MAX_ROWS + 1))
    received = torch.full((BUFFERS, ranks, max_rows, hidden), -0.0, dtype=torch.bfloat16, device=device)
    return ReceiveBuffers(received=received, control=torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device))


def check_buffers(buffers: ReceiveBuffers, rows: int, hidden: int, like: torch.Tensor) -> tuple[int, int]:
    """Number of ranks and rows that the buffers are made for."""
    import torch

    check_one_of("hidden", hidden, range(64, MAX_HIDDEN + 1, 64))
    check_tensor(
        "buffers.received", buffers.received, dtypes=(torch.bfloat16,), shape=(BUFFERS, None, None, hidden), like=like
    )
    check_tensor("buffers.control", buffers.control, dtypes=(torch.int32,), shape=(CONTROL_WORDS,), like=like)
    _, ranks, max_rows, _ = buffers.received.shape
    check_one_of("buffers.received.shape[1]", ranks, range(1, MAX_RANKS + 1))
    check_one_of("rows", rows, range(1, min(max_rows, MAX_ROWS) + 1))
    return ranks, max_rows


@cache
def _produce(rows: int, depth: int, hidden: int, ranks: int, max_rows: int) -> Any:
    get_cutlass()
    from k3sim.kernels.proj_allreduce.kernel import ProduceConfiguration, compile_produce

    configuration = ProduceConfiguration(rows=rows, depth=depth, hidden=hidden, ranks=ranks, max_rows=max_rows)
    return compiled(configuration, lambda: compile_produce(configuration))


@cache
def _consume(
    rows: int, hidden: int, ranks: int, max_rows: int, residual: bool, snapshots: bool, release_next: bool
) -> Any:
    get_cutlass()
    from k3sim.kernels.proj_allreduce.kernel import ConsumeConfiguration, compile_consume

    configuration = ConsumeConfiguration(
        rows=rows,
        hidden=hidden,
        ranks=ranks,
        max_rows=max_rows,
        residual=residual,
        snapshots=snapshots,
        release_next=release_next,
    )
    return compiled(configuration, lambda: compile_consume(configuration))


def _stream(tensor: torch.Tensor) -> Any:
    import torch
    from cuda.bindings.driver import CUstream

    return CUstream(torch.cuda.current_stream(tensor.device).cuda_stream)


def produce(x: torch.Tensor, weight: torch.Tensor, peers: torch.Tensor, buffers: ReceiveBuffers, *, rank: int) -> None:
    """Store this rank's ``x [B, K] @ weight [D, K].T`` into slot ``rank`` of every peer.

    bf16, contiguous; 1 <= B <= 16, K a multiple of 128 up to 1536, D a multiple of 64. ``peers [ranks]`` int64 on the
    device: base addresses of all ranks' ``received``, this rank's own among them. ``weight`` is read before the kernel
    waits for the launch before it. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("weight", weight, dtypes=bf16, shape=(None, None))
    hidden, depth = weight.shape
    check_one_of("weight.shape[1]", depth, range(128, MAX_DEPTH + 1, 128))
    check_tensor("x", x, dtypes=bf16, shape=(None, depth), like=weight)
    ranks, max_rows = check_buffers(buffers, x.shape[0], hidden, weight)
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(ranks,), like=weight, alignment_bytes=8)
    check_one_of("rank", rank, range(ranks))
    check_on_gpu("weight", weight)
    _produce(x.shape[0], depth, hidden, ranks, max_rows)(
        x.data_ptr(), weight.data_ptr(), peers.data_ptr(), buffers.control.data_ptr(), rank, _stream(x)
    )


def consume(
    buffers: ReceiveBuffers,
    residual: torch.Tensor | None,
    snapshot_part: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    query_norm: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    prefix: torch.Tensor,
    out: torch.Tensor,
    *,
    release_next: bool = True,
) -> torch.Tensor:
    """Wait for all ranks' partial rows; write the new ``prefix [B, D]`` and the normalised ``out [B, D]``, both bf16.

    ``residual [B, D]`` bf16 (None: the prefix restarts here; it may be ``prefix`` itself), ``snapshot_part``: largest
    logit ``[B]``, denominator ``[B]``, weighted sum ``[B, D]``, fp32 (None: no snapshot yet). ``query_norm``,
    ``query``, ``norm_weight [D]`` bf16. ``release_next`` lets the next launch on the stream start while this one
    waits. It must be False where several ranks share a GPU: such a launch could fill the SMs that a peer needs in
    order to push. Raises UserError before any launch.
    """
    import torch

    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    check_tensor("out", out, dtypes=bf16, shape=(None, None))
    rows, hidden = out.shape
    ranks, max_rows = check_buffers(buffers, rows, hidden, out)
    check_tensor("prefix", prefix, dtypes=bf16, shape=(rows, hidden), like=out)
    if residual is not None:
        check_tensor("residual", residual, dtypes=bf16, shape=(rows, hidden), like=out)
    parts = (0, 0, 0)
    if snapshot_part is not None:
        if len(snapshot_part) != 3:
            raise refuse("snapshot_part", f"{len(snapshot_part)} tensors", "maximum, denominator, weighted sum")
        for name, tensor, shape in zip(
            ("maximum", "denominator", "weighted"), snapshot_part, ((rows,), (rows,), (rows, hidden)), strict=True
        ):
            alignment_bytes = 16 if name == "weighted" else 4
            check_tensor(
                f"snapshot_part.{name}", tensor, dtypes=fp32, shape=shape, like=out, alignment_bytes=alignment_bytes
            )
        parts = tuple(one.data_ptr() for one in snapshot_part)  # type: ignore[assignment]
    for name, tensor in (("query_norm", query_norm), ("query", query), ("norm_weight", norm_weight)):
        check_tensor(name, tensor, dtypes=bf16, shape=(hidden,), like=out)
    check_on_gpu("out", out)
    _consume(rows, hidden, ranks, max_rows, residual is not None, snapshot_part is not None, release_next)(
        buffers.received.data_ptr(),
        buffers.control.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        *parts,
        query_norm.data_ptr(),
        query.data_ptr(),
        norm_weight.data_ptr(),
        prefix.data_ptr(),
        out.data_ptr(),
        _stream(out),
    )
    return out
