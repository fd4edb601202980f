"""One GPU of the simulation: the constructor names its parts, each of which holds one physical thing."""

from __future__ import annotations

from k3sim.sim.clock import Clock
from k3sim.sim.components.activations import ActivationLoads
from k3sim.sim.components.barriers import Barriers
from k3sim.sim.components.fabric import Fabric
from k3sim.sim.components.instruction_cache import InstructionCache
from k3sim.sim.components.launch_queue import LaunchQueue
from k3sim.sim.components.load_pipeline import LoadPipeline
from k3sim.sim.components.memory import Memory
from k3sim.sim.components.occupancy import Occupancy
from k3sim.sim.components.peers import Peers
from k3sim.sim.components.skew import Lateness
from k3sim.sim.components.sm_timing import SmTiming
from k3sim.sim.machine import Machine
from k3sim.sim.units import bytes_per_us


class Gpu:
    """The GPU of one rank.

    ``counts_code``: its kernels are the project's own, whose machine code is known. ``averages_skew``: it stands for
    all ranks, and at exchanges waits for the slowest of them in the mean.
    """

    def __init__(
        self, env: Clock, machine: Machine, fabric: Fabric, rank: int, *,
        counts_code: bool, averages_skew: bool,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.num_sms = int(machine.num_sms)
        self.hbm_bytes_per_us = bytes_per_us(machine.hbm_read_bytes_per_s)
        self.launches = LaunchQueue(machine)
        self.occupancy = Occupancy(env, machine)
        self.memory = Memory(env, machine)
        self.loads = LoadPipeline(env, machine, self.memory)
        self.activations = ActivationLoads(machine)
        self.sm_timing = SmTiming(machine)
        self.barriers = Barriers(machine)
        self.instruction_cache = InstructionCache(machine, counts_code=counts_code)
        lateness = Lateness(machine.rank_skew_relative_sd) if averages_skew else None
        self.peers = Peers(env, fabric, self.memory, rank, lateness)
