"""Signs: a primitive that is slower makes no step faster, on any path or machine.

What is launched later may ask for its bytes later and leave others room: a step may gain a little, never 0.2 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from k3sim.calibrate.compare.shipped_steps import label_of, measured_steps, predict_measured
from k3sim.sim.machine import PROFILE_FIELDS, Machine
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import question_of

MOST_FASTER = 0.002
#: Where a slower primitive makes a step faster by more, and by how much at most. What is launched or read later finds
#: HBM and L2 less busy, and dependent loads come sooner than what was lost.
KNOWN_FASTER = {
    ("--machine gb300 --path megakernel", "hbm_in_flight_curve"): 0.005,
    ("--machine gb300 --path megakernel", "l2_read_bytes_per_s"): 0.02,
    ("--machine gb200 --concurrency 4", "hbm_latency_s"): 0.012,
    ("fused, 1 row, 8k", "kernel_exit_warm_s"): 0.004,
    ("fused, 2 rows, 8k", "hbm_bytes_per_s_per_sm"): 0.003,
    ("fused, 2 rows, 8k", "pdl_trigger_to_launch_s"): 0.004,
    ("stock, 16 rows, 8k", "block_refill_s"): 0.008,
    ("stock, 16 rows, 8k", "hbm_in_flight_curve"): 0.008,
    ("stock, 16 rows, 8k", "hbm_partial_grid_loss"): 0.005,
    ("stock, 16 rows, 8k", "hbm_queue_threshold_s"): 0.009,
    ("stock, 16 rows, 8k", "l2_loaded_latency_s"): 0.006,
    ("fused, 16 rows, 128k", "kernel_exit_warm_s"): 0.003,
    ("fused, 16 rows, 128k", "pdl_trigger_to_launch_s"): 0.003,
}
#: What a machine has, not how fast it is.
SIZES = {
    "num_sms", "smem_bytes_per_sm", "max_smem_bytes_per_block", "threads_per_sm", "hbm_capacity_bytes",
    "nvlink_domain_gpus", "nvlink_multicast", "nvlink_in_switch_reduction",
}  # fmt: skip
SLOWER_WHEN_MORE = {"l2_hit_queueing_fraction", "hbm_partial_grid_loss", "rank_skew_relative_sd"}
SLOWER_WHEN_LESS = {"hbm_queue_threshold_s", "l2_effective_bytes"}
VALUES = sorted(PROFILE_FIELDS.keys() - SIZES)

PUBLIC = (
    "--machine gb300", "--machine gb300 --path stock", "--machine gb300 --path megakernel",
    "--machine gb200 --concurrency 4", "--machine gb200 --path stock --concurrency 16",
    "--machine b300 --tp 8 --path stock --concurrency 8", "--machine b300 --tp 8 --context 131072",
    "--machine gb200 --path megakernel --concurrency 4",
)  # fmt: skip
OWN = ("stock, 1 row, 8k", "fused, 1 row, 8k", "fused, 2 rows, 8k", "stock, 16 rows, 8k", "fused, 16 rows, 128k")


def slower(machine: Machine, name: str, by: float) -> Machine:
    """``machine`` whose value ``name`` is worse by the share ``by``: a time longer, a rate lower."""
    value, unit = getattr(machine, name), PROFILE_FIELDS[name].metadata["unit"]
    if name == "hbm_in_flight_curve":
        return replace(machine, hbm_in_flight_curve=tuple((at, rate / (1 + by)) for at, rate in value))
    if name == "hbm_read_bytes_per_s":
        curve = tuple((at, min(rate, value / (1 + by))) for at, rate in machine.hbm_in_flight_curve)
        return replace(machine, hbm_read_bytes_per_s=value / (1 + by), hbm_in_flight_curve=curve)
    is_more = name not in SLOWER_WHEN_LESS and (unit == "s" or name in SLOWER_WHEN_MORE)
    changed = value * (1 + by) if is_more else value / (1 + by)
    return replace(machine, **{name: round(changed) if isinstance(value, int) else changed})  # type: ignore[arg-type]


Predict = Callable[[Machine], int]


@cache
def asked(case: str) -> tuple[Machine, Predict, int]:
    """The machine of a case, with the card and the peers of a measured step; its step on any, and on its own."""
    measured = {label_of(one): one for one in measured_steps()}.get(case)
    question = question_of(f"k3sim timeline {case}") if measured is None else predict_measured(measured).question

    def step_ps(on: Machine) -> int:
        return predict(replace(question, machine=on)).step_ps

    return question.machine, step_ps, step_ps(question.machine)


def check(case: str, name: str, by: float) -> bool:
    """No faster with a slower value; whether it is slower or faster at all."""
    machine, step_ps, before_ps = asked(case)
    most_faster = KNOWN_FASTER.get((case, name), MOST_FASTER)
    after_ps = step_ps(slower(machine, name, by))
    assert after_ps >= (1 - most_faster) * before_ps, (case, name, by)
    return after_ps != before_ps


def test_every_value_of_speed_has_a_slower_one() -> None:
    gb300 = load_machine("gb300")
    alike = {name for name in VALUES if slower(gb300, name, 0.1) == gb300}
    assert alike == {name for name in VALUES if getattr(gb300, name) == 0}
    assert slower(gb300, "hbm_latency_s", 0.5).hbm_latency_s == 1.5 * gb300.hbm_latency_s
    assert slower(gb300, "bf16_flops", 0.25).bf16_flops == 0.8 * gb300.bf16_flops
    assert slower(gb300, "hbm_queue_threshold_s", 0.25).hbm_queue_threshold_s == 0.8 * gb300.hbm_queue_threshold_s


#: Where steps once became faster: the curve by 2.4 %, a cluster barrier either way, instructions of warm code by 1.5 %.
ONCE_WRONG = (
    ("--machine gb300", "hbm_in_flight_curve", 1 / 0.9 - 1), ("--machine gb300 --path stock", "cluster_sync_s", 0.1),
    ("--machine gb300", "launch_latency_s", 0.5), ("--machine gb300 --path stock", "kernel_prologue_s", 0.01),
    ("--machine gb300", "nvlink_visibility_s", 0.1), ("stock, 1 row, 8k", "instruction_s", 0.5),
    ("fused, 1 row, 8k", "hbm_queue_threshold_s", 0.5), ("fused, 1 row, 8k", "hbm_read_bytes_per_s", 0.1),
)  # fmt: skip


@pytest.mark.parametrize(("case", "name", "by"), ONCE_WRONG)
def test_a_slower_primitive_makes_no_step_faster(case: str, name: str, by: float) -> None:
    check(case, name, by)


@pytest.mark.parametrize("faster", ("cluster_sync_s", "launch_latency_s"))
@pytest.mark.parametrize("case", ("--machine gb300", "--machine gb300 --path stock"))
def test_a_free_primitive_makes_no_step_slower(case: str, faster: str) -> None:
    machine, step_ps, before_ps = asked(case)
    assert step_ps(replace(machine, **{faster: 0.0})) <= (1 + MOST_FASTER) * before_ps  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), KNOWN_FASTER)
def test_a_known_exception_still_is_one(case: str, name: str) -> None:
    machine, step_ps, before_ps = asked(case)
    shares = [1 - step_ps(slower(machine, name, by)) / before_ps for by in (0.01, 0.1, 0.5)]
    assert MOST_FASTER < max(shares) <= KNOWN_FASTER[case, name]


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("case", (*PUBLIC, *OWN))
def test_no_slower_value_makes_a_step_faster(case: str, name: str) -> None:
    # Where half as much again changes no picosecond the step does not hang on the value, and less of it does nothing.
    if check(case, name, 0.5):
        for by in (0.01, 0.1):
            check(case, name, by)
