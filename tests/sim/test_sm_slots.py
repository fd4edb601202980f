"""Room on the SMs: what a kernel holds, who waits, and who gets room back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, call, reads, simulate, stream, work

from k3sim.errors import UserError
from k3sim.kernels.work import Pass
from k3sim.sim.components.occupancy import Footprint, Occupancy, Placement

NOTHING = Pass()


def slots() -> tuple[simpy.Environment, Occupancy]:
    env = simpy.Environment()
    return env, Occupancy(env, TINY)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ({"num_blocks": 7}, 7),
        ({"num_blocks": 1000}, 80),  # registers allow eight on each of ten SMs
        ({"num_blocks": 1000, "threads_per_block": 300}, 30),  # 1000 threads an SM
        ({"num_blocks": 1000, "smem_bytes_per_block": 400}, 20),  # 1000 bytes an SM
        ({"num_blocks": 1000, "smem_bytes_per_block": 0}, 80),
    ],
)
def test_a_kernel_holds_one_full_wave(shape: dict[str, int], blocks: int) -> None:
    one = work(NOTHING, **shape)
    assert slots()[1].footprint(one) == Footprint(
        blocks, blocks * one.smem_bytes_per_block, blocks * one.threads_per_block
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"smem_bytes_per_block": 1001}, "1001 bytes of shared memory in a block and gb300 has 1000"),
        ({"threads_per_block": 1001}, "1001 threads in a block and gb300 has 1000"),
    ],
)
def test_a_block_that_no_sm_can_hold_is_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        slots()[1].footprint(work(NOTHING, num_blocks=1, **shape))


def test_a_refusal_reaches_the_caller_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(TINY, smem_bytes_per_sm=200, max_smem_bytes_per_block=50)
    with pytest.raises(UserError, match="shared memory"):
        simulate(monkeypatch, {"a": stream(1)}, [call(0, "a")], machine, num_ranks=1)


def test_threads_and_shared_memory_are_both_limits() -> None:
    _, sms = slots()
    assert sms.acquire(Footprint(10, 9000, 2000)) is None
    assert sms.acquire(Footprint(10, 2000, 100)) is not None
    _, sms = slots()
    assert sms.acquire(Footprint(10, 100, 9000)) is None
    assert sms.acquire(Footprint(10, 100, 2000)) is not None
    assert sms.acquire(Footprint(10, 9900, 1000)) is None


def test_room_goes_to_the_longest_waiting_that_fits_and_it_learns_who_left() -> None:
    env, sms = slots()
    large, small = Footprint(10, 8000, 10), Footprint(1, 3000, 10)
    assert sms.acquire(Footprint(10, 9000, 10)) is None
    waiting = [sms.acquire(one) for one in (large, small, small)]
    assert all(one is not None and not one.triggered for one in waiting)
    sms.release(Footprint(10, 3000, 0), by=41)  # 4000 are free: the first small one passes the large one
    env.run()
    assert [one is not None and one.triggered for one in waiting] == [False, True, False]
    assert waiting[1] is not None and waiting[1].value == 41
    sms.release(Footprint(10, 6000, 10), by=42)  # 7000 are free, still too few for the large one
    sms.release(small, by=43)
    env.run()
    assert [one is not None and one.triggered for one in waiting] == [False, True, True]
    sms.release(small, by=44)
    env.run()
    assert waiting[0] is not None and waiting[0].value == 44


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 50)), max_size=30))
def test_room_never_runs_below_zero_and_all_of_it_comes_back(kernels: list[tuple[int, int, int]]) -> None:
    env, sms = slots()
    held = []

    def one(smem: int, threads: int, duration: int):  # type: ignore[no-untyped-def]
        wanted = Footprint(1, smem, threads)
        granted = sms.acquire(wanted)
        if granted is not None:
            yield granted
        held.append(wanted)
        assert sum(every.smem_bytes for every in held) <= 10_000
        assert sum(every.threads for every in held) <= 10_000
        yield env.timeout(duration)
        held.remove(wanted)
        sms.release(wanted, by=0)

    for smem, threads, duration in kernels:
        env.process(one(smem, threads, duration))
    env.run()
    assert held == []
    assert sms.acquire(Footprint(1, 10_000, 10_000)) is None


def test_two_kernels_in_turn_on_a_full_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    full = work(Pass(reads=(reads(1000),)), smem_bytes_per_block=1000)
    timeline = simulate(monkeypatch, {"a": full}, [call(0, "a"), call(1, "a", stream="aux")], num_ranks=1)
    assert [(run.start_ps, run.end_ps) for run in timeline.kernels] == [(0, 2100), (0, 4200)]


HOPPER = replace(
    TINY, num_sms=4, smem_bytes_per_sm=228 * 1024, max_smem_bytes_per_block=227 * 1024, threads_per_sm=2048
)


def placed(sms: Occupancy, **shape: int) -> Placement:
    one = replace(work(NOTHING, max_blocks_per_sm=8, carve_out_percent=None), **shape)
    return sms.place(one, sms.footprint(one))


def test_a_block_waits_for_an_sm_that_was_carved_out_for_less() -> None:
    """A small kernel on two of four SMs: the large one starts on the other two, and whole when the small has gone."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = placed(sms, num_blocks=2, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    assert [len(blocks) for blocks in large.on.values()] == [1, 1] and set(large.on).isdisjoint(small.on)
    assert not large.whole.triggered
    sms.leave(small)
    assert large.missing == 0 and large.whole.triggered and len(large.on) == 4


