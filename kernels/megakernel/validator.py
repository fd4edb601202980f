"""Checks an instruction list before it is launched: it ends, and every read finds what was meant.

* Every target is what its counter reaches in a launch: more would hang, and with less it would not be known whose
  signals have come.
* The list ends: strands are run in the order that the counters allow. Counters only grow, so one order stands for all,
  and an instruction that is left behind is in a cycle or behind one.
* Two accesses of the same bytes, one of them a write, are ordered by strands and counters, and the last write in front
  of a read is of the version that the read means. What is read ahead through the ring counts as read at the launch.

Order is kept as one vector clock an instruction: how far each strand of each SM has surely come when it starts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import INITIAL, NUM_STRANDS, Access, Instruction, InstructionList, Region

MAX_FAULTS = 8


@dataclass(frozen=True)
class _Use:
    """One access: by the instruction at ``place`` of a strand (of the last one that it is in); ``seen``: its clock."""

    strand: int
    place: int
    seen: tuple[int, ...]
    region: Region
    version: int
    writes: bool
    ahead: bool
    name: str

    def precedes(self, other: _Use) -> bool:
        """Whether it is surely over when ``other`` takes place."""
        if other.ahead:  # it may take place at the launch
            return False
        return self.place < other.seen[self.strand]


def check(program: InstructionList) -> InstructionList:
    """``program``. Raises UserError with its faults, at most eight."""
    faults = [fault for _, fault in zip(range(MAX_FAULTS), find_faults(program), strict=False)]
    if faults:
        raise UserError("instruction list: " + "; ".join(faults))
    return program


def find_faults(program: InstructionList) -> Iterator[str]:
    """What is wrong with a list; nothing where it may be launched."""
    faults = list(_wrong_targets(program))
    yield from faults
    if faults:
        return
    clocks = _run(program)
    pairs = zip(_strands(program), clocks, strict=True)
    stuck = [strand[len(seen)] for strand, seen in pairs if len(seen) < len(strand)]
    for one in stuck:
        waited = ", ".join(wait.counter for wait in one.waits)
        yield f"{one.name} never starts: it waits for {waited} in a cycle"
    if not stuck:
        yield from _races(program, clocks)


def _wrong_targets(program: InstructionList) -> Iterator[str]:
    totals = program.totals()
    for one in program:
        for wait in one.waits:
            total = totals.get(wait.counter, 0)
            if wait.target > total:
                yield f"{one.name} waits for {wait.target} signals of {wait.counter}, which gets {total}"
            elif wait.target < total:
                yield f"{one.name} waits for {wait.target} of {total} signals of {wait.counter}: for which is not known"


def _strands(program: InstructionList) -> list[tuple[Instruction, ...]]:
    """All strands: those of SM s are numbers 2 s and 2 s + 1."""
    return [program.strand(sm, strand) for sm in range(len(program.queues)) for strand in range(NUM_STRANDS)]


def _run(program: InstructionList) -> list[list[tuple[int, ...]]]:
    """Vector clocks, strand by strand, of the instructions that start."""
    strands = _strands(program)
    left = program.totals()
    merged: dict[str, list[int]] = {counter: [0] * len(strands) for counter in left}
    waiting: dict[str, list[int]] = {}
    clocks: list[list[tuple[int, ...]]] = [[] for _ in strands]
    now = [[0] * len(strands) for _ in strands]
    ready = list(range(len(strands)))
    while ready:
        number = ready.pop()
        while len(clocks[number]) < len(strands[number]):
            one = strands[number][len(clocks[number])]
            missing = next((wait.counter for wait in one.waits if left.get(wait.counter, 0)), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
                break
            own = [number - number % NUM_STRANDS + strand for strand in one.strands]
            if any(_next(strands, clocks, other) is not one for other in own):
                break  # the strand that is behind comes here too
            clock = list(map(max, *(now[other] for other in own))) if len(own) > 1 else now[number]
            for wait in one.waits:
                clock[:] = map(max, clock, merged.get(wait.counter, clock))
            for other in own:
                clocks[other].append(tuple(clock))
            for other in own:
                clock[other] = len(clocks[other])
                now[other] = list(clock)
            ready += [other for other in own if other != number]
            for counter in one.signals:
                merged[counter] = list(map(max, merged[counter], clock))
                left[counter] -= 1
                if not left[counter]:
                    ready += waiting.pop(counter, [])
    return clocks


def _next(
    strands: list[tuple[Instruction, ...]], clocks: list[list[tuple[int, ...]]], number: int
) -> Instruction | None:
    """The instruction that a strand has come to."""
    place = len(clocks[number])
    return strands[number][place] if place < len(strands[number]) else None


def _uses(program: InstructionList, clocks: list[list[tuple[int, ...]]]) -> dict[str, list[_Use]]:
    found: dict[str, list[_Use]] = {}
    for number, strand in enumerate(_strands(program)):
        for place, (one, seen) in enumerate(zip(strand, clocks[number], strict=True)):
            if one.strands[-1] != number % NUM_STRANDS:
                continue
            accesses = [(Access(region=stream.region), False, True) for stream in one.streams]
            accesses += [(read, False, False) for read in one.reads] + [(write, True, False) for write in one.writes]
            for access, writes, ahead in accesses:
                use = _Use(number, place, seen, access.region, access.version, writes, ahead, one.name)
                found.setdefault(access.region.buffer, []).append(use)
    return found


def _races(program: InstructionList, clocks: list[list[tuple[int, ...]]]) -> Iterator[str]:
    for buffer, uses in _uses(program, clocks).items():
        size = program.sizes.get(buffer, 0)
        for use in uses:
            if not 0 <= use.region.first < use.region.last <= size:
                yield f"{use.name} is outside of {buffer} ({size} bytes): [{use.region.first}, {use.region.last})"
        writes = [use for use in uses if use.writes]
        edges = sorted({edge for one in writes for edge in (one.region.first, one.region.last)})
        cells: dict[int, list[_Use]] = {edge: [] for edge in edges}
        for write in writes:
            for edge in edges[bisect_left(edges, write.region.first) : bisect_left(edges, write.region.last)]:
                cells[edge].append(write)
        for edge in edges:  # an order of queues and counters has fewer instructions in front of what comes first
            cells[edge].sort(key=lambda one: (sum(one.seen), one.place))
            for early, late in pairwise(cells[edge]):
                if not early.precedes(late):
                    yield f"{early.name} and {late.name} write {buffer} in no order"
        for use in uses:
            if not use.writes:
                yield from _faults_of_read(use, edges, cells)


def _faults_of_read(read: _Use, edges: list[int], cells: dict[int, list[_Use]]) -> Iterator[str]:
    """What is wrong with a read, part by part of its region: each part's writes are in order."""
    begin, end = read.region.first, read.region.last
    first = max(bisect_right(edges, begin) - 1, 0)
    parts = [edge for edge in edges[first : bisect_left(edges, end)]]
    if read.version != INITIAL and (not parts or parts[0] > begin):
        yield f"{read.name} reads version {read.version} of {read.region.buffer}, which nothing writes"
    for edge in parts:
        writes = cells[edge]
        num_before = bisect_left(writes, True, key=lambda write: not write.precedes(read))
        found = writes[num_before - 1].version if num_before else INITIAL
        if num_before < len(writes) and not _follows(writes[num_before], read):
            yield f"{writes[num_before].name} and {read.name} touch {read.region.buffer} in no order"
        elif found != read.version:
            yield f"{read.name} reads version {found} of {read.region.buffer} and means {read.version}"


def _follows(write: _Use, read: _Use) -> bool:
    """Whether a write surely comes behind a read. An instruction's own writes follow what it reads."""
    if (write.strand, write.place) == (read.strand, read.place):
        return True
    return read.precedes(write) if not read.ahead else read.place < write.seen[read.strand]
