"""Occupancy: what a kernel holds, which blocks become resident, and who waits for SMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, call, reads, simulate, stream, work

from k3sim.errors import UserError
from k3sim.kernels.work import Pass
from k3sim.sim.components.occupancy import Occupancy
from k3sim.sim.components.placement import Placement, num_blocks
from k3sim.sim.components.sm import Sm
from k3sim.sim.profile import load_machine

NOTHING = Pass()


def occupancy() -> tuple[simpy.Environment, Occupancy]:
    env = simpy.Environment()
    return env, Occupancy(env, TINY)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ({"num_blocks": 7}, 7),
        ({"num_blocks": 1000}, 80),  # its own limit allows eight on each of ten SMs
        ({"num_blocks": 1000, "threads_per_block": 300}, 30),  # 1000 threads an SM
        ({"num_blocks": 1000, "smem_bytes_per_block": 400}, 20),  # 1000 bytes an SM
        ({"num_blocks": 1000, "smem_bytes_per_block": 0}, 80),
        ({"num_blocks": 1000, "registers_per_thread": 128}, 40),  # a warp of each in one partition of 16 K
        ({"num_blocks": 1000, "threads_per_block": 8, "smem_bytes_per_block": 0, "max_blocks_per_sm": 99}, 320),
    ],
)
def test_a_full_wave_is_what_the_chip_takes(shape: dict[str, int], blocks: int) -> None:
    one = work(NOTHING, **shape)
    assert occupancy()[1].full_wave(one) == blocks
    assert occupancy()[1].place(one).all_resident.triggered


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"smem_bytes_per_block": 1001}, "1001 bytes of shared memory in a block and gb300 has 1000"),
        ({"threads_per_block": 1001}, "1001 threads in a block and gb300 has 1000"),
    ],
)
def test_a_block_beyond_an_sm_is_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        occupancy()[1].place(work(NOTHING, num_blocks=1, **shape))


def test_a_refusal_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(TINY, smem_bytes_per_sm=200, max_smem_bytes_per_block=50)
    with pytest.raises(UserError, match="shared memory"):
        simulate(monkeypatch, {"a": stream(1)}, [call(0, "a")], machine, num_ranks=1)


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ({"smem_bytes_per_block": 900}, {"smem_bytes_per_block": 100}, True),
        ({"smem_bytes_per_block": 900}, {"smem_bytes_per_block": 101}, False),
        ({"threads_per_block": 800, "smem_bytes_per_block": 0}, {"threads_per_block": 200}, True),
        ({"threads_per_block": 800, "smem_bytes_per_block": 0}, {"threads_per_block": 201}, False),
    ],
)
def test_threads_and_shared_memory_are_both_limits(one: dict[str, int], other: dict[str, int], fits: bool) -> None:
    _, sms = occupancy()
    sms.place(work(NOTHING, **one))
    assert sms.place(work(NOTHING, **other)).all_resident.triggered is fits


def test_who_waits_learns_who_made_room() -> None:
    _, sms = occupancy()
    full = work(NOTHING, smem_bytes_per_block=1000)
    first, second = sms.place(full), sms.place(full)
    assert first.all_resident.value == -1 and not second.first_resident.triggered
    sms.release_all(first, by=41)
    assert second.first_resident.value == second.all_resident.value == 41


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 8), st.integers(1, 40), st.integers(1, 50)
        ),
        max_size=30,
    )
)
def test_what_is_allocated_is_released(kernels: list[tuple[int, int, int, int, int]]) -> None:
    """Whatever comes together, every kernel gets its wave, no SM holds more than it has, and all is free at the end."""
    env, sms = occupancy()
    ended = []

    def one(index: int, smem: int, threads: int, registers: int, blocks: int, duration: int):  # type: ignore[no-untyped-def]
        placement = sms.place(
            work(NOTHING, smem_bytes_per_block=smem, threads_per_block=threads, registers_per_thread=8 * registers,
                 num_blocks=blocks)
        )  # fmt: skip
        if not placement.all_resident.triggered:
            yield placement.all_resident
        assert all(min(sm.smem_bytes, sm.threads, *sm.partitions) >= 0 for sm in sms.sms.states_of(-1))
        yield env.timeout(duration)
        sms.release_all(placement, by=index)
        ended.append(index)

    for index, kernel in enumerate(kernels):
        env.process(one(index, *kernel))
    env.run()
    assert len(ended) == len(kernels)
    assert list(sms.sms.states_of(-1)) == [Sm.idle(1000, 1000)]


def test_two_kernels_in_turn_on_a_full_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    full = work(Pass(reads=(reads(1000),)), smem_bytes_per_block=1000)
    timeline = simulate(monkeypatch, {"a": full}, [call(0, "a"), call(1, "a", stream="aux")], num_ranks=1)
    assert [(run.start_ps, run.end_ps) for run in timeline.kernels] == [(0, 2100), (0, 4200)]


HOPPER = replace(
    TINY, num_sms=4, smem_bytes_per_sm=228 * 1024, max_smem_bytes_per_block=227 * 1024, threads_per_sm=2048
)


def placed(sms: Occupancy, **shape: int) -> Placement:
    one = replace(work(NOTHING, max_blocks_per_sm=8, carve_out_percent=None), **shape)
    return sms.place(one)


def test_a_block_waits_for_a_larger_carve_out() -> None:
    """A small kernel on two of four SMs: the large one starts on the other two, and whole when the small has gone."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = placed(sms, num_blocks=2, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    assert large.num_on_sms() == [(1, 0b1100)] and small.num_on_sms() == [(1, 0b0011)]
    assert not large.all_resident.triggered
    sms.release_all(small)
    assert large.num_pending == 0 and large.all_resident.triggered and large.sms == 0b1111


