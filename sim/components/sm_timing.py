"""What an SM takes for arithmetic and reductions.

| Quantity | Time |
| --- | --- |
| fp32 on CUDA cores | flops / (2 ``fp32_fma_per_clock_per_sm`` x clock x SMs) |
| tensor cores | flops / (rate of the format x SMs / all SMs) |
| FP4 weights | the longer of that and weights / (``fp4_weights_per_clock_per_sm`` x clock x SMs) |
| tile epilogues of a block beside the stream | two block reductions each, in series |

At few rows the rate at which FP4 weights enter the tensor core bounds, not the flops.
"""

from __future__ import annotations

from k3sim.kernels.work import Pass, Unit, Work
from k3sim.sim.components.wave import Wave
from k3sim.sim.machine import Machine
from k3sim.sim.units import picoseconds


class SmTiming:
    """Rates of the SMs of one GPU. Times are picoseconds."""

    def __init__(self, machine: Machine) -> None:
        self._num_sms = machine.num_sms
        self._clock_hz = machine.sm_clock_hz
        self._fma_per_clock = machine.fp32_fma_per_clock_per_sm
        self._fp4_weights_per_clock = machine.fp4_weights_per_clock_per_sm
        self._flops_per_s = {
            Unit.BF16: machine.bf16_flops,
            Unit.FP4: machine.fp4_flops or machine.bf16_flops,  # weights are decoded where there is no FP4
        }
        self.block_reduction_ps = picoseconds(machine.block_reduction_s)
        self.tensor_core_setup_ps = picoseconds(machine.tensor_core_setup_s)

    def arithmetic_ps(self, wave: Wave, one: Pass) -> float:
        """Arithmetic of a pass on the SMs that run it, or its epilogues in series where these take longer."""
        sms = min(one.num_blocks or wave.work.num_blocks, int(self._num_sms))
        return max(self._flops_ps(one, sms), 2 * one.num_tile_epilogues * self.block_reduction_ps)

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


def last_slot_share(work: Work, one: Pass) -> float:
    """Share of a pass's arithmetic that comes after its last bytes: that of one slot of each block's ring."""
    num_bytes = sum(read.num_bytes for read in one.reads)
    if not work.ring_slots or not num_bytes:
        return 0.0
    slot_bytes = work.bytes_in_flight_per_block / work.ring_slots
    return min(1.0, slot_bytes * (one.num_blocks or work.num_blocks) / num_bytes)
