"""What the lists of all layers are put together from: buffers and their sizes, versions, waits for what was made.

The constants are those of the kernel's ring and hand-overs; ``schedule``, ``mla_schedule`` and ``moe_schedule`` make
instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from k3sim.kernels.megakernel.instructions import Access, Instruction, Region, Stream, Wait
from k3sim.model.architecture import Architecture
from k3sim.model.program import Call, Program, Weight

COLUMNS = 56  # of an exchange an SM: seven words of 16 bytes to a rank
PUSHED = 8  # outputs that leave in one word of 16 bytes
BUFFERS = 3  # receive buffers in rotation, as the fused path has them (kernels/device/lamport.py)
STAGE_BYTES = 14_336  # of the ring: one row of the hidden width
RING_STAGES = 15
PRODUCT_WARPS = 7  # that take turns at the stages of a pushed product
MAX_WINDOW = RING_STAGES - PRODUCT_WARPS  # stages under way, see ``kernel._await_stage``
HEAD_DIM = 128
OUTPUT_BYTES = 4  # of a product or a head: a bf16 value above the tag of its version, so that it is its own flag
HALVES = 2  # words of an fp32 value
LINE_BYTES = 128  # of a packet an SM: its 56 columns of the residual, then four fp32: x.x, x.probe, a.x, a.a
PACKETS = 3  # in rotation


def pushed_rows_per_stage(depth: int) -> int:
    """Rows of a pushed product in one stage: as many as fit of the eight that leave together, a power of two."""
    rows = PUSHED
    while rows * depth * 2 > STAGE_BYTES:
        rows //= 2
    return rows


@dataclass(frozen=True)
class Made:
    """Outputs of a call: the buffer, the version in it, and the wait for all of them."""

    buffer: str
    version: int
    wait: Wait


@dataclass
class ListBuilder:
    """The list as far as it has come."""

    program: Program
    num_sms: int
    architecture: Architecture
    queues: list[list[Instruction]]
    sizes: dict[str, int] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    exchanges: int = 0  # pushes so far
    made: dict[str, Made] = field(default_factory=dict)  # by stage, of the newest layer
    newest: str = ""  # stage of the newest outputs that a pushed product reads
    gathered: str = ""  # stage whose outputs are the columns of the next residual; none: an exchange's
    version: int = 0  # of the residual

    @property
    def hidden(self) -> int:
        return self.architecture.hidden_size

    @property
    def num_columns_sms(self) -> int:
        """SMs with columns of an exchange, each with 56."""
        return self.hidden // COLUMNS

    def packet(self, version: int) -> str:
        """The buffer of a version of residual and sums."""
        return f"packets {version % PACKETS}"

    def whole(self, buffer: str, num_bytes: int) -> Region:
        self.sizes[buffer] = max(self.sizes.get(buffer, 0), num_bytes)
        return Region(buffer=buffer, first=0, last=num_bytes)

    def part(self, buffer: str, first: int, count: int) -> Region:
        return Region(buffer=buffer, first=first, last=first + count)

    def dealt(self, count: int) -> Iterator[tuple[int, int, int]]:
        """``(sm, first, last)``: ``count`` rows dealt evenly, without the SMs that get none."""
        for sm in range(self.num_sms):
            first, last = (at * count // self.num_sms for at in (sm, sm + 1))
            if last > first:
                yield sm, first, last

    def residual_wait(self) -> tuple[Wait, ...]:
        """For all lines of the newest packet; the first is there at the launch."""
        return (Wait(counter=f"packets {self.version}", target=self.num_columns_sms),) if self.version else ()

    def residual_read(self) -> Access:
        """The newest packet."""
        newest = self.whole(self.packet(self.version), LINE_BYTES * self.num_columns_sms)
        return Access(region=newest, version=self.version)

    def words(self, stage: str, first: int, count: int) -> Region:
        """Outputs ``first`` to ``first + count`` of a stage."""
        return self.part(f"{stage} out", OUTPUT_BYTES * first, OUTPUT_BYTES * count)

    def makes(self, call: Call, stage: str, num_outputs: int, num_signals: int) -> Made:
        """Enter the outputs of a call, each of which is its own flag; ``num_signals``: instructions that write them."""
        counter = f"{call.index} {stage}"
        self.whole(f"{stage} out", OUTPUT_BYTES * num_outputs)
        self.flags.add(counter)
        self.made[stage] = Made(f"{stage} out", call.index + 1, Wait(counter=counter, target=num_signals))
        self.newest = stage
        return self.made[stage]

    def reads(self, stage: str) -> Access:
        """All outputs of a stage."""
        made = self.made[stage]
        return Access(region=self.whole(made.buffer, self.sizes[made.buffer]), version=made.version)

    def add(self, instruction: Instruction) -> None:
        """To the end of its SM's queue."""
        self.queues[instruction.sm].append(instruction)

    def rows_of_all(self, weights: Sequence[Weight], first: int, last: int) -> Iterator[Stream]:
        """Rows ``first`` to ``last`` of matrices that follow each other."""
        begin = 0
        for weight in weights:
            low, high = max(first, begin), min(last, begin + weight.num_outputs)
            if high > low:
                yield self.rows(weight, low - begin, high - low)
            begin += weight.num_outputs

    def rows(self, weight: Weight, first: int, count: int, rows_per_stage: int = 1) -> Stream:
        """Rows of a matrix through the ring."""
        row_bytes = weight.num_bytes // weight.num_outputs
        self.whole(weight.region, weight.num_bytes)
        region = self.part(weight.region, first * row_bytes, count * row_bytes)
        return Stream(region=region, stage_bytes=rows_per_stage * row_bytes)


def site_of(call: Call) -> str:
    """Whose norms and queries apply to the residual that a call reads."""
    return "attn_res.mixer" if call.stage.startswith(("kda.", "mla.")) else "attn_res.ffn"
