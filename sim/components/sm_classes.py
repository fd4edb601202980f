"""The SMs of one GPU by their state, and how blocks become resident on them.

Blocks start in rounds of one block an SM: the emptiest SMs first, by free registers and then by free shared memory, and
of equal ones those with the lowest numbers. The last round ends with the last pending block.

What becomes of an SM that a block is offered to depends on its state and on what it holds of that kernel. Most SMs are
in one of few states, since a grid is spread evenly. So a round is computed once for each class of equal SMs and is
exact: ``test_occupancy.py`` compares it with the same rules SM by SM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from k3sim.sim.components.placement import Allocation, Held, Placement, SmSet, lowest
from k3sim.sim.components.sm import Readiness, Registers, Sm, readiness_of, started


class SmClass(NamedTuple):
    """SMs in one state that hold equal blocks of a kernel, and what becomes of one that a further block is offered to.

    Without ``registers`` it does not start there, though the SM may have been divided anew for it.
    """

    sms: SmSet
    state: Sm
    held: Held
    after: Sm
    registers: Registers | None


class SmClasses:
    """``num_sms`` SMs, which begin ``idle``."""

    def __init__(self, num_sms: int, idle: Sm) -> None:
        self._by_state: dict[Sm, SmSet] = {idle: (1 << num_sms) - 1}

    def states_of(self, sms: SmSet) -> Iterator[Sm]:
        """States that some of these SMs are in."""
        return (state for state, those in self._by_state.items() if those & sms)

    def release_blocks(self, placement: Placement, blocks: list[Allocation]) -> None:
        """Release some blocks of a kernel."""
        for sms, registers in blocks:
            for held, those in list(placement.resident.items()):
                if common := sms & those:
                    position = held.index(registers)
                    placement.change(common, held, held[:position] + held[position + 1 :])
            self._release(placement, sms, (registers,))

    def release_all(self, placement: Placement) -> None:
        """Release all blocks of a kernel."""
        for held, sms in placement.resident.items():
            self._release(placement, sms, held)
        placement.resident.clear()

    def _release(self, placement: Placement, sms: SmSet, held: Held) -> None:
        """Free on each of some SMs what blocks of a kernel held there."""
        for state, those in list(self._by_state.items()):
            if common := sms & those:
                after = state
                for registers in held:
                    after = after.without_block(placement.request.block, registers)
                self._change(common, state, after)

    def _change(self, sms: SmSet, before: Sm, after: Sm) -> None:
        """Some of the SMs that were in the state ``before`` are in the state ``after``."""
        left = self._by_state[before] & ~sms
        if left:
            self._by_state[before] = left
        else:
            del self._by_state[before]
        self._by_state[after] = self._by_state.get(after, 0) | sms

    def admit(self, one: Placement) -> list[Allocation]:
        """Make pending blocks of a kernel resident, as many as fit."""
        admitted: list[Allocation] = []
        while one.num_pending and (classes := self._classes(one)):
            readiness = min(key[0] for key in classes)
            for key in sorted((key for key in classes if key[0] == readiness), key=lambda key: key[1], reverse=True):
                if not one.num_pending:
                    break
                admitted += self._admit_equal(one, classes[key])
        return admitted

    def _classes(self, one: Placement) -> dict[tuple[Readiness, tuple[int, int]], list[SmClass]]:
        """SMs in equal states with equal blocks of a kernel, by how soon they start one and how empty they are.

        Those that a block changes.
        """
        classes: dict[tuple[Readiness, tuple[int, int]], list[SmClass]] = {}
        for state, sms in self._by_state.items():
            for held, those in (*one.resident.items(), ((), sms)):
                common = sms & those
                if not common:
                    continue
                sms &= ~those
                after, registers = started(state, one.request, len(held))
                if registers is not None or after != state:
                    key = readiness_of(state, after, one.request), (state.registers, state.smem_bytes)
                    classes.setdefault(key, []).append(SmClass(common, state, held, after, registers))
        return classes

    def _admit_equal(self, one: Placement, classes: list[SmClass]) -> list[Allocation]:
        """A block on each SM of classes that are equally empty, while there are pending ones."""
        fitting = 0
        for each in classes:
            if each.registers is not None:
                fitting |= each.sms
        chosen = lowest(fitting, one.num_pending)
        one.num_pending -= chosen.bit_count()
        # SMs behind that of the last pending block are not looked at, and keep the carve-out that they have.
        looked_at = -1 if one.num_pending else (1 << chosen.bit_length()) - 1
        admitted = []
        for each in classes:
            sms = each.sms & (looked_at if each.registers is None else chosen)
            if not sms:
                continue
            self._change(sms, each.state, each.after)
            if each.registers is not None:
                one.change(sms, each.held, (*each.held, each.registers))
                admitted.append(Allocation(sms, each.registers))
        return admitted
