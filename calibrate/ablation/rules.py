"""Every rule of the model that can be switched off, and where it stands.

A rule is off by what that takes: other machine values, other counts of Work, or another value of a name in a component.
The base of the model is no rule: bytes over the rate of HBM, round trips, launches, blocks on SMs. Who adds a rule adds
a row here, and keeps it where the table (``python -m k3sim.calibrate.ablation``) says that it earns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from k3sim.kernels import costs
from k3sim.kernels.work import ActivationForm, Barrier, MachineCode, Pass, Work
from k3sim.model.program import Weight
from k3sim.sim.components import instruction_cache, peers, sm_timing
from k3sim.sim.components.bandwidth import SharedBandwidth
from k3sim.sim.components.instruction_cache import InstructionCache
from k3sim.sim.components.occupancy import Occupancy
from k3sim.sim.machine import Machine

WITHOUT_BOUND = 1e18  # a rate that bounds nothing


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: what it says, the file that applies it, and what is different where it is off.

    ``machine`` and ``work`` return theirs without the rule; ``replaced`` holds (owner, attribute, value without it).
    """

    name: str
    says: str
    place: str
    machine: Callable[[Machine], Machine] = lambda machine: machine
    work: Callable[[Work], Work] | None = None
    replaced: tuple[tuple[Any, str, Any], ...] = ()


@contextmanager
def switched_off(rule: Rule | None) -> Iterator[Callable[[Machine], Machine]]:
    """Predict without a rule inside the block, with what it gives made of each machine; None leaves all on."""
    if rule is None:
        yield lambda machine: machine
        return
    replaced = rule.replaced
    if rule.work is not None:
        replaced = (*replaced, (costs, "_work_of", _works(rule.work)))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield rule.machine
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _works(change: Callable[[Work], Work]) -> Callable[..., Work]:
    """``costs._work_of`` with every Work changed; kept, as that is."""
    with_rule = costs._work_of

    @lru_cache(maxsize=4096)
    def changed(operator: str, weights: tuple[Weight, ...], shape: tuple[tuple[str, int], ...]) -> Work:
        return change(with_rule(operator, weights, shape))

    return changed


def _values(**values: float) -> Callable[[Machine], Machine]:
    """Machine with other values."""
    return lambda machine: replace(machine, **values)  # type: ignore[arg-type]


def _as(**others: str) -> Callable[[Machine], Machine]:
    """Machine some of whose values are those of other fields."""
    return lambda machine: replace(machine, **{name: getattr(machine, other) for name, other in others.items()})


def _work(**fields: object) -> Callable[[Work], Work]:
    """Work with other fields."""
    return lambda work: replace(work, **fields)  # type: ignore[arg-type]


def _passes(change: Callable[[Pass], Pass]) -> Callable[[Work], Work]:
    """Work with other passes."""
    return lambda work: replace(work, passes=tuple(map(change, work.passes)))


def _without(**fields: object) -> Callable[[Work], Work]:
    """Work whose passes have other fields."""
    return _passes(lambda one: replace(one, **fields))  # type: ignore[arg-type]


def _plain_barrier(one: Pass) -> Pass:
    return replace(one, barrier=Barrier.CLUSTER) if one.barrier is Barrier.CLUSTER_RELEASE else one


def _input_at_once(one: Pass) -> Pass:
    whole = one.activation_bytes_per_block + one.streamed_activation_bytes_per_block
    return replace(one, activation_bytes_per_block=whole, streamed_activation_bytes_per_block=0)


def _without_serial_code(operator: str) -> MachineCode:
    return replace(costs.code_of(operator), serial_instructions=0)


def _without_misses(operator: str) -> MachineCode:
    return replace(costs.code_of(operator), icache_miss_instructions=0)


def _flat_curve(machine: Machine) -> Machine:
    return replace(machine, hbm_in_flight_curve=((1, machine.hbm_read_bytes_per_s),))


def _without_l1_limit(*_: object) -> int:
    return 1 << 40


def _cold_exit(cache: InstructionCache, code: object, *, pushes: bool) -> tuple[int, int]:
    return cache.exit_cold_ps, cache._exit_warm_ps if pushes else 0


_transfer = SharedBandwidth.transfer


def _even_shares(ports: SharedBandwidth, *given: Any, share: int = 1, **named: Any) -> Any:
    return _transfer(ports, *given[:4], **named)


