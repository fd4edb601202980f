"""Machines: what is shipped, and the curve between its points."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3sim.sim.machine import Machine, describe
from k3sim.sim.profile import load_machine, machine_names

SHIPPED = ("b200", "b300", "gb200", "gb300", "h100", "h200")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
HOPPER = ("h100", "h200")
FILES = Path(__file__).parents[2] / "sim" / "machines"

UNITS = {
    "num_sms": "SM",
    "sm_clock_hz": "Hz",
    "smem_bytes_per_sm": "B",
    "max_smem_bytes_per_block": "B",
    "threads_per_sm": "thread",
    "hbm_capacity_bytes": "B",
    "hbm_read_bytes_per_s": "B/s",
    "hbm_latency_s": "s",
    "hbm_in_flight_curve": "B/SM, B/s",
    "hbm_bytes_per_s_per_sm": "B/s",
    "hbm_partial_grid_loss": "1",
    "hbm_copy_bytes_per_s": "B/s",
    "prefetch_bytes_per_s_per_sm": "B/s",
    "l2_effective_bytes": "B",
    "l2_read_bytes_per_s": "B/s",
    "l2_bytes_per_s_per_sm": "B/s",
    "l2_input_bytes_per_s_per_sm": "B/s",
    "l2_fragment_bytes_per_s_per_sm": "B/s",
    "l2_fragment_bytes_per_s": "B/s",
    "l2_far_latency_s": "s",
    "l2_loaded_latency_s": "s",
    "l2_queueing_utilisation": "1",
    "l2_hit_queueing_fraction": "1",
    "hbm_queue_threshold_s": "s",
    "launch_latency_s": "s",
    "grid_completion_s": "s",
    "pdl_trigger_to_launch_s": "s",
    "block_refill_s": "s",
    "fork_s": "s",
    "kernel_prologue_s": "s",
    "kernel_exit_cold_s": "s",
    "kernel_exit_warm_s": "s",
    "block_dispatch_s": "s",
    "instruction_s": "s",
    "cold_instruction_s": "s",
    "host_launch_s": "s",
    "host_graph_launch_s": "s",
    "warp_sum_s": "s",
    "block_reduction_s": "s",
    "cluster_sync_s": "s",
    "grid_barrier_s": "s",
    "last_block_s": "s",
    "counter_handoff_s": "s",
    "tensor_core_setup_s": "s",
    "dependent_mma_s": "s",
    "fp32_fma_per_clock_per_sm": "FMA/clock/SM",
    "bf16_flops": "FLOP/s",
    "fp4_flops": "FLOP/s",
    "fp4_weights_per_clock_per_sm": "weight/clock/SM",
    "nvlink_domain_gpus": "GPU",
    "nvlink_egress_bytes_per_s": "B/s",
    "nvlink_ingress_bytes_per_s": "B/s",
    "nvlink_one_way_s": "s",
    "nvlink_visibility_s": "s",
    "system_fence_s": "s",
    "nvlink_multicast": "bool",
    "nvlink_in_switch_reduction": "bool",
    "loopback_visibility_s": "s",
    "loopback_slot_s": "s",
    "rank_skew_relative_sd": "1",
}


# What is shipped


def test_shipped_names() -> None:
    assert machine_names() == list(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_profile_is_complete_and_sourced(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert {f: origin.unit for f, origin in machine.provenance.items()} == UNITS
    for f, origin in machine.provenance.items():
        assert len(origin.source) > 5, f
        assert origin.kind != "measured" or origin.date is not None, f
        assert origin.kind != "inferred" or origin.note, f"{f}: an inferred value says from what"


def test_names_in_any_case_are_the_machine() -> None:
    assert load_machine("GB300") == load_machine(str(FILES / "gb300.json"))


def test_attributes_have_the_types_they_declare() -> None:
    machine = load_machine("h200")
    kinds = {f.name: f.type for f in dataclasses.fields(Machine) if f.metadata}
    assert set(kinds) == set(UNITS)
    for f, kind in kinds.items():
        value = getattr(machine, f)
        assert type(value).__name__ == {"Curve": "tuple"}.get(str(kind), kind), f


def test_datasheet_figures() -> None:
    gb300 = load_machine("gb300")
    assert gb300.num_sms == 152
    assert gb300.max_smem_bytes_per_block == 227 * 1024
    assert gb300.hbm_capacity_bytes == 284_208 * 1024**2
    assert gb300.nvlink_domain_gpus == 72
    assert gb300.fp4_flops == 15e15
    h200 = load_machine("h200")
    assert (h200.num_sms, h200.fp4_flops, h200.nvlink_domain_gpus) == (132, 0, 8)


def test_gb200s_node_boundary_is_as_measured() -> None:
    gb200 = load_machine("gb200")
    assert gb200.grid_completion_s == 0.65e-6
    assert gb200.launch_latency_s == pytest.approx(0.30e-6)
    assert gb200.provenance["launch_latency_s"].kind == "inferred"
    # Below the public probe's 1.095 us, which counts more than the boundary (docs/machines.md).
    assert gb200.launch_latency_s + gb200.grid_completion_s < 1.095e-6


def test_gb200s_remote_visibility_is_2_us() -> None:
    gb200 = load_machine("gb200")
    assert gb200.nvlink_one_way_s + gb200.nvlink_visibility_s == pytest.approx(2.0e-6, rel=1e-9)


@pytest.mark.parametrize("blackwell", BLACKWELL)
@pytest.mark.parametrize("hopper", HOPPER)
def test_blackwell_exceeds_hopper(blackwell: str, hopper: str) -> None:
    newer, older = load_machine(blackwell), load_machine(hopper)
    for f in (
        "num_sms",
        "hbm_capacity_bytes",
        "hbm_read_bytes_per_s",
        "hbm_latency_s",
        "l2_effective_bytes",
        "l2_far_latency_s",
        "bf16_flops",
        "fp4_flops",
        "fp4_weights_per_clock_per_sm",
        "nvlink_egress_bytes_per_s",
        "nvlink_ingress_bytes_per_s",
        "nvlink_one_way_s",
    ):
        assert getattr(newer, f) > getattr(older, f), f


@pytest.mark.parametrize("name", SHIPPED)
def test_physical_order_within_a_machine(name: str) -> None:
    m = load_machine(name)
    assert m.l2_far_latency_s < m.hbm_latency_s
    assert m.hbm_read_bytes_per_s < m.l2_read_bytes_per_s
    assert m.hbm_read_bytes_per_s / m.num_sms < m.hbm_bytes_per_s_per_sm <= m.l2_bytes_per_s_per_sm
    assert (
        m.block_dispatch_s < m.block_reduction_s < m.cluster_sync_s < m.counter_handoff_s < m.grid_barrier_s
    )
    assert m.l2_effective_bytes < m.hbm_capacity_bytes
    # a cluster barrier stays inside a GPC, a signal over NVLink crosses two L2s and the switch
    assert m.cluster_sync_s < m.nvlink_one_way_s + m.nvlink_visibility_s
    assert m.launch_latency_s + m.grid_completion_s > 0.58e-6, "more than an empty node's period"


@pytest.mark.parametrize("name", SHIPPED)
def test_curve_stays_within_idle_latency_and_ceiling(name: str) -> None:
    """Little's law at the idle latency is the most that any bytes in flight can give."""
    m = load_machine(name)
    for bytes_per_sm, rate in m.hbm_in_flight_curve:
        assert rate <= 1.001 * bytes_per_sm * m.num_sms / m.hbm_latency_s
    assert m.hbm_in_flight_curve[-1][1] == m.hbm_read_bytes_per_s


