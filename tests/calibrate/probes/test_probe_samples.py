"""The recorded samples of the H200 probes, and the profile that rests on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3sim.calibrate import probes
from k3sim.calibrate.probes.gpu import BLOCK_BYTES
from k3sim.calibrate.probes.tiny import TINY_STAGES
from k3sim.calibrate.samples import read_samples
from k3sim.sim.profile import load_machine

DATA = Path(probes.__file__).parents[1] / "data"
SAMPLES: dict[str, Any] = json.loads((DATA / "h200-primitives.json").read_text(encoding="utf-8"))
CYCLE_US = 1 / 1980
STAMP_CYCLES = 20  # what a clock reading around a load adds: chases with and without it


def median(probe: str, quantity: str, **parameters: object) -> float:
    """Mean of the two runs' medians of the only case with these parameters."""
    found = [
        case["readings"][quantity]["runs"]
        for case in SAMPLES["cases"]
        if case["probe"] == probe and parameters.items() <= case["parameters"].items()
    ]
    assert len(found) == 1, (probe, quantity, parameters, len(found))
    first, second = found[0]
    return float(first[0] + second[0]) / 2


def boundary(quantity: str, *, pdl: bool) -> list[float]:
    """From the end of a producer on, us: 1, 8 and 132 blocks on two GPUs."""
    found = []
    for probe in ("graph_boundary", "graph_boundary_other_gpu"):
        both = {"shared_memory": [0, 0]} if probe == "graph_boundary" else {}
        for blocks in (1, 8, 132):
            grids = {"producer_blocks": blocks, "consumer_blocks": blocks}
            found.append(median(probe, quantity, pdl=pdl, bytes_written_per_block=4096, **grids, **both))
    return found


def after_weights(quantity: str, *, pdl: bool = False, copies: int = 32) -> float:
    return median(
        "tiny_kernel",
        f"1t.{quantity}",
        pattern="Gt",
        streamed_bytes=51904512,
        copies_of_code=copies,
        tiny_blocks=1,
        tiny_threads=512,
        pdl=pdl,
        rehearsed=False,
    )


def test_samples_say_how_they_were_taken() -> None:
    assert SAMPLES["gpu"] == "NVIDIA H200"
    assert SAMPLES["driver_and_clocks"]["clocks.sm"] == SAMPLES["driver_and_clocks"]["clocks.max.sm"]
    assert not SAMPLES["quick"]
    assert SAMPLES["columns_of_runs"] == ["median", "p10", "p90", "count"]
    for case in SAMPLES["cases"]:
        for quantity, readings in case["readings"].items():
            assert len(readings["runs"]) == 2, (case["probe"], quantity)
            for middle, low, high, count in readings["runs"]:
                assert low <= middle <= high and count > 0, (case["probe"], quantity)


@pytest.mark.parametrize(
    ("unit", "relative", "absolute"), [("B/s", 0.01, 0), ("us", 0.01, 0.05), ("cycle", 0.06, 50)]
)
def test_second_run_repeats_the_first(unit: str, relative: float, absolute: float) -> None:
    """Where a kernel lands among the SMs moves a gap by a timer step and a stage by a trip within L2.

    Of all samples that a fit may use: what does not repeat is refused.
    """
    for one in read_samples(DATA / "h200-primitives.json").samples:
        if one.unit == unit and not one.instability:
            first, second = (run.median for run in one.runs)
            assert abs(first - second) <= max(relative * abs(first), absolute), one.label


