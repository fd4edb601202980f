"""Cases of ``l2_prefetch``. It changes no value: what can be checked is that a prefetched matrix is read faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import at_least
from k3sim.kernels.l2_prefetch.cost import bulk
from k3sim.kernels.skinny_gemv.cases import weight_of, weights

if TYPE_CHECKING:
    import torch

SHAPE = (7168, 1536)
FLUSH_FLOATS = 100 << 20  # more than any L2
NUM_READINGS = 30
SLEEP_CYCLES = 100_000  # in which 22 MB arrive
# A search by halves over 22 MB is a chain of some 17 loads from different lines, and a load from HBM takes 0.2 us
# longer than one from L2 (probes hbm_chase and l2_chase_resident of the H200). A product would save too little to
# judge by: L2 is not much faster than HBM for a stream.
LEAST_SAVING_US = 1.5


def _problem() -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.l2_prefetch import launch

        table = torch.arange(SHAPE[0] * SHAPE[1] // 2, dtype=torch.float32, device=device)
        value = torch.rand(1, device=device, generator=generator_on(device, seed)) * table.numel()
        regions = launch.make_regions([table])
        saved_us = torch.empty(1, device=device)

        def median_us(budget_bytes: int) -> float:
            flush = torch.zeros(FLUSH_FLOATS, device=device)
            times: list[float] = []
            for _ in range(NUM_READINGS + 1):
                flush.sum()
                launch.l2_prefetch(regions, budget_bytes=budget_bytes)
                torch.cuda._sleep(SLEEP_CYCLES)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.searchsorted(table, value)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3)
            return statistics.median(times[1:])

        return Problem(
            outputs=[Output(name="saved_us", tensor=saved_us, judge=at_least())],
            launch=lambda: saved_us.fill_(median_us(0) - median_us(table.numel() * 4)),
            reference=lambda: (torch.tensor([LEAST_SAVING_US]),),
            repeatable=False,
        )

    return make


def _timed(*, multiplies: bool) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.l2_prefetch import launch
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv

        generator = generator_on(device, seed)
        num_bytes = SHAPE[0] * SHAPE[1] * 2
        copies = weights(num_copies(num_bytes, l2_bytes), *SHAPE, generator)
        x = normal((1, SHAPE[1]), generator)
        out = torch.empty(1, SHAPE[0], dtype=torch.bfloat16, device=device)

        def multiply(weight: torch.Tensor) -> Call:
            return lambda: skinny_gemv(x, weight, out)

        def call(weight: torch.Tensor) -> Call:
            regions = launch.make_regions([weight])

            def step() -> None:
                launch.l2_prefetch(regions, budget_bytes=num_bytes)
                if multiplies:
                    skinny_gemv(x, weight, out)

            return step

        peers = {"skinny_gemv alone": lambda: [multiply(weight) for weight in copies]} if multiplies else {}
        return Timed(calls=[call(weight) for weight in copies], peers=peers, keep=(copies,))

    return make


def cases() -> list[Case]:
    size, work = f"{SHAPE[0]}x{SHAPE[1]}", bulk([weight_of(*SHAPE)], budget_bytes=1 << 30)
    # In a row of prefetches the rate is HBM's; a time below the floor would mean that requests are dropped.
    return [
        Case(
            operator="l2_prefetch", name=size, rows=1, works=(work,), num_bytes=8 * SHAPE[0] * SHAPE[1],
            problem=_problem(), timed=_timed(multiplies=False),
        ),
        Case(
            operator="l2_prefetch", name=f"{size}, and its product behind it", rows=1, works=(work,), num_bytes=0,
            timed=_timed(multiplies=True),
        ),
    ]