def test_gb300_needs_more_than_idle_latency_says() -> None:
    m = load_machine("gb300")
    littles_law = m.hbm_read_bytes_per_s * m.hbm_latency_s
    assert m.hbm_rate_for(littles_law) < 0.6 * m.hbm_read_bytes_per_s
    assert m.hbm_rate_for(64 * 1024 * m.num_sms) > 0.95 * m.hbm_read_bytes_per_s


# Curve


def _with_curve(*points: tuple[float, float], num_sms: int = 10, ceiling: float = 1e12) -> Machine:
    return dataclasses.replace(
        load_machine("gb300"), num_sms=num_sms, hbm_in_flight_curve=points, hbm_read_bytes_per_s=ceiling
    )


def test_rate_at_between_below_and_above_points() -> None:
    m = _with_curve((100, 1e9), (400, 4e9), (1600, 8e9))
    assert m.hbm_rate_for(10 * 100) == pytest.approx(1e9)
    assert m.hbm_rate_for(10 * 400) == pytest.approx(4e9)
    assert m.hbm_rate_for(10 * 200) == pytest.approx(2e9), "slope 1 in log-log"
    assert m.hbm_rate_for(10 * 800) == pytest.approx(4e9 * math.sqrt(2)), "slope 1/2 in log-log"
    assert m.hbm_rate_for(10 * 25) == pytest.approx(0.25e9), "through the origin"
    assert m.hbm_rate_for(0) == 0
    assert m.hbm_rate_for(10 * 1600) == m.hbm_rate_for(1e12) == 8e9


def test_rate_never_exceeds_the_ceiling() -> None:
    m = _with_curve((100, 1e9), (400, 4e9), ceiling=3e9)
    assert m.hbm_rate_for(10 * 400) == 3e9


def test_one_point_is_a_curve() -> None:
    m = _with_curve((100, 1e9))
    assert m.hbm_rate_for(500) == pytest.approx(0.5e9)
    assert m.hbm_rate_for(5000) == 1e9


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.sampled_from(SHIPPED))
def test_more_bytes_in_flight_never_slow_the_stream(a: float, b: float, name: str) -> None:
    m = load_machine(name)
    assert m.hbm_rate_for(min(a, b)) <= m.hbm_rate_for(max(a, b)) * (1 + 1e-12)


# Rows for people


def test_describe_rows() -> None:
    rows = describe(load_machine("gb300"))
    assert [row["field"] for row in rows] == list(UNITS)
    assert rows[0] == {
        "field": "num_sms",
        "value": 152,
        "unit": "SM",
        "kind": "measured",
        "low": 152,
        "high": 152,
        "source": "pegainfer-project/pegainfer e38dfdd8 docs/models/glm52",
    }


def test_machine_travels_to_worker_processes() -> None:
    machine = load_machine("h200")
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert hash(machine) == hash(load_machine("h200"))


def test_loading_stays_light() -> None:
    code = (
        "import sys; from k3sim.sim.profile import load_machine; load_machine('gb300');"
        "print([m for m in ('numpy', 'pandas', 'pydantic', 'simpy', 'difflib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