def test_a_small_block_joins_an_sm_that_was_carved_out_for_more() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    small = placed(sms, num_blocks=2, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    assert small.whole.triggered


def test_the_carve_out_is_for_as_many_blocks_as_fit_by_threads() -> None:
    """As probed on an H200 (``residency``): 64 KB find no room beside 8 KB, and 128 KB find room beside 48 KB."""
    for first, second, beside in ((8, 64, False), (8, 200, False), (48, 128, True), (200, 8, True)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        placed(sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=1024 * first)
        other = placed(
            sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=1024 * second
        )
        assert other.whole.triggered is beside, (first, second)


def test_a_kernel_alone_always_finds_room_for_its_wave() -> None:
    for smem in (0, 1, 1000, 8 * 1024, 16 * 1024, 33 * 1024, 100 * 1024, 227 * 1024):
        for threads, registers in ((64, 32), (128, 168), (256, 128), (448, 48), (544, 96)):
            sms = Occupancy(simpy.Environment(), HOPPER)
            alone = placed(
                sms, num_blocks=99, threads_per_block=threads, registers_per_thread=registers, smem_bytes_per_block=smem
            )
            assert alone.missing == 0, (smem, threads, registers)


def test_a_kernel_that_wants_all_of_an_sm_as_shared_memory_leaves_the_rest_to_others() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = work(NOTHING, num_blocks=4, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    sms.place(small, sms.footprint(small))
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    assert large.whole.triggered


def test_registers_keep_a_block_out() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    first = placed(sms, num_blocks=3, threads_per_block=256, registers_per_thread=184, smem_bytes_per_block=2048)
    second = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=2048)
    assert first.whole.triggered
    # 4,608 registers are left in each part beside the first, and 14 warps put 6,144 into two of them; the fourth SM
    # takes two blocks.
    assert {sm: len(blocks) for sm, blocks in second.on.items()} == {3: 2} and second.missing == 2


@pytest.mark.parametrize(("threads", "beside"), [(384, True), (416, False)])
def test_warps_are_dealt_out_over_the_parts_of_an_sm(threads: int, beside: bool) -> None:
    """As blocks of 256 threads come in beside 12 warps of 128 registers, and not beside 13 (probe ``residency``)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=threads, registers_per_thread=128, smem_bytes_per_block=0)
    second = placed(sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=0)
    assert second.whole.triggered is beside


@pytest.mark.parametrize(("registers", "beside"), [(72, True), (96, False)])
def test_the_part_with_a_warp_more_gets_one_less_of_the_next_block(registers: int, beside: bool) -> None:
    """17 warps of 72 registers leave room for 14 of 40, which 17 of 96 do not (timestamps of blocks on an H200)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=544, registers_per_thread=registers, smem_bytes_per_block=0)
    second = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=40, smem_bytes_per_block=0)
    assert second.whole.triggered is beside


def test_a_carve_out_of_others_does_not_hold_a_kernel_back_for_good() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = placed(sms, num_blocks=4, threads_per_block=128, registers_per_thread=48, smem_bytes_per_block=512)
    large = placed(sms, num_blocks=28, threads_per_block=128, registers_per_thread=72, smem_bytes_per_block=3000)
    assert len(large.on) == 4 and large.missing > 0  # one block beside each small one
    sms.leave(small)
    assert large.whole.triggered


def test_blocks_start_in_the_order_of_launch() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    running = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    behind = placed(sms, num_blocks=1, threads_per_block=128, registers_per_thread=32, smem_bytes_per_block=1024)
    assert large.missing == 4 and behind.missing == 1
    sms.leave(running)
    assert large.whole.triggered and behind.whole.triggered


