"""Prefetches into L2 and the kernels that read the same regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY, call, counter_bytes, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass

Patch = pytest.MonkeyPatch


def test_a_prefetched_region_is_served_by_l2(monkeypatch: Patch) -> None:
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(4000, region="w"),)), prefetches=True),
        "b": work(Pass(reads=(reads(4000, region="w"),))),
    }
    timeline = simulate(monkeypatch, works, [call(0, "l2_prefetch.bulk"), call(1, "b")], num_ranks=1)
    fetched, run = kernel(timeline, "l2_prefetch.bulk"), kernel(timeline, "b")
    assert (fetched.end_ps, fetched.hbm_bytes) == (5000, 4000)
    assert spans(run)[-1] == ("l2", 6600, 7600)
    assert (run.hbm_bytes, run.l2_bytes) == (0, 4000)
    assert counter_bytes(timeline, "hbm") == 4000
    assert counter_bytes(timeline, "l2") == 8000


def test_an_evicted_region_comes_from_hbm_again(monkeypatch: Patch) -> None:
    # 4000 prefetched and 8000 of other reads into 10000 are 2000 too many; the region was there alone and loses them.
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(4000, region="w"),)), prefetches=True),
        "a": stream(8000),
        "b": work(Pass(reads=(reads(4000, region="w"),))),
    }
    timeline = simulate(monkeypatch, works, [call(0, "l2_prefetch.bulk"), call(1, "a"), call(2, "b")], num_ranks=1)
    run = kernel(timeline, "b")
    assert (run.hbm_bytes, run.l2_bytes) == (2000, 2000)
    # Both parts run together: L2's 2000 at three of four bytes a picosecond are hidden behind HBM's 2000.
    assert spans(run)[-1] == ("weights", run.end_ps - 2000, run.end_ps)


def test_a_prefetch_stops_where_the_kernel_takes_over(monkeypatch: Patch) -> None:
    works = {
        "l2_prefetch.bulk": work(Pass(reads=(reads(5 << 20, region="w"),)), prefetches=True),
        "b": work(Pass(reads=(reads(5 << 20, region="w"),))),
    }
    machine = replace(TINY, l2_effective_bytes=16 << 20)
    calls = [call(0, "l2_prefetch.bulk", stream="prefetch"), call(1, "a"), call(2, "b")]
    # a keeps the chip busy until 3 MiB of the five have been prefetched: one chunk is there, one under way.
    works["a"] = work(Pass(flops=10.0 * (3 << 20)))
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1)
    run, fetched = kernel(timeline, "b"), kernel(timeline, "l2_prefetch.bulk")
    assert (run.l2_bytes, run.hbm_bytes) == (2 << 20, 3 << 20)
    # The chunk under way is finished; what the kernel read itself is not fetched again.
    assert counter_bytes(timeline, "hbm") == pytest.approx(7 << 20, abs=2)
    assert fetched.hbm_bytes == 4 << 20