def test_a_small_block_joins_larger_carve_outs() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    small = placed(sms, num_blocks=2, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    assert small.all_resident.triggered


def test_the_drivers_carve_out_is_by_threads() -> None:
    """As probed on an H200 (``residency``): 64 KB do not fit beside 8 KB, and 128 KB fit beside 48 KB."""
    for first, second, beside in ((8, 64, False), (8, 200, False), (48, 128, True), (200, 8, True)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        placed(sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=1024 * first)
        other = placed(
            sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=1024 * second
        )
        assert other.all_resident.triggered is beside, (first, second)


def test_a_kernel_alone_is_wholly_resident() -> None:
    for smem in (0, 1, 1000, 8 * 1024, 16 * 1024, 33 * 1024, 100 * 1024, 227 * 1024):
        for threads, registers in ((64, 32), (128, 168), (256, 128), (448, 48), (544, 96)):
            sms = Occupancy(simpy.Environment(), HOPPER)
            alone = placed(
                sms, num_blocks=99, threads_per_block=threads, registers_per_thread=registers, smem_bytes_per_block=smem
            )
            assert alone.num_pending == 0, (smem, threads, registers)


def test_the_largest_carve_out_leaves_the_rest() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = work(NOTHING, num_blocks=4, threads_per_block=128, registers_per_thread=64, smem_bytes_per_block=2048)
    sms.place(small)
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    assert large.all_resident.triggered


def test_registers_keep_a_block_out() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    first = placed(sms, num_blocks=3, threads_per_block=256, registers_per_thread=184, smem_bytes_per_block=2048)
    second = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=2048)
    assert first.all_resident.triggered
    # 4,608 registers are left in each part beside the first, and 14 warps put 6,144 into two of them; the fourth SM
    # takes two blocks.
    assert second.num_on_sms() == [(2, 0b1000)] and second.num_pending == 2


@pytest.mark.parametrize(("threads", "beside"), [(384, True), (416, False)])
def test_warps_are_spread_over_partitions(threads: int, beside: bool) -> None:
    """As blocks of 256 threads come in beside 12 warps of 128 registers, and not beside 13 (probe ``residency``)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=threads, registers_per_thread=128, smem_bytes_per_block=0)
    second = placed(sms, num_blocks=4, threads_per_block=256, registers_per_thread=32, smem_bytes_per_block=0)
    assert second.all_resident.triggered is beside


@pytest.mark.parametrize(("registers", "beside"), [(72, True), (96, False)])
def test_the_fullest_partition_gets_a_warp_less(registers: int, beside: bool) -> None:
    """17 warps of 72 registers leave registers for 14 of 40, which 17 of 96 do not (block timestamps on an H200)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    placed(sms, num_blocks=4, threads_per_block=544, registers_per_thread=registers, smem_bytes_per_block=0)
    second = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=40, smem_bytes_per_block=0)
    assert second.all_resident.triggered is beside


