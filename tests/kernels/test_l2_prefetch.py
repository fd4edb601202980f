"""L2 prefetch: the budget's cut, refusals; on a GPU, what was prefetched is read faster."""

from __future__ import annotations

import statistics

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.l2_prefetch import launch, reference  # noqa: E402


def test_the_list_is_cut_where_the_budget_ends() -> None:
    regions = [(0, 100), (1000, 64), (2000, 48)]
    assert reference.prefetched_ranges(regions, 1000) == [(0, 96), (1000, 64), (2000, 48)]
    assert reference.prefetched_ranges(regions, 140) == [(0, 96), (1000, 32)]
    assert reference.prefetched_ranges(regions, 15) == []
    assert reference.prefetched_ranges(regions, 0) == []


def test_what_cannot_be_honoured_is_named() -> None:
    with pytest.raises(UserError, match=r"tensors\[1\].stride"):
        launch.make_regions([torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]])
    with pytest.raises(UserError, match=r"regions\.shape"):
        launch.l2_prefetch(torch.zeros(4, dtype=torch.int64), budget_bytes=1)
    with pytest.raises(UserError, match="budget_bytes: got -1"):
        launch.l2_prefetch(torch.zeros(4, 2, dtype=torch.int64), budget_bytes=-1)


@pytest.mark.gpu
def test_what_was_prefetched_is_read_faster() -> None:
    # Loads one behind the other: a search by halves over 22 MB, some 17 of them. A product would gain too little to
    # judge by (0.75 us on an H200): L2 is not much faster than HBM for a stream.
    table = torch.arange(11 << 19, dtype=torch.float32, device="cuda")
    value = torch.full((1,), 0.37, device="cuda") * table.numel()
    flush = torch.randn(100 << 20, device="cuda")
    regions = launch.make_regions([table])

    def time_us(budget_bytes: int) -> float:
        times = []
        for _ in range(31):
            flush.sum()
            launch.l2_prefetch(regions, budget_bytes=budget_bytes)
            torch.cuda._sleep(100_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.searchsorted(table, value)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[1:])

    time_us(0)
    cold, warm = time_us(0), time_us(22 << 20)
    assert warm < cold - 1.5, (cold, warm)  # a load from L2 is 0.2 us shorter than one from HBM
