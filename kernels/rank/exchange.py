"""Where the pushes of a rank land.

*Emulated* ranks share a process (and a GPU): the push to peer r lands in r's slots. *Loop-back* runs one rank of T:
the push to peer r lands in this rank's own slot r, so it sends and polls as much as one of T and all peers say what it
says. The same slots serve both; only the destination differs. Ranks of other processes have their slots in *symmetric
memory* of torch, reached by unicast stores alone; W processes may stand for the T ranks of a layout, each for T / W of
them (``kernels/multi_gpu/symmetric.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.multi_gpu.symmetric import SharedBlock
    from k3sim.kernels.rank.state import Rank


@dataclass
class Mailbox:
    """A rank's slots for the reference backend: NaN where nothing has arrived. ``gathered`` is one row a token."""

    slots: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str) -> torch.Tensor:
        """What arrived, copied; the slots are empty again. What has not arrived is a mistake of the program's order."""
        slot = self.slots[name]
        assert not bool(slot.isnan().any()), f"{name}: polled before every rank has pushed"
        taken = slot.clone()
        slot.fill_(float("nan"))
        return taken


@dataclass
class ReferenceExchange:
    """Mailboxes of all ranks that take part; ``loop_back``: there is one, and it stands for all of them."""

    mailboxes: Sequence[Mailbox]
    rank: int
    num_ranks: int
    loop_back: bool

    @property
    def own(self) -> Mailbox:
        return self.mailboxes[0 if self.loop_back else self.rank]

    def landings(self) -> Iterator[tuple[int, Mailbox, int]]:
        """(peer, its mailbox, slot in it) of a push to everyone."""
        for peer in range(self.num_ranks):
            if self.loop_back:
                yield peer, self.mailboxes[0], peer
            else:
                yield peer, self.mailboxes[peer], self.rank

    def push(self, name: str, values: torch.Tensor) -> None:
        """``values`` into this rank's slot of every peer."""
        for _, mailbox, slot in self.landings():
            mailbox.slots[name][slot].copy_(values)


