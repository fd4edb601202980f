"""The fit: planted values come back, unstable samples are not used, the shipped profile is its result bit for bit."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from k3sim.calibrate.compare.chain import ChainedKernel, bf16, chain_us
from k3sim.calibrate.fit.fit import fit
from k3sim.calibrate.fit.fitted import Fitted, outward
from k3sim.calibrate.fit.kernel_fit import Shape, fit_kernels
from k3sim.calibrate.fit.l2_capacity import kept_share
from k3sim.calibrate.fit.profile_text import Calibration, base_of, profile_text
from k3sim.calibrate.fit.readings import READINGS
from k3sim.calibrate.fit.statements import Reader
from k3sim.calibrate.probes import recorder
from k3sim.calibrate.samples import read_samples
from k3sim.errors import UserError
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine, machine_of, profile_path
from k3sim.sim.whatif import loopback_fabric

DATA = Path(recorder.__file__).parents[1] / "data"
NOISE = 0.003  # of a planted reading, relative
Document = dict[str, Any]
Case = dict[str, Any]


@cache
def shipped() -> Calibration:
    return fit(read_samples(DATA / "h200-primitives.json"), load_machine("h200"))


def values_of(found: Calibration) -> dict[str, Fitted]:
    return {one.field: one for one in found.fitted}


def stored() -> Document:
    """The shipped samples with their summaries alone, which a test may change without changing every repetition."""
    document: Document = json.loads((DATA / "h200-primitives.json").read_text(encoding="utf-8"))
    for case in document["cases"]:
        for reading in case["readings"].values():
            reading.pop("samples", None)
    assert document["thinned"]
    return document


def refitted(tmp_path: Path, document: Document, base: str = "h200", seed: int = 0) -> Calibration:
    path = tmp_path / "samples.json"
    path.write_text(json.dumps({**document, "checksum": recorder.checksum(document)}), encoding="utf-8")
    return fit(read_samples(path), load_machine(base), seed)


def scaled(document: Document, factor: Callable[[Case, str, str], float], seed: int = 1) -> Document:
    """Every reading times ``factor`` of its case, quantity and unit, and noise of its own for both runs."""
    noise = random.Random(seed)
    document = copy.deepcopy(document)
    for case in document["cases"]:
        for quantity, reading in case["readings"].items():
            for run in reading["runs"]:
                by = factor(case, quantity, reading["unit"])
                if reading["unit"] != "Hz":  # a clock is steadier than that, or its samples are refused
                    by *= 1 + noise.uniform(-NOISE, NOISE)
                run[:3] = [one * by for one in run[:3]]
    return document


# -- the shipped profile --------------------------------------------------------------------------------------------


def test_refitted_samples_are_the_shipped_profile() -> None:
    assert profile_text(shipped().profile("h200")).encode() == profile_path("h200").read_bytes()


def test_every_value_that_probes_read_is_from_them() -> None:
    h200 = load_machine("h200")
    from_probes = {name for name, one in h200.provenance.items() if one.source == "k3sim calibrate/probes"}
    assert from_probes == set(values_of(shipped()))
    assert {one.field for one in READINGS} < from_probes
    kinds = {h200.provenance[name].kind for name in from_probes}
    assert kinds == {"measured", "fitted"}
    assert h200.provenance["l2_effective_bytes"].kind == "fitted"


def test_what_no_probe_reads_is_said_and_kept() -> None:
    found = shipped()
    assert found.undetermined["tensor_core_setup_s"] == "no probe reads it"
    assert found.undetermined.keys() & values_of(found).keys() == set()
    assert found.undetermined.keys() | values_of(found).keys() == set(load_machine("h200").provenance)
    entries = found.profile("h200")["values"]
    assert entries["tensor_core_setup_s"]["kind"] == "inferred"


def test_intervals_hold_every_case_and_the_bootstrap() -> None:
    for one in shipped().fitted:
        middle = 1.0 if isinstance(one.value, list) else one.value
        assert one.low <= middle <= one.high, one.field
        if one.field not in ("num_sms", "l2_effective_bytes"):
            assert all(one.low <= case.value <= one.high for case in one.cases), one.field
            assert one.low <= one.statistical[0] <= one.statistical[1] <= one.high, one.field


def test_no_unstable_sample_is_among_the_cases() -> None:
    labels = " ".join(case.label for one in shipped().fitted for case in one.cases)
    assert "sm=1 first_read_far_decile" in labels
    assert "sm=0 first_read_far_decile" not in labels


def test_a_left_out_case_is_predicted() -> None:
    errors = {one.field: one.left_out_error for one in shipped().fitted}
    assert errors["hbm_read_bytes_per_s"] == pytest.approx(0.0034, abs=0.001)
    assert errors["hbm_in_flight_curve"] == pytest.approx(0.043, abs=0.01)
    assert errors["hbm_latency_s"] is None  # one case


# -- planted values -------------------------------------------------------------------------------------------------

# Factors on what groups of probes read. Values that come from one group move with it.
PLANTED = {"hbm rates": 0.72, "chases": 1.21, "loops": 0.83, "boundaries": 1.34}
GROUP_OF = {
    "hbm_bulk_in_flight": "hbm rates",
    "hbm_bulk_by_sms": "hbm rates",
    "hbm_loads_in_flight": "hbm rates",
    "hbm_loads_by_sms": "hbm rates",
    "l2_chase_resident": "chases",
    "l2_chase_written": "chases",
    "hbm_chase": "chases",
    "block_reduction": "loops",
    "cluster_barrier": "loops",
    "grid_barrier": "loops",
    "fence": "loops",
    "graph_boundary": "boundaries",
    "graph_boundary_other_gpu": "boundaries",
}
EXPECTED = {
    "hbm_read_bytes_per_s": "hbm rates",
    "hbm_bytes_per_s_per_sm": "hbm rates",
    "hbm_latency_s": "chases",
    "l2_far_latency_s": "chases",
    "block_reduction_s": "loops",
    "cluster_sync_s": "loops",
    "grid_barrier_s": "loops",
    "system_fence_s": "loops",
    "launch_latency_s": "boundaries",
    "grid_completion_s": "boundaries",
}


def planted_factor(case: Case, quantity: str, unit: str) -> float:
    return PLANTED.get(GROUP_OF.get(case["probe"], ""), 1.0)


def test_planted_values_come_back_from_noisy_samples(tmp_path: Path) -> None:
    before, after = values_of(shipped()), values_of(refitted(tmp_path, scaled(stored(), planted_factor)))
    digits = {one.field: one.digits for one in READINGS}
    for field, group in EXPECTED.items():
        allowed = 0.04 if digits[field] == 2 else 0.012  # both sides are rounded, and there is the noise
        assert after[field].value / before[field].value == pytest.approx(PLANTED[group], rel=allowed), field
        assert after[field].low <= after[field].value <= after[field].high
    for field in ("l2_read_bytes_per_s", "counter_handoff_s", "kernel_prologue_s", "sm_clock_hz"):
        assert after[field].value == pytest.approx(before[field].value, rel=0.012), field
    curves = [dict(one["hbm_in_flight_curve"].value) for one in (before, after)]
    for at in (512, 8192, 32768):
        assert curves[1][at] / curves[0][at] == pytest.approx(PLANTED["hbm rates"], rel=0.01)


PLANTED_READINGS = {
    # field: probe, quantity (or None for all), factor
    "hbm_copy_bytes_per_s": ("hbm_copy", "moved_rate", 0.81),
    "pdl_trigger_to_launch_s": ("residency", "first_entry_after_start", 1.6),
    "last_block_s": ("last_block_barrier", "arrival_to_loaded", 1.3),
    "block_refill_s": ("residency", "entry_after_sm", 1.4),
    "fp4_weights_per_clock_per_sm": ("mxfp4_rate", "weights_per_clock", 1.7),
    "loopback_visibility_s": ("looped_back_push", "one_way", 1.5),
    "loopback_slot_s": ("looped_back_push", "one_way", 1.5),
    "dependent_mma_s": ("product_chain", "step", 1.4),
    "instruction_s": ("cold_code", "run", 1.5),
    "cold_instruction_s": ("cold_code", "run", 1.5),
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", PLANTED_READINGS)
def test_a_reading_moves_its_value_alone(tmp_path: Path, name: str) -> None:
    probe, quantity, factor = PLANTED_READINGS[name]

    def planted(case: Case, what: str, unit: str) -> float:
        return factor if (case["probe"], what) == (probe, quantity) else 1.0

    before, after = values_of(shipped()), values_of(refitted(tmp_path, scaled(stored(), planted)))
    assert after[name].value / before[name].value == pytest.approx(factor, rel=0.04)
    assert after[name].low <= after[name].value <= after[name].high
    moved = {one for one, (where, what, _) in PLANTED_READINGS.items() if (where, what) == (probe, quantity)}
    for other in PLANTED_READINGS.keys() - moved:
        assert after[other].value == pytest.approx(before[other].value, rel=0.03), other


def test_values_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Copies half as fast again, and so faster than reads."""
    document = scaled(stored(), lambda case, what, unit: 1.5 if case["probe"] == "hbm_copy" else 1.0)
    profile = refitted(tmp_path, document).profile("mine")
    with pytest.raises(UserError, match=r"^fitted: values.hbm_copy_bytes_per_s.value is .*hbm_read_bytes_per_s"):
        machine_of(profile, "fitted")