_exit_ps = InstructionCache.exit_ps


def _push_behind_exit(cache: InstructionCache, code: Any, *, pushes: bool) -> tuple[int, int]:
    return _exit_ps(cache, code, pushes=False)


_SIM = "sim/components"

RULES: tuple[Rule, ...] = (
    # Occupancy
    Rule(name="registers", says="blocks become resident SM by SM, by registers", place=f"{_SIM}/occupancy.py",
         work=_work(registers_per_thread=0)),
    Rule(name="carve-out", says="kernels that ask for less than all shared memory", place=f"{_SIM}/sm.py",
         work=_work(carve_out_percent=100)),
    Rule(name="later-waves", says="blocks end and make room for others of their kernel", place=f"{_SIM}/wave.py",
         work=_work(co_resident=True)),
    Rule(name="co-residency", says="some kernels wait until all blocks are resident", place=f"{_SIM}/wave.py",
         work=_work(co_resident=False)),
    # Launch
    Rule(name="block-refill", says="the first instruction of a pending block", place=f"{_SIM}/launch_queue.py",
         machine=_values(block_refill_s=0.0)),
    Rule(name="fork", says="the second node behind one launches later", place=f"{_SIM}/launch_queue.py",
         machine=_values(fork_s=0.0)),
    Rule(name="block-dispatch", says="time of each block of a launch", place=f"{_SIM}/launch_queue.py",
         machine=_values(block_dispatch_s=0.0)),
    # Code
    Rule(name="serial-code", says="straight code behind the dependency wait", place=f"{_SIM}/instruction_cache.py",
         work=_work(serial_instructions=0), replaced=((instruction_cache, "code_of", _without_serial_code),)),
    Rule(name="cold-code", says="code that others replaced is fetched", place=f"{_SIM}/instruction_cache.py",
         machine=_as(cold_instruction_s="instruction_s")),
    Rule(name="cold-cublas", says="misses of code whose pace is in other counts", place=f"{_SIM}/instruction_cache.py",
         replaced=((instruction_cache, "code_of", _without_misses),)),
    Rule(name="warm-exit", says="warm code exits sooner", place=f"{_SIM}/instruction_cache.py",
         replaced=((InstructionCache, "exit_ps", _cold_exit),)),
    Rule(name="push-before-exit", says="a push leaves before the kernel exits", place=f"{_SIM}/instruction_cache.py",
         replaced=((InstructionCache, "exit_ps", _push_behind_exit),)),
    # Loads
    Rule(name="in-flight-curve", says="a stream's rate by its bytes in flight", place="sim/machine.py",
         machine=_flat_curve),
    Rule(name="draw-of-an-sm", says="an SM draws no more of HBM", place=f"{_SIM}/memory.py",
         machine=_values(hbm_bytes_per_s_per_sm=WITHOUT_BOUND)),
    Rule(name="partial-grid", says="a grid on part of the SMs reads slower", place="sim/machine.py",
         machine=_values(hbm_partial_grid_loss=0.0)),
    Rule(name="part-of-the-ring", says="a ring is filled in turns before the wait", place=f"{_SIM}/load_pipeline.py",
         work=_work(early_bytes_in_flight_per_block=0)),
    Rule(name="register-loads", says="loads into registers keep later loads back", place=f"{_SIM}/load_pipeline.py",
         work=_work(register_loads=False)),
    Rule(name="l1-limit", says="loads into registers have their place in L1", place=f"{_SIM}/load_pipeline.py",
         replaced=((Occupancy, "l1_bytes", _without_l1_limit),)),
    Rule(name="trigger-behind-loads", says="a trigger behind loads into registers", place=f"{_SIM}/load_pipeline.py",
         work=_work(triggers_after_loads=False)),
    Rule(name="prefetch-rate", says="an SM asks for no more by prefetches", place=f"{_SIM}/memory.py",
         machine=_values(prefetch_bytes_per_s_per_sm=WITHOUT_BOUND)),
    Rule(name="write-cost", says="a written byte costs more than a read one", place=f"{_SIM}/memory.py",
         machine=_as(hbm_copy_bytes_per_s="hbm_read_bytes_per_s")),
    # L2
    Rule(name="l2-residency", says="state that is read again is in L2", place=f"{_SIM}/l2.py",
         machine=_values(l2_effective_bytes=1)),
    Rule(name="l2-rate", says="all bytes cross the L2 port", place=f"{_SIM}/memory.py",
         machine=_values(l2_read_bytes_per_s=WITHOUT_BOUND, l2_bytes_per_s_per_sm=WITHOUT_BOUND)),
    Rule(name="loaded-latency", says="an L2 hit queues near HBM's ceiling", place=f"{_SIM}/memory.py",
         machine=_as(l2_loaded_latency_s="l2_far_latency_s")),
    Rule(name="hit-queueing", says="an L2 hit waits behind what was asked for", place=f"{_SIM}/memory.py",
         machine=_values(l2_hit_queueing_fraction=0.0)),
    Rule(name="queue-threshold", says="a short queue costs an L2 hit nothing", place=f"{_SIM}/memory.py",
         machine=_values(hbm_queue_threshold_s=0.0)),
    Rule(name="hand-over-trips", says="a hand-over waits three times as an L2 hit", place=f"{_SIM}/peers.py",
         replaced=((peers, "TRIPS", 1),)),
    Rule(name="shares", says="a full port is shared by bytes in flight", place=f"{_SIM}/bandwidth.py",
         replaced=((SharedBandwidth, "transfer", _even_shares),)),
    # Input
    Rule(name="input-rate", says="an SM loads no more of what all load", place=f"{_SIM}/activations.py",
         machine=_values(l2_input_bytes_per_s_per_sm=WITHOUT_BOUND)),
    Rule(name="fragments", says="operands of tensor cores come in small pieces", place=f"{_SIM}/activations.py",
         work=_without(activation_form=ActivationForm.COALESCED)),
    Rule(name="fragments-of-all", says="L2 hands out less of small pieces", place=f"{_SIM}/activations.py",
         machine=_values(l2_fragment_bytes_per_s=WITHOUT_BOUND)),
    Rule(name="streamed-input", says="input that comes slot by slot", place=f"{_SIM}/activations.py",
         work=_passes(_input_at_once)),
    # Arithmetic
    Rule(name="last-slot", says="the last ring slot's arithmetic is behind its bytes", place=f"{_SIM}/sm_timing.py",
         work=_work(ring_slots=0)),
    Rule(name="shared-memory-port", says="128 bytes a clock of shared memory", place=f"{_SIM}/sm_timing.py",
         replaced=((sm_timing, "SMEM_BYTES_PER_CLOCK", WITHOUT_BOUND),)),
    Rule(name="stages", says="stages of a warp in series beside the stream", place=f"{_SIM}/sm_timing.py",
         work=_without(num_stages=0, stage_instructions=0)),
    Rule(name="warp-sums", says="sums over a warp in every stage", place=f"{_SIM}/sm_timing.py",
         machine=_values(warp_sum_s=0.0)),
    Rule(name="dependent-mma", says="MMAs that add to the same sums", place=f"{_SIM}/sm_timing.py",
         machine=_values(dependent_mma_s=0.0)),
    Rule(name="tile-epilogues", says="epilogues of a block in series", place=f"{_SIM}/sm_timing.py",
         work=_without(num_tile_epilogues=0)),
    Rule(name="fp4-weights", says="the rate at which FP4 weights are decoded", place=f"{_SIM}/sm_timing.py",
         machine=_values(fp4_weights_per_clock_per_sm=WITHOUT_BOUND)),
    Rule(name="tensor-core-setup", says="set-up of a block on tensor cores", place=f"{_SIM}/sm_timing.py",
         machine=_values(tensor_core_setup_s=0.0)),
    Rule(name="release-fence", says="a barrier behind DSMEM stores counts twice", place=f"{_SIM}/barriers.py",
         work=_passes(_plain_barrier)),
    Rule(name="address-loads", says="round trips before reads can be asked for", place=f"{_SIM}/load_pipeline.py",
         work=_without(num_address_loads=0)),
    # Peers
    Rule(name="polled-slots", says="pollers of one slot see it sooner", place=f"{_SIM}/peers.py",
         work=_work(polled_slots=0)),
    Rule(name="slot-visibility", says="slots that are looked at one after the other", place=f"{_SIM}/fabric.py",
         machine=_values(loopback_slot_s=0.0)),
    Rule(name="skew", says="ranks wait for the slowest", place=f"{_SIM}/skew.py",
         machine=_values(rank_skew_relative_sd=0.0)),
)  # fmt: skip