def test_profile_is_what_was_measured() -> None:
    h200 = load_machine("h200")
    measured = {
        "hbm_read_bytes_per_s": median("hbm_loads_in_flight", "read_rate", blocks=264),
        "hbm_latency_s": median("hbm_chase", "mean_without_stamps", region_mib=1024) * CYCLE_US * 1e-6,
        "hbm_bytes_per_s_per_sm": median("hbm_bulk_by_sms", "read_rate", blocks=32) / 32,
        "l2_read_bytes_per_s": median("l2_read", "read_rate", region_bytes=34603008),
        "l2_bytes_per_s_per_sm": median(
            "l2_read_one_sm", "read_rate", region_bytes=8388608, loads=4, threads=1024
        ),
        "l2_far_latency_s": (median("l2_chase_written", "first_read_far_decile", sm=1) - STAMP_CYCLES)
        * CYCLE_US
        * 1e-6,
        "l2_loaded_latency_s": (
            median("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=65536) - STAMP_CYCLES
        )
        * CYCLE_US
        * 1e-6,
        "block_reduction_s": median("block_reduction", "time", threads=512) * 1e-6,
        "cluster_sync_s": median("cluster_barrier", "time", blocks=128, store_to_neighbour=True) * 1e-6,
        "grid_barrier_s": median("grid_barrier", "time", blocks=132) * 1e-6,
        "counter_handoff_s": median("handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=0)
        * CYCLE_US
        * 1e-6,
        "system_fence_s": median("fence", "time", scope="system", threads=32) * 1e-6,
    }
    for name, value in measured.items():
        assert getattr(h200, name) == pytest.approx(value, rel=0.015), name
        assert h200.provenance[name].kind == "measured", name
    for in_flight, rate in h200.hbm_in_flight_curve:
        sampled = median("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=in_flight, stages=4)
        assert rate == pytest.approx(sampled, rel=0.005)


def test_the_profile_is_among_measured_boundaries() -> None:
    h200 = load_machine("h200")
    whole = boundary("end_to_entry", pdl=False)
    waiting = boundary("end_to_resume", pdl=True)
    assert min(waiting) <= h200.grid_completion_s * 1e6 <= max(waiting)
    assert min(whole) <= (h200.launch_latency_s + h200.grid_completion_s) * 1e6 <= 1.02 * max(whole)
    launch = [a - b for a, b in zip(whole, waiting, strict=True)]
    assert min(launch) <= h200.launch_latency_s * 1e6 <= max(launch)


def test_boundary_depends_little_on_grid_and_shared_memory() -> None:
    plain = [
        median("graph_boundary", "end_to_entry", pdl=False, producer_blocks=producer, consumer_blocks=132,
               shared_memory=shared, bytes_written_per_block=4096)
        for producer, shared in ((132, [0, 0]), (1056, [0, 0]), (132, [BLOCK_BYTES, 0]))
    ]  # fmt: skip
    assert max(plain) - min(plain) < 0.035


def test_stages_add_up_to_a_tiny_kernel() -> None:
    stages = [stage for stage, _, _ in TINY_STAGES if stage != "entry_to_end"]
    cycles = sum(after_weights(stage) for stage in stages)
    assert cycles == pytest.approx(after_weights("entry_to_end"), rel=0.01)
    whole = after_weights("end_to_entry") + cycles * CYCLE_US
    assert whole == pytest.approx(after_weights("end_to_end"), rel=0.01)
    assert whole == pytest.approx(1.97, abs=0.03)


def test_pdl_hides_launch_and_parameters_but_no_load() -> None:
    saved = after_weights("end_to_end") - after_weights("end_to_end", pdl=True)
    hidden = after_weights("end_to_entry") - after_weights("end_to_resume", pdl=True)
    hidden += (after_weights("parameter") + after_weights("prologue_or_wait")) * CYCLE_US
    assert saved == pytest.approx(hidden, abs=0.04)
    assert after_weights("dependent_load", pdl=True) == pytest.approx(
        after_weights("dependent_load"), rel=0.05
    )


def test_a_tiny_kernel_waits_for_no_code() -> None:
    assert after_weights("end_to_end") - after_weights("end_to_end", copies=1) < 0.05


@pytest.mark.parametrize(("region", "streamed"), [(8, 24), (16, 16), (32, 8), (16, 32), (32, 24), (40, 24)])
def test_l2_keeps_what_least_recently_used_replacement_keeps(region: int, streamed: int) -> None:
    kept = median(
        "l2_survival", "kept", region_mib=region, streamed_mib=streamed, region_reads=2, evict_first=False
    )
    capacity = load_machine("h200").l2_effective_bytes / 2**20
    assert kept == pytest.approx(min(1.0, (capacity - streamed) / region), abs=0.12)


def test_evict_first_spares_what_others_left_in_l2() -> None:
    assert median("l2_survival", "kept", region_mib=16, streamed_mib=120, evict_first=True) > 0.95
    assert (
        median("l2_survival", "kept", region_mib=16, streamed_mib=60, region_reads=1, evict_first=False)
        < 0.05
    )


def test_values_that_end_a_wait_never_trap() -> None:
    """``depend`` compares with a value that data below 2^31, and sums and exclusive ors of it, cannot have."""
    assert int("fedcba98", 16) >= 2**31
    host = (Path(probes.__file__).parent / "gpu.py").read_text(encoding="utf-8")
    assert "torch.randint(0, 2**31 - 1, (2**29,)" in host
    assert "& 0x7fffffff)" not in "".join(re.findall(r"depend\([^;]*;", probes.SOURCE)), (
        "the compiler drops it"
    )


def test_probes_import_without_a_gpu() -> None:
    code = "import sys; import k3sim.calibrate.probes; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
