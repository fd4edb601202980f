"""Machine profiles: what is shipped, what a file may hold, and the curve between its points."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
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
    "hbm_datasheet_bytes_per_s": "B/s",
    "hbm_read_bytes_per_s": "B/s",
    "hbm_latency_s": "s",
    "hbm_in_flight_curve": "B/SM, B/s",
    "hbm_bytes_per_s_per_sm": "B/s",
    "hbm_partial_grid_loss": "1",
    "hbm_copy_bytes_per_s": "B/s",
    "prefetch_bytes_per_s_per_sm": "B/s",
    "l2_capacity_bytes": "B",
    "l2_effective_bytes": "B",
    "l2_read_bytes_per_s": "B/s",
    "l2_bytes_per_s_per_sm": "B/s",
    "l2_input_bytes_per_s_per_sm": "B/s",
    "l2_fragment_bytes_per_s_per_sm": "B/s",
    "l2_fragment_bytes_per_s": "B/s",
    "l2_near_latency_s": "s",
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
    "fp8_flops": "FLOP/s",
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
POSITIVE = [
    name
    for name, unit in UNITS.items()
    if unit not in ("s", "s/B", "1", "bool", "B/SM, B/s") and name not in ("fp8_flops", "fp4_flops")
]


def _profile() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FILES / "gb300.json").read_text())
    return loaded


def _load(directory: Path, profile: object) -> Machine:
    path = directory / "mine.json"
    path.write_text(json.dumps(profile))
    return load_machine(str(path))


def _refused(directory: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The message for gb300's profile with ``change`` made to it."""
    profile = _profile()
    change(profile)
    with pytest.raises(UserError) as caught:
        _load(directory, profile)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"machine profile {directory / 'mine.json'}: ")
    return message.removeprefix(f"machine profile {directory / 'mine.json'}: ")


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


def test_name_in_any_case_and_path_give_the_same_machine() -> None:
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
    assert gb300.hbm_datasheet_bytes_per_s == 8.0e12
    assert gb300.nvlink_domain_gpus == 72
    assert gb300.fp4_flops == 15e15
    h200 = load_machine("h200")
    assert (h200.num_sms, h200.fp4_flops, h200.nvlink_domain_gpus) == (132, 0, 8)
    assert h200.hbm_datasheet_bytes_per_s == 4.8e12


def test_node_boundary_of_gb200_is_its_measured_release_and_the_launch_measured_on_h200() -> None:
    gb200 = load_machine("gb200")
    assert gb200.grid_completion_s == 0.65e-6
    assert gb200.launch_latency_s == pytest.approx(0.30e-6)
    assert gb200.provenance["launch_latency_s"].kind == "inferred"
    # Below the public probe's 1.095 us, which counts more than the boundary (docs/machines.md).
    assert gb200.launch_latency_s + gb200.grid_completion_s < 1.095e-6


def test_store_to_remote_visibility_of_gb200_is_the_2_us_measured_in_a_server() -> None:
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
        "fp8_flops",
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
    assert m.l2_near_latency_s < m.l2_latency_s < m.l2_far_latency_s < m.hbm_latency_s
    assert m.hbm_read_bytes_per_s < m.hbm_datasheet_bytes_per_s < m.l2_read_bytes_per_s
    assert m.hbm_read_bytes_per_s / m.num_sms < m.hbm_bytes_per_s_per_sm <= m.l2_bytes_per_s_per_sm
    assert (
        m.block_dispatch_s < m.block_reduction_s < m.cluster_sync_s < m.counter_handoff_s < m.grid_barrier_s
    )
    assert m.l2_effective_bytes < m.l2_capacity_bytes < m.hbm_capacity_bytes
    assert m.bf16_flops < m.fp8_flops
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


def test_gb300_needs_far_more_in_flight_than_idle_latency_says() -> None:
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


def test_l2_latency_is_the_mean_of_its_partitions() -> None:
    m = dataclasses.replace(load_machine("gb300"), l2_near_latency_s=1e-7, l2_far_latency_s=4e-7)
    assert m.l2_latency_s == pytest.approx(2.5e-7)
    assert dataclasses.replace(m, l2_far_latency_s=1e-7).l2_latency_s == pytest.approx(1e-7)


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


# Names and files that cannot be honoured


