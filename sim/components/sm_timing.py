"""What an SM takes for arithmetic, stages and reductions.

| Quantity | Time |
| --- | --- |
| fp32 on CUDA cores | flops / (2 ``fp32_fma_per_clock_per_sm`` x clock x SMs) |
| tensor cores | flops / (rate of the format x SMs / all SMs) |
| FP4 weights | the longer of that and weights / (``fp4_weights_per_clock_per_sm`` x clock x SMs) |
| MMAs of a warp that add to the same sums | ``dependent_mma`` each, in series |
| tile epilogues of a block beside the stream | two block reductions each, in series |
| a stage of a warp | instructions x the longer of ``instruction`` and issue, its bytes through the port, ``warp_sum`` |
| issue of an instruction | warps of the SM / 4 schedulers / clock |
| the port of shared memory | bytes of the SM's blocks / 128 a clock (32 banks of 4 bytes, CUDA C++ Programming Guide) |

All warps of an SM begin a stage when its bytes have come: these pass the port of shared memory, and then instructions
are issued in turn with those of the other warps. At few rows the rate at which FP4 weights enter the tensor core
bounds, not the flops.
"""

from __future__ import annotations

from math import ceil

from k3sim.kernels.work import Pass, Unit, Work
from k3sim.sim.components.wave import Wave
from k3sim.sim.machine import Machine
from k3sim.sim.units import picoseconds

SCHEDULERS = 4  # of an SM: each issues an instruction of one warp a clock
SMEM_BYTES_PER_CLOCK = 128
UNEVEN = 0.1  # of a slot: what the mean block may have more than whole slots, where blocks have unequal shares


class SmTiming:
    """Rates of the SMs of one GPU. Times are picoseconds."""

    def __init__(self, machine: Machine) -> None:
        self._num_sms = machine.num_sms
        self._clock_hz = machine.sm_clock_hz
        self._fma_per_clock = machine.fp32_fma_per_clock_per_sm
        self._fp4_weights_per_clock = machine.fp4_weights_per_clock_per_sm
        self._instruction_s = machine.instruction_s
        self._flops_per_s = {
            Unit.BF16: machine.bf16_flops,
            Unit.FP4: machine.fp4_flops or machine.bf16_flops,  # weights are decoded where there is no FP4
        }
        self._warp_sum_ps = picoseconds(machine.warp_sum_s)
        self._dependent_mma_ps = picoseconds(machine.dependent_mma_s)
        self.block_reduction_ps = picoseconds(machine.block_reduction_s)
        self.tensor_core_setup_ps = picoseconds(machine.tensor_core_setup_s)

    def arithmetic_ps(self, wave: Wave, one: Pass) -> float:
        """Arithmetic of a pass on the SMs that run it, its longest chain where that takes longer, or its stages."""
        sms = min(one.num_blocks or wave.work.num_blocks, int(self._num_sms))
        chain_ps = max(
            2 * one.num_tile_epilogues * self.block_reduction_ps, one.num_dependent_mmas * self._dependent_mma_ps
        )
        return max(max(self._flops_ps(one, sms), chain_ps), one.num_stages * self.stage_ps(wave, one))

    def _flops_ps(self, one: Pass, sms: int) -> float:
        if not (one.flops or one.decoded_weights):
            return 0.0
        if one.unit is Unit.CUDA_CORE:
            return 1e12 * one.flops / (2 * self._fma_per_clock * self._clock_hz * sms)
        share = sms / self._num_sms
        if one.unit is Unit.FP4:
            weights_s = one.decoded_weights / (self._fp4_weights_per_clock * self._clock_hz * sms)
            return 1e12 * max(weights_s, one.flops / (self._flops_per_s[Unit.FP4] * share))
        return 1e12 * one.flops / (self._flops_per_s[one.unit] * share)

    def stage_ps(self, wave: Wave, one: Pass) -> float:
        """One stage of a warp: what it multiplies, its instructions and its sums; 0 for a pass without stages."""
        if not one.num_stages:
            return 0.0
        num_bytes = sum(read.num_bytes for read in one.reads) / (one.num_blocks or wave.work.num_blocks)
        port_ps = self._port_ps(wave, num_bytes / one.num_stages)
        each_s = max(self._instruction_s, wave.warps_per_sm / SCHEDULERS / self._clock_hz)
        return 1e12 * one.stage_instructions * each_s + port_ps + self._warp_sum_ps

    def last_slot_port_ps(self, wave: Wave, one: Pass) -> float:
        """What the last slot of a ring takes through the port of shared memory before tensor cores multiply it.

        A stage on CUDA cores has its loads in it, and the rate of FP4 those of the probe that gave it.
        """
        if not wave.work.ring_slots or one.unit is not Unit.BF16:
            return 0.0
        return self._port_ps(wave, wave.work.bytes_in_flight_per_block / wave.work.ring_slots)

    def _port_ps(self, wave: Wave, num_bytes: float) -> float:
        """What an SM takes to load ``num_bytes`` of each of its blocks from shared memory."""
        return 1e12 * wave.blocks_per_sm * num_bytes / SMEM_BYTES_PER_CLOCK / self._clock_hz


def last_slot_share(work: Work, one: Pass) -> float:
    """Share of a pass's arithmetic that comes after its last bytes: that of one slot of each block's ring.

    A pass fills whole slots, which are equal: what a block reads of it, over the most that a slot holds, rounded up.
    """
    num_bytes = sum(read.num_bytes for read in one.reads)
    if not work.ring_slots or not num_bytes:
        return 0.0
    slot_bytes = work.bytes_in_flight_per_block / work.ring_slots
    slots = num_bytes / (one.num_blocks or work.num_blocks) / slot_bytes
    return 1.0 / max(1, ceil(slots - UNEVEN))
