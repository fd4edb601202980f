"""NVLink's values from samples of links with planted values, and what is refused of such files and commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from k3sim.calibrate.fit import link_fit
from k3sim.calibrate.fit.link_fit import LINK_READINGS, fit_links, link_profile
from k3sim.calibrate.fit.profile_text import Calibration
from k3sim.calibrate.probes import links as link_probes
from k3sim.calibrate.probes.recorder import checksum
from k3sim.calibrate.samples import read_samples
from k3sim.errors import UserError
from k3sim.sim.profile import load_machine, machine_of
from k3sim.sim.whatif import emulated_ranks

HZ = 1.98e9
ONE_WAY_S, VISIBILITY_S, EGRESS, INGRESS = 410e-9, 930e-9, 361e9, 384e9
L2_LOAD_S, L2_HOP_S = 140e-9, 700e-9
MIB = 1 << 20
NUM_SMS = 132


def planted(noise: float = 0.002, seed: int = 0) -> dict[str, Any]:
    """A file as ``probes/links.py`` writes it, of a machine with the values above."""
    draw = random.Random(seed)
    cases: list[dict[str, Any]] = []

    def add(probe: str, parameters: dict[str, Any], quantity: str, unit: str, value: float) -> None:
        runs, kept = [], []
        for _ in range(2):
            values = sorted(value * (1 + draw.gauss(0, noise)) for _ in range(40))
            values = [float(f"{one:.5g}") for one in values]
            middle = float(f"{(values[19] + values[20]) / 2:.5g}")
            draw.shuffle(values)
            ordered = sorted(values)
            runs.append([middle, ordered[3], ordered[36], len(values)])
            kept.append(values)
        readings = {quantity: {"unit": unit, "runs": runs, "samples": kept}}
        cases.append({"probe": probe, "parameters": parameters, "sm_clock_hz": [HZ, HZ], "readings": readings})

    add("clocks", {}, "sm_clock", "Hz", HZ)
    cases[-1]["readings"]["sm_clock"] = {"unit": "Hz", "runs": [[HZ, HZ, HZ, 2]] * 2, "samples": [[HZ, HZ]] * 2}
    add("link_load", {"over": "l2", "region_mib": 4}, "round_trip", "cycle", L2_LOAD_S * HZ)
    add("link_load", {"over": "link", "region_mib": 4}, "round_trip", "cycle", (L2_LOAD_S + 2 * ONE_WAY_S) * HZ)
    for form in link_probes.FORMS:
        add("link_hop", {"form": form, "over": "l2"}, "one_way", "cycle", L2_HOP_S * HZ)
        add("link_hop", {"form": form, "over": "link"}, "one_way", "cycle", (L2_HOP_S + ONE_WAY_S) * HZ)
    for blocks, slots in ((1, 1), (8, 1), (8, 2), (8, 4), (8, 7), (32, 1), (32, 7)):
        parameters = {"blocks": blocks, "threads": 128, "slots": slots, "bytes": 16 * blocks * 128 * slots}
        value = ONE_WAY_S + VISIBILITY_S + parameters["bytes"] / EGRESS
        add("link_exchange", parameters, "round", "cycle", value * HZ)
    for probe, rate in (("link_push", EGRESS), ("link_pull", INGRESS)):
        for mib, blocks in ((16, NUM_SMS), (64, NUM_SMS), (64, 2 * NUM_SMS)):
            add(probe, {"bytes": mib * MIB, "blocks": blocks, "both_ways": False}, "rate", "B/s", rate)
    add("all_reduce", {"bytes": 14336, "ranks": 2, "gpus": 2, "calls": 1, "by": "NCCL"}, "time", "us", 7.5)
    return {
        "schema_version": 2, "gpu": "NVIDIA H200", "num_sms": NUM_SMS, "l2_bytes": 62914560, "date": "2026-12",
        "source": link_fit.SOURCE, "quick": False, "torch": "2.11", "gpus": 2, "cases": cases,
    }  # fmt: skip


def stored(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({**document, "checksum": checksum(document)}), encoding="utf-8")
    return path


def fitted(tmp_path: Path, document: dict[str, Any]) -> Calibration:
    return fit_links(read_samples(stored(tmp_path, document)), load_machine("h200"))


def test_planted_values_come_back_with_intervals_around_them(tmp_path: Path) -> None:
    found = {one.field: one for one in fitted(tmp_path, planted()).fitted}
    assert found.keys() == {one.field for one in LINK_READINGS}
    for name, value in (
        ("nvlink_egress_bytes_per_s", EGRESS),
        ("nvlink_ingress_bytes_per_s", INGRESS),
        ("nvlink_one_way_s", ONE_WAY_S),
        ("nvlink_visibility_s", VISIBILITY_S),
    ):
        assert found[name].value == pytest.approx(value, rel=0.01), name
        assert found[name].low <= value <= found[name].high, name
        assert found[name].statistical[0] <= found[name].statistical[1]
    # A hop within the GPU takes longer than the polling that is planted: single threads widen the interval.
    assert found["nvlink_visibility_s"].low == pytest.approx(L2_HOP_S, rel=0.02)


def test_no_time_of_a_kernel_is_fitted(tmp_path: Path) -> None:
    document = planted()
    slower = json.loads(json.dumps(document))
    for run in slower["cases"][-1]["readings"]["time"]["runs"]:
        run[:3] = [3 * one for one in run[:3]]
    slower["cases"][-1]["readings"]["time"]["samples"] = [
        [3 * one for one in values] for values in slower["cases"][-1]["readings"]["time"]["samples"]
    ]
    before, after = fitted(tmp_path, document), fitted(tmp_path, slower)
    assert [(one.field, one.value) for one in before.fitted] == [(one.field, one.value) for one in after.fitted]


def test_the_profile_takes_the_links_alone(tmp_path: Path) -> None:
    profile = link_profile(fitted(tmp_path, planted()), "h200")
    machine, before = machine_of(profile, "fitted"), load_machine("h200")
    changed = {name for name in before.provenance if getattr(machine, name) != getattr(before, name)}
    assert changed <= {one.field for one in LINK_READINGS}
    assert machine.provenance["nvlink_one_way_s"].source == link_fit.SOURCE
    assert machine.provenance["nvlink_one_way_s"].kind == "measured"
    assert machine.provenance["hbm_latency_s"] == before.provenance["hbm_latency_s"]


def test_what_is_missing_or_unstable_is_not_guessed(tmp_path: Path) -> None:
    document = planted()
    document["cases"] = [one for one in document["cases"] if one["probe"] != "link_hop"]
    found = fitted(tmp_path, document)
    assert {one.field for one in found.fitted} == {"nvlink_egress_bytes_per_s", "nvlink_ingress_bytes_per_s"}
    assert found.undetermined["nvlink_one_way_s"] == "no sample of link_hop form=word over=link one_way"
    assert found.undetermined["hbm_latency_s"] == "no probe of links reads it"
    noisy = planted(noise=0.2)
    assert "nvlink_egress_bytes_per_s" in fitted(tmp_path, noisy).undetermined


def test_loads_stand_beside_one_way(tmp_path: Path) -> None:
    def one_way(document: dict[str, Any]) -> Any:
        return next(one for one in fitted(tmp_path, document).fitted if one.field == "nvlink_one_way_s")

    document = planted()
    assert [case.label for case in one_way(document).cases if not case.central] == [
        "link_load round_trip over the link less in l2, halved"
    ]
    for case in document["cases"]:
        if case["probe"] == "link_load":
            case["readings"]["round_trip"] |= {"runs": [[0.0, 0.0, 0.0, 2]] * 2, "samples": [[0.0, 0.0]] * 2}
    without = one_way(document)
    assert all(case.central for case in without.cases)
    assert without.value == pytest.approx(ONE_WAY_S, rel=0.01)


def test_rounds_that_fill_the_port_are_out(tmp_path: Path) -> None:
    (found,) = (one for one in fitted(tmp_path, planted()).fitted if one.field == "nvlink_visibility_s")
    labels = " ".join(case.label for case in found.cases)
    assert "blocks=32 threads=128 slots=1 " in labels  # 0.18 us of 1.5
    assert "blocks=32 threads=128 slots=7 " not in labels  # 1.3 us of 2.6


def test_samples_of_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, {**planted(), "source": "k3sim calibrate/probes.py"})
    with pytest.raises(UserError, match=r"are not of links; accepted are those of calibrate/probes/links.py"):
        fit_links(read_samples(path), load_machine("h200"))
    assert link_fit.main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert link_fit.main([str(stored(tmp_path, planted())), "--machine-out", "profile.txt"]) == 2
    assert "accepted: a path that ends in .json" in capsys.readouterr().err


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.json"
    assert link_fit.main([str(stored(tmp_path, planted())), "--machine-out", str(target)]) == 0
    assert load_machine(str(target)).nvlink_one_way_s == pytest.approx(ONE_WAY_S, rel=0.01)
    assert "nvlink_visibility_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "gpus: got 1, accepted: 2 or more"),
        (["--only", "hbm"], "unknown probe 'hbm'; accepted: clocks, latencies"),
    ],
)
def test_probes_that_cannot_run_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert link_probes.main(["links.json", *arguments]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert written.count("\n") == 1


def test_emulated_ranks_send_fewer_bytes() -> None:
    h200 = load_machine("h200")
    both = emulated_ranks(h200, 2, 8)
    # Four of eight pushes cross, where seven would.
    assert both.nvlink_egress_bytes_per_s == pytest.approx(h200.nvlink_egress_bytes_per_s * 7 / 4)
    assert both.nvlink_one_way_s == h200.nvlink_one_way_s
    assert not both.nvlink_multicast
    assert 0 < both.rank_skew_relative_sd < h200.rank_skew_relative_sd
    all_ranks = emulated_ranks(h200, 8, 8)
    assert all_ranks.nvlink_egress_bytes_per_s == h200.nvlink_egress_bytes_per_s
    assert all_ranks.rank_skew_relative_sd == h200.rank_skew_relative_sd


def test_processes_must_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3sim.calibrate.decode.lines import standing_lines
    from k3sim.calibrate.decode.options import DecodeOptions, case_of, exchanging_gpus

    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="processes: got 3, accepted with tp=8: 1, 2, 4, 8"):
        case_of(DecodeOptions(tp=8, layers=4))
    monkeypatch.setenv("WORLD_SIZE", "2")
    case = case_of(DecodeOptions(tp=8, layers=4))
    assert exchanging_gpus(case.options) == 2
    assert "2 GPUs stand for 8 ranks, each for 4: of a rank's 8 pushes 4 cross NVLink" in standing_lines(8, 2)[0]
    alone = DecodeOptions(tp=8, layers=4, loop_back=True)
    assert exchanging_gpus(alone) == 1
    assert alone.command().endswith("--loop-back")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE is 'two'"):
        case_of(DecodeOptions(tp=8, layers=4))


def test_a_command_runs_once_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the module's name is the module's, options too."""
    from k3sim.kernels.multi_gpu import processes

    seen: list[Any] = []
    monkeypatch.setattr(processes, "check_gpus", lambda count: None)
    monkeypatch.setattr(
        processes, "run_processes", lambda *given, timeout_s: seen.append((given, timeout_s)) or 0
    )
    words = ["--gpus", "2", "--timeout-s", "9", "k3sim.calibrate.decode", "--tp", "8", "--table", "steps.json"]
    assert processes.main(words) == 0
    assert seen == [(("k3sim.calibrate.decode", ["--tp", "8", "--table", "steps.json"], 2), 9.0)]
