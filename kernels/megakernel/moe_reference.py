"""The instructions of a latent mixture of experts on the CPU, in fp32 torch; roundings to bf16 are those of words.

Shape legend: T ranks, E experts, S selected, L latent, W width of this rank's slice of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from k3sim.kernels.expert_gemv.mxfp4 import decode
from k3sim.kernels.expert_gemv.reference import situ_glu
from k3sim.kernels.latent_tail.reference import EPS
from k3sim.kernels.megakernel.instructions import Instruction, Opcode
from k3sim.kernels.megakernel.list_builder import HALVES, OUTPUT_BYTES
from k3sim.kernels.megakernel.moe_schedule import GATE_UP, LATENT, ROUTE_WORDS
from k3sim.kernels.megakernel.reference_words import (
    Memory,
    folded,
    outputs,
    put_outputs,
    put_residual,
    put_wholes,
    wholes,
)
from k3sim.kernels.router_topk.reference import router_topk

EXPERT_FIELDS = ("gate", "gate_scales", "up", "up_scales", "down", "down_scales")


def _rows(one: Instruction) -> slice:
    return slice(one.first, one.first + one.count)


def _to_every_rank(one: Instruction, memory: Memory, values: torch.Tensor) -> None:
    """The same outputs into the slots of all ranks, as a loopback fabric leaves them."""
    for write in one.writes:
        first = write.region.first // OUTPUT_BYTES
        put_outputs(one, memory, slice(first, first + len(values)), values)


def _front_push(one: Instruction, memory: Memory) -> None:
    x = folded(memory, f"{one.layer}/{one.site}", one.packet)
    router, latent_down = (memory[f"{one.layer}/moe.{name}_shard"].float() for name in ("router", "latent_down"))
    num_logits = len(router)
    slot = HALVES * num_logits + len(latent_down)
    of_router = slice(one.first, min(one.first + one.count, num_logits))
    of_latent = slice(max(one.first - num_logits, 0), max(one.first + one.count - num_logits, 0))
    for rank in range(len(one.writes)):
        if of_router.stop > of_router.start:
            words = slice(rank * slot + HALVES * of_router.start, rank * slot + HALVES * of_router.stop)
            put_wholes(one, memory, words, router[of_router] @ x)
        if of_latent.stop > of_latent.start:
            begin = rank * slot + HALVES * num_logits
            put_outputs(one, memory, slice(begin + of_latent.start, begin + of_latent.stop), latent_down[of_latent] @ x)


def _fronts(one: Instruction, memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[E]`` and latent ``[L]`` from what all ranks have sent."""
    num_words = HALVES * len(memory[f"{one.layer}/moe.router_shard"])
    slot = num_words + len(memory[f"{one.layer}/moe.latent_down_shard"])
    sent = outputs(one, memory, "moe.front").unflatten(0, (-1, slot))
    return wholes(sent[:, :num_words].flatten()), sent[:, num_words:].flatten()


def _shared_push(one: Instruction, memory: Memory) -> None:
    x = outputs(one, memory, "moe.shared_gate_up")
    put_outputs(one, memory, _rows(one), memory[f"{one.layer}/moe.shared_down"][_rows(one)].float() @ x)


def _route(one: Instruction, memory: Memory) -> None:
    logits, _ = _fronts(one, memory)
    ids, weights = router_topk(logits[None], memory[f"{one.layer}/moe.bias"])
    for number, (expert, weight) in enumerate(zip(ids[0], weights[0], strict=True)):
        first = ROUTE_WORDS * number
        # An id takes the upper half of its word as it stands: no bf16 value.
        put_wholes(one, memory, slice(first, first + HALVES), weight[None])
        put_outputs(one, memory, slice(first + HALVES, first + ROUTE_WORDS), (expert[None] << 16).view(torch.float32))


def _selected(one: Instruction, memory: Memory) -> list[tuple[int, torch.Tensor]]:
    """Ids and weights of the selected experts, best first."""
    found = outputs(one, memory, "moe.routing").unflatten(0, (-1, ROUTE_WORDS))
    ids = found[:, HALVES].contiguous().view(torch.int32) >> 16
    return list(zip(ids.tolist(), wholes(found[:, :HALVES].flatten()), strict=True))


def _expert_gate_up(one: Instruction, memory: Memory) -> None:
    """Row ``i`` is row ``i % W`` of expert number ``i // W``."""
    _, latent = _fronts(one, memory)
    gate, gate_scales, up, up_scales, *_ = (memory[f"{one.layer}/moe.experts.{name}"] for name in EXPERT_FIELDS)
    selected, width = _selected(one, memory), gate.shape[1]
    for row in range(one.first, one.first + one.count):
        (expert, weight), at = selected[row // width], row % width
        logit, linear = (
            decode(codes[expert, at], scales[expert, at], torch.float32) @ latent
            for codes, scales in ((gate, gate_scales), (up, up_scales))
        )
        put_outputs(one, memory, slice(row, row + 1), (weight * situ_glu(logit, linear))[None])


def _expert_down_push(one: Instruction, memory: Memory) -> None:
    hidden = outputs(one, memory, GATE_UP).unflatten(0, (-1, one.depth))
    down, scales = memory[f"{one.layer}/moe.experts.down"], memory[f"{one.layer}/moe.experts.down_scales"]
    total = torch.zeros(one.count)
    for (expert, _), x in zip(_selected(one, memory), hidden, strict=True):
        total += decode(down[expert, _rows(one)], scales[expert, _rows(one)], torch.float32) @ x
    _to_every_rank(one, memory, total)


def _latent_reduce(one: Instruction, memory: Memory) -> None:
    """Sum over ranks, rounded, and its part of the sum of squares; ``depth``: the number of the part."""
    latent = len(memory[f"{one.layer}/moe.latent_norm"])
    columns = [slice(read.region.first // OUTPUT_BYTES, read.region.last // OUTPUT_BYTES) for read in one.reads]
    total = torch.stack([outputs(one, memory, "moe.experts", part) for part in columns]).sum(0).bfloat16().float()
    put_outputs(one, memory, _rows(one), total)
    first = latent + HALVES * one.depth
    put_wholes(one, memory, slice(first, first + HALVES), total.square().sum()[None])


def _tail_push(one: Instruction, memory: Memory) -> None:
    latent = one.depth
    found = outputs(one, memory, LATENT)
    scale = (wholes(found[latent:]).sum() / latent + EPS).rsqrt()
    x = found[:latent] * scale * memory[f"{one.layer}/moe.latent_norm"].float()
    shard = memory[f"{one.layer}/moe.latent_up_shard"]
    shared = outputs(one, memory, "moe.shared_down").unflatten(0, (-1, len(shard)))[:, _rows(one)].sum(0)
    _to_every_rank(one, memory, shard[_rows(one)].float() @ x + shared)


def _collect(one: Instruction, memory: Memory) -> None:
    put_residual(one, memory, outputs(one, memory, "moe.latent_up", _rows(one)))


MOE_EXECUTE: Mapping[Opcode, Callable[[Instruction, Memory], None]] = {
    Opcode.FRONT_PUSH: _front_push,
    Opcode.SHARED_PUSH: _shared_push,
    Opcode.ROUTE: _route,
    Opcode.EXPERT_GATE_UP: _expert_gate_up,
    Opcode.EXPERT_DOWN_PUSH: _expert_down_push,
    Opcode.LATENT_REDUCE: _latent_reduce,
    Opcode.TAIL_PUSH: _tail_push,
    Opcode.COLLECT: _collect,
}
