"""The ring's protocol with barriers that tell a phase from the next alone, at random speeds of warps and of HBM.

One loading warp and seven that read: rows of a product by all of them, stages of a pushed product in turns. The model
follows ``kernels/megakernel/kernel.py`` wait by wait; it was written after a form hung in which warps waited for stages
more than a ring ahead (stages dealt to warps in blocks, not in turns).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from k3sim.kernels.megakernel.list_builder import MAX_WINDOW, PRODUCT_WARPS, RING_STAGES

FOLD, PUSH = "fold", "push"
LAYER = ((FOLD, 24), (PUSH, 7), (FOLD, 32), (PUSH, 28))
MAX_STEPS = 100_000


class Barrier:
    """An mbarrier: a phase is over after ``count`` arrivals."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self, arrivals: int = 1) -> None:
        self.pending -= arrivals
        assert self.pending >= 0, "more arrivals than a phase has"
        if not self.pending:
            self.pending, self.phase = self.count, self.phase + 1

    def is_over(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Ring:
    def __init__(self, window: int, narrow: int) -> None:
        self.window, self.narrow = window, narrow
        self.busy = False
        self.full = [Barrier(1) for _ in range(RING_STAGES)]
        self.empty = [Barrier(PRODUCT_WARPS) for _ in range(RING_STAGES)]
        self.under_way: list[int] = []
        self.met = [0] * 100

    def come(self, stage: int) -> bool:
        """What a warp sees that waits for a stage; fails where that is another phase than it means."""
        barrier = self.full[stage % RING_STAGES]
        over = barrier.is_over(stage // RING_STAGES & 1)
        assert not over or barrier.phase == stage // RING_STAGES + 1, f"stage {stage} taken for another"
        return over

    def load(self, num_stages: int) -> Iterator[None]:
        for stage in range(num_stages):
            while not self.empty[stage % RING_STAGES].is_over(stage // RING_STAGES & 1 ^ 1):
                yield
            while stage >= self.window and not self.come(stage - self.window):
                yield
            while stage >= self.narrow and not self.busy and not self.come(stage - self.narrow):
                yield
            self.under_way.append(stage)
            yield

    def read(self, warp: int, instructions: list[tuple[str, int]], in_blocks: bool) -> Iterator[None]:
        first = 0
        for number, (kind, count) in enumerate(instructions):
            turns = count if kind == FOLD else count // PRODUCT_WARPS
            for turn in range(turns):
                of_warp = warp * turns + turn if in_blocks else turn * PRODUCT_WARPS + warp
                stage = first + (turn if kind == FOLD else of_warp)
                while not self.come(stage):
                    yield
                yield
                self.empty[stage % RING_STAGES].arrive(1 if kind == FOLD else PRODUCT_WARPS)
            self.met[number] += 1
            while self.met[number] < PRODUCT_WARPS:  # every instruction has a barrier of the warps
                yield
            first += count


def run(seed: int, *, in_blocks: bool = False) -> None:
    choose = random.Random(seed)
    window = choose.randint(1, MAX_WINDOW)
    ring = Ring(window, choose.randint(1, window))
    instructions = [*LAYER, *LAYER]
    workers = [ring.load(sum(count for _, count in instructions))]
    workers += [ring.read(warp, instructions, in_blocks) for warp in range(PRODUCT_WARPS)]
    speeds = {id(worker): choose.choice((1, 1, 5, 30)) for worker in workers}
    hbm = choose.choice((0.05, 0.2, 1.0))
    for _ in range(MAX_STEPS):
        if not workers:
            return
        if ring.under_way and choose.random() < hbm:  # copies come in any order
            ring.full[ring.under_way.pop(choose.randrange(len(ring.under_way))) % RING_STAGES].arrive()
        ring.busy = choose.random() < 0.5 if choose.random() < 0.1 else ring.busy
        worker = choose.choices(workers, [speeds[id(one)] for one in workers])[0]
        if next(worker, StopIteration) is StopIteration:
            workers.remove(worker)
    raise AssertionError("the ring hangs")


def test_no_stage_is_taken_for_another() -> None:
    for seed in range(25):
        run(seed)


def test_stages_dealt_in_blocks_are_mistaken() -> None:
    """The form that hung: four neighbouring stages a warp, the last of them more than a ring ahead."""
    with pytest.raises(AssertionError):
        for seed in range(25):
            run(seed, in_blocks=True)
