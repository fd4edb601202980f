"""Predictions beside the measured steps and kernels of the project: each error stays below its limit."""

from __future__ import annotations

import json
import statistics
from functools import cache

import pytest

from k3sim.calibrate.compare import shipped_steps
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.shipped_chains import CHAINS
from k3sim.calibrate.compare.shipped_kernels import cublas_cases, shipped_kernel_cases
from k3sim.model.paths import SWITCHES
from k3sim.sim.profile import load_machine
from k3sim.sim.whatif import loopback_fabric, of_card


@cache
def step(label: str) -> ComparedCase:
    """One stored step; all of them take most of a minute."""
    (found,) = (one for one in shipped_steps.labelled_steps() if one[0] == label)
    (compared,) = shipped_steps.compare_steps([found], [load_machine("h200")], jobs=1)
    return compared.in_ms()


@cache
def steps() -> dict[str, ComparedCase]:
    return {one.label: one for one in shipped_steps.shipped_step_cases()}


@cache
def stages() -> dict[str, shipped_steps.StageCase]:
    return {one.stage: one for one in shipped_steps.shipped_stage_cases()}


@cache
def kernels() -> dict[str, ComparedCase]:
    return {one.label: one for one in shipped_kernel_cases()}


@cache
def cublas() -> dict[str, ComparedCase]:
    return {one.label: one for one in cublas_cases()}


def test_every_stored_step_has_its_label_and_samples() -> None:
    assert len({label for label, *_ in shipped_steps.labelled_steps()}) == len(shipped_steps.measured_steps()) == 38
    assert {one["machine"] for one in shipped_steps.measured_steps()} == {"NVIDIA H200"}
    for one in shipped_steps.measured_steps():
        assert one["step_us"] == pytest.approx(statistics.median(one["samples_us"]), rel=0.003)


@pytest.mark.slow
def test_every_stored_step_is_predicted_once() -> None:
    assert len(steps()) == 38
    for one in shipped_steps.measured_steps():
        assert steps()[shipped_steps.label_of(one)].measured == one["step_us"] / 1e3


def test_labels_tell_switch_sets_apart() -> None:
    one = {"path": "fused", "concurrency": 2, "context": 8192}
    assert shipped_steps.label_of({**one, "switches": SWITCHES}) == "fused, 2 rows, 8k"
    assert shipped_steps.label_of({**one, "switches": SWITCHES[1:]}) == f"fused without {SWITCHES[0]}, 2 rows, 8k"
    assert shipped_steps.label_of({**one, "switches": SWITCHES[:1]}) == f"fused with {SWITCHES[0]} alone, 2 rows, 8k"


LIMITS = [("stock", 0.03), ("fused", 0.042)]


@pytest.mark.parametrize(("kind", "limit"), LIMITS)
def test_one_users_step_is_within_its_limit(kind: str, limit: float) -> None:
    assert abs(step(f"{kind}, 1 row, 8k").error) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), LIMITS)
def test_whole_steps_are_within_their_limit(kind: str, limit: float) -> None:
    errors = {label: row.error for label, row in steps().items() if label.startswith(f"{kind},")}
    assert len(errors) == 15
    for label, error in errors.items():
        assert abs(error) <= limit, label
    assert statistics.median(abs(error) for error in errors.values()) < 0.02


@pytest.mark.parametrize(
    ("switch", "limit"),
    [("low-batch-kernels", 0.13), ("fused-allreduce", 0.25), ("sharded-router", 0.38)],
)
def test_what_a_switch_saves_is_predicted(switch: str, limit: float) -> None:
    """Predicted over measured cost of leaving one out."""
    whole, without = step("fused, 1 row, 8k"), step(f"fused without {switch}, 1 row, 8k")
    ratio = (without.predicted - whole.predicted) / (without.measured - whole.measured)
    assert abs(ratio - 1) <= limit


