"""Public calls of the output projection with all-reduce: receive buffers, the pushing launch, the consuming launch.

    buffers = make_receive_buffers(ranks=8, max_rows=16, device="cuda")      # once a rank
    peers = torch.tensor([address of every rank's buffers.received, in rank order], dtype=torch.int64, device="cuda")
    produce(x, weight, peers, buffers, rank=rank)                            # a step, and a graph, repeat these two
    consume(buffers, residual, snapshot_part, query_norm, query, norm_weight, prefix, out)

Both calls of a step go to one stream, ``consume`` right after ``produce``; every rank makes the same calls with the
same number of rows. The first call of a configuration compiles: make it before a graph capture.

    up(slots, ..., peers, rank, rows, release_late=True)                     # of latent_tail: shards of one row
    consume_gathered(slots, residual, snapshot_part, query_norm, query, norm_weight, prefix, out)

is the same in front of a mixer, where peers send disjoint columns of a finished row instead of partial rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.latent_tail.launch import TailSlots, check_slots
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

MAX_ROWS = 16
MAX_RANKS = 16
DEPTHS = (*range(128, 1537, 128), 2112, 4224)
MAX_HIDDEN = 8192
GATHERED_HIDDEN = 7168
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


def produce(
    x: torch.Tensor,
    weight: torch.Tensor,
    peers: torch.Tensor,
    buffers: ReceiveBuffers,
    *,
    rank: int,
    release_early: bool = False,
) -> None:
    """Store this rank's ``x [B, K] @ weight [D, K].T`` into slot ``rank`` of every peer.

    bf16, contiguous; 1 <= B <= 16, K a multiple of 128 up to 1536, 2112 or 4224, D a multiple of 64. ``peers [ranks]``
    int64 on the device: base addresses of all ranks' ``received``, this rank's own among them. ``weight`` is read
    before the kernel waits for the launch before it. ``release_early``: ``consume`` may start before that wait is over;
    only where what that one reads early has been written when this launch begins. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("weight", weight, dtypes=bf16, shape=(None, None))
    hidden, depth = weight.shape
    check_one_of("weight.shape[1]", depth, DEPTHS)
    check_tensor("x", x, dtypes=bf16, shape=(None, depth), like=weight)
    ranks, max_rows = check_buffers(buffers, x.shape[0], hidden, weight)
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(ranks,), like=weight, alignment_bytes=8)
    check_one_of("rank", rank, range(ranks))
    check_on_gpu("weight", weight)
    fields = {"depth": depth, "hidden": hidden, "ranks": ranks, "max_rows": max_rows, "release_early": release_early}
    compiled_kernel("proj_allreduce.kernel", "compile_produce", rows=x.shape[0], **fields)(
        x.data_ptr(), weight.data_ptr(), peers.data_ptr(), buffers.control.data_ptr(), rank, current_stream(x)
    )


@dataclass(frozen=True)
class _Operands:
    """Addresses of what both consumers take, in the order of the kernel, and what of it changes the machine code."""

    addresses: tuple[int, ...]
    fields: dict[str, Any]


def _check_consumer(
    residual: torch.Tensor | None, snapshot_part: Sequence[torch.Tensor] | None, query_norm: torch.Tensor,
    query: torch.Tensor, norm_weight: torch.Tensor, prefix: torch.Tensor, out: torch.Tensor,
) -> _Operands:
    import torch

    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    rows, hidden = out.shape
    check_tensor("prefix", prefix, dtypes=bf16, shape=(rows, hidden), like=out, contiguous=False)
    if residual is not None:
        check_tensor("residual", residual, dtypes=bf16, shape=(rows, hidden), like=out)
    parts, paired = (0, 0, 0), False
    if snapshot_part is not None:
        if len(snapshot_part) not in (2, 3):
            accepted = "maximum, denominator, weighted sum, or both statistics in one and weighted sum"
            raise refuse("snapshot_part", f"{len(snapshot_part)} tensors", accepted)
        *stats, weighted = snapshot_part
        check_tensor("snapshot_part.weighted", weighted, dtypes=fp32, shape=(rows, hidden), like=out)
        if len(stats) == 1:
            check_tensor("snapshot_part.stats", stats[0], dtypes=fp32, shape=(rows, 2), like=out, alignment_bytes=4)
            parts = (stats[0].data_ptr(), stats[0].data_ptr() + 4, weighted.data_ptr())
            paired = rows > 1
        else:
            for name, tensor in zip(("maximum", "denominator"), stats, strict=True):
                check_tensor(f"snapshot_part.{name}", tensor, dtypes=fp32, shape=(rows,), like=out, alignment_bytes=4)
            parts = (stats[0].data_ptr(), stats[1].data_ptr(), weighted.data_ptr())
    for name, tensor in (("query_norm", query_norm), ("query", query), ("norm_weight", norm_weight)):
        check_tensor(name, tensor, dtypes=bf16, shape=(hidden,), like=out)
    strided = rows > 1 and prefix.stride(0) != hidden
    if strided and prefix.stride(0) < hidden:
        raise refuse("prefix.stride", prefix.stride(), f"rows at least {hidden} values apart")
    return _Operands(
        addresses=(
            0 if residual is None else residual.data_ptr(),
            *parts,
            query_norm.data_ptr(),
            query.data_ptr(),
            norm_weight.data_ptr(),
            prefix.data_ptr(),
            out.data_ptr(),
        ),
        fields={
            "rows": rows,
            "hidden": hidden,
            "residual": residual is not None,
            "snapshots": snapshot_part is not None,
            "prefix_stride": prefix.stride(0) if strided else 0,
            "paired_stats": paired,
        },
    )


