"""What two H200 read over NVLink: the stored files, values fitted from them, errors below their limits."""

from __future__ import annotations

import json
import statistics
from functools import cache
from typing import Any

import pytest

from k3sim.calibrate.compare import shipped_links, shipped_steps
from k3sim.calibrate.compare.check import check
from k3sim.calibrate.compare.shipped_chains import HIDDEN
from k3sim.calibrate.fit.link_fit import LINK_READINGS, SOURCE, fit_links, link_profile
from k3sim.calibrate.fit.profile_text import profile_text
from k3sim.sim.profile import load_machine, profile_path

FIELDS = {one.field for one in LINK_READINGS}
HAND_OVERS = shipped_links.LINKS.with_name("h200-hand-overs.json")


@cache
def kernels() -> dict[str, Any]:
    return {one.label: one for one in shipped_links.link_kernel_cases()}


@cache
def steps() -> dict[str, Any]:
    return {one.label: one for one in shipped_links.link_step_cases()}


@cache
def differences() -> dict[str, shipped_links.LinkDifference]:
    return {one.case.label: one for one in shipped_links.link_differences()}


# -- the stored files ------------------------------------------------------------------------------------------------


def test_the_samples_are_whole_with_their_origin() -> None:
    file = shipped_links.link_samples()
    head = file.metadata
    assert (head["source"], head["gpus"], head["quick"]) == (SOURCE, 2, False)
    assert head["commit"] == "68a3bdf"
    assert (file.gpu, file.num_sms, head["versions"]["nccl"]) == ("NVIDIA H200", 132, "2.28.9")
    assert {one.case for one in file.samples} == {
        "clocks", "link_hop", "link_load", "link_exchange", "link_push", "link_pull", "link_copy", "all_reduce",
        "projection",
    }  # fmt: skip
    assert all(len(one.runs) == 2 and all(run.values for run in one.runs) for one in file.samples)


def test_only_one_case_did_not_repeat() -> None:
    ((refused, reason),) = shipped_links.link_samples().refused
    assert (refused.case, refused.parameters["over"]) == ("link_load", "l2")
    assert "its last third is 18 cycle from its first" in reason


def test_the_hand_overs_all_passed() -> None:
    document = json.loads(HAND_OVERS.read_text(encoding="utf-8"))
    assert document["environment"]["commit"] == "68a3bdf"
    checks = document["checks"]
    pairs = ["proj_allreduce", "router_topk", "latent_tail", "lse_merge"]
    assert [(one["operator"], one["ranks"]) for one in checks] == [
        *((one, 2) for one in pairs), ("engine", 8), ("engine", 8), *((one, 4) for one in pairs),
        *((one, 8) for one in pairs),
    ]  # fmt: skip
    for one in checks:
        assert one["ok"] and not one["reason"] and one["gpus"] == 2, one["case"]
        assert one["between_gpus"] == 0 and not any(one["unequal"].values()), one["case"]
        if one["operator"] != "engine":
            assert one["replays"] == {"close": 10000, "skewed": 10000, "late": 10}


def test_steps_of_two_gpus_hold_every_replay() -> None:
    found = shipped_links.measured_link_steps()
    assert len(found) == 12 == len(steps())
    over = {(one["path"], one["concurrency"]) for one in found if one["gpus"] == 2}
    assert over == {(path, rows) for path in ("stock", "fused") for rows in (1, 2, 4, 8, 16)}
    assert [(one["path"], one["concurrency"]) for one in found if one["gpus"] == 1] == [("stock", 1), ("fused", 1)]
    for one in found:
        assert one["layout"] == "tp8ep1dcp1" and one["layers"] == 40
        assert one["environment"]["commit"] == ("68a3bdf" if one["concurrency"] == 4 else "20cff8e")
        assert len(one["samples_us"]) == 200
        assert statistics.median(one["samples_us"]) == pytest.approx(one["step_us"], rel=1e-4)


# -- the profile -----------------------------------------------------------------------------------------------------


def test_refitted_links_are_the_shipped_profile() -> None:
    found = fit_links(shipped_links.link_samples(), load_machine("h200"))
    assert {one.field for one in found.fitted} == FIELDS
    assert profile_text(link_profile(found, "h200")).encode() == profile_path("h200").read_bytes()


