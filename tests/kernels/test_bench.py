"""The timing protocol's arithmetic; the timing itself needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from k3sim.kernels.harness.bench import Timing, num_copies, write_samples


def test_copies_fill_l2_three_times_at_least_eight() -> None:
    assert num_copies(90_144_768, 62_914_560) == 8
    assert num_copies(1_000_000, 10_000_000) == 30
    assert num_copies(1_000_001, 10_000_000) == 30
    assert num_copies(999_999, 10_000_000) == 31


def test_percentiles_are_samples_that_were_taken() -> None:
    timing = Timing(name="t", num_calls_per_replay=8, samples_us=tuple(float(i) for i in range(10, 0, -1)))
    assert (timing.percentile_us(10), timing.median_us, timing.percentile_us(90)) == (1.0, 5.5, 9.0)


def test_a_sample_file_keeps_every_sample(tmp_path: Path) -> None:
    timing = Timing(name="t", num_calls_per_replay=8, samples_us=(3.0, 1.0, 2.0))
    write_samples(tmp_path / "samples.json", [timing, timing], {"gpu": "none"})
    stored = json.loads((tmp_path / "samples.json").read_text())
    assert stored["environment"] == {"gpu": "none"}
    assert [one["samples_us"] for one in stored["timings"]] == [[3.0, 1.0, 2.0]] * 2
    assert stored["timings"][0]["median_us"] == 2.0
