"""Cost of the selected MXFP4 experts for one or a few rows, as the kernel of this folder computes them.

``gate_up`` and ``down`` are the two products as launches of their own, ``persistent`` is both in one; tiles are decoded
to bf16, row by row, and an expert that two rows chose is read twice. The rate at which weights are decoded and
multiplied is the machine's: probe ``mxfp4_rate`` runs the multiplying loop of this kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BITS_PER_WEIGHT = 4.25
OWN_DOWN_BLOCKS = 112
OWN_RING_SLOTS = 4
OWN_RING_BYTES = OWN_RING_SLOTS * 30_464
MAX_BLOCKS = 128  # a persistent launch that fits every machine listed; further tiles follow in the same block


def gate_up(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """First product of ``expert_gemv`` as a launch of its own: 128 blocks, each an eighth of one expert."""
    (w13,) = weights
    return _own_launch(w13, MAX_BLOCKS, "gate_up", rows, top_k, distinct_milli)


def down(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int) -> Work:
    """Second product with the weighted sum: 112 blocks, each 32 outputs over all experts."""
    (w2,) = weights
    return _own_launch(w2, OWN_DOWN_BLOCKS, "down", rows, top_k, distinct_milli)


def _own_launch(weight: Weight, num_blocks: int, part: str, rows: int, top_k: int, distinct_milli: int) -> Work:
    """Ids, then weights: nothing is read before the wait. Row by row, each ending with a barrier of the warps."""
    num_bytes = round(weight.num_bytes * top_k * 1000 / distinct_milli)
    passes = tuple(
        Pass(
            num_address_loads=0 if row else 2,
            num_dependent_loads=1,
            reads=(Read(region=f"{weight.region}/{row}", num_bytes=num_bytes, early=row > 0),),
            unit=Unit.FP4,
            decoded_weights=round(num_bytes * 8 / BITS_PER_WEIGHT),
            num_block_reductions=1,
        )
        for row in range(rows)
    )
    built = footprint("expert_gemv", f"width192_{part}")
    return Work(
        num_blocks=num_blocks,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=OWN_RING_BYTES,
        ring_slots=OWN_RING_SLOTS,
        max_blocks_per_sm=1,
        registers_per_thread=built.allocated_registers,
        deep_prefetch=True,
        passes=passes,
    )


def persistent(weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, width: int) -> Work:
    """Both products in the launch of this folder, row by row: an expert that two rows chose is read twice.

    One stream of bulk copies behind the ids, all gate and up of the rows, then all down: it does not stop between the
    products, where hidden vectors go through L2 to all blocks. A row ends with a barrier of the warps.
    """
    passes: list[Pass] = []
    share = top_k * 1000 / distinct_milli  # of the distinct experts, those of one row
    for weight, num_blocks in zip(weights, (MAX_BLOCKS, OWN_DOWN_BLOCKS), strict=True):
        for row in range(rows):
            num_bytes = round(weight.num_bytes * share)
            first = not passes
            passes.append(
                Pass(
                    num_blocks=num_blocks,
                    # An id, from which addresses follow; a row's x, or the hidden vector that is polled.
                    num_address_loads=1 if first else 0,
                    num_dependent_loads=1 if weight is weights[0] or row else 3,
                    reads=(Read(region=f"{weight.region}/{row}", num_bytes=num_bytes, early=not first),),
                    unit=Unit.FP4,
                    decoded_weights=round(num_bytes * 8 / BITS_PER_WEIGHT),
                    num_block_reductions=1,
                )
            )
    built = footprint("expert_gemv", "width192_bf16" if width <= 192 else "width384_bf16")
    return Work(
        num_blocks=MAX_BLOCKS,
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=OWN_RING_BYTES,
        ring_slots=OWN_RING_SLOTS,
        max_blocks_per_sm=1,
        registers_per_thread=built.allocated_registers,
        co_resident=True,
        deep_prefetch=True,
        passes=tuple(passes),
    )


def persistent_push(
    weights: Sequence[Weight], *, rows: int, top_k: int, distinct_milli: int, width: int, latent: int
) -> Work:
    """``persistent``, whose sums go to every peer's slots in bf16 instead of to memory."""
    work = persistent(weights, rows=rows, top_k=top_k, distinct_milli=distinct_milli, width=width)
    addresses = Pass(num_dependent_loads=1)  # of the peers, when a row's sums are there
    return replace(work, passes=(*work.passes, addresses), sent_bytes_per_peer=rows * latent * 2)


CODE: Mapping[str, MachineCode] = {
    "down": built_code("expert_gemv", "width192_down"),
    "gate_up": built_code("expert_gemv", "width192_gate_up"),
    "persistent": built_code("expert_gemv", "width192_bf16"),
    "persistent_push": built_code("expert_gemv", "width192_push16"),
}