def test_shared_memory_that_a_block_has_left_counts_with_what_was_free() -> None:
    """As on an H200 (probe ``three_blocks``): 85 KB start beside 128 when 60 have left, with 36 apart from them."""
    for first, second, third in ((60, 128, 85), (85, 65, 141), (73, 65, 85)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32}

        def place(kib: int, sms: Occupancy = sms, shape: dict[str, int] = shape) -> Placement:
            one = replace(work(NOTHING, max_blocks_per_sm=1), smem_bytes_per_block=1024 * kib, **shape)
            return sms.place(one, sms.footprint(one))

        short = place(first)
        assert place(second).whole.triggered
        late = place(third)
        assert late.whole.triggered is (first + second + third <= 228), (first, third)
        sms.leave(short)
        assert late.whole.triggered


def test_blocks_that_are_done_make_room_for_others_of_their_kernel() -> None:
    """Four SMs, two of them taken: of eight blocks, one an SM, two start, and as these are given back two more do."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"threads_per_block": 448, "registers_per_thread": 48, "smem_bytes_per_block": 100 * 1024}
    taken = placed(sms, **{**shape, "num_blocks": 2, "smem_bytes_per_block": 200 * 1024})
    several = placed(sms, **shape, num_blocks=8)
    assert several.begun.triggered and several.missing == 4 and len(several.first) == 4
    groups: list[int] = []
    several.on_start = lambda shares: groups.append(len(shares))
    sms.give(several, None, 7)
    assert groups == [4] and several.missing == 0 and several.whole.value == 7
    sms.leave(taken)
    sms.leave(several)
    assert all(room.smem_bytes == room.carve_out and not room.blocks for room in sms._rooms)


def test_a_kernel_that_asks_for_a_part_of_an_sm_as_shared_memory_keeps_large_blocks_out() -> None:
    """60 % become 164 KB: a block of 150 KB starts beside one of 8 KB, and one of 160 KB does not."""
    for kib, beside in ((150, True), (160, False)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32, "max_blocks_per_sm": 1}
        one = replace(work(NOTHING), smem_bytes_per_block=8 * 1024, carve_out_percent=60, **shape)
        sms.place(one, sms.footprint(one))
        other = replace(work(NOTHING), smem_bytes_per_block=1024 * kib, **shape)
        assert sms.place(other, sms.footprint(other)).whole.triggered is beside, kib


def test_a_block_that_waited_takes_an_sm_as_it_was_divided() -> None:
    """As on an H200 (probe ``carve_out_inheritance``): 127 KB that waited behind 60 % leave no room for 84; launched, they do.

    Each shape is blocks, threads, KB of shared memory, blocks an SM, and the wish.
    """

    def placed_one(sms: Occupancy, blocks: int, threads: int, kib: int, per_sm: int, wish: int = 100) -> Placement:
        one = replace(
            work(NOTHING), num_blocks=blocks, threads_per_block=threads, smem_bytes_per_block=1024 * kib,
            max_blocks_per_sm=per_sm, registers_per_thread=16, carve_out_percent=wish,
        )  # fmt: skip
        return sms.place(one, sms.footprint(one))

    for waits in (True, False):
        sms = Occupancy(simpy.Environment(), HOPPER)
        before = placed_one(sms, 4, 128, 4, 1, wish=60)
        first = placed_one(sms, 8, 768, 28, 2)
        assert first.whole.triggered
        sms.leave(before)
        if not waits:
            sms.leave(first)
        second = placed_one(sms, 4, 1024, 127, 1)
        assert second.whole.triggered is not waits
        if waits:
            sms.leave(first)
        assert second.whole.triggered
        assert placed_one(sms, 4, 512, 84, 1).whole.triggered is not waits


def test_a_block_that_waited_and_does_not_fit_divides_the_sm_anew() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32, "max_blocks_per_sm": 1}
    before = replace(work(NOTHING), smem_bytes_per_block=4096, carve_out_percent=60, **shape)
    large = replace(work(NOTHING), smem_bytes_per_block=200 * 1024, **shape)
    first = sms.place(before, sms.footprint(before))
    second = sms.place(large, sms.footprint(large))
    assert not second.begun.triggered
    sms.leave(first)
    assert second.whole.triggered


def test_a_kernel_that_wants_more_l1_waits_until_an_sm_is_idle() -> None:
    """It finds room beside the other, and would have no L1 there (probe ``carve_out_persistence``)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"num_blocks": 4, "threads_per_block": 128, "registers_per_thread": 32, "max_blocks_per_sm": 1}
    shared = replace(work(NOTHING), smem_bytes_per_block=64 * 1024, **shape)
    cached = replace(work(NOTHING), smem_bytes_per_block=4096, carve_out_percent=60, **shape)
    first = sms.place(shared, sms.footprint(shared))
    second = sms.place(cached, sms.footprint(cached))
    assert not second.begun.triggered
    sms.leave(first)
    assert second.whole.triggered
    assert sms.l1_bytes(cached, second) == 92 * 1024
