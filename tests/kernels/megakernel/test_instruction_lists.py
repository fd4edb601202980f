"""Instruction lists: those of real layers are accepted, and none of many broken ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from dense_model import dense_architecture, program_of

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import COMPUTING, EMPTY, Access, Instruction, InstructionList, Opcode, Wait
from k3sim.kernels.megakernel.schedule import schedule, streamed_bytes
from k3sim.kernels.megakernel.validator import check, find_faults
from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture

Place = tuple[int, int]
FEW, MANY = 600, 10_000


def changed(program: InstructionList, places: dict[Place, Instruction]) -> InstructionList:
    return replace(
        program,
        queues=tuple(
            tuple(places.get((sm, at), one) for at, one in enumerate(queue)) for sm, queue in enumerate(program.queues)
        ),
    )


def places(program: InstructionList, having: Callable[[Instruction], object]) -> list[Place]:
    return [(sm, at) for sm, queue in enumerate(program.queues) for at, one in enumerate(queue) if having(one)]


def at(program: InstructionList, place: Place) -> Instruction:
    return program.queues[place[0]][place[1]]


def computing(program: InstructionList, sm: int) -> list[int]:
    """Places of a queue whose instructions are of the computing strand."""
    return [place for place, one in enumerate(program.queues[sm]) if COMPUTING in one.strands]


def one_signal_missing(program: InstructionList, choose: random.Random) -> InstructionList:
    waited = {wait.counter for one in program for wait in one.waits}
    place = choose.choice(places(program, lambda one: waited.intersection(one.signals)))
    return changed(program, {place: replace(at(program, place), signals=())})


def target_off_by(program: InstructionList, choose: random.Random, difference: int) -> InstructionList:
    place = choose.choice(places(program, lambda one: one.waits))
    one = at(program, place)
    wait = one.waits[0]
    return changed(program, {place: replace(one, waits=(replace(wait, target=wait.target + difference),))})


def target_too_high(program: InstructionList, choose: random.Random) -> InstructionList:
    return target_off_by(program, choose, choose.randint(1, 5))


def target_too_low(program: InstructionList, choose: random.Random) -> InstructionList:
    return target_off_by(program, choose, -1)


def wait_for_what_comes_later(program: InstructionList, choose: random.Random) -> InstructionList:
    """An instruction waits for a later one of its own strand."""
    sm = choose.randrange(len(program.queues))
    early, late = sorted(choose.sample(computing(program, sm), 2))
    first, second = (at(program, (sm, one)) for one in (early, late))
    first = replace(first, waits=(*first.waits, Wait(counter="circle", target=1)))
    second = replace(second, signals=(*second.signals, "circle"))
    return changed(program, {(sm, early): first, (sm, late): second})


def circle_of_two_queues(program: InstructionList, choose: random.Random) -> InstructionList:
    """Two instructions that wait for each other's successors."""
    one, other = choose.sample(range(len(program.queues)), 2)
    found: dict[Place, Instruction] = {}
    for sm, peer in ((one, other), (other, one)):
        early, late = sorted(choose.sample(computing(program, sm), 2))
        first, second = at(program, (sm, early)), at(program, (sm, late))
        found[sm, early] = replace(first, waits=(*first.waits, Wait(counter=f"by {peer}", target=1)))
        found[sm, late] = replace(second, signals=(*second.signals, f"by {sm}"))
    return changed(program, found)


def queue_out_of_order(program: InstructionList, choose: random.Random) -> InstructionList:
    """Two pushes, or two reductions, of an SM change places."""
    kind = choose.choice((Opcode.GEMV_PUSH, Opcode.REDUCE))
    sm = choose.randrange(3)
    found = places(program, lambda one: one.opcode is kind and one.sm == sm)
    first, second = choose.sample(found, 2)
    return changed(program, {first: at(program, second), second: at(program, first)})