def test_values_of_links_are_from_their_probes() -> None:
    provenance = load_machine("h200").provenance
    assert {name for name, one in provenance.items() if one.source == SOURCE} == FIELDS
    for name in FIELDS:
        assert (provenance[name].kind, provenance[name].date) == ("measured", "2026-11"), name
        assert provenance[name].low < getattr(load_machine("h200"), name) < provenance[name].high, name


def test_rates_are_below_the_nominal_one() -> None:
    h200, file = load_machine("h200"), shipped_links.link_samples()
    nominal_bytes_per_s = 18 * 25e9  # connections, each direction
    for rate in (h200.nvlink_egress_bytes_per_s, h200.nvlink_ingress_bytes_per_s):
        assert 0.78 * nominal_bytes_per_s < rate < 0.90 * nominal_bytes_per_s
    (clock,) = file.matching("clocks", "sm_clock")
    (hop,) = file.matching("link_hop", "one_way", form="word", over="link")
    assert h200.nvlink_one_way_s < hop.value / clock.value < h200.nvlink_one_way_s + h200.nvlink_visibility_s


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "rows", "limit"),
    [("stock", (1, 2, 4), 0.04), ("stock", (8, 16), 0.05), ("fused", (1, 2, 4), 0.035), ("fused", (8, 16), 0.03)],
)
def test_steps_over_the_link_are_within_limits(path: str, rows: tuple[int, ...], limit: float) -> None:
    for count in rows:
        label = f"{path}, {count} row{'s' * (count > 1)}, 8k, 40 layers, TP8, 2 GPUs over NVLink"
        assert abs(steps()[label].error) <= limit, label


@pytest.mark.parametrize(
    ("path", "exchanges", "measured_us", "limit_us"), [("stock", 121, 79.5, 24.5), ("fused", 160, 171.6, 87.6)]
)
def test_what_the_link_adds_is_within_limits(path: str, exchanges: int, measured_us: float, limit_us: float) -> None:
    one = differences()[path]
    assert (one.num_exchanges, round(one.case.measured, 1)) == (exchanges, measured_us)
    assert abs(one.case.predicted - one.case.measured) <= limit_us


def test_exchanges_over_the_link_are_within_limits() -> None:
    assert len(kernels()) == 20
    for label, one in kernels().items():
        if label.startswith("all_reduce"):
            assert abs(one.error) <= 0.20, label
        elif "7168x768, 1 row," in label:
            assert abs(one.error) <= 0.08, label
        else:
            assert abs(one.error) <= 0.17, label


def test_one_row_of_a_fused_projection_is_fast() -> None:
    """Asked were 11 us, and half the time of GEMV and NCCL."""
    times = {
        one.parameters["by"]: one.value
        for one in shipped_links.link_samples().matching("projection", "time", ranks=8, depth=1536, rows=1)
    }
    assert 7.8 < times["fused-allreduce"] < 8.4
    assert 2.2 < times["cuBLAS, NCCL, attn_res"] / times["fused-allreduce"] < 2.4


def test_a_group_of_more_ranks_sends_more() -> None:
    two, eight = (
        kernels()[f"all_reduce of {2 * HIDDEN} B, 2 GPUs for {ranks} ranks"] for ranks in (2, 8)
    )
    assert two.predicted < eight.predicted and two.measured < eight.measured


@pytest.mark.slow
def test_a_check_holds_everything_over_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_steps, "measured_steps", list)
    cases = check(load_machine("h200"), num_draws=2)
    assert {one.label.partition(":")[0] for one in cases if one.label.startswith("nvlink_")} == FIELDS
    exchanges = [one for one in cases if "2 GPUs for" in one.label]
    assert len(exchanges) == 20 and not any(one.used_in_fit for one in exchanges)
    found = {one.label: one for one in cases if one.kind == "step"}
    assert found.keys() == steps().keys()
    for label, one in found.items():
        assert one.predicted == pytest.approx(1e3 * steps()[label].predicted, rel=1e-12)
        assert one.interval[0] <= one.predicted <= one.interval[1]