def test_a_carve_out_ends_on_idle_sms() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    small = placed(sms, num_blocks=4, threads_per_block=128, registers_per_thread=48, smem_bytes_per_block=512)
    large = placed(sms, num_blocks=28, threads_per_block=128, registers_per_thread=72, smem_bytes_per_block=3000)
    assert large.sms == 0b1111 and large.num_pending > 0  # one block beside each small one
    sms.release_all(small)
    assert large.all_resident.triggered


def test_blocks_start_in_the_order_of_launch() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    running = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    large = placed(sms, num_blocks=4, threads_per_block=448, registers_per_thread=48, smem_bytes_per_block=200 * 1024)
    behind = placed(sms, num_blocks=1, threads_per_block=128, registers_per_thread=32, smem_bytes_per_block=1024)
    assert large.num_pending == 4 and behind.num_pending == 1
    sms.release_all(running)
    assert large.all_resident.triggered and behind.all_resident.triggered


def test_released_shared_memory_need_not_be_contiguous() -> None:
    """As on an H200 (probe ``three_blocks``): 85 KB start beside 128 when 60 have left, with 36 apart from them."""
    for first, second, third in ((60, 128, 85), (85, 65, 141), (73, 65, 85)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32}

        def place(kib: int, sms: Occupancy = sms, shape: dict[str, int] = shape) -> Placement:
            one = replace(work(NOTHING, max_blocks_per_sm=1), smem_bytes_per_block=1024 * kib, **shape)
            return sms.place(one)

        short = place(first)
        assert place(second).all_resident.triggered
        late = place(third)
        assert late.all_resident.triggered is (first + second + third <= 228), (first, third)
        sms.release_all(short)
        assert late.all_resident.triggered


