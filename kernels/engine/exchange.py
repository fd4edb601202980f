"""Where the pushes of a rank land.

*Emulated* ranks share a process (and a GPU): the push to peer r lands in r's slots. *Loop-back* runs one rank of T:
the push to peer r lands in this rank's own slot r, so it sends and polls as much as one of T and all peers say what it
says. The same slots serve both; only the destination differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.engine.state import Rank


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