def test_unknown_name_lists_nearest_and_all() -> None:
    with pytest.raises(UserError) as caught:
        load_machine("GB30")
    assert str(caught.value) == (
        "unknown machine 'GB30': did you mean gb300 or b300 or gb200? Shipped machines: b200, b300, gb200, "
        "gb300, h100, h200; or give the path of a profile that ends in .json"
    )


def test_unknown_name_without_near_ones() -> None:
    with pytest.raises(UserError, match=r"^unknown machine 'tpu': Shipped machines: b200, .*"):
        load_machine("tpu")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot read machine profile {tmp_path}/no\.json: No such file"):
        load_machine(f"{tmp_path}/no.json")


def test_directory_instead_of_file(tmp_path: Path) -> None:
    (tmp_path / "d.json").mkdir()
    with pytest.raises(UserError, match=r"^cannot read machine profile .*d\.json: Is a directory"):
        load_machine(str(tmp_path / "d.json"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"name": ', "Expecting value: line 1 column 10 (char 9)"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"name": 1, "name": 2}', "key 'name' stands twice in one object"),
    ],
)
def test_not_json(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=f"^{re.escape(f'machine profile {path} is not valid JSON: {why}')}$"):
        load_machine(str(path))


def test_nesting_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[" * 200_000)
    with pytest.raises(UserError, match="is not valid JSON"):
        load_machine(str(path))


def test_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"profile is \[1\], accepted is an object with schema_version, name,"
    ):
        _load(tmp_path, [1])


CASES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda p: p.update(schema_version=1), "schema_version is 1, accepted is 2"),
    (lambda p: p.update(schema_version=True), "schema_version is True, accepted is 2"),
    (lambda p: p.update(name=""), "name is '', accepted is a text that is not empty"),
    (lambda p: p.pop("title"), "profile lacks title; all of these are required"),
    (lambda p: p["values"].pop("num_sms"), "values lacks num_sms; all of these are required"),
    (
        lambda p: p["values"].update(hbm_latencys=1),
        "values has unknown hbm_latencys; did you mean hbm_latency_s?",
    ),
    (lambda p: p["values"].update(num_sms=152), "num_sms is 152, accepted is an object with value, unit, "),
    (lambda p: p["values"]["num_sms"].pop("kind"), "num_sms lacks kind; all of these are required"),
    (
        lambda p: p["values"]["num_sms"].update(units="SM"),
        "num_sms has unknown units; did you mean unit?",
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(unit="us"),
        "hbm_latency_s has unit 'us', accepted is 's'",
    ),
    (
        lambda p: p["values"]["num_sms"].update(kind="guess"),
        "num_sms has kind 'guess', accepted are datasheet, measured, fitted, inferred",
    ),
    (
        lambda p: p["values"]["num_sms"].update(date=None),
        'num_sms date is None, accepted is "YYYY-MM"',
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(date="2026-13"),
        "hbm_latency_s date is '2026-13', accepted is \"YYYY-MM\" or null",
    ),
    (
        lambda p: p["values"]["num_sms"].update(source=" "),
        "num_sms source is ' ', accepted is a text that is not empty",
    ),
    (
        lambda p: p["values"]["num_sms"].update(value=0),
        "num_sms value is 0, accepted is a finite number above zero",
    ),
    (
        lambda p: p["values"]["num_sms"].update(value=151.5),
        "num_sms value is 151.5, accepted is a whole number",
    ),
    (
        lambda p: p["values"]["num_sms"].update(value=True),
        "num_sms value is True, accepted is a finite number above zero",
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(value=math.nan),
        "hbm_latency_s value is nan, accepted is a finite number that is not negative",
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(high=math.inf),
        "hbm_latency_s high is inf, accepted is a finite number that is not negative",
    ),
    (
        lambda p: p["values"]["bf16_flops"].update(value=10**400),
        f"bf16_flops value is {'1' + '0' * 59}, accepted is a finite number above zero",
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(low=1.0),
        "hbm_latency_s has low 1.0, value 4.2e-07, high 4.42e-07; accepted is low <= value <= high",
    ),
    (
        lambda p: p["values"]["hbm_latency_s"].update(value=1.0),
        "hbm_latency_s has low 3.88e-07, value 1.0, high 4.42e-07; accepted is low <= value <= high",
    ),
    (
        lambda p: p["values"]["nvlink_multicast"].update(value=1),
        "nvlink_multicast value is 1, accepted is true or false",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(value=[]),
        "hbm_in_flight_curve value is [], accepted is a list of [bytes in flight per SM, bytes/s]",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(value=[[1, 2, 3]]),
        "hbm_in_flight_curve point 0 is [1, 2, 3], accepted is [bytes in flight per SM, bytes/s]",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(value=[[1, 1e9], [1, 2e9]]),
        "hbm_in_flight_curve point 1 is [1.0, 2000000000.0] after [1.0, 1000000000.0]; "
        "accepted are bytes in flight that increase and rates that do not fall",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(value=[[1, 2e9], [2, 1e9]]),
        "hbm_in_flight_curve point 1 is [2.0, 1000000000.0] after [1.0, 2000000000.0]; "
        "accepted are bytes in flight that increase and rates that do not fall",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(interval=[1.1, 1.2]),
        "hbm_in_flight_curve has low 1.1, value 1, high 1.2; accepted is low <= value <= high",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"].update(interval=0.1),
        "hbm_in_flight_curve interval is 0.1, accepted is [low factor, high factor]",
    ),
    (
        lambda p: p["values"]["hbm_in_flight_curve"]["value"].append([200000, 7.5e12]),
        "hbm_in_flight_curve reaches 7500000000000.0 B/s, accepted is at most hbm_read_bytes_per_s, "
        "which is 7000000000000.0",
    ),
    (
        lambda p: p["values"]["max_smem_bytes_per_block"].update(value=300000, high=300000),
        "max_smem_bytes_per_block is 300000, accepted is at most smem_bytes_per_sm, which is 233472",
    ),
    (
        lambda p: p["values"]["hbm_read_bytes_per_s"].update(value=9e12, high=9e12),
        "hbm_read_bytes_per_s is 9000000000000.0, accepted is at most hbm_datasheet_bytes_per_s, "
        "which is 8000000000000.0",
    ),
    (
        lambda p: p["values"]["l2_effective_bytes"].update(value=10**9, high=10**9),
        "l2_effective_bytes is 1000000000, accepted is at most l2_capacity_bytes, which is 132644864",
    ),
    (
        lambda p: p["values"]["l2_near_latency_s"].update(value=1.0, high=1.0),
        "l2_near_latency_s is 1.0, accepted is at most l2_far_latency_s, which is 3.4e-07",
    ),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message.split(",")[0] for _, message in CASES])