def test_increments_add_up_to_the_step() -> None:
    measured = sum(one.count * one.increment.measured for one in stages().values())
    document = json.loads(shipped_steps.TIMELINE.read_text(encoding="utf-8"))
    assert measured == pytest.approx(max(one["end_us"] for one in document["stages"]), abs=0.01)
    predicted = sum(one.count * one.increment.predicted for one in stages().values())
    assert predicted == pytest.approx(shipped_steps.predict_measured(document).step_us, rel=0.001)


AGREE = (
    "embed.push", "attn_res.mixer", "kda.in_proj", "kda.o_proj", "attn_res.ffn", "dense.gate_up", "mla.qkv_a_gate",
    "mla.prep", "mla.attention", "mla.lift_gate", "mla.o_proj", "moe.front", "moe.routing", "moe.experts",
    "moe.latent_up", "head.lm_head", "head.advance",
)  # fmt: skip


@pytest.mark.parametrize("stage", AGREE)
def test_stages_that_agree(stage: str) -> None:
    one = stages()[stage]
    assert one.increment.predicted == pytest.approx(one.increment.measured, rel=0.25)


@pytest.mark.parametrize(
    ("stage", "limit"), [("kda.decode", 0.55), ("dense.down", 0.4), ("head.attn_res", 0.6), ("head.top_k", 0.5)]
)
def test_stages_that_do_not_agree(stage: str, limit: float) -> None:
    assert abs(stages()[stage].increment.error) <= limit


def test_no_large_part_is_off_by_a_quarter() -> None:
    whole = sum(one.count * one.increment.measured for one in stages().values())
    large = [one for one in stages().values() if one.count * one.increment.measured > 0.05 * whole]
    ratios = {one.stage: one.increment.predicted / one.increment.measured for one in large}
    assert set(ratios) == {
        "kda.in_proj", "attn_res.ffn", "attn_res.mixer", "moe.routing", "moe.experts", "moe.latent_up"
    }  # fmt: skip
    assert min(ratios.values()) >= 0.86 and max(ratios.values()) <= 1.16


@pytest.mark.parametrize(("operator", "case"), sorted(CHAINS))
def test_every_chain_has_a_reading(operator: str, case: str) -> None:
    assert f"{operator} {case}" in kernels()


def test_single_kernels_are_within_their_limits() -> None:
    errors = [abs(one.error) for one in kernels().values()]
    assert statistics.median(errors) <= 0.13
    assert max(errors) < 0.70


def test_chains_with_exchanges_are_within_their_limits() -> None:
    """Visibility is that of a probe."""
    for case, limit in (
        ("unfused all_reduce, 16 slots of this GPU, 1 row", 0.13),
        ("router_topk push of 280x7168 and gather_topk, 16 shards looped back, 1 row", 0.08),
        ("proj_allreduce send, up and consume_gathered, 16 ranks looped back, 1 row", 0.09),
    ):
        assert abs(kernels()[case].error) <= limit, case


def test_cublas_is_within_its_limits() -> None:
    for label, one in cublas().items():
        assert abs(one.error) <= 0.22, label
    assert statistics.median(abs(one.error) for one in cublas().values()) <= 0.055


def test_a_loopback_rank_has_no_late_peer() -> None:
    machine = loopback_fabric(load_machine("h200"))
    assert machine.nvlink_one_way_s == machine.rank_skew_relative_sd == 0.0
    assert not machine.nvlink_multicast
    assert machine.hbm_read_bytes_per_s == load_machine("h200").hbm_read_bytes_per_s


def test_a_card_reads_at_its_own_rate() -> None:
    h200 = load_machine("h200")
    fast, slow = (of_card(h200, share * h200.hbm_read_bytes_per_s) for share in (1.03, 0.9))
    for one, share in ((fast, 1.03), (slow, 0.9)):
        assert one.hbm_rate_for(132 * 131072) == one.hbm_read_bytes_per_s == share * h200.hbm_read_bytes_per_s
        assert one.hbm_copy_bytes_per_s == pytest.approx(share * h200.hbm_copy_bytes_per_s)
        assert one.hbm_rate_for(132 * 4096) == h200.hbm_rate_for(132 * 4096)
