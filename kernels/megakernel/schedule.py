"""The instruction list of a megakernel, made from the program that the simulator reads.

Covered: layers of a KDA mixer and a dense FFN at one row, as the fused path of the project's own kernels has them
(``model/paths/own.py``), without the kernels of the head and the snapshots' parts. What a call of the program becomes:

==========================================  ======================================================================
``skinny_gemv.tiled``, ``tiled_situ``       rows dealt to all SMs; each SM folds and normalises the residual itself,
                                            so that its norm is no hand-over of its own
``kda_decode.cluster``                      a head an SM; states and gate weights come ahead through the ring
``proj_allreduce.produce_whole``            56 outputs an SM, pushed to every rank; the words are their own flags
``consume``, ``consume_gathered``           on each SM the 56 columns that it pushes: sum over ranks, residual, sums of
                                            the norm, in a line of 128 bytes whose words are flags. The rest is in the
                                            product that follows
==========================================  ======================================================================

A product's rows are dealt evenly, and heads to the SMs that have the fewest rows and no columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import (
    EMPTY,
    INITIAL,
    Access,
    Instruction,
    InstructionList,
    Opcode,
    Region,
    Stream,
    Wait,
)
from k3sim.model.architecture import Architecture
from k3sim.model.program import Call, Program

COLUMNS = 56  # of an exchange an SM: seven words of 16 bytes to a rank
PUSHED = 8  # outputs that leave in one word of 16 bytes
BUFFERS = 3  # receive buffers in rotation, as the fused path has them (kernels/device/lamport.py)
STAGE_BYTES = 14_336  # of the ring: one row of the hidden width
RING_STAGES = 15
PRODUCT_WARPS = 7  # that take turns at the stages of a pushed product
MAX_WINDOW = RING_STAGES - PRODUCT_WARPS  # stages under way, see ``kernel._await_stage``
HEAD_DIM = 128
OUTPUT_BYTES = 4  # of a product or a head: a bf16 value above the tag of its version, so that it is its own flag
LINE_BYTES = 128  # of a packet an SM: its 56 columns of the residual, then four fp32: x.x, x.probe, a.x, a.a
PACKETS = 3  # in rotation
PRODUCTS = {"skinny_gemv.tiled": Opcode.FOLD_GEMV, "skinny_gemv.tiled_situ": Opcode.FOLD_GEMV_SITU}
CONSUMERS = ("proj_allreduce.consume", "proj_allreduce.consume_gathered")
LEFT_OUT = ("unfused.embedding", "attn_res.snapshot_part")


def pushed_rows_per_stage(depth: int) -> int:
    """Rows of a pushed product in one stage: as many as fit of the eight that leave together, a power of two."""
    rows = PUSHED
    while rows * depth * 2 > STAGE_BYTES:
        rows //= 2
    return rows


@dataclass
class _Builder:
    program: Program
    num_sms: int
    architecture: Architecture
    queues: list[list[Instruction]]
    sizes: dict[str, int] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    exchanges: int = 0  # pushes so far
    waits: tuple[Wait, ...] = ()  # for the output of the newest product or mixer
    output: tuple[str, int] = ("", 0)  # its buffer and version
    version: int = 0

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

    def consumed(self, call: Call) -> None:
        """The residual from an exchange; the first consumer of all finds it in memory."""
        if not self.exchanges:
            return
        restarts = call.stage == "attn_res.ffn" and self.architecture.is_snapshot(call.layer)
        exchange = self.exchanges - 1
        buffer, before = exchange % BUFFERS, (exchange - 1) % BUFFERS
        self.version += 1
        written, emptied = self.packet(self.version), self.packet(self.version - 1)
        flag = f"packets {self.version}"
        slot_bytes = 2 * self.hidden
        for sm in range(self.num_columns_sms):
            first = sm * COLUMNS
            columns = self.part("residual", 2 * first, 2 * COLUMNS)
            lines = [self.part(packet, sm * LINE_BYTES, LINE_BYTES) for packet in (written, emptied)]
            fresh = EMPTY if self.version >= PACKETS else INITIAL
            slots = [
                (r * slot_bytes + 2 * first, 2 * COLUMNS) for r in range(self.program.num_ranks)
            ]  # of every rank the same columns
            self.queues[sm].append(
                Instruction(
                    opcode=Opcode.REDUCE, stage=call.stage, layer=call.layer, sm=sm, first=first, count=COLUMNS,
                    buffer=buffer, packet=self.version % PACKETS, site=call.stage, restarts=restarts,
                    waits=(Wait(counter=f"{exchange} arrived {sm}", target=1),),
                    signals=(flag,),
                    reads=(
                        Access(region=columns, version=self.version - 1),
                        Access(region=lines[0], version=fresh),  # flags must read "not arrived" before they are set
                        *(Access(region=self.part(f"received {buffer}", *slot), version=exchange + 1)
                          for slot in slots),
                    ),
                    writes=(
                        Access(region=columns, version=self.version),
                        Access(region=lines[0], version=self.version),
                        Access(region=lines[1], version=EMPTY),
                        *(Access(region=self.part(f"received {before}", *slot), version=EMPTY)
                          for slot in slots if exchange),
                    ),
                )
            )  # fmt: skip
            self.flags.add(f"{exchange} arrived {sm}")
        self.flags.add(flag)

    def product(self, call: Call) -> None:
        """Rows of a product of the residual, folded and normalised."""
        opcode, (weight,) = PRODUCTS[call.operator], call.weights
        paired = opcode is Opcode.FOLD_GEMV_SITU
        num_outputs = weight.num_outputs // (2 if paired else 1)
        row_bytes = 2 * weight.depth
        counter, output = f"{call.index} {call.stage}", f"{call.stage} out"
        self.whole(weight.region, weight.num_bytes)
        self.whole(output, OUTPUT_BYTES * num_outputs)
        self.flags.add(counter)
        self.whole("residual", 2 * self.hidden)
        version = call.index + 1
        reduced = (Wait(counter=f"packets {self.version}", target=self.num_columns_sms),) if self.version else ()
        for sm in range(self.num_sms):
            first, last = (at * num_outputs // self.num_sms for at in (sm, sm + 1))
            halves = (0, num_outputs) if paired else (0,)
            self.queues[sm].append(
                Instruction(
                    opcode=opcode, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                    depth=weight.depth, site=_site(call),
                    packet=self.version % PACKETS,
                    waits=reduced,
                    signals=(counter,),
                    streams=tuple(
                        Stream(region=self.part(weight.region, (half + first) * row_bytes, (last - first) * row_bytes),
                               stage_bytes=row_bytes)
                        for half in halves
                    ),
                    reads=(Access(region=self.whole(self.packet(self.version), LINE_BYTES * self.num_columns_sms),
                                  version=self.version),),
                    writes=(Access(region=self.part(output, OUTPUT_BYTES * first, OUTPUT_BYTES * (last - first)),
                                   version=version),),
                )
            )  # fmt: skip
        self.waits, self.output = (Wait(counter=counter, target=self.num_sms),), (output, version)

    def heads(self, call: Call) -> None:
        """A head an SM: those without columns first, then the last of the others."""
        (weight,), num_heads = call.weights, call.shape["heads"]
        counter, output = f"{call.index} {call.stage}", f"{call.stage} out"
        state, past, gate_bytes = f"{call.layer}/kda.state", f"{call.layer}/kda.past", 2 * HEAD_DIM * HEAD_DIM
        state_bytes = call.shape["state_bytes"] // num_heads
        past_bytes = call.shape["conv_state_bytes"] // num_heads
        self.whole(weight.region, weight.num_bytes)
        self.whole(state, call.shape["state_bytes"])
        self.whole(past, call.shape["conv_state_bytes"])
        self.whole(output, OUTPUT_BYTES * num_heads * HEAD_DIM)
        self.flags.add(counter)
        version = call.index + 1
        for head in range(num_heads):
            sm = self.num_sms - 1 - head
            states = self.part(state, head * state_bytes, state_bytes)
            # By heads here; in memory a head's three samples of q, k and v lie apart.
            samples = self.part(past, head * past_bytes, past_bytes)
            out = self.part(output, OUTPUT_BYTES * head * HEAD_DIM, OUTPUT_BYTES * HEAD_DIM)
            self.queues[sm].append(
                Instruction(
                    opcode=Opcode.KDA_HEAD, stage=call.stage, layer=call.layer, sm=sm, first=head, count=1,
                    depth=HEAD_DIM,
                    waits=self.waits, signals=(counter,),
                    streams=(
                        Stream(region=self.part(weight.region, head * gate_bytes, gate_bytes),
                               stage_bytes=gate_bytes // 4),
                        Stream(region=states, stage_bytes=state_bytes // 8),
                    ),
                    reads=(Access(region=self.whole(self.output[0], self.sizes[self.output[0]]),
                                  version=self.output[1]), Access(region=samples)),
                    writes=(Access(region=out, version=version), Access(region=states, version=version),
                            Access(region=samples, version=version)),
                )
            )  # fmt: skip
        self.waits, self.output = (Wait(counter=counter, target=num_heads),), (output, version)

    def push(self, call: Call) -> None:
        """Rows of a product to every rank; of this rank's slots all are shown, since a loopback fabric fills them."""
        (weight,) = call.weights
        row_bytes, exchange = 2 * weight.depth, self.exchanges
        buffer, slot_bytes = exchange % BUFFERS, 2 * self.hidden
        self.whole(weight.region, weight.num_bytes)
        for one in range(PACKETS):
            self.whole(f"packets {one}", LINE_BYTES * self.num_columns_sms)
        for one in range(BUFFERS):
            self.whole(f"received {one}", self.program.num_ranks * slot_bytes)
        for sm in range(self.num_columns_sms):
            first = sm * COLUMNS
            slots = [
                self.part(f"received {buffer}", r * slot_bytes + 2 * first, 2 * COLUMNS)
                for r in range(self.program.num_ranks)
            ]
            self.queues[sm].append(
                Instruction(
                    opcode=Opcode.GEMV_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first, count=COLUMNS,
                    depth=weight.depth, buffer=buffer,
                    waits=self.waits, signals=(f"{exchange} arrived {sm}",),
                    streams=(Stream(region=self.part(weight.region, first * row_bytes, COLUMNS * row_bytes),
                                    stage_bytes=pushed_rows_per_stage(weight.depth) * row_bytes),),
                    reads=(Access(region=self.whole(self.output[0], OUTPUT_BYTES * weight.depth),
                                  version=self.output[1]),
                           # Flags must read "not arrived" before they are set.
                           *(Access(region=one, version=EMPTY if exchange >= BUFFERS else INITIAL) for one in slots)),
                    writes=tuple(Access(region=one, version=exchange + 1) for one in slots),
                )
            )  # fmt: skip
        self.exchanges += 1

    def finish(self) -> None:
        """Leave all receive buffers empty and the residual where the next launch finds it; count the launch."""
        buffer = (self.exchanges - 1) % BUFFERS
        newest = self.packet(self.version)
        slot_bytes, layer = 2 * self.hidden, self.program.layers[-1]
        for sm in range(self.num_sms):
            columns = range(0, self.program.num_ranks * slot_bytes, slot_bytes) if sm < self.num_columns_sms else ()
            line = (sm * LINE_BYTES, LINE_BYTES)
            emptied = [self.part(f"received {buffer}", slot + 2 * sm * COLUMNS, 2 * COLUMNS) for slot in columns]
            self.queues[sm].append(
                Instruction(
                    opcode=Opcode.FINISH, stage="finish", layer=layer, sm=sm, first=sm * COLUMNS,
                    count=COLUMNS if emptied else 0, buffer=buffer, signals=("finished",),
                    packet=self.version % PACKETS,
                    reads=(Access(region=self.part(newest, *line), version=self.version),) if emptied else (),
                    writes=(*(Access(region=one, version=EMPTY) for one in emptied),
                            *(Access(region=self.part(self.packet(one), *line), version=EMPTY if one else self.version)
                              for one in range(PACKETS) if emptied)),
                )
            )  # fmt: skip
        self.queues[0].append(
            Instruction(
                opcode=Opcode.ADVANCE, stage="finish", layer=layer, sm=0,
                waits=(Wait(counter="finished", target=self.num_sms),),
            )
        )  # fmt: skip


