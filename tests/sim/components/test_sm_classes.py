"""Classes of SMs in equal states: they do what the same rules do SM by SM."""

from __future__ import annotations

import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.sim.components.placement import Placement, lowest
from k3sim.sim.components.sm import BlockRequest, BlockResources, Registers, Sm, readiness_of
from k3sim.sim.components.sm_classes import SmClasses

KIB = 1024
NUM_SMS = 7
IDLE = Sm.idle(228 * KIB, 2048)
BLOCKS = st.builds(
    BlockResources,
    smem_bytes=st.sampled_from([0, 1, 28, 64, 100, 150]).map(lambda kib: kib * KIB),
    threads=st.sampled_from([128, 448, 1024]),
    warps=st.integers(1, 18),
    registers_per_warp=st.sampled_from([16, 40, 72, 128]).map(lambda registers: 32 * registers),
)
REQUESTS = st.builds(
    BlockRequest,
    block=BLOCKS,
    carve_out=st.sampled_from([100, 164, 228]).map(lambda kib: kib * KIB),
    requests_carve_out=st.booleans(),
    was_pending=st.booleans(),
)


class OneByOne:
    """The reference: every SM has its own state, and blocks are offered to one SM after the other."""

    def __init__(self) -> None:
        self.states = [IDLE] * NUM_SMS
        self.held: dict[int, list[list[Registers]]] = {}

    def admit(self, kernel: int, request: BlockRequest, pending: int) -> int:
        held = self.held.setdefault(kernel, [[] for _ in range(NUM_SMS)])
        while pending:
            offers = {}
            for sm, state in enumerate(self.states):
                carved = state.carved(request, len(held[sm]))
                registers = None if carved is None else carved.registers_for(request.block)
                after = carved if carved is None or registers is None else carved.with_block(request.block, registers)
                if after is not None and after != state:
                    offers[sm] = after, registers, readiness_of(state, after, request)
            if not offers:
                break
            soonest = min(readiness for _, _, readiness in offers.values())
            emptiest = sorted(offers, key=lambda sm: (-self.states[sm].registers, -self.states[sm].smem_bytes))
            for sm in emptiest:
                after, registers, readiness = offers[sm]
                if not pending or readiness is not soonest:
                    continue
                self.states[sm] = after
                if registers is not None:
                    held[sm].append(registers)
                    pending -= 1
        return pending

    def release(self, kernel: int, request: BlockRequest) -> None:
        for sm, blocks in enumerate(self.held.pop(kernel)):
            for registers in blocks:
                self.states[sm] = self.states[sm].without_block(request.block, registers)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8))
def test_classes_place_blocks_like_single_sms(kernels: list[tuple[BlockRequest, int, int]]) -> None:
    """Kernels come one after the other, and before each some of those that run end: the first, or that after it."""
    env, single, classes = simpy.Environment(), OneByOne(), SmClasses(NUM_SMS, IDLE)
    running: list[tuple[int, Placement]] = []
    for kernel, (request, num_pending, ended) in enumerate(kernels):
        if ended and running:
            number, gone = running.pop((ended - 1) % len(running))
            single.release(number, gone.request)
            classes.release_all(gone)
        placement = Placement(request, num_pending, num_pending, simpy.Event(env), simpy.Event(env))
        classes.admit(placement)
        assert placement.num_pending == single.admit(kernel, request, num_pending)
        running.append((kernel, placement))
        for sm in range(NUM_SMS):
            assert list(classes.states_of(1 << sm)) == [single.states[sm]]
            assert [held for held, sms in placement.resident.items() if sms >> sm & 1] == [
                tuple(blocks) for blocks in (single.held[kernel][sm],) if blocks
            ]


def test_a_wave_that_ends_leaves_the_others() -> None:
    """Two blocks on each of seven SMs and a third on two: the first round leaves."""
    request = BlockRequest(BlockResources(28 * KIB, 128, 4, 1024), 228 * KIB, False, False)
    classes, env = SmClasses(NUM_SMS, IDLE), simpy.Environment()
    placement = Placement(request, 16, 16, simpy.Event(env), simpy.Event(env))
    first, *others = classes.admit(placement)
    assert placement.num_on_sms() == [(2, 0b1111100), (3, 0b0000011)]
    classes.release_blocks(placement, [first])
    assert placement.num_on_sms() == [(1, 0b1111100), (2, 0b0000011)]
    classes.release_blocks(placement, others)
    assert placement.sms == 0 and list(classes.states_of(-1)) == [IDLE]


def test_the_lowest_sms_of_a_set() -> None:
    assert [lowest(0b101101, count) for count in (0, 1, 3, 4, 9)] == [0, 0b1, 0b1101, 0b101101, 0b101101]