def test_ended_blocks_make_room_for_their_kernel() -> None:
    """Four SMs, two of them taken: of eight blocks, one an SM, two start, and as these are given back two more do."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"threads_per_block": 448, "registers_per_thread": 48, "smem_bytes_per_block": 100 * 1024}
    taken = placed(sms, **{**shape, "num_blocks": 2, "smem_bytes_per_block": 200 * 1024})
    several = placed(sms, **shape, num_blocks=8)
    assert several.first_resident.triggered and several.num_pending == 4 and num_blocks(several.first_wave) == 4
    groups: list[tuple[int, int]] = []
    several.on_later_wave = lambda blocks, by: groups.append((num_blocks(blocks), by))
    sms.release_blocks(several, None, 7)
    assert groups == [(4, 7)] and several.num_pending == 0 and several.all_resident.value == 7
    sms.release_all(taken)
    sms.release_all(several)
    assert all(sm.smem_bytes == sm.carve_out and not sm.blocks for sm in sms.sms.states_of(0b1111))


def test_a_requested_carve_out_keeps_blocks_out() -> None:
    """60 % become 164 KB: a block of 150 KB starts beside one of 8 KB, and one of 160 KB does not."""
    for kib, beside in ((150, True), (160, False)):
        sms = Occupancy(simpy.Environment(), HOPPER)
        shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32, "max_blocks_per_sm": 1}
        one = replace(work(NOTHING), smem_bytes_per_block=8 * 1024, carve_out_percent=60, **shape)
        sms.place(one)
        other = replace(work(NOTHING), smem_bytes_per_block=1024 * kib, **shape)
        assert sms.place(other).all_resident.triggered is beside, kib


def test_a_pending_block_inherits_the_carve_out() -> None:
    """As on an H200 (probe ``carve_out_inheritance``): behind 60 % 127 KB keep 84 out; launched, they do not.

    Each shape is blocks, threads, KB of shared memory, blocks an SM, and the requested carve-out.
    """

    def placed_one(sms: Occupancy, blocks: int, threads: int, kib: int, per_sm: int, request: int = 100) -> Placement:
        one = replace(
            work(NOTHING), num_blocks=blocks, threads_per_block=threads, smem_bytes_per_block=1024 * kib,
            max_blocks_per_sm=per_sm, registers_per_thread=16, carve_out_percent=request,
        )  # fmt: skip
        return sms.place(one)

    for waits in (True, False):
        sms = Occupancy(simpy.Environment(), HOPPER)
        before = placed_one(sms, 4, 128, 4, 1, request=60)
        first = placed_one(sms, 8, 768, 28, 2)
        assert first.all_resident.triggered
        sms.release_all(before)
        if not waits:
            sms.release_all(first)
        second = placed_one(sms, 4, 1024, 127, 1)
        assert second.all_resident.triggered is not waits
        if waits:
            sms.release_all(first)
        assert second.all_resident.triggered
        assert placed_one(sms, 4, 512, 84, 1).all_resident.triggered is not waits


def test_blocks_start_first_where_nothing_is_divided() -> None:
    """As on an H200 at 16 rows of TP8 (block timestamps, 2026-12-01).

    The output projection requests 60 %, and its second wave is still on 50 SMs. The residual's small blocks, which
    request all, start on the 82 others. When the projection has ended, the front's blocks of 100 KB go to those that
    are divided already, up to two to an SM (70 SMs there: its clusters of four are on two SMs each).
    """
    sms = Occupancy(simpy.Environment(), load_machine("h200"))
    shape = {"threads_per_block": 128, "registers_per_thread": 88}
    projection = replace(
        work(NOTHING), num_blocks=50, smem_bytes_per_block=55_296, carve_out_percent=60, max_blocks_per_sm=1, **shape
    )
    residual = replace(work(NOTHING), num_blocks=128, smem_bytes_per_block=192, max_blocks_per_sm=4, **shape)
    front = replace(work(NOTHING), num_blocks=140, smem_bytes_per_block=102_400, max_blocks_per_sm=8, **shape)
    first = sms.place(projection)
    second = sms.place(residual)
    assert second.sms.bit_count() == 82 and not first.sms & second.sms
    sms.release_all(first)
    third = sms.place(front)
    assert third.all_resident.triggered and third.sms == second.sms and third.most_on_an_sm() == 2


def test_an_unfitting_pending_block_divides_anew() -> None:
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"num_blocks": 4, "threads_per_block": 256, "registers_per_thread": 32, "max_blocks_per_sm": 1}
    before = replace(work(NOTHING), smem_bytes_per_block=4096, carve_out_percent=60, **shape)
    large = replace(work(NOTHING), smem_bytes_per_block=200 * 1024, **shape)
    first = sms.place(before)
    second = sms.place(large)
    assert not second.first_resident.triggered
    sms.release_all(first)
    assert second.all_resident.triggered


def test_more_l1_waits_for_an_idle_sm() -> None:
    """It finds room beside the other, and would have no L1 there (probe ``carve_out_persistence``)."""
    sms = Occupancy(simpy.Environment(), HOPPER)
    shape = {"num_blocks": 4, "threads_per_block": 128, "registers_per_thread": 32, "max_blocks_per_sm": 1}
    shared = replace(work(NOTHING), smem_bytes_per_block=64 * 1024, **shape)
    cached = replace(work(NOTHING), smem_bytes_per_block=4096, carve_out_percent=60, **shape)
    first = sms.place(shared)
    second = sms.place(cached)
    assert not second.first_resident.triggered
    sms.release_all(first)
    assert second.all_resident.triggered


def test_a_prefetch_leaves_room_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills the chip; what follows on another stream starts when it has gone, and so does the next prefetch."""
    fetch = work(Pass(reads=(reads(1000),)), smem_bytes_per_block=1000, prefetches=True)
    kernel = work(Pass(reads=(reads(1000),)), smem_bytes_per_block=1000)
    calls = [call(0, "f"), call(1, "k", stream="aux"), call(2, "f"), call(3, "k", stream="aux")]
    timeline = simulate(monkeypatch, {"f": fetch, "k": kernel}, calls, num_ranks=1)
    assert all(run.end_ps > 0 for run in timeline.kernels)
