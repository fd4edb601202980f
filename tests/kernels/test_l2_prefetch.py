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
@pytest.mark.parametrize("keep", [False, True])
def test_a_prefetched_matrix_is_read_faster(keep) -> None:  # type: ignore[no-untyped-def]
    weight = torch.randn(7168, 1536, device="cuda").bfloat16()
    x = torch.randn(1, 1536, device="cuda").bfloat16()
    flush = torch.randn(100 << 20, device="cuda")
    regions = launch.make_regions([weight])

    def time_us(budget_bytes: int) -> float:
        times = []
        for _ in range(30):
            flush.sum()
            launch.l2_prefetch(regions, budget_bytes=budget_bytes, keep=keep)
            torch.cuda._sleep(100_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            x @ weight.T
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

    time_us(0)
    cold, warm = time_us(0), time_us(weight.numel() * 2)
    assert warm < cold - 1.0, (cold, warm)  # 22 MB from L2 instead of HBM
