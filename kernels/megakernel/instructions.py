"""Instructions of a megakernel, and the list of them: a queue for each SM.

An SM runs its queue in order, in two strands: seven warps compute, and an eighth takes what belongs to an exchange
(REDUCE, COLLECT, FINISH, ADVANCE). A strand skips what is the other's; a KDA head needs all eight warps and so belongs
to both. Nothing else orders two instructions but counters: an instruction starts once the counters of
``waits`` have reached their targets, and adds one to those of ``signals`` when what it wrote is visible. A counter with
``is_flag`` lies in no memory of its own: the reader polls the written words until none reads "not arrived".

``reads`` and ``writes`` name bytes of buffers with the version that is meant, so that a list can be checked without
running it. ``streams`` are read ahead through the ring, at any time from the launch on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

INITIAL = 0  # version of what lies in memory before the launch
EMPTY = -1  # version of words that read "not arrived"


class Opcode(Enum):
    """What an SM does. Numbers are those of the records that the kernel reads."""

    FOLD_GEMV = 0  # mix and norm of the residual, then rows of a product
    FOLD_GEMV_SITU = 1  # as FOLD_GEMV, rows in pairs of gate and up, SiTU-GLU of each
    KDA_HEAD = 2  # one head of the recurrence
    GEMV_PUSH = 3  # rows of a product, each output to every rank
    REDUCE = 4  # columns of the exchanged product: sum over ranks, new residual, sums for its norm
    FINISH = 5  # empty what the last exchange left
    ADVANCE = 6  # count the launch
    # Of the latent mixture of experts; the kernel has no bodies of these yet (``launch``).
    FRONT_PUSH = 7  # mix and norm of the residual, rows of router and latent down-projection, to every rank
    SHARED_PUSH = 8  # rows of the shared experts' down-projection, each to the rank that owns its column
    ROUTE = 9  # the selected experts and their weights
    EXPERT_GATE_UP = 10  # rows of gate and up of selected experts, SiTU-GLU of each, times the expert's weight
    EXPERT_DOWN_PUSH = 11  # columns of the latent: sum over the selected experts, to every rank
    LATENT_REDUCE = 12  # columns of the latent: sum over ranks, part of its norm's sum
    TAIL_PUSH = 13  # norm of the latent, rows of its up-projection, the shared experts' parts, to every rank
    COLLECT = 14  # columns that other ranks have summed: new residual, sums for its norm
    # Of MLA, without bodies too.
    MLA_QUERY = 15  # norm of the query's latent, rows of its up-projection
    MLA_ABSORB = 16  # rows of the key's up-projection, which moves the query into the latent
    MLA_ATTEND = 17  # all heads over a page of the cache
    MLA_MERGE = 18  # columns of the heads' latent outputs from those of all pages
    MLA_LIFT = 19  # rows of the value's up-projection, times their gates


COMPUTING, EXCHANGING = 0, 1
NUM_STRANDS = 2
_EXCHANGES = (Opcode.REDUCE, Opcode.COLLECT, Opcode.FINISH, Opcode.ADVANCE)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Bytes [first, last) of a buffer."""

    buffer: str
    first: int
    last: int

    def overlaps(self, other: Region) -> bool:
        return self.buffer == other.buffer and self.first < other.last and other.first < self.last


@dataclass(frozen=True, kw_only=True)
class Access:
    """A region as it is read or written; ``version``: which writing of it is meant."""

    region: Region
    version: int = INITIAL


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Until ``counter`` has reached ``target``."""

    counter: str
    target: int


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Bytes that come through the ring: a region cut into stages of ``stage_bytes``, the last one shorter."""

    region: Region
    stage_bytes: int

    @property
    def num_stages(self) -> int:
        return -(-(self.region.last - self.region.first) // self.stage_bytes)

    @property
    def last_bytes(self) -> int:
        """Bytes of the last stage."""
        return self.region.last - self.region.first - (self.num_stages - 1) * self.stage_bytes


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of one SM.

    ``stage`` and ``layer`` are those of the program's call. ``first`` and ``count``: the outputs, columns or head that
    it computes. ``depth``: length of the sums of a product. ``buffer``: which of the receive buffers an exchange uses.
    ``packet``: which of the packets of residual and sums is the newest.
    ``site``: whose norms and queries apply. ``restarts``: the residual is the exchanged sum alone, without what was.
    """

    opcode: Opcode
    stage: str
    layer: int
    sm: int
    first: int = 0
    count: int = 0
    depth: int = 0
    buffer: int = 0
    packet: int = 0
    site: str = ""
    restarts: bool = False
    waits: tuple[Wait, ...] = ()
    signals: tuple[str, ...] = ()
    streams: tuple[Stream, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()

    @property
    def strands(self) -> tuple[int, ...]:
        """Which warps of the SM run it."""
        if self.opcode is Opcode.KDA_HEAD:
            return (COMPUTING, EXCHANGING)
        return (EXCHANGING,) if self.opcode in _EXCHANGES else (COMPUTING,)

    @property
    def name(self) -> str:
        """In messages."""
        return f"layer {self.layer} {self.stage} {self.opcode.name} SM {self.sm}"


def outputs_version(accesses: Iterable[Access]) -> int:
    """The version of the outputs of products and heads among ``accesses``; 0 where there are none."""
    return max((one.version for one in accesses if one.region.buffer.endswith(" out")), default=0)


@dataclass(frozen=True, kw_only=True)
class InstructionList:
    """``queues[sm]`` in order. ``flags``: counters that lie in the data. ``sizes``: bytes of every buffer."""

    queues: tuple[tuple[Instruction, ...], ...]
    sizes: Mapping[str, int]
    flags: frozenset[str] = field(default_factory=frozenset)

    def __iter__(self) -> Iterator[Instruction]:
        for queue in self.queues:
            yield from queue

    @property
    def counters(self) -> tuple[str, ...]:
        """Counters in memory, in the order in which they first appear."""
        names: dict[str, None] = {}
        for one in self:
            names.update(dict.fromkeys(wait.counter for wait in one.waits))
            names.update(dict.fromkeys(one.signals))
        return tuple(name for name in names if name not in self.flags)

    def strand(self, sm: int, strand: int) -> tuple[Instruction, ...]:
        """What one strand of an SM runs, in order."""
        return tuple(one for one in self.queues[sm] if strand in one.strands)

    def totals(self) -> dict[str, int]:
        """How often each counter is signalled in a launch."""
        found: dict[str, int] = {}
        for one in self:
            for counter in one.signals:
                found[counter] = found.get(counter, 0) + 1
        return found
