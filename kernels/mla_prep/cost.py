"""Cost of what precedes MLA attention: q and kv norms, q_b, absorption into the latent, cache write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import REGISTER_LOAD_CARVE_OUT, Barrier, MachineCode, Pass, Read, Unit, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
CLUSTER_BLOCKS = 8
WARPS = 8  # that share K of the query projection, in steps of 32


def fused(weights: Sequence[Weight], *, rows: int, heads: int, kv_row_bytes: int) -> Work:
    """One launch: a cluster of eight blocks a head. ``weights`` are q_b and W_UK, both read before the wait.

    Every block normalises the latents itself (3 KB), a warp a row, projects its share of the head's query, and after a
    cluster barrier absorbs it into the latent. A product takes eight rows; of the projection each adds to the one
    before.
    """
    q_b, w_uk = weights
    built = footprint("mla_prep", "heads6_fp8")
    return Work(
        num_blocks=CLUSTER_BLOCKS * (heads + 1),  # the last cluster writes the cache
        threads_per_block=built.threads,
        smem_bytes_per_block=built.smem_bytes,
        bytes_in_flight_per_block=-(-(q_b.num_bytes + w_uk.num_bytes) // (CLUSTER_BLOCKS * heads)),
        register_loads=True,
        # For sm_90a: 580, 635, 693, 877, 1,485 and 1,590 at 1, 2, 4, 8, 12 and 16 rows.
        serial_instructions=560 + 38 * rows + 450 * (-(-rows // 8) - 1),
        max_blocks_per_sm=1,
        registers_per_thread=built.allocated_registers,
        carve_out_percent=REGISTER_LOAD_CARVE_OUT,
        passes=(
            Pass(
                num_dependent_loads=-(-rows // WARPS),
                activation_bytes_per_block=rows * q_b.depth * BF16_BYTES,
                reads=(Read(region=q_b.region, num_bytes=q_b.num_bytes, early=True),),
                flops=2.0 * -(-rows // 8) * 8 * q_b.num_outputs * q_b.depth,
                unit=Unit.BF16,
                num_dependent_mmas=2 * q_b.depth // (32 * WARPS),
                num_block_reductions=2,  # norm, projection
                barrier=Barrier.CLUSTER_RELEASE,
                num_barriers=1,
            ),
            Pass(
                reads=(Read(region=w_uk.region, num_bytes=w_uk.num_bytes, early=True),),
                written_bytes=rows * kv_row_bytes,
                flops=2.0 * 16 * w_uk.num_outputs * w_uk.depth,
                unit=Unit.BF16,
                num_block_reductions=1,
            ),
        ),
    )


CODE: Mapping[str, MachineCode] = {
    "fused": built_code("mla_prep", "heads6_fp8"),
}
