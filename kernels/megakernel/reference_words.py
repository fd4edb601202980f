"""What instructions read and write besides matrices and states: outputs, packets, the residual, word by word."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from k3sim.errors import UserError
from k3sim.kernels.attn_res.reference import NORM_EPSILON
from k3sim.kernels.megakernel.instructions import Instruction, outputs_version
from k3sim.kernels.megakernel.list_builder import COLUMNS, PACKETS

Memory = dict[str, torch.Tensor]
NOT_ARRIVED = -0.0
TAG_MASK = 0xFFFF
EMPTY_WORD = 0x80008000 - (1 << 32)  # two of them


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


def outputs(one: Instruction, memory: Memory, stage: str, rows: slice | None = None) -> torch.Tensor:
    """Outputs of a stage that ``one`` reads, fp32; all, or some. Raises UserError where a tag is of another version."""
    name = f"{stage} out"
    words = memory[name] if rows is None else memory[name][rows]
    tag = outputs_version(access for access in one.reads if access.region.buffer == name) & TAG_MASK
    if bool(((words & TAG_MASK) != tag).any()):
        raise UserError(f"{one.name} finds outputs of {stage} that have not arrived")
    return (words & ~TAG_MASK).view(torch.float32)


def put_outputs(one: Instruction, memory: Memory, rows: slice, values: torch.Tensor) -> None:
    """Each output a word: its bf16 value above the tag of its version."""
    _put_words(one, memory, rows, values.bfloat16().float().view(torch.int32))


def _put_words(one: Instruction, memory: Memory, rows: slice, upper_halves: torch.Tensor) -> None:
    memory[f"{one.stage} out"][rows] = upper_halves | (outputs_version(one.writes) & TAG_MASK)


def put_wholes(one: Instruction, memory: Memory, rows: slice, values: torch.Tensor) -> None:
    """Each fp32 value two words: its upper half above the tag, then its lower."""
    bits = values.float().contiguous().view(torch.int32)
    _put_words(one, memory, rows, torch.stack([bits & ~TAG_MASK, bits << 16], dim=1).flatten())


def wholes(halves: torch.Tensor) -> torch.Tensor:
    """fp32 values from what ``outputs`` found in their pairs of words."""
    bits = halves.contiguous().view(torch.int32).unflatten(0, (-1, 2))
    return (bits[:, 0] | (bits[:, 1] >> 16 & TAG_MASK)).view(torch.float32)


def put_residual(one: Instruction, memory: Memory, total: torch.Tensor) -> None:
    """The new residual's columns from their sum, its packet's line, and the line before empty."""
    columns, residual = slice(one.first, one.first + one.count), memory["residual"]
    if not one.restarts:
        total = total + residual[columns].float()
    residual[columns] = total.to(residual.dtype)
    put_line(memory, one.packet, one.sm, f"{one.layer}/{one.site}")
    memory[f"packets {(one.packet - 1) % PACKETS}"][one.sm] = EMPTY_WORD