def planted_medians(document: Document, probe: str, quantity: str, value: Callable[[Document], float | None]) -> None:
    """Set both runs of a quantity to ``value`` of the case's parameters, but for noise; cases of None stay."""
    noise = random.Random(probe)
    for case in document["cases"]:
        if case["probe"] == probe and quantity in case["readings"]:
            planted = value(case["parameters"])
            if planted is not None:
                for run in case["readings"][quantity]["runs"]:
                    run[:3] = [planted * (1 + noise.uniform(-NOISE, NOISE))] * 3


@pytest.mark.slow
def test_planted_chains_come_back(tmp_path: Path) -> None:
    """0.12 us behind the release, 0.2 a load, 0.09 a sum over a warp."""
    document = stored()
    flush_us = 1e6 * values_of(shipped())["grid_completion_s"].value
    planted_medians(
        document, "chained", "period",
        lambda parameters: flush_us + 0.12 + 0.2 * parameters["loads"] + 0.09 * parameters["warp_sums"],
    )  # fmt: skip
    after = values_of(refitted(tmp_path, document))
    assert after["warp_sum_s"].value == pytest.approx(0.09e-6, rel=0.02)
    assert after["kernel_exit_warm_s"].value == pytest.approx(0.12e-6, abs=0.015e-6)  # the flush is rounded


