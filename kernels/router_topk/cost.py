"""Cost of the exact top-16 of 896: bias, selection with ties to the lower id, renormalised weights.

Selection is a radix search over the scores: eight rounds of four bits, a block reduction each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import MachineCode, Pass, Work, block_work
from k3sim.model.program import Weight

SELECTION_ROUNDS = 8
FP32_BYTES = 4


def selection(*, experts: int, latent: int, num_quantise_reductions: int) -> Pass:
    """The selection as one pass of a block, with the latent quantised beside it where asked."""
    return Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=experts * FP32_BYTES + latent * 2,
        num_block_reductions=SELECTION_ROUNDS + 1 + num_quantise_reductions,
        num_selection_rounds=SELECTION_ROUNDS,
    )


def select(weights: Sequence[Weight], *, rows: int, experts: int, latent: int) -> Work:
    """Selection from whole logits that this rank computed: nothing is polled and no latent is moved."""
    return block_work(
        rows,
        selection(experts=experts, latent=0, num_quantise_reductions=0),
        block=footprint("router_topk", "whole").block(),
        in_flight_kib=8,
    )


def gather_topk(weights: Sequence[Weight], *, rows: int, latent: int) -> Work:
    """The kernel behind a divided front: a block a row selects, two collect the latent, which travels in fp32.

    A push sends ``4 * (experts + latent) / ranks`` bytes a row to each peer. Four barriers of the block that selects
    (kernel.py); the larger input, half of the latent, is of the blocks beside it.
    """
    return Work(
        num_blocks=3 * rows,
        threads_per_block=224,
        smem_bytes_per_block=footprint("router_topk", "gather16").smem_bytes,
        bytes_in_flight_per_block=8 * 1024,
        max_blocks_per_sm=4,
        registers_per_thread=footprint("router_topk", "gather16").allocated_registers,
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=latent * FP32_BYTES // 2,
                num_block_reductions=4,
                num_selection_rounds=4,
            ),
        ),
    )


CODE: Mapping[str, MachineCode] = {
    "gather_topk": built_code("router_topk", "gather16"),
    "select": built_code("router_topk", "whole"),
}
