"""Every reading of the probes of one GPU, in the order of the profile: clock, HBM, L2, launches, SMs, loopback."""

from __future__ import annotations

from k3sim.calibrate.fit.readings_hbm import HBM_READINGS
from k3sim.calibrate.fit.readings_l2 import L2_READINGS
from k3sim.calibrate.fit.readings_launch import LAUNCH_READINGS
from k3sim.calibrate.fit.readings_loopback import LOOPBACK_READINGS
from k3sim.calibrate.fit.readings_sm import SM_CLOCK, SM_READINGS
from k3sim.calibrate.fit.statements import Reading

READINGS: tuple[Reading, ...] = (
    SM_CLOCK,
    *HBM_READINGS,
    *L2_READINGS,
    *LAUNCH_READINGS,
    *SM_READINGS,
    *LOOPBACK_READINGS,
)