def consume(
    buffers: ReceiveBuffers, residual: torch.Tensor | None, snapshot_part: Sequence[torch.Tensor] | None,
    query_norm: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, prefix: torch.Tensor, out: torch.Tensor,
    *,
    release_next: bool = True,
) -> torch.Tensor:
    """Wait for all ranks' partial rows; write the new ``prefix [B, D]`` and the normalised ``out [B, D]``, both bf16.

    ``residual [B, D]`` bf16 (None: the prefix restarts here; it may be ``prefix`` itself). ``prefix`` may have any row
    stride of a multiple of 8 values. ``snapshot_part``: largest logit ``[B]``, denominator ``[B]``, weighted sum
    ``[B, D]``, fp32, or ``stats [B, 2]`` and weighted sum as ``attn_res.snapshot_part`` writes them (None: no snapshot
    yet). ``query_norm``, ``query``, ``norm_weight [D]`` bf16. ``release_next`` lets the next launch on the stream start
    while this one waits. It must be False where several ranks share a GPU: such a launch could fill the SMs that a peer
    needs in order to push. Raises UserError before any launch.
    """
    import torch

    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(None, None))
    rows, hidden = out.shape
    ranks, max_rows = check_buffers(buffers, rows, hidden, out)
    operands = _check_consumer(residual, snapshot_part, query_norm, query, norm_weight, prefix, out)
    check_on_gpu("out", out)
    fields = {**operands.fields, "ranks": ranks, "max_rows": max_rows, "release_next": release_next}
    run = compiled_kernel("proj_allreduce.kernel", "compile_consume", **fields)
    run(buffers.received.data_ptr(), buffers.control.data_ptr(), *operands.addresses, current_stream(out))
    return out


def consume_gathered(
    slots: TailSlots, residual: torch.Tensor | None, snapshot_part: Sequence[torch.Tensor] | None,
    query_norm: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, prefix: torch.Tensor, out: torch.Tensor,
    *,
    empty_parts: bool = True,
    release_next: bool = True,
) -> torch.Tensor:
    """``consume`` of the rows that peers store by columns into ``slots.gathered``; the slots are empty again after it.

    Operands as in ``consume``, D = 7168: the new prefix is ``gathered`` plus ``residual`` (None: the embedding starts
    the prefix). At a layer that takes a snapshot ``prefix`` is that snapshot's place, ``snapshots[:, k]``, and the next
    ``consume`` has no residual. ``empty_parts``: ``latent_tail.up`` precedes, and its latent and shared slots (of as
    many rows) are emptied too; False where nothing was sent through them, as behind the embedding.

    The launch before it must let it start only after its own dependency wait (``up`` with ``release_late``), or must
    not be a programmatic predecessor. ``release_next`` as in ``consume``. Raises UserError before any launch.
    """
    import torch

    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(None, GATHERED_HIDDEN), like=slots.gathered)
    rows = out.shape[0]
    check_slots(slots, rows)
    operands = _check_consumer(residual, snapshot_part, query_norm, query, norm_weight, prefix, out)
    check_on_gpu("out", out)
    fields = {**operands.fields, "ranks": slots.ranks, "max_rows": 0, "release_next": release_next}
    run = compiled_kernel(
        "proj_allreduce.kernel", "compile_consume_gathered", gathered=True, empties=empty_parts, **fields
    )
    run(
        slots.gathered.data_ptr(),
        slots.latent.data_ptr(),
        slots.shared.data_ptr(),
        *operands.addresses,
        current_stream(out),
    )
    return out
