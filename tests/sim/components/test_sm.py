"""One SM: what fits beside what, to the byte, the thread and the register."""

from __future__ import annotations

import pytest
from tiny import work

from k3sim.kernels.work import Pass
from k3sim.sim.components.sm import REGISTERS_PER_SM, BlockResources, Sm, requested_carve_out, resources_of

KIB = 1024
FULL = BlockResources(smem_bytes=600, threads=400, warps=12, registers_per_warp=1024)


def test_a_block_holds_its_resources_until_released() -> None:
    idle = Sm.idle(1000, 1000)
    registers = idle.registers_for(FULL)
    assert registers == (3 * 1024,) * 4
    sm = idle.with_block(FULL, registers)
    assert (sm.smem_bytes, sm.threads, sm.registers, sm.blocks) == (400, 600, REGISTERS_PER_SM - 12 * 1024, 1)
    assert sm.without_block(FULL, registers) == idle


@pytest.mark.parametrize(
    ("beside", "fits"),
    [
        (BlockResources(400, 600, 1, 32), True),
        (BlockResources(401, 600, 1, 32), False),  # a byte of shared memory too many
        (BlockResources(400, 601, 1, 32), False),  # a thread
        (BlockResources(0, 0, 4, 13 * 1024), True),  # 16 K registers a partition, of which three warps hold 3 K
        (BlockResources(0, 0, 4, 13 * 1024 + 1), False),
        (BlockResources(0, 0, 5, 7 * 1024), False),  # a fifth warp has no partition with 14 K
    ],
)
def test_a_block_fits_to_the_last_unit(beside: BlockResources, fits: bool) -> None:
    idle = Sm.idle(1000, 1000)
    sm = idle.with_block(FULL, idle.registers_for(FULL) or ())
    assert (sm.registers_for(beside) is not None) is fits


@pytest.mark.parametrize(("smem_bytes", "carve_out"), [(0, 8), (8 * KIB, 8), (8 * KIB + 1, 16), (200 * KIB, 228)])
def test_a_carve_out_is_the_next_size(smem_bytes: int, carve_out: int) -> None:
    one = work(Pass(), max_blocks_per_sm=1, carve_out_percent=None, smem_bytes_per_block=smem_bytes)
    assert requested_carve_out(one, 228 * KIB, 2048) == carve_out * KIB


def test_a_block_counts_whole_warps() -> None:
    assert resources_of(work(Pass(), threads_per_block=33, registers_per_thread=40)).warps == 2
