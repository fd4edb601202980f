"""Public calls of the stock path's kernels between ranks: checks, then one launch on the current stream.

    embedding(ids, table, rows, first_id=rank * table.shape[0])
    all_reduce(partial, out, peers, buffers, rank=rank)         # buffers and peers as for proj_allreduce

``launch.py`` says what all of them share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.proj_allreduce.launch import ReceiveBuffers, check_buffers
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream
from k3sim.kernels.unfused.launch import MAX_EXCHANGED_ROWS, MAX_HIDDEN, MAX_RANKS, MAX_ROWS

if TYPE_CHECKING:
    import torch


def _check_lookup(ids: torch.Tensor, table: torch.Tensor, first_id: int) -> tuple[int, int, int]:
    """Rows, ids of this rank, hidden width."""
    import torch

    check_tensor("table", table, dtypes=(torch.bfloat16,), shape=(None, None))
    num_ids, hidden = table.shape
    check_one_of("table.shape[1]", hidden, range(64, MAX_HIDDEN + 1, 64))
    if num_ids < 1:
        raise refuse("table.shape[0]", num_ids, "1 or more")
    if not 0 <= first_id < 2**31 - num_ids:
        raise refuse("first_id", first_id, f"0 to {2**31 - num_ids - 1}")
    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(None,), like=table, alignment_bytes=4)
    return int(ids.shape[0]), int(num_ids), int(hidden)


def embedding(
    ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, first_id: int = 0, pdl: bool = False
) -> torch.Tensor:
    """``out [B, D]`` bf16: rows of ``table [N, D]`` bf16 at ``ids [B]`` int32 less ``first_id``, 0 where outside it.

    1 <= B <= 256, D a multiple of 64 up to 8192. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    rows, num_ids, hidden = _check_lookup(ids, table, first_id)
    check_one_of("ids.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(rows, hidden), like=table)
    check_on_gpu("table", table)
    run = compiled_kernel("unfused.exchange", "compile_embedding", hidden=hidden, peers=0, pdl=pdl)
    run(ids.data_ptr(), table.data_ptr(), out.data_ptr(), first_id, num_ids, rows, current_stream(table))
    return out


def embedding_push(
    ids: torch.Tensor, table: torch.Tensor, peers: torch.Tensor, *, first_id: int, pdl: bool = False
) -> None:
    """As ``embedding``, but the rank that owns an id stores its row to row b of every peer's ``[max rows, D]`` slots.

    ``peers [T]`` int64: base addresses of all ranks' slots, such as ``TailPeers.gathered`` of ``latent_tail``, whose
    ``collect`` then waits for the rows. Every row comes from one rank, if the ranks' tables are the vocabulary between
    them: ids below 0 are rows of 0 from the rank with ``first_id`` 0. An id beyond the vocabulary is stored by nobody.
    1 <= B <= 16. The rule for two uses of the same slots is that of ``latent_tail``. Raises UserError before any
    launch.
    """
    import torch

    rows, num_ids, hidden = _check_lookup(ids, table, first_id)
    check_one_of("ids.shape[0]", rows, range(1, MAX_EXCHANGED_ROWS + 1))
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(None,), like=table, alignment_bytes=8)
    check_one_of("peers.shape[0]", peers.shape[0], range(1, MAX_RANKS + 1))
    check_on_gpu("table", table)
    run = compiled_kernel("unfused.exchange", "compile_embedding", hidden=hidden, peers=int(peers.shape[0]), pdl=pdl)
    run(ids.data_ptr(), table.data_ptr(), peers.data_ptr(), first_id, num_ids, rows, current_stream(table))


def all_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    peers: torch.Tensor,
    buffers: ReceiveBuffers,
    *,
    rank: int,
    release_next: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """``out [B, D]`` bf16: the sum of all ranks' ``x [B, D]`` bf16 in rank order; the same bits on every rank.

    1 <= B <= 16, D a multiple of 64 up to 8192; ``out`` may be ``x``. ``buffers`` and ``peers [ranks]`` int64, the
    addresses of all ranks' ``received``, this rank's own among them, as for ``proj_allreduce``; every rank makes the
    same calls with the same number of rows. ``release_next`` lets the next launch on the stream start while this one
    waits; it must be False where several ranks share a GPU, as such a launch could fill the SMs that a peer needs in
    order to push. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("x", x, dtypes=bf16, shape=(None, None))
    rows, hidden = x.shape
    check_tensor("out", out, dtypes=bf16, shape=(rows, hidden), like=x)
    ranks, max_rows = check_buffers(buffers, rows, hidden, x)
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(ranks,), like=x, alignment_bytes=8)
    check_one_of("rank", rank, range(ranks))
    check_on_gpu("x", x)
    run = compiled_kernel(
        "unfused.exchange",
        "compile_all_reduce",
        rows=rows,
        hidden=hidden,
        ranks=ranks,
        max_rows=max_rows,
        release_next=release_next,
        pdl=pdl,
    )
    run(
        x.data_ptr(), peers.data_ptr(), buffers.received.data_ptr(), buffers.control.data_ptr(), out.data_ptr(), rank,
        current_stream(x),
    )  # fmt: skip
    return out
