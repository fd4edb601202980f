"""Activations that every block of a kernel loads from L2 at the same moment.

Of ``n`` bytes in each of ``b`` blocks, ``b_sm`` of them on the SM that has most, a load takes

    n max(b_sm / r_sm, b / r_all)

| Form | r_sm | r_all |
| --- | --- | --- |
| coalesced: whole rows by loads | ``l2_input_bytes_per_s_per_sm`` | no bound: an SM's own round trips bound it |
| cp.async: whole rows into shared memory | ``l2_input_bytes_per_s_per_sm`` | ``l2_read_bytes_per_s`` |
| MMA fragments: 64 bytes of a row at a time | ``l2_fragment_bytes_per_s_per_sm`` | ``l2_fragment_bytes_per_s`` |

In pieces of 64 bytes L2 hands out less of the same lines (H200, probe ``same_input``).
"""

from __future__ import annotations

import math

from k3sim.kernels.work import ActivationForm, Pass
from k3sim.sim.components.wave import Wave
from k3sim.sim.machine import Machine


class ActivationLoads:
    """L2 of one GPU as the source of a kernel's input."""

    def __init__(self, machine: Machine) -> None:
        self._num_sms = int(machine.num_sms)
        self._rates = {  # of an SM, of all SMs together
            ActivationForm.COALESCED: (machine.l2_input_bytes_per_s_per_sm, math.inf),
            ActivationForm.CP_ASYNC: (machine.l2_input_bytes_per_s_per_sm, machine.l2_read_bytes_per_s),
            ActivationForm.MMA_FRAGMENTS: (machine.l2_fragment_bytes_per_s_per_sm, machine.l2_fragment_bytes_per_s),
        }

    def load_ps(self, wave: Wave, one: Pass, num_bytes: int) -> float:
        """What the blocks of a pass take to load ``num_bytes`` each."""
        if not num_bytes:
            return 0.0
        blocks = min(wave.resident_blocks, one.num_blocks or wave.work.num_blocks)
        of_an_sm, of_all = self._rates[one.activation_form]
        return 1e12 * num_bytes * max(-(-blocks // self._num_sms) / of_an_sm, blocks / of_all)
