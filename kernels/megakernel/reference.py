"""Runs an instruction list on the CPU: what the kernel computes, instruction by instruction, in fp32 torch.

The order is any that strands and counters allow (``seed``), so a result that changes with the seed shows a missing
wait. Roundings to bf16 stand where the kernel has them; sums within a product are torch's, so results agree to rounding
and not by bit.

Tensors lie in one dictionary by name, as ``schedule`` names buffers; matrices, states and vectors of a layer as
``<layer>/<name>``. ``fill`` makes those that a list needs beside them.

Shape legend: D hidden width, R ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch

from k3sim.errors import UserError
from k3sim.kernels.kda_decode.reference import kda_decode
from k3sim.kernels.megakernel.instructions import NUM_STRANDS, Instruction, InstructionList, Opcode
from k3sim.kernels.megakernel.list_builder import BUFFERS, COLUMNS, LINE_BYTES, OUTPUT_BYTES, PACKETS
from k3sim.kernels.megakernel.mla_reference import MLA_EXECUTE
from k3sim.kernels.megakernel.moe_reference import MOE_EXECUTE
from k3sim.kernels.megakernel.reference_words import (
    EMPTY_WORD,
    NOT_ARRIVED,
    Memory,
    folded,
    outputs,
    put_line,
    put_outputs,
    put_residual,
)
from k3sim.kernels.skinny_gemv.reference import situ_glu


def run(program: InstructionList, memory: Memory, *, seed: int = 0) -> list[Instruction]:
    """Run ``program`` over ``memory``, in place; returns the order. Raises UserError where it hangs."""
    choose = random.Random(seed)
    count = dict.fromkeys((*program.counters, *program.flags), 0)
    places = [(sm, strand) for sm in range(len(program.queues)) for strand in range(NUM_STRANDS)]
    strands = {place: program.strand(*place) for place in places}
    heads = dict.fromkeys(strands, 0)
    order: list[Instruction] = []

    def coming(place: tuple[int, int]) -> Instruction | None:
        return strands[place][heads[place]] if heads[place] < len(strands[place]) else None

    def may_start(one: Instruction) -> bool:
        here = all(coming((one.sm, strand)) is one for strand in one.strands)
        return here and all(count[wait.counter] >= wait.target for wait in one.waits)

    while left := [one for place in strands if (one := coming(place)) is not None]:
        ready = [one for one in left if may_start(one)]
        if not ready:
            raise UserError(f"instruction list: {left[0].name} waits for ever")
        one = choose.choice(ready)
        EXECUTE[one.opcode](one, memory)
        for counter in one.signals:
            count[counter] += 1
        for strand in one.strands:
            heads[one.sm, strand] += 1
        order.append(one)
    return order


def fill(memory: Memory, program: InstructionList, *, hidden: int, ranks: int) -> None:
    """Add what a list reads and writes besides operands: receive buffers, outputs, the sums of the first norm."""
    like = memory["residual"]
    received = torch.full((BUFFERS, ranks, hidden), NOT_ARRIVED, dtype=like.dtype, device=like.device)
    for number, buffer in enumerate(received):  # one behind the other, as pushes find them
        memory[f"received {number}"] = buffer
    for name, num_bytes in program.sizes.items():
        if name.endswith(" out"):
            memory[name] = torch.zeros(num_bytes // OUTPUT_BYTES, dtype=torch.int32, device=like.device)
    shape = (PACKETS, hidden // COLUMNS, LINE_BYTES // 4)
    packets = torch.full(shape, EMPTY_WORD, dtype=torch.int32, device=like.device)
    for number, packet in enumerate(packets):
        memory[f"packets {number}"] = packet
    first = min((one for one in program if one.opcode is Opcode.FOLD_GEMV), key=lambda one: one.layer)
    for sm in range(hidden // COLUMNS):
        put_line(memory, 0, sm, f"{first.layer}/{first.site}")


def _fold_gemv(one: Instruction, memory: Memory) -> None:
    x = folded(memory, f"{one.layer}/{one.site}", one.packet)
    parts = []
    for stream in one.streams:  # of a product two matrices may follow each other, of a pair gate and up lie apart
        first, last = (edge // (2 * one.depth) for edge in (stream.region.first, stream.region.last))
        parts.append(memory[stream.region.buffer][first:last].float() @ x)
    values = situ_glu(*parts) if one.opcode is Opcode.FOLD_GEMV_SITU else torch.cat(parts)
    put_outputs(one, memory, slice(one.first, one.first + one.count), values)


def _kda_head(one: Instruction, memory: Memory) -> None:
    layer, head, dim = one.layer, one.first, one.depth
    width = memory[f"{layer}/kda.f_b"].shape[0]
    heads = width // dim
    of_head = slice(head * dim, (head + 1) * dim)
    channels = torch.cat([torch.arange(of_head.start, of_head.stop) + part * width for part in range(3)])
    projected = outputs(one, memory, "kda.in_proj").bfloat16()
    state, past = memory[f"{layer}/kda.state"], memory[f"{layer}/kda.past"]
    own = torch.cat([
        *(projected[part * width :][of_head] for part in range(4)),
        projected[4 * width : 4 * width + dim], projected[4 * width + dim + head :][:1],
    ])  # fmt: skip
    head_past = torch.stack([past[:, channels]] * 2)  # slot 0 stands for padding
    head_state = torch.stack([state[head][None]] * 2)
    out = kda_decode(
        own[None],
        memory[f"{layer}/kda.f_b"][of_head],
        memory[f"{layer}/kda.conv"][channels],
        memory[f"{layer}/kda.dt_bias"][of_head],
        memory[f"{layer}/kda.a_log"][head : head + 1],
        memory[f"{layer}/kda.norm"],
        torch.ones(1, dtype=torch.int32),
        head_past,
        head_state,
        heads=1,
    )
    assert head < heads
    past[:, channels], state[head] = head_past[1], head_state[1, 0]
    put_outputs(one, memory, of_head, out[0])


def _gemv_push(one: Instruction, memory: Memory) -> None:
    x = outputs(one, memory, INPUTS[one.stage])
    rows = slice(one.first, one.first + one.count)
    received = memory[f"received {one.buffer}"]
    sent = (memory[f"{one.layer}/{one.stage}"][rows].float() @ x).to(received.dtype)
    received[:, rows] = sent + 0.0  # -0 stands for what has not arrived


def _reduce(one: Instruction, memory: Memory) -> None:
    columns = slice(one.first, one.first + one.count)
    arrived = memory[f"received {one.buffer}"][:, columns]
    if bool((arrived == 0).logical_and(arrived.signbit()).any()):
        raise UserError(f"{one.name} finds words that have not arrived")
    put_residual(one, memory, arrived.float().sum(0))
    memory[f"received {(one.buffer - 1) % BUFFERS}"][:, columns] = NOT_ARRIVED


def _finish(one: Instruction, memory: Memory) -> None:
    if one.count:
        memory[f"received {one.buffer}"][:, one.first : one.first + one.count] = NOT_ARRIVED
        line = memory[f"packets {one.packet}"][one.sm].clone()
        for number in range(PACKETS):
            memory[f"packets {number}"][one.sm] = EMPTY_WORD if number else line


def _advance(one: Instruction, memory: Memory) -> None:
    """Counts of launches are the kernel's own."""


INPUTS = {"kda.o_proj": "kda.decode", "mla.o_proj": "mla.lift_gate", "dense.down": "dense.gate_up"}
EXECUTE: Mapping[Opcode, Callable[[Instruction, Memory], None]] = {
    Opcode.FOLD_GEMV: _fold_gemv,
    Opcode.FOLD_GEMV_SITU: _fold_gemv,
    Opcode.KDA_HEAD: _kda_head,
    Opcode.GEMV_PUSH: _gemv_push,
    Opcode.REDUCE: _reduce,
    Opcode.FINISH: _finish,
    Opcode.ADVANCE: _advance,
    **MLA_EXECUTE,
    **MOE_EXECUTE,
}