def test_refusals_say_what_and_what_is_accepted(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    refusal = _refused(tmp_path, change)
    assert refusal == message or (message.endswith(" ") and refusal.startswith(message))


@pytest.mark.parametrize("field", POSITIVE)
def test_sizes_and_rates_cannot_be_zero(tmp_path: Path, field: str) -> None:
    refusal = _refused(tmp_path, lambda p: p["values"][field].update(value=0, low=0))
    assert refusal == f"{field} value is 0, accepted is a finite number above zero"


def test_costs_can_be_zero(tmp_path: Path) -> None:
    profile = _profile()
    for field, unit in UNITS.items():
        if unit == "s":
            profile["values"][field].update(value=0, low=0)
    machine = _load(tmp_path, profile)
    assert (machine.launch_latency_s, machine.l2_latency_s, machine.nvlink_one_way_s) == (0, 0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    field=st.sampled_from(sorted(UNITS)),
    part=st.sampled_from(["value", "low", "high"]),
    bad=st.one_of(
        st.just(math.nan),
        st.floats(max_value=-1e-300, allow_nan=False),
        st.integers(max_value=-1),
        st.text(),
        st.none(),
        st.just({}),
    ),
)
def test_any_number_replaced_by_nonsense_is_refused(
    tmp_path: Path, field: str, part: str, bad: object
) -> None:
    def spoil(profile: dict[str, Any]) -> None:
        entry = profile["values"][field]
        if field != "hbm_in_flight_curve":
            entry[part] = bad
        elif part == "value":
            entry["value"][3][1] = bad
        else:
            entry["interval"][part == "high"] = bad

    assert _refused(tmp_path, spoil).startswith(f"{field} ")