def connect_reference(ranks: Sequence[Rank], *, loop_back: bool = False) -> None:
    """Give each rank its ``exchange``. ``loop_back``: one rank that stands for all ``tp`` of its layout."""
    import torch

    num_ranks = ranks[0].layout.tp
    assert len(ranks) == (1 if loop_back else num_ranks), "every rank takes part, or one in loop-back"
    mailboxes = []
    for rank in ranks:
        hidden, moe = rank.architecture.hidden_size, rank.architecture.moe
        candidates = rank.buffers["head.top"].shape[1]
        shapes = {
            "gathered": (rank.rows, hidden),
            "embed": (num_ranks, rank.rows, hidden),
            "attention": (num_ranks, rank.rows, hidden),
            "ffn": (num_ranks, rank.rows, hidden),
            "latent": (num_ranks, rank.rows, moe.latent_size),
            "shared": (num_ranks, rank.rows, hidden // num_ranks),
            "route": (num_ranks, rank.rows, (moe.num_experts + moe.latent_size) // num_ranks),
            "logits": (num_ranks, rank.rows, rank.architecture.vocab_size // num_ranks),
            "top": (num_ranks, rank.rows, candidates),
            "ids": (num_ranks, rank.rows, candidates),
        }
        fp32 = ("route", "logits", "top", "ids")
        mailboxes.append(
            Mailbox(
                {
                    name: torch.full(
                        shape, torch.nan, dtype=torch.float32 if name in fp32 else rank.dtype, device=rank.device
                    )
                    for name, shape in shapes.items()
                }
            )
        )
    for rank in ranks:
        rank.exchange = ReferenceExchange(mailboxes, rank.index, num_ranks, loop_back)


@dataclass
class KernelExchange:
    """A rank's slots in GPU memory and the addresses of its peers', as the exchanging kernels take them.

    Sums of partial rows (all-reduces, pushing projections) share ``sums``: every rank makes those calls in the same
    order. ``shared_gpu``: several ranks poll on one GPU.
    """

    sums: Any  # ReceiveBuffers
    sum_peers: torch.Tensor
    tail: Any  # TailSlots
    tail_peers: Any  # TailPeers
    row_peers: torch.Tensor  # where a whole gathered row goes, one address a rank or GPU
    front: torch.Tensor
    front_peers: torch.Tensor
    candidates: torch.Tensor  # [2, B, 64] int32: fp32 logits, then ids, of this rank
    candidate_slots: torch.Tensor  # [2, T, B, 64] int32
    logit_slots: torch.Tensor | None  # [B, T, V / T] fp32
    rank: int
    shared_gpu: bool
    loop_back: bool
    peers: Sequence[KernelExchange] = ()
    # Ranks of other processes: those of their candidate and logit slots that this one fills, as tensors of this GPU,
    # and a barrier on the stream.
    mapped_candidates: Sequence[torch.Tensor] = ()
    mapped_logits: Sequence[torch.Tensor] = ()
    barrier: Callable[[], None] | None = None
    block: SharedBlock | None = None

    @property
    def top(self) -> torch.Tensor:
        import torch

        return self.candidates[0].view(torch.float32)

    @property
    def ids(self) -> torch.Tensor:
        return self.candidates[1]

    # Candidates and logits are copied between ranks of one process, who wait for one another at an event; a copy is a
    # product with one, because a plain one may become a copy-engine node.
    def push_candidates(self) -> None:
        import torch

        if self.loop_back:
            torch.mul(self.candidates[:, None].expand_as(self.candidate_slots), 1, out=self.candidate_slots)
        for peer in self.peers:
            torch.mul(self.candidates, 1, out=peer.candidate_slots[:, self.rank])
        for slots in self.mapped_candidates:
            torch.mul(self.candidates[:, None].expand_as(slots), 1, out=slots)
        if self.barrier is not None:
            self.barrier()

    def arrived_candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        return self.candidate_slots[0].view(torch.float32), self.candidate_slots[1]

    def push_logits(self, logits: torch.Tensor) -> None:
        import torch

        assert self.logit_slots is not None
        if self.loop_back:
            torch.mul(logits[:, None].expand_as(self.logit_slots), 1, out=self.logit_slots)
        for peer in self.peers:
            assert peer.logit_slots is not None
            torch.mul(logits, 1, out=peer.logit_slots[:, self.rank])
        for slots in self.mapped_logits:
            torch.mul(logits[:, None].expand_as(slots), 1, out=slots)
        if self.barrier is not None:
            self.barrier()

    def all_logits(self) -> torch.Tensor:
        """[B, V], the slots as they lie."""
        assert self.logit_slots is not None
        return self.logit_slots.flatten(1)


def connect_kernels(ranks: Sequence[Rank], *, loop_back: bool = False) -> None:
    """Give each rank of this process its slots and its peers' addresses. ``loop_back``: one rank that stands for all.

    Raises UserError for a number of ranks that an exchanging kernel does not take.
    """
    import torch

    from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots
    from k3sim.kernels.proj_allreduce.launch import make_receive_buffers
    from k3sim.kernels.router_topk.launch import front_peers, front_peers_looped, make_front_slots

    num_ranks = ranks[0].layout.tp
    assert len(ranks) == (1 if loop_back else num_ranks), "every rank takes part, or one in loop-back"
    rows, hidden, device = ranks[0].rows, ranks[0].architecture.hidden_size, ranks[0].device
    samples_whole = "sharded-router" not in ranks[0].program.path.switches
    count = ranks[0].buffers["head.top"].shape[1]
    vocab = ranks[0].architecture.vocab_size // num_ranks
    sums = [make_receive_buffers(ranks=num_ranks, max_rows=rows, hidden=hidden, device=device) for _ in ranks]
    tails = [TailSlots.allocate(ranks=num_ranks, max_rows=rows, device=device) for _ in ranks]
    fronts = [make_front_slots(ranks=num_ranks, max_rows=rows, device=device) for _ in ranks]

    def table(addresses: Sequence[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=device)

    sum_slot_bytes = rows * hidden * 2
    exchanges = []
    for position, rank in enumerate(ranks):
        if loop_back:
            base = sums[0].received.data_ptr()
            sum_peers = table([base + (peer - rank.index) * sum_slot_bytes for peer in range(num_ranks)])
            tail_peers = TailPeers.loopback_fabric(tails[0], rank=rank.index, rows=rows)
            row_peers = table([tails[0].gathered.data_ptr()] * num_ranks)
            front_table = front_peers_looped(fronts[0])
        else:
            sum_peers = table([one.received.data_ptr() for one in sums])
            tail_peers = TailPeers.of(tails)
            row_peers = tail_peers.gathered
            front_table = front_peers([one.data_ptr() for one in fronts], rank.index, fronts[position])
        exchanges.append(
            KernelExchange(
                sums=sums[position],
                sum_peers=sum_peers,
                tail=tails[position],
                tail_peers=tail_peers,
                row_peers=row_peers,
                front=fronts[position],
                front_peers=front_table,
                candidates=torch.zeros((2, rows, count), dtype=torch.int32, device=device),
                candidate_slots=torch.zeros((2, num_ranks, rows, count), dtype=torch.int32, device=device),
                logit_slots=torch.zeros((rows, num_ranks, vocab), device=device) if samples_whole else None,
                rank=rank.index,
                shared_gpu=len(ranks) > 1,
                loop_back=loop_back,
            )
        )
    for rank, exchange in zip(ranks, exchanges, strict=True):
        exchange.peers = () if loop_back else exchanges
        rank.exchange = exchange


SLOT_ALIGNMENT = 256  # bytes


def slot_layout(num_ranks: int, rows: int, hidden: int, latent: int, experts: int, vocab: int, candidates: int) -> dict[
    str, tuple[int, tuple[int, ...], int]
]:  # fmt: skip
    """Every slot tensor of a rank in one block of memory: offset in bytes, shape, bytes of an element."""
    from k3sim.kernels.proj_allreduce.launch import BUFFERS

    shapes = {
        "sums": ((BUFFERS, num_ranks, rows, hidden), 2),
        "latent": ((num_ranks, rows, latent), 2),
        "shared": ((num_ranks, rows, hidden // num_ranks), 2),
        "gathered": ((rows, hidden), 2),
        "front": ((num_ranks, rows, (experts + latent) // num_ranks), 4),
        "candidates": ((2, num_ranks, rows, candidates), 4),
        "logits": ((rows, num_ranks, vocab), 4),
    }
    found, offset = {}, 0
    for name, (shape, element_bytes) in shapes.items():
        found[name] = (offset, shape, element_bytes)
        size = math.prod(shape) * element_bytes
        offset += -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    found["end"] = (offset, (), 1)
    return found


def connect_symmetric(rank: Rank, group: Any) -> None:
    """Give the one rank of this process its slots in symmetric memory, mapped by all processes of ``group``.

    Every process of the group calls it, with ranks of one layout and as many rows, whose index is the process's. There
    may be fewer processes than the layout has ranks, if they divide them: W GPUs then stand for all T ranks
    (``kernels/multi_gpu/symmetric.py``), each pushing as much as one of T, and every slot is filled. Raises UserError
    where they do not divide them, or where torch mapped a multicast object, which this project does not use.
    """
    import torch
    import torch.distributed as dist

    from k3sim.kernels.multi_gpu.symmetric import check_standing, symmetric_block

    num_ranks, num_gpus = rank.layout.tp, dist.get_world_size(group)
    check_standing(num_ranks, num_gpus)
    assert rank.index == dist.get_rank(group), "GPU g computes as rank g does"
    places = places_of(rank)
    rank.exchange = exchange_in_block(rank, places, symmetric_block(places["end"][0], rank.device, group))
    torch.cuda.synchronize()
    dist.barrier(group)


def places_of(rank: Rank) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """``slot_layout`` for a rank's sizes."""
    architecture, num_ranks = rank.architecture, rank.layout.tp
    return slot_layout(
        num_ranks, rank.rows, architecture.hidden_size, architecture.moe.latent_size, architecture.moe.num_experts,
        architecture.vocab_size // num_ranks, rank.buffers["head.top"].shape[1],
    )  # fmt: skip


def exchange_in_block(
    rank: Rank, places: dict[str, tuple[int, tuple[int, ...], int]], block: SharedBlock
) -> KernelExchange:
    """Slots of ``rank`` in its block, emptied, and where its pushes to each rank of the layout land."""
    import torch

    from k3sim.kernels.latent_tail.launch import EMPTY, TailPeers, TailSlots
    from k3sim.kernels.proj_allreduce.launch import CONTROL_WORDS, ReceiveBuffers

    num_ranks, num_gpus, rows = rank.layout.tp, block.num_gpus, rank.rows
    dtypes = {"front": torch.float32, "candidates": torch.int32, "logits": torch.float32}

    def tensor(name: str, owner: torch.Tensor) -> torch.Tensor:
        offset, shape, element_bytes = places[name]
        part = owner[offset : offset + math.prod(shape) * element_bytes]
        return part.view(dtypes.get(name, torch.bfloat16)).view(shape)

    def slot_bytes(name: str, first_axis: int) -> int:
        _, shape, element_bytes = places[name]
        return math.prod(shape[first_axis:]) * element_bytes

    def addresses(name: str, slot: int, *, kernel_adds_rank: bool = True) -> torch.Tensor:
        return block.table(places[name][0], slot, num_ranks, kernel_adds_rank=kernel_adds_rank)

    block.own.fill_(0xFF)  # EMPTY of the tail and of the front: all bits set
    assert EMPTY == -1
    tensor("sums", block.own).fill_(-0.0)
    shard_bytes = rank.architecture.hidden_size // num_ranks * 2
    # Slots of this rank on every GPU: the T / W that it fills.
    mine = slice(block.rank, None, num_gpus)
    samples_whole = "sharded-router" not in rank.program.path.switches
    return KernelExchange(
        sums=ReceiveBuffers(
            received=tensor("sums", block.own),
            control=torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=rank.device),
        ),
        sum_peers=addresses("sums", slot_bytes("sums", 2)),
        tail=TailSlots(**{name: tensor(name, block.own) for name in ("latent", "shared", "gathered")}),
        tail_peers=TailPeers(
            latent=addresses("latent", slot_bytes("latent", 1)),
            shared=addresses("shared", slot_bytes("shared", 1)),
            gathered=addresses("gathered", shard_bytes),
            max_rows=rows,
        ),
        # Once a GPU, not once a rank: a second copy could arrive after the first has been taken and its place emptied.
        row_peers=torch.tensor(
            [one + places["gathered"][0] for one in block.addresses], dtype=torch.int64, device=rank.device
        ),
        front=tensor("front", block.own),
        front_peers=addresses("front", slot_bytes("front", 1), kernel_adds_rank=False),
        candidates=torch.zeros((2, rows, places["candidates"][1][3]), dtype=torch.int32, device=rank.device),
        candidate_slots=tensor("candidates", block.own),
        logit_slots=tensor("logits", block.own) if samples_whole else None,
        rank=rank.index,
        shared_gpu=False,
        loop_back=False,
        mapped_candidates=[tensor("candidates", one)[:, mine] for one in block.peers],
        mapped_logits=[tensor("logits", one)[:, mine] for one in block.peers] if samples_whole else (),
        barrier=block.barrier,
        block=block,
    )