@pytest.mark.slow
def test_planted_inputs_come_back(tmp_path: Path) -> None:
    """200 GB/s an SM by rows; by fragments 50 GB/s an SM where 28 ask, and 2.8 TB/s where 112 do."""
    document = stored()

    def period_us(parameters: Document) -> float:
        rate = 200e9
        if parameters["form"] == "fragments":
            rate = 50e9 if parameters["blocks"] == 28 else 2.8e12 / 112
        return 1.0 + 1e6 * 1024 * parameters["kib_per_block"] / rate

    planted_medians(document, "same_input", "period", period_us)
    after = values_of(refitted(tmp_path, document))
    assert after["l2_input_bytes_per_s_per_sm"].value == pytest.approx(200e9, rel=0.05)
    assert after["l2_fragment_bytes_per_s_per_sm"].value == pytest.approx(50e9, rel=0.05)
    assert after["l2_fragment_bytes_per_s"].value == pytest.approx(2.8e12, rel=0.05)


@pytest.mark.slow
def test_a_chain_of_two_sizes_gives_no_line(tmp_path: Path) -> None:
    document = stored()
    document["cases"] = [
        case for case in document["cases"] if case["probe"] != "chained" or case["parameters"]["warp_sums"] in (0, 4)
    ]
    assert "2 stable samples of chained by warp_sums" in refitted(tmp_path, document).undetermined["warp_sum_s"]


