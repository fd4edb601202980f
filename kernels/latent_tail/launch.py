"""LatentMoE tail on the current GPU, one rank's three launches.

    slots = TailSlots.allocate(ranks=8, max_rows=16, device="cuda")     # once; addresses exchanged with the peers
    peers = TailPeers.of([slots_of_rank_0, ...])                        # or from addresses of mapped peer memory
    send(latent, shared, peers, rank)                                   # this rank's parts to every rank
    up(slots, norm_weight, up_weight, peers, rank, rows)                # sum, norm, product, to every rank
    collect(slots, out, prefix)                                         # all ranks' outputs; slots empty again

``expert_gemv_push`` and ``send_shared(shared, peers, rank)`` together do what ``send`` does.

Shapes: T ranks, R rows (1 to 16), 3584 latent, 7168 hidden, N = 7168 / T outputs of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.latent_tail.reference import EPS
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

LATENT = 3584
HIDDEN = 7168
RANK_COUNTS = (1, 2, 4, 8, 16)
MAX_ROWS = 16
ROW_LIMITS = (1, 4, 16)  # of the compiled forms of ``up``, by shared memory
EMPTY = -1  # as int16


@dataclass(frozen=True, kw_only=True)
class TailSlots:
    """One rank's landing places, bf16; a call with R rows uses the front of each, packed for R rows."""

    latent: torch.Tensor  # [T, max rows, 3584]
    shared: torch.Tensor  # [T, max rows, N]
    gathered: torch.Tensor  # [max rows, 7168]

    @classmethod
    def allocate(cls, *, ranks: int, max_rows: int, device: torch.device | str) -> TailSlots:
        """Empty slots. Peers store into them: where ranks are processes, allocate in memory that they can map."""
        import torch

        check_one_of("ranks", ranks, RANK_COUNTS)
        check_one_of("max_rows", max_rows, range(1, MAX_ROWS + 1))

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, EMPTY, dtype=torch.int16, device=device).view(torch.bfloat16)

        return cls(
            latent=empty(ranks, max_rows, LATENT),
            shared=empty(ranks, max_rows, HIDDEN // ranks),
            gathered=empty(max_rows, HIDDEN),
        )

    @property
    def ranks(self) -> int:
        return int(self.latent.shape[0])

    @property
    def max_rows(self) -> int:
        return int(self.latent.shape[1])


@dataclass(frozen=True, kw_only=True)
class TailPeers:
    """Addresses of every rank's slots as this GPU sees them, int64 [T] on this GPU, this rank's own included."""

    latent: torch.Tensor
    shared: torch.Tensor
    gathered: torch.Tensor
    max_rows: int

    @classmethod
    def of(cls, slots: Sequence[TailSlots]) -> TailPeers:
        """Peers whose slots are at hand as tensors (ranks on one GPU, or symmetric memory), in rank order."""
        import torch

        def table(name: str) -> torch.Tensor:
            addresses = [getattr(one, name).data_ptr() for one in slots]
            return torch.tensor(addresses, dtype=torch.int64, device=slots[0].latent.device)

        return cls(
            latent=table("latent"), shared=table("shared"), gathered=table("gathered"), max_rows=slots[0].max_rows
        )

    @classmethod
    def loopback_fabric(cls, slots: TailSlots, *, rank: int, rows: int) -> TailPeers:
        """Peers of a rank that has none: what it sends to rank p lands in its own slots as if rank p had sent it.

        For calls with exactly ``rows`` rows. Every slot and every column is filled, each once, by this rank's data.
        """
        import torch

        check_one_of("rank", rank, range(slots.ranks))
        check_slots(slots, rows)
        # A call stores at slot ``rank``, or at column rank x N, of the address of peer p.
        offsets = torch.arange(slots.ranks, device=slots.latent.device, dtype=torch.int64) - rank
        shard_bytes = HIDDEN // slots.ranks * 2
        return cls(
            latent=slots.latent.data_ptr() + offsets * (rows * LATENT * 2),
            shared=slots.shared.data_ptr() + offsets * (rows * shard_bytes),
            gathered=slots.gathered.data_ptr() + offsets * shard_bytes,
            max_rows=rows,
        )

    @property
    def ranks(self) -> int:
        return int(self.latent.shape[0])


def check_peers(peers: TailPeers, rank: int, rows: int, like: torch.Tensor) -> None:
    import torch

    check_one_of("ranks of peers", peers.ranks, RANK_COUNTS)
    for name in ("latent", "shared", "gathered"):
        check_tensor(
            f"peers.{name}", getattr(peers, name), dtypes=(torch.int64,), shape=(peers.ranks,), like=like,
            alignment_bytes=8,
        )  # fmt: skip
    check_one_of("rank", rank, range(peers.ranks))
    if rows > peers.max_rows:
        raise refuse("rows", rows, f"at most {peers.max_rows}, for which the slots have room")


def check_slots(slots: TailSlots, rows: int) -> None:
    """Raise UserError unless the slots fit one another and have room for ``rows``."""
    import torch

    ranks, max_rows = slots.ranks, slots.max_rows
    check_one_of("ranks of slots", ranks, RANK_COUNTS)
    bf16 = (torch.bfloat16,)
    check_tensor("slots.latent", slots.latent, dtypes=bf16, shape=(ranks, max_rows, LATENT))
    shared_shape = (ranks, max_rows, HIDDEN // ranks)
    check_tensor("slots.shared", slots.shared, dtypes=bf16, shape=shared_shape, like=slots.latent)
    check_tensor("slots.gathered", slots.gathered, dtypes=bf16, shape=(max_rows, HIDDEN), like=slots.latent)
    check_one_of("rows", rows, range(1, max_rows + 1))


def send(latent: torch.Tensor, shared: torch.Tensor, peers: TailPeers, rank: int) -> None:
    """Push this rank's ``latent`` [R, 3584] (bf16 or fp32) to every rank and ``shared`` [R, 7168] bf16 to its owners.

    Raises UserError before any launch.
    """
    import torch

    check_tensor("latent", latent, dtypes=(torch.bfloat16, torch.float32), shape=(None, LATENT))
    rows = latent.shape[0]
    check_one_of("rows of latent", rows, range(1, MAX_ROWS + 1))
    check_tensor("shared", shared, dtypes=(torch.bfloat16,), shape=(rows, HIDDEN), like=latent)
    check_peers(peers, rank, rows, latent)
    check_on_gpu("latent", latent)
    run = compiled_kernel(
        "latent_tail.kernel", "compile_send", ranks=peers.ranks, fp32_latent=latent.dtype == torch.float32
    )
    run(
        latent.data_ptr(), shared.data_ptr(), peers.latent.data_ptr(), peers.shared.data_ptr(), rank, rows,
        current_stream(latent),
    )  # fmt: skip


def send_shared(shared: torch.Tensor, peers: TailPeers, rank: int) -> None:
    """The half of ``send`` that moves ``shared`` [R, 7168] bf16 to its owners, where the latent goes another way.

    Raises UserError before any launch.
    """
    import torch

    check_tensor("shared", shared, dtypes=(torch.bfloat16,), shape=(None, HIDDEN))
    rows = shared.shape[0]
    check_one_of("rows of shared", rows, range(1, MAX_ROWS + 1))
    check_peers(peers, rank, rows, shared)
    check_on_gpu("shared", shared)
    run = compiled_kernel("latent_tail.kernel", "compile_send", ranks=peers.ranks, shared_only=True)
    run(0, shared.data_ptr(), peers.latent.data_ptr(), peers.shared.data_ptr(), rank, rows, current_stream(shared))


def up(
    slots: TailSlots,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    peers: TailPeers,
    rank: int,
    rows: int,
    eps: float = EPS,
    *,
    release_late: bool = False,
) -> None:
    """Wait for every rank's parts in ``slots`` and push this rank's N outputs of ``rows`` rows to every rank.

    ``norm_weight`` [3584] bf16; ``up_weight`` [N, 3584] bf16, rows from rank x N of the whole matrix. ``release_late``:
    the next launch on the stream starts only once all launches before this one have ended, so it may read and write
    what they did without a wait of its own; ``proj_allreduce.consume_gathered`` needs that. Raises UserError before any
    launch.
    """
    import torch

    check_slots(slots, rows)
    check_tensor("norm_weight", norm_weight, dtypes=(torch.bfloat16,), shape=(LATENT,), like=slots.latent)
    outputs = HIDDEN // slots.ranks
    check_tensor("up_weight", up_weight, dtypes=(torch.bfloat16,), shape=(outputs, LATENT), like=slots.latent)
    check_peers(peers, rank, rows, slots.latent)
    if peers.ranks != slots.ranks:
        raise refuse("ranks of peers", peers.ranks, f"{slots.ranks}, those of the slots")
    check_on_gpu("slots.latent", slots.latent)
    limit = min(one for one in ROW_LIMITS if one >= rows)
    run = compiled_kernel(
        "latent_tail.kernel", "compile_up", ranks=slots.ranks, max_rows=limit, release_late=release_late
    )
    run(
        slots.latent.data_ptr(), slots.shared.data_ptr(), norm_weight.data_ptr(), up_weight.data_ptr(),
        peers.gathered.data_ptr(), rank, rows, eps, current_stream(slots.latent),
    )  # fmt: skip


def collect(slots: TailSlots, out: torch.Tensor, prefix: torch.Tensor | None = None) -> None:
    """Wait for all ranks' outputs, write them (plus ``prefix``) to ``out``, both [R, 7168] bf16, and empty the slots.

    Raises UserError before any launch.
    """
    import torch

    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(None, HIDDEN), like=slots.latent)
    rows = out.shape[0]
    check_slots(slots, rows)
    if prefix is not None:
        check_tensor("prefix", prefix, dtypes=(torch.bfloat16,), shape=(rows, HIDDEN), like=out)
    check_on_gpu("out", out)
    run = compiled_kernel("latent_tail.kernel", "compile_collect", ranks=slots.ranks, prefix=prefix is not None)
    run(
        slots.gathered.data_ptr(), slots.latent.data_ptr(), slots.shared.data_ptr(),
        0 if prefix is None else prefix.data_ptr(), out.data_ptr(), rows, current_stream(out),
    )  # fmt: skip
