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
from k3sim.kernels.attn_res.reference import NORM_EPSILON
from k3sim.kernels.kda_decode.reference import kda_decode
from k3sim.kernels.megakernel.instructions import NUM_STRANDS, Instruction, InstructionList, Opcode, outputs_version
from k3sim.kernels.megakernel.schedule import BUFFERS, COLUMNS, LINE_BYTES, OUTPUT_BYTES, PACKETS
from k3sim.kernels.skinny_gemv.reference import situ_glu

Memory = dict[str, torch.Tensor]
NOT_ARRIVED = -0.0
TAG_MASK = 0xFFFF
EMPTY_WORD = 0x80008000 - (1 << 32)  # two of them


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


def put_line(memory: Mapping[str, torch.Tensor], packet: int, sm: int, site: str) -> None:
    """An SM's line of a packet: its columns of the residual and their parts of the sums of the norm at ``site``."""
    line = memory[f"packets {packet}"][sm]
    columns = memory["residual"][sm * COLUMNS : (sm + 1) * COLUMNS]
    line[: COLUMNS // 2] = (columns + 0.0).view(torch.int32)  # -0 stands for what has not arrived
    line[COLUMNS // 2 :] = _column_sums(memory, site, sm * COLUMNS, COLUMNS).view(torch.int32)


def folded(memory: Mapping[str, torch.Tensor], site: str, packet: int) -> torch.Tensor:
    """``[D]`` fp32: the residual mixed with the snapshots' part of ``site``, normalised, from a packet alone."""
    lines = memory[f"packets {packet}"]
    square, product, cross, part_square = lines[:, COLUMNS // 2 :].contiguous().view(torch.float32).sum(0)
    residual = lines[:, : COLUMNS // 2].contiguous().view(torch.bfloat16).flatten().float()
    weighted = memory[f"{site}.weighted"]
    maximum, denominator = memory[f"{site}.stats"]
    hidden = residual.numel()
    logit = product * (square / hidden + NORM_EPSILON).rsqrt()
    largest = torch.maximum(maximum, logit)
    part_weight, own_weight = (maximum - largest).exp(), (logit - largest).exp()
    total = part_weight * denominator + own_weight
    part_weight, own_weight = part_weight / total, own_weight / total
    mix_square = part_weight**2 * part_square + own_weight**2 * square + 2 * part_weight * own_weight * cross
    scale = (mix_square.clamp(min=0) / hidden + NORM_EPSILON).rsqrt()
    return (part_weight * weighted + own_weight * residual) * scale * memory[f"{site}.norm"].float()


def _column_sums(memory: Mapping[str, torch.Tensor], site: str, first: int, count: int) -> torch.Tensor:
    columns = slice(first, first + count)
    residual, weighted = memory["residual"][columns].float(), memory[f"{site}.weighted"][columns]
    probe = memory[f"{site}.query_norm"][columns].float() * memory[f"{site}.query"][columns].float()
    pairs = ((residual, residual), (residual, probe), (residual, weighted), (weighted, weighted))
    return torch.stack([one @ other for one, other in pairs])


def outputs(one: Instruction, memory: Memory, name: str) -> torch.Tensor:
    """Outputs of the product or heads that ``one`` reads, fp32. Raises UserError where a tag is of another version."""
    words, tag = memory[f"{name} out"], outputs_version(one.reads) & TAG_MASK
    if bool(((words & TAG_MASK) != tag).any()):
        raise UserError(f"{one.name} finds outputs of {name} that have not arrived")
    return (words & ~TAG_MASK).view(torch.float32)


def _put_outputs(one: Instruction, memory: Memory, rows: slice, values: torch.Tensor) -> None:
    """Each output a word: its bf16 value above the tag of its version."""
    bits = values.bfloat16().float().view(torch.int32)
    memory[f"{one.stage} out"][rows] = bits | (outputs_version(one.writes) & TAG_MASK)


def _fold_gemv(one: Instruction, memory: Memory) -> None:
    x = folded(memory, f"{one.layer}/{one.site}", one.packet)
    weight = memory[f"{one.layer}/{one.stage}"]
    rows = slice(one.first, one.first + one.count)
    if one.opcode is Opcode.FOLD_GEMV:
        _put_outputs(one, memory, rows, weight[rows].float() @ x)
        return
    gate, up = (part[rows].float() @ x for part in weight.chunk(2))
    _put_outputs(one, memory, rows, situ_glu(gate, up))


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
    _put_outputs(one, memory, of_head, out[0])


def _gemv_push(one: Instruction, memory: Memory) -> None:
    x = outputs(one, memory, INPUTS[one.stage])
    rows = slice(one.first, one.first + one.count)
    received = memory[f"received {one.buffer}"]
    sent = (memory[f"{one.layer}/{one.stage}"][rows].float() @ x).to(received.dtype)
    received[:, rows] = sent + 0.0  # -0 stands for what has not arrived


def _reduce(one: Instruction, memory: Memory) -> None:
    columns = slice(one.first, one.first + one.count)
    residual = memory["residual"]
    arrived = memory[f"received {one.buffer}"][:, columns]
    if bool((arrived == 0).logical_and(arrived.signbit()).any()):
        raise UserError(f"{one.name} finds words that have not arrived")
    total = arrived.float().sum(0)
    if not one.restarts:
        total = total + residual[columns].float()
    residual[columns] = total.to(residual.dtype)
    put_line(memory, one.packet, one.sm, f"{one.layer}/{one.site}")
    memory[f"packets {(one.packet - 1) % PACKETS}"][one.sm] = EMPTY_WORD
    memory[f"received {(one.buffer - 1) % BUFFERS}"][:, columns] = NOT_ARRIVED


def _finish(one: Instruction, memory: Memory) -> None:
    if one.count:
        memory[f"received {one.buffer}"][:, one.first : one.first + one.count] = NOT_ARRIVED
        line = memory[f"packets {one.packet}"][one.sm].clone()
        for number in range(PACKETS):
            memory[f"packets {number}"][one.sm] = EMPTY_WORD if number else line


def _advance(one: Instruction, memory: Memory) -> None:
    """Counts of launches are the kernel's own."""


INPUTS = {"kda.o_proj": "kda.decode", "dense.down": "dense.gate_up"}
EXECUTE: Mapping[Opcode, Callable[[Instruction, Memory], None]] = {
    Opcode.FOLD_GEMV: _fold_gemv,
    Opcode.FOLD_GEMV_SITU: _fold_gemv,
    Opcode.KDA_HEAD: _kda_head,
    Opcode.GEMV_PUSH: _gemv_push,
    Opcode.REDUCE: _reduce,
    Opcode.FINISH: _finish,
    Opcode.ADVANCE: _advance,
}
