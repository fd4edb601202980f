"""Barriers between blocks."""

from __future__ import annotations

import pytest
from tiny import call, kernel, simulate, spans, work

from k3sim.kernels.work import Barrier, Pass

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("barrier", "reduce_ps"), [
        (Barrier.NONE, 0), (Barrier.CLUSTER, 60), (Barrier.CLUSTER_RELEASE, 120), (Barrier.GRID, 90),
        (Barrier.LAST, 105), (Barrier.LAUNCH, 3 * (500 + 1000)),
    ],
)
def test_each_barrier_has_its_time(monkeypatch: Patch, barrier: Barrier, reduce_ps: int) -> None:
    ending = work(Pass(num_block_reductions=2, barrier=barrier, num_barriers=3))
    timeline = simulate(monkeypatch, {"a": ending}, [call(0, "a")], num_ranks=1)
    expected = [("launch", 0, 1000), ("block reduction", 1000, 1014), ("barrier", 1014, 1014 + reduce_ps)]
    assert spans(kernel(timeline, "a")) == expected[: 3 if reduce_ps else 2]
