"""A machine of round numbers and programs of hand-made kernels, so that a test can state every picosecond.

HBM moves one byte a picosecond, L2 four, an NVLink port one; the ten SMs do one flop a picosecond each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from k3sim.kernels.work import MachineCode, Pass, Read, ReadKind, Work
from k3sim.model.paths import find_path
from k3sim.model.program import Call, Program
from k3sim.sim import engine
from k3sim.sim.components import instruction_cache
from k3sim.sim.components.l2 import L2Residency
from k3sim.sim.components.wave import Wave
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine
from k3sim.sim.timeline.timeline import KernelRun, Timeline

PS = 1e-12

TINY = replace(
    load_machine("gb300"),
    # SMs
    num_sms=10, sm_clock_hz=0.5e12, smem_bytes_per_sm=1000, max_smem_bytes_per_block=1000, threads_per_sm=1000,
    # HBM
    hbm_read_bytes_per_s=1e12, hbm_latency_s=100 * PS, hbm_in_flight_curve=((1000.0, 1e12),),
    hbm_bytes_per_s_per_sm=1e12, hbm_partial_grid_loss=0.0, hbm_copy_bytes_per_s=1e12,
    prefetch_bytes_per_s_per_sm=1e12,
    # L2
    l2_effective_bytes=10_000, l2_read_bytes_per_s=4e12, l2_bytes_per_s_per_sm=0.4e12,
    l2_input_bytes_per_s_per_sm=0.4e12, l2_fragment_bytes_per_s_per_sm=0.1e12, l2_fragment_bytes_per_s=0.8e12,
    l2_far_latency_s=10 * PS, l2_loaded_latency_s=10 * PS, l2_queueing_utilisation=0.9,
    l2_hit_queueing_fraction=0.25, hbm_queue_threshold_s=400 * PS,
    # launches
    launch_latency_s=1000 * PS, pdl_trigger_to_launch_s=1000 * PS, block_refill_s=1000 * PS, fork_s=0.0,
    kernel_prologue_s=0.0, kernel_exit_cold_s=0.0, kernel_exit_warm_s=0.0, grid_completion_s=500 * PS,
    instruction_s=0.0, cold_instruction_s=0.0, block_dispatch_s=0.0, host_launch_s=5000 * PS,
    host_graph_launch_s=300 * PS,
    # barriers and sums
    warp_sum_s=3 * PS, block_reduction_s=7 * PS, cluster_sync_s=20 * PS, grid_barrier_s=30 * PS, last_block_s=35 * PS,
    counter_handoff_s=40 * PS, tensor_core_setup_s=50 * PS,
    # arithmetic
    dependent_mma_s=0.0, fp32_fma_per_clock_per_sm=1.0, bf16_flops=20e12, fp4_flops=80e12,
    fp4_weights_per_clock_per_sm=4.0,
    # NVLink
    nvlink_egress_bytes_per_s=1e12, nvlink_ingress_bytes_per_s=1e12, nvlink_one_way_s=200 * PS,
    nvlink_visibility_s=30 * PS, system_fence_s=60 * PS, nvlink_multicast=True, nvlink_in_switch_reduction=True,
    loopback_visibility_s=80 * PS, loopback_slot_s=5 * PS, rank_skew_relative_sd=0.1,
)  # fmt: skip

Spans = list[tuple[str, int, int]]


def reads(num_bytes: int, *, region: str = "", early: bool = False, kind: ReadKind = ReadKind.WEIGHTS) -> Read:
    return Read(region=region, num_bytes=num_bytes, early=early, kind=kind)


def work(*passes: Pass, **footprint: Any) -> Work:
    """A kernel of ten blocks, each a tenth of an SM, that keeps more than enough bytes in flight."""
    shape: dict[str, Any] = {
        "num_blocks": 10,
        "threads_per_block": 100,
        "smem_bytes_per_block": 100,
        "bytes_in_flight_per_block": 1000,
        "max_blocks_per_sm": 8,
        "registers_per_thread": 8,
    }
    return Work(**{**shape, **footprint}, passes=passes)


def stream(num_bytes: int, **of_pass: Any) -> Work:
    """A kernel that reads ``num_bytes`` nobody else wants and does nothing else."""
    return work(Pass(reads=(reads(num_bytes),), **of_pass))


def wave_of(one: Work, resident_blocks: int, **of_wave: Any) -> Wave:
    """Blocks of a kernel of ``TINY`` that are resident together."""
    run = KernelRun(index=0, rank=0, stream="main", layer=0, kind="", stage="")
    return Wave(run, one, one.num_blocks, resident_blocks, TINY.num_sms, 1.0, 0, **of_wave)


def call(index: int, operator: str, **columns: Any) -> Call:
    row: dict[str, Any] = {
        "layer": 0,
        "kind": "kda+moe",
        "stage": operator,
        "weights": (),
        "shape": {},
        "stream": "main",
        "launch": "graph",
        "trigger": "end",
        "after": (),
        "sends": "",
        "transport": "push",
        "group_size": 2,
        "receives": (),
    }
    return Call(**{**row, **columns}, index=index, operator=operator)


# One kernel pushes 100 bytes to every peer, the next one waits for what peers pushed.
PUSH = {"a": work(Pass(reads=(reads(1000),)), sent_bytes_per_peer=100), "b": work(Pass(num_dependent_loads=1))}
PUSH_CALLS = [call(0, "a", trigger="start", sends="x"), call(1, "b", launch="pdl", receives=(0,))]


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    works: Mapping[str, Work],
    calls: Sequence[Call],
    machine: Machine = TINY,
    *,
    num_ranks: int = 2,
    codes: Mapping[str, MachineCode] | None = None,
    **how: Any,
) -> Timeline:
    """Run ``calls`` whose operators are the keys of ``works``, and of ``codes`` where their machine code counts."""
    monkeypatch.setattr(engine, "work_of", lambda operator, weights, shape, draw: works[operator])
    if codes is not None:
        monkeypatch.setattr(instruction_cache, "code_of", lambda operator: codes[operator])
    path = find_path("stock", kernel_set="public" if codes is None else "own")
    program = Program(path=path, num_ranks=num_ranks, layers=(0,), calls=tuple(calls))
    return engine.simulate(program, machine, **how)


def spans(run: KernelRun) -> Spans:
    return [(span.phase.value, span.start_ps, span.end_ps) for span in run.spans]


def kernel(timeline: Timeline, stage: str, rank: int = 0) -> KernelRun:
    (one,) = (run for run in timeline.of_rank(rank) if run.stage == stage)
    return one


def counter_bytes(timeline: Timeline, resource: str, rank: int = 0) -> float:
    """Bytes that a resource moved in the step."""
    (one,) = (one for one in timeline.counters if (one.rank, one.resource) == (rank, resource))
    return one.bytes_until(timeline.step_ps)


def check_lines(l2: L2Residency) -> None:
    """Lines, totals by region and the total are the same bytes."""
    assert all(num_bytes > 0 for _, num_bytes in l2._lines)
    for region, num_bytes in l2._resident.items():
        assert num_bytes == sum(line[1] for line in l2._lines if line[0] == region) >= 0
    assert l2.used_bytes == sum(line[1] for line in l2._lines) <= l2.capacity_bytes