def _site(call: Call) -> str:
    return "attn_res.mixer" if call.stage.startswith(("kda.", "mla.")) else "attn_res.ffn"


def schedule(program: Program, architecture: Architecture, *, num_sms: int) -> InstructionList:
    """The list of ``program`` for a GPU of ``num_sms``; runs from a residual in memory to the last exchange, reduced.

    Raises UserError for a call that has no instruction yet, for a layer behind the first that takes a snapshot, and
    where an SM would have more than one part of the exchange.
    """
    hidden = architecture.hidden_size
    if hidden % COLUMNS or hidden // COLUMNS > num_sms:
        raise UserError(f"megakernel: {num_sms} SMs, and {hidden} columns in parts of {COLUMNS}; needs as many SMs")
    late = [layer for layer in program.layers if layer and architecture.is_snapshot(layer)]
    if late:
        raise UserError(f"megakernel: layer {late[0]} takes a snapshot, which has no instruction; accepted are layers "
                        f"0 to {architecture.attn_res_block_size - 1}")
    builder = _Builder(program, num_sms, architecture, [[] for _ in range(num_sms)])
    for call in program.calls:
        if call.operator in LEFT_OUT:
            continue
        if call.stage.startswith("head."):
            if call.stage == "head.attn_res":
                builder.consumed(call)
            break
        if call.operator in CONSUMERS:
            builder.consumed(call)
        elif call.operator in PRODUCTS and call.shape["rows"] == 1 and len(call.weights) == 1:
            builder.product(call)
        elif call.operator == "kda_decode.cluster" and call.shape["heads"] <= num_sms:
            builder.heads(call)
        elif call.operator == "proj_allreduce.produce_whole":
            builder.push(call)
        else:
            raise UserError(
                f"megakernel: layer {call.layer} runs {call.operator} ({call.stage}), which has no instruction; "
                "accepted are layers of a KDA mixer and a dense FFN at one row"
            )
    builder.finish()
    return InstructionList(
        queues=tuple(map(tuple, builder.queues)), sizes=builder.sizes, flags=frozenset(builder.flags)
    )


def streamed_bytes(program: InstructionList) -> int:
    """Bytes that come through the rings in a launch."""
    return sum(stream.region.last - stream.region.first for one in program for stream in one.streams)

