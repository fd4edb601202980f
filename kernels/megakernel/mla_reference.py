"""The instructions of MLA on the CPU, in fp32 torch; roundings to bf16 are those of words and of the cache.

Shape legend: H heads of this rank, V = 512 values of the latent, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from k3sim.kernels.megakernel.instructions import Instruction, Opcode
from k3sim.kernels.megakernel.list_builder import HALVES
from k3sim.kernels.megakernel.mla_schedule import ABSORBED, LATENTS, MERGED, PART_WORDS, QUERY
from k3sim.kernels.megakernel.reference_words import Memory, outputs, put_outputs, put_wholes, wholes
from k3sim.kernels.mla_decode.cache import LATENT
from k3sim.kernels.mla_decode.reference import lse_merge, mla_decode
from k3sim.kernels.mla_prep.reference import EXTRA, NOPE, QUERY_LATENT, rms_norm


def _rows(one: Instruction) -> slice:
    return slice(one.first, one.first + one.count)


def _query(one: Instruction, memory: Memory) -> None:
    latent = outputs(one, memory, LATENTS)[:QUERY_LATENT]
    x = rms_norm(latent, memory[f"{one.layer}/mla.query_norm"]).bfloat16().float()
    put_outputs(one, memory, _rows(one), memory[f"{one.layer}/mla.q_b"][_rows(one)].float() @ x)


def _absorb(one: Instruction, memory: Memory) -> None:
    """Row ``i`` is value ``i % V`` of head ``i // V``."""
    query = outputs(one, memory, QUERY).unflatten(0, (-1, NOPE + EXTRA))
    rows = torch.arange(one.first, one.first + one.count)
    weight = memory[f"{one.layer}/mla.w_uk"][rows].float()
    put_outputs(one, memory, _rows(one), (weight * query[rows // LATENT, :NOPE]).sum(1))


def _attend(one: Instruction, memory: Memory) -> None:
    """One page; that of the newest token makes its row first."""
    absorbed = outputs(one, memory, ABSORBED).unflatten(0, (-1, LATENT))
    extra = outputs(one, memory, QUERY).unflatten(0, (-1, NOPE + EXTRA))[:, NOPE:]
    page = memory[f"{one.layer}/mla.cache"][one.first]
    if any(write.region.buffer.endswith("mla.cache") for write in one.writes):
        latents = outputs(one, memory, LATENTS)[QUERY_LATENT:]
        key_value = rms_norm(latents[:LATENT], memory[f"{one.layer}/mla.kv_norm"])
        page[one.count - 1] = torch.cat([key_value, latents[LATENT : LATENT + EXTRA]]).to(page.dtype)
    table, tokens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([one.count])
    part = mla_decode(torch.cat([absorbed, extra], dim=1)[None], page[None], table, tokens)
    for head, (values, log_sum) in enumerate(zip(part.output_BHV[0], part.log_sum_exp_BH[0], strict=True)):
        first = (one.first * len(absorbed) + head) * PART_WORDS
        put_outputs(one, memory, slice(first, first + LATENT), values)
        put_wholes(one, memory, slice(first + LATENT, first + PART_WORDS), log_sum[None])


def _merge(one: Instruction, memory: Memory) -> None:
    heads = len(memory[f"{one.layer}/mla.w_uv"]) // NOPE
    parts_PHW = outputs(one, memory, "mla.attention").unflatten(0, (-1, heads, PART_WORDS))
    log_sums_PH = wholes(parts_PHW[:, :, LATENT:].reshape(-1, HALVES).flatten()).unflatten(0, (-1, heads))
    merged = lse_merge(parts_PHW[:, None, :, :LATENT], log_sums_PH[:, None])
    put_outputs(one, memory, _rows(one), merged.output_BHV.flatten()[_rows(one)])


def _lift(one: Instruction, memory: Memory) -> None:
    """Row ``i`` is of head ``i // 128``; its gate lies behind the latents."""
    latent_HV = outputs(one, memory, MERGED).unflatten(0, (-1, LATENT))
    gates = outputs(one, memory, LATENTS)[QUERY_LATENT + LATENT + EXTRA :]
    rows = torch.arange(one.first, one.first + one.count)
    lifted = (memory[f"{one.layer}/mla.w_uv"][rows].float() * latent_HV[rows // NOPE]).sum(1)
    put_outputs(one, memory, _rows(one), lifted * gates[rows].sigmoid())


MLA_EXECUTE: Mapping[Opcode, Callable[[Instruction, Memory], None]] = {
    Opcode.MLA_QUERY: _query,
    Opcode.MLA_ABSORB: _absorb,
    Opcode.MLA_ATTEND: _attend,
    Opcode.MLA_MERGE: _merge,
    Opcode.MLA_LIFT: _lift,
}