@pytest.mark.slow
def test_a_planted_queue_comes_back(tmp_path: Path) -> None:
    """L2 hits that wait 0.44 of what a queue is longer than 0.9 us."""
    document = stored()
    read = Reader(shipped().file)
    rate = read.one("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=131072)
    idle = read.one("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=0)

    def cycles(parameters: Document) -> float | None:
        queue_s = parameters["stream_bytes_in_flight_per_sm"] * 130 / rate
        return (idle + 0.44 * (queue_s - 0.9e-6)) * read.clock_hz if queue_s > 0.9e-6 else None

    planted_medians(document, "loads_beside_stream", "mean_in_l2", cycles)
    after = values_of(refitted(tmp_path, document))
    assert after["l2_hit_queueing_fraction"].value == pytest.approx(0.44, rel=0.03)
    assert after["hbm_queue_threshold_s"].value == pytest.approx(0.9e-6, rel=0.03)
    assert {after[name].how for name in ("l2_hit_queueing_fraction", "hbm_queue_threshold_s")} == {"joint"}


@pytest.mark.slow
def test_a_steady_queue_is_not_guessed(tmp_path: Path) -> None:
    document = stored()
    planted_medians(document, "loads_beside_stream", "mean_in_l2", lambda parameters: 700.0)
    found = refitted(tmp_path, document)
    assert "does not grow with the queue" in found.undetermined["l2_hit_queueing_fraction"]
    assert "does not grow with the queue" in found.undetermined["hbm_queue_threshold_s"]


@pytest.mark.slow
def test_a_planted_utilisation_comes_back(tmp_path: Path) -> None:
    document = stored()
    shares = {32768: 0.86, 131072: 1.0}
    planted_medians(
        document, "loads_beside_stream", "stream_rate",
        lambda parameters: 4e12 * shares.get(parameters["stream_bytes_in_flight_per_sm"], 0.95),
    )  # fmt: skip
    assert values_of(refitted(tmp_path, document))["l2_queueing_utilisation"].value == pytest.approx(0.86, abs=0.011)


@pytest.mark.slow
def test_a_planted_prefetch_rate_comes_back(tmp_path: Path) -> None:
    """Eight SMs at 150 GB/s each, of whose lines nine in ten are seen."""
    document = stored()
    planted_medians(
        document, "prefetch_arrival", "in_l2",
        lambda parameters: min(0.9, 0.9 * 8 * 150e9 * (parameters["after_us"] - 0.4) * 1e-6 / parameters["bytes"])
        if parameters["streaming_blocks"] == 0 and parameters["issuing_blocks"] == 8 else None,
    )  # fmt: skip
    for case in document["cases"]:
        if case["probe"] == "prefetch_arrival" and case["parameters"]["after_us"] > 4:
            for run in case["readings"]["in_l2"]["runs"]:
                run[:3] = [0.9] * 3
    one = values_of(refitted(tmp_path, document))["prefetch_bytes_per_s_per_sm"]
    assert one.value == pytest.approx(150e9, rel=0.03)


@pytest.mark.slow
def test_a_planted_loss_of_uneven_grids_comes_back(tmp_path: Path) -> None:
    """96 of 132 SMs: 60 blocks share 30 pairs, which loses 15/16 of the most that can be lost."""
    document = stored()
    whole = Reader(shipped().file).one("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=131072, stages=8)
    planted_medians(
        document, "hbm_bulk_by_sms", "read_rate",
        lambda parameters: whole * (1 - 0.15 * 15 / 16) if parameters["blocks"] == 96 else None,
    )  # fmt: skip
    assert values_of(refitted(tmp_path, document))["hbm_partial_grid_loss"].value == pytest.approx(0.15, rel=0.06)


@pytest.mark.slow
def test_a_planted_fork_comes_back(tmp_path: Path) -> None:
    document = stored()
    for probe in ("graph_join", "graph_fork_join"):
        planted_medians(document, probe, "fork_same_stream", lambda parameters: 0.70)
        planted_medians(document, probe, "fork_other_stream", lambda parameters: 0.95)
    assert values_of(refitted(tmp_path, document))["fork_s"].value == pytest.approx(0.25e-6, rel=0.05)


@pytest.mark.slow
def test_another_clock_moves_values_in_cycles(tmp_path: Path) -> None:
    document = scaled(stored(), lambda case, quantity, unit: 0.5 if unit == "Hz" else 1.0)
    after = values_of(refitted(tmp_path, document))
    assert after["sm_clock_hz"].value == pytest.approx(0.99e9, rel=0.005)
    assert after["hbm_latency_s"].value == pytest.approx(2 * 3.43e-7, rel=0.01)
    assert after["grid_barrier_s"].value == pytest.approx(9.26e-7, rel=0.01)  # read in microseconds


@pytest.mark.slow_but_one
@pytest.mark.parametrize("capacity_mib", [28, 39, 52])
def test_a_planted_l2_capacity_comes_back(tmp_path: Path, capacity_mib: int) -> None:
    noise, document = random.Random(capacity_mib), stored()
    for case in document["cases"]:
        if case["probe"] == "l2_survival" and not case["parameters"]["evict_first"]:
            share = kept_share(capacity_mib, case["parameters"]["region_mib"], case["parameters"]["streamed_mib"])
            for run in case["readings"]["kept"]["runs"]:
                middle = share + noise.gauss(0, 0.005)
                run[:3] = [middle, middle - 0.005, middle + 0.005]
    one = values_of(refitted(tmp_path, document))["l2_effective_bytes"]
    assert one.value == capacity_mib << 20
    assert one.how == "joint"
    assert one.low <= one.value <= one.high


@pytest.mark.slow
def test_whole_shares_do_not_fix_a_capacity(tmp_path: Path) -> None:
    document = stored()
    for case in document["cases"]:
        if case["probe"] == "l2_survival":
            for run in case["readings"]["kept"]["runs"]:
                run[:3] = [float(round(run[0]))] * 3
    found = refitted(tmp_path, document)
    assert "0 stable cases of l2_survival keep part of a region" in found.undetermined["l2_effective_bytes"]
    assert found.profile("h200")["values"]["l2_effective_bytes"]["value"] == 41943040  # as the base has it


# -- what cannot be used ---------------------------------------------------------------------------------------------


def test_an_unstable_case_leaves_its_value_undetermined(tmp_path: Path) -> None:
    document = stored()
    for case in document["cases"]:
        if case["probe"] == "hbm_chase":
            for run in case["readings"]["mean_without_stamps"]["runs"][1:]:
                run[:3] = [one * 1.2 for one in run[:3]]
    found = refitted(tmp_path, document)
    assert found.undetermined["hbm_latency_s"] == "no stable sample of hbm_latency_s"
    assert "hbm_latency_s" not in values_of(found)
    assert found.profile("h200")["values"]["hbm_latency_s"]["value"] == 3.43e-7
    assert any("hbm_chase region_mib=1024" in one.label for one, _ in found.file.refused)


def test_a_clock_that_drifted_leaves_all_cycles_undetermined(tmp_path: Path) -> None:
    document = stored()
    document["cases"][0]["readings"]["sm_clock"]["runs"][1][:3] = [1.755e9] * 3
    undetermined = refitted(tmp_path, document).undetermined
    for field in ("sm_clock_hz", "hbm_latency_s", "l2_far_latency_s", "counter_handoff_s", "kernel_prologue_s"):
        assert "clocks sm_clock: its runs are 2.245e+08 Hz apart" in undetermined[field], field
    assert "hbm_read_bytes_per_s" not in undetermined


def test_doubled_or_incomplete_cases_are_not_used(tmp_path: Path) -> None:
    document = stored()
    document["cases"] += [one for one in document["cases"] if one["probe"] == "clocks"]
    for case in document["cases"]:
        if case["probe"] == "hbm_bulk_in_flight":
            del case["parameters"]["bytes_in_flight_per_sm"]
    undetermined = refitted(tmp_path, document).undetermined
    assert undetermined["sm_clock_hz"] == "2 samples of clocks sm_clock, accepted is one"
    assert undetermined["hbm_in_flight_curve"] == "a case lacks the parameter 'bytes_in_flight_per_sm'"


def test_a_file_of_kernels_is_not_fitted() -> None:
    with pytest.raises(UserError, match=r"are of kernels; accepted for a fit are those of 'k3sim calibrate'"):
        fit(read_samples(DATA / "h200-kernels.json"), load_machine("h200"))


def test_another_gpu_needs_a_base(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no shipped profile is of 'NVIDIA X1'; give one to start from with --base"):
        base_of("NVIDIA X1")
    assert base_of("NVIDIA X1", "h100").name == "h100"
    assert base_of("NVIDIA H200").name == "h200"
    document = {**stored(), "gpu": "NVIDIA X1", "num_sms": 132}
    document["cases"] = [one for one in document["cases"] if one["probe"] in ("clocks", "block_reduction", "hbm_chase")]
    found = refitted(tmp_path, document)
    entries = found.profile("x1")["values"]
    assert entries["hbm_latency_s"]["kind"] == "measured"
    assert entries["grid_barrier_s"]["kind"] == "inferred"
    assert entries["grid_barrier_s"]["note"].startswith("Inferred from h200. ")
    assert found.undetermined["grid_barrier_s"] == "no stable sample of grid_barrier_s"
    assert machine_of(found.profile("x1"), "x1").name == "x1"


# -- seeds and rounding ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_seed_moves_the_bootstrap_and_nothing_else() -> None:
    again, other = (fit(shipped().file, load_machine("h200"), seed) for seed in (0, 7))
    assert again.fitted == shipped().fitted
    assert [one.value for one in other.fitted] == [one.value for one in again.fitted]
    assert [one.statistical for one in other.fitted] != [one.statistical for one in again.fitted]


@pytest.mark.parametrize(
    ("value", "direction", "bound"),
    [
        (1.23456, -1, 1.234),
        (1.23456, +1, 1.235),
        (1.98e9, +1, 1.98e9),
        (3.0e-7, -1, 3.0e-7),
        (0.0, -1, 0.0),
        (9.9999, +1, 10.0),
    ],
)
def test_bounds_are_rounded_away_from_what_they_bound(value: float, direction: int, bound: float) -> None:
    assert outward(value, direction) == pytest.approx(bound, rel=1e-12)


# -- values from kernels ---------------------------------------------------------------------------------------------


def planted_shapes(machine: Machine, noise: float = 0.004) -> list[Shape]:
    """cuBLAS GEMMs and a small kernel as ``machine`` would run them."""
    generator = random.Random(3)
    links = {
        f"{outputs}x{depth}": ChainedKernel(
            operator="cublas.gemm", weights=(bf16(outputs, depth),), shape={"rows": 1}, launch="graph", trigger="end"
        )
        for outputs, depth in ((10240, 7168), (8448, 7168), (3584, 7168), (1536, 7168), (448, 7168))
    }
    return [
        Shape(
            case=name,
            measured_us=chain_us((link,), loopback_fabric(machine)) * (1 + generator.uniform(-noise, noise)),
            kernels=(link,),
        )
        for name, link in links.items()
    ]


@pytest.mark.slow
def test_kernels_give_planted_values() -> None:
    h200 = load_machine("h200")
    planted = replace(h200, tensor_core_setup_s=2.4e-6, hbm_read_bytes_per_s=4.2e12)
    parameters = {
        "tensor_core_setup_s": (1e-7, 1e-5),
        "hbm_read_bytes_per_s": (2e12, 4.8e12),
        "fp4_weights_per_clock_per_sm": (4.0, 256.0),
    }
    found = fit_kernels(h200, planted_shapes(planted), parameters)
    setup, rate, decode = found.found
    assert setup.value == pytest.approx(2.4e-6, rel=0.05)
    assert rate.value == pytest.approx(4.2e12, rel=0.02)
    assert setup.determined and rate.determined
    assert setup.low is not None and setup.high is not None and setup.low < 2.4e-6 < setup.high
    assert not setup.profile_value_inside
    assert (decode.determined, decode.reason) == (False, "the times do not depend on it")
    assert (decode.low, decode.high) == (None, None)
    assert decode.value == pytest.approx(h200.fp4_weights_per_clock_per_sm)
    assert found.singular_values[-1] == 0.0 < found.singular_values[1]
    assert max(map(abs, found.residuals.values())) < 0.01
    assert max(map(abs, found.left_out_errors.values())) < 0.03
    assert set(found.left_out_errors) == set(found.residuals)