def no_wait(program: InstructionList, choose: random.Random) -> InstructionList:
    """A read that nothing orders behind its write; a push's wait also guards its slots.

    Left out are waits that are doubled on a loopback fabric: for a residual that the SM has seen, for this SM's own
    words, for fronts that the shared experts' outputs follow, on the routing SM for what it has routed.
    """
    waiting = (
        Opcode.KDA_HEAD, Opcode.GEMV_PUSH, Opcode.FOLD_GEMV_SITU, Opcode.FRONT_PUSH, Opcode.SHARED_PUSH,
        Opcode.EXPERT_GATE_UP, Opcode.EXPERT_DOWN_PUSH, Opcode.TAIL_PUSH, Opcode.MLA_QUERY, Opcode.MLA_ABSORB,
        Opcode.MLA_ATTEND, Opcode.MLA_MERGE, Opcode.MLA_LIFT,
    )  # fmt: skip
    routing = len(program.queues) - 1

    def is_alone(one: Instruction) -> bool:
        doubled = one.stage == "moe.shared_gate_up" or (one.opcode is Opcode.EXPERT_GATE_UP and one.sm == routing)
        return bool(one.waits) and one.opcode in waiting and not doubled

    place = choose.choice(places(program, is_alone))
    return changed(program, {place: replace(at(program, place), waits=())})


def write_into_a_neighbour(program: InstructionList, choose: random.Random) -> InstructionList:
    """Outputs of an SM over those of another one that no counter orders."""
    kinds = (Opcode.FOLD_GEMV, Opcode.FOLD_GEMV_SITU, Opcode.REDUCE, Opcode.EXPERT_GATE_UP, Opcode.COLLECT)
    place = choose.choice(places(program, lambda one: one.opcode in kinds and one.sm))
    one = at(program, place)
    moved = tuple(
        replace(write, region=replace(write.region, first=max(0, write.region.first - 2))) if write.version != EMPTY
        else write
        for write in one.writes
    )  # fmt: skip
    return changed(program, {place: replace(one, writes=moved)})


def overwritten_before_its_readers(program: InstructionList, choose: random.Random) -> InstructionList:
    """A head writes over the projection that all heads read."""
    place = choose.choice(places(program, lambda one: one.opcode is Opcode.KDA_HEAD))
    one = at(program, place)
    projection = one.reads[0]
    write = Access(region=projection.region, version=projection.version + 1)
    return changed(program, {place: replace(one, writes=(*one.writes, write))})


def buffer_turned_too_early(program: InstructionList, choose: random.Random) -> InstructionList:
    """A push into the receive buffer of the exchange before, which its reduction has not emptied."""
    place = choose.choice(places(program, lambda one: one.opcode is Opcode.GEMV_PUSH and one.layer))
    one = at(program, place)
    before = f"received {(one.buffer - 1) % 3}"

    def moved(access: Access) -> Access:
        return replace(access, region=replace(access.region, buffer=before))

    reads = (one.reads[0], *map(moved, one.reads[1:]))
    return changed(program, {place: replace(one, reads=reads, writes=tuple(map(moved, one.writes)))})


def not_emptied(program: InstructionList, choose: random.Random) -> InstructionList:
    """A reduction that leaves the buffer before it full, which a push of two exchanges later finds."""
    found = places(program, lambda one: one.opcode is Opcode.REDUCE and one.buffer == 1 and one.layer == 0)
    place = choose.choice(found or places(program, lambda one: one.opcode is Opcode.REDUCE and one.layer == 1))
    one = at(program, place)
    kept = tuple(write for write in one.writes if write.version != EMPTY)
    return changed(program, {place: replace(one, writes=kept)})


def weights_written(program: InstructionList, choose: random.Random) -> InstructionList:
    """A write into what a later instruction of any SM reads ahead."""
    early = choose.choice(places(program, lambda one: one.opcode is Opcode.FOLD_GEMV and one.layer == 0))
    late = choose.choice(places(program, lambda one: one.streams and one.layer > 0))
    one = at(program, early)
    write = Access(region=at(program, late).streams[0].region, version=1)
    return changed(program, {early: replace(one, writes=(*one.writes, write))})


def outside_of_a_buffer(program: InstructionList, choose: random.Random) -> InstructionList:
    place = choose.choice(places(program, lambda one: one.writes))
    one = at(program, place)
    region = one.writes[0].region
    beyond = program.sizes[region.buffer]
    write = replace(one.writes[0], region=replace(region, first=beyond, last=beyond + 2))
    return changed(program, {place: replace(one, writes=(write, *one.writes[1:]))})


BREAKING = (
    one_signal_missing, target_too_high, target_too_low, wait_for_what_comes_later, circle_of_two_queues,
    queue_out_of_order, no_wait, write_into_a_neighbour, overwritten_before_its_readers, buffer_turned_too_early,
    not_emptied, weights_written, outside_of_a_buffer,
)  # fmt: skip


