"""The instruction list of a megakernel, made from the program that the simulator reads.

Covered: layers of a KDA mixer or MLA (``mla_schedule``) and a dense FFN or latent experts (``moe_schedule``) at one
row, as the fused path of the project's own kernels has them (``model/paths/own.py``), without the kernels of the head
and the snapshots' parts, and without prefetches into L2. What a call of the program becomes:

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

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import (
    EMPTY,
    INITIAL,
    Access,
    Instruction,
    InstructionList,
    Opcode,
    Stream,
    Wait,
)
from k3sim.kernels.megakernel.list_builder import (
    BUFFERS,
    COLUMNS,
    HEAD_DIM,
    LINE_BYTES,
    PACKETS,
    ListBuilder,
    pushed_rows_per_stage,
    site_of,
)
from k3sim.kernels.megakernel.mla_schedule import MLA_CALLS
from k3sim.kernels.megakernel.moe_schedule import MOE_CALLS
from k3sim.model.architecture import Architecture
from k3sim.model.program import Call, Program

PRODUCTS = {"skinny_gemv.tiled": Opcode.FOLD_GEMV, "skinny_gemv.tiled_situ": Opcode.FOLD_GEMV_SITU}
CONSUMERS = ("proj_allreduce.consume", "proj_allreduce.consume_gathered")
LEFT_OUT = ("unfused.embedding", "attn_res.snapshot_part", "l2_prefetch.bulk")


class _Builder(ListBuilder):
    """Instructions of mixers, dense FFNs and exchanges."""

    def consumed(self, call: Call) -> None:
        """The residual from an exchange; the first consumer of all finds it in memory."""
        if not self.exchanges:
            return
        gathered, self.gathered = self.gathered, ""
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
            # Of every rank the same columns; gathered ones are summed already, and behind them is nothing to empty.
            ranks = range(0 if gathered else self.program.num_ranks)
            slots = [(r * slot_bytes + 2 * first, 2 * COLUMNS) for r in ranks]
            sent: tuple[Access, ...] = ()
            arrived = Wait(counter=f"{exchange} arrived {sm}", target=1)
            if gathered:
                made = self.made[gathered]
                sent, arrived = (Access(region=self.words(gathered, first, COLUMNS), version=made.version),), made.wait
            self.add(
                Instruction(
                    opcode=Opcode.COLLECT if gathered else Opcode.REDUCE,
                    stage=call.stage, layer=call.layer, sm=sm, first=first, count=COLUMNS, buffer=buffer,
                    packet=self.version % PACKETS, site=call.stage, restarts=restarts,
                    waits=(arrived,),
                    signals=(flag,),
                    reads=(
                        *sent,
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
            self.flags.add(arrived.counter)
        self.flags.add(flag)

    def product(self, call: Call) -> None:
        """Rows of a product of the residual, folded and normalised; matrices of a call follow each other."""
        opcode = PRODUCTS[call.operator]
        paired = opcode is Opcode.FOLD_GEMV_SITU
        num_outputs = sum(weight.num_outputs for weight in call.weights) // (2 if paired else 1)
        reads, waits, dealt = (self.residual_read(),), self.residual_wait(), list(self.dealt(num_outputs))
        made = self.makes(call, call.stage, num_outputs, len(dealt))
        self.whole("residual", 2 * self.hidden)
        for sm, first, last in dealt:
            streams = (
                tuple(self.rows(call.weights[0], half + first, last - first) for half in (0, num_outputs))
                if paired
                else tuple(self.rows_of_all(call.weights, first, last))
            )
            write = Access(region=self.words(call.stage, first, last - first), version=made.version)
            self.add(
                Instruction(
                    opcode=opcode, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                    depth=call.weights[0].depth, site=site_of(call), packet=self.version % PACKETS,
                    waits=waits, signals=(made.wait.counter,), streams=streams, reads=reads, writes=(write,),
                )
            )  # fmt: skip

    def heads(self, call: Call) -> None:
        """A head an SM: those without columns first, then the last of the others."""
        (weight,), num_heads = call.weights, call.shape["heads"]
        source = self.made["kda.in_proj"]
        state, past, gate_bytes = f"{call.layer}/kda.state", f"{call.layer}/kda.past", 2 * HEAD_DIM * HEAD_DIM
        state_bytes = call.shape["state_bytes"] // num_heads
        past_bytes = call.shape["conv_state_bytes"] // num_heads
        self.whole(weight.region, weight.num_bytes)
        self.whole(state, call.shape["state_bytes"])
        self.whole(past, call.shape["conv_state_bytes"])
        made = self.makes(call, call.stage, num_heads * HEAD_DIM, num_heads)
        version = made.version
        for head in range(num_heads):
            sm = self.num_sms - 1 - head
            states = self.part(state, head * state_bytes, state_bytes)
            # By heads here; in memory a head's three samples of q, k and v lie apart.
            samples = self.part(past, head * past_bytes, past_bytes)
            out = self.words(call.stage, head * HEAD_DIM, HEAD_DIM)
            self.add(
                Instruction(
                    opcode=Opcode.KDA_HEAD, stage=call.stage, layer=call.layer, sm=sm, first=head, count=1,
                    depth=HEAD_DIM,
                    waits=(source.wait,), signals=(made.wait.counter,),
                    streams=(
                        Stream(region=self.part(weight.region, head * gate_bytes, gate_bytes),
                               stage_bytes=gate_bytes // 4),
                        Stream(region=states, stage_bytes=state_bytes // 8),
                    ),
                    reads=(self.reads("kda.in_proj"), Access(region=samples)),
                    writes=(Access(region=out, version=version), Access(region=states, version=version),
                            Access(region=samples, version=version)),
                )
            )  # fmt: skip

    def push(self, call: Call) -> None:
        """Rows of a product to every rank; of this rank's slots all are shown, since a loopback fabric fills them."""
        (weight,) = call.weights
        exchange, source = self.exchanges, self.made[self.newest]
        buffer, slot_bytes = exchange % BUFFERS, 2 * self.hidden
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
            self.add(
                Instruction(
                    opcode=Opcode.GEMV_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first, count=COLUMNS,
                    depth=weight.depth, buffer=buffer,
                    waits=(source.wait,), signals=(f"{exchange} arrived {sm}",),
                    streams=(self.rows(weight, first, COLUMNS, pushed_rows_per_stage(weight.depth)),),
                    reads=(self.reads(self.newest),
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
            self.add(
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
        self.add(
            Instruction(
                opcode=Opcode.ADVANCE, stage="finish", layer=layer, sm=0,
                waits=(Wait(counter="finished", target=self.num_sms),),
            )
        )  # fmt: skip


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
        elif call.operator in PRODUCTS and call.shape["rows"] == 1 and call.stage not in MOE_CALLS:
            builder.product(call)
        elif call.operator == "kda_decode.cluster" and call.shape["heads"] <= num_sms:
            builder.heads(call)
        elif call.operator == "proj_allreduce.produce_whole":
            builder.push(call)
        elif call.operator in MLA_CALLS:
            MLA_CALLS[call.operator](builder, call)
        elif call.stage in MOE_CALLS and call.operator == MOE_CALLS[call.stage][0]:
            MOE_CALLS[call.stage][1](builder, call)
        else:
            raise UserError(
                f"megakernel: layer {call.layer} runs {call.operator} ({call.stage}), which has no instruction; "
                "accepted is one row on the fused path of the project's own kernels"
            )
    builder.finish()
    return InstructionList(
        queues=tuple(map(tuple, builder.queues)), sizes=builder.sizes, flags=frozenset(builder.flags)
    )


def streamed_bytes(program: InstructionList) -> int:
    """Bytes that come through the rings in a launch."""
    return sum(stream.region.last - stream.region.first for one in program for stream in one.streams)