def accepted_of(program: InstructionList, count: int) -> list[str]:
    found = []
    for seed in range(count):
        breaking = BREAKING[seed % len(BREAKING)]
        broken = breaking(program, random.Random(seed))
        if next(find_faults(broken), None) is None:
            found.append(f"{breaking.__name__} {seed}")
    return found


def test_lists_of_real_layers_are_accepted() -> None:
    for num_layers, num_sms in ((1, 132), (3, 132), (1, 148), (1, 152)):
        architecture = dense_architecture(num_layers)
        program = schedule(program_of(architecture, 16), architecture, num_sms=num_sms)
        assert list(find_faults(check(program))) == []


@pytest.mark.slow_but_one
@pytest.mark.parametrize(("num_layers", "num_sms"), ((4, 132), (4, 148), (12, 132)))
def test_lists_of_all_kinds_are_accepted(num_layers: int, num_sms: int) -> None:
    k3 = load_architecture()
    kda, mla = (tuple(one for one in layers if one < num_layers) for layers in (k3.kda_layers, k3.mla_layers))
    few = replace(k3, num_layers=num_layers, kda_layers=kda, mla_layers=mla)
    assert list(find_faults(schedule(program_of(few, 16), few, num_sms=num_sms))) == []


def test_no_broken_list_is_accepted(
    small_list: InstructionList, small_moe_list: InstructionList, small_mla_list: InstructionList
) -> None:
    for program in (small_list, small_moe_list, small_mla_list):
        assert list(find_faults(program)) == []
        assert accepted_of(program, FEW // 3) == []


@pytest.mark.slow
def test_none_of_ten_thousand_is_accepted(
    small_list: InstructionList, small_moe_list: InstructionList, small_mla_list: InstructionList
) -> None:
    for program in (small_list, small_moe_list, small_mla_list):
        assert accepted_of(program, -(-MANY // 3)) == []


def test_the_newest_row_is_not_read_ahead(small_mla_list: InstructionList) -> None:
    """Another instruction that streams the row which a step writes is refused."""
    pages = places(small_mla_list, lambda one: one.opcode is Opcode.MLA_ATTEND and one.layer == 1)
    newest = next(one for place in pages if len((one := at(small_mla_list, place)).writes) > 1)
    other = next(place for place in pages if at(small_mla_list, place) is not newest)
    stream = replace(newest.streams[0], region=newest.writes[1].region)
    broken = changed(small_mla_list, {other: replace(at(small_mla_list, other), streams=(stream,))})
    assert any("touch 1/mla.cache in no order" in fault for fault in find_faults(broken))


def test_a_fault_names_instruction_and_counter(small_list: InstructionList) -> None:
    place = places(small_list, lambda one: one.opcode is Opcode.KDA_HEAD)[0]
    wait = at(small_list, place).waits[0]
    broken = changed(small_list, {place: replace(at(small_list, place), waits=(replace(wait, target=99),))})
    with pytest.raises(UserError, match=f"layer 0 kda.decode KDA_HEAD SM {place[0]} waits for 99 .* {wait.counter}"):
        check(broken)


def test_products_stream_every_weight_once() -> None:
    architecture = dense_architecture(1)
    program = program_of(architecture, 16)
    listed = schedule(program, architecture, num_sms=132)
    weights = sum(weight.num_bytes for call in program.calls if call.layer == 0 for weight in call.weights)
    states = sum(call.shape.get("state_bytes", 0) for call in program.calls)
    assert streamed_bytes(listed) == weights + states


def test_a_layer_without_instructions_is_refused() -> None:
    k3: Architecture = load_architecture()
    with pytest.raises(UserError, match="layer 12 takes a snapshot"):
        schedule(program_of(k3, 16), k3, num_sms=132)
    two_rows = program_of(dense_architecture(1), 16, rows=2)
    with pytest.raises(UserError, match=r"layer 0 runs .* \(kda.in_proj\), which has no instruction"):
        schedule(two_rows, dense_architecture(1), num_sms=132)
    with pytest.raises(UserError, match="64 SMs"):
        schedule(program_of(dense_architecture(1), 16), dense_architecture(1), num_sms=64)
