"""Serial instructions of a kernel: what one warp runs straight through behind its wait, counted in SASS by one rule.

Other counts of a ``Work`` price streams, products and exchanges; the rest of the code behind the wait takes its time in
series, and at decode sizes that is a tenth of many kernels. The rule needs no reading by eye, so that a build can apply
it to every kernel (``kernels/footprints``):

* It begins behind a dependency wait (``ACQBULK``), and where a loop polls memory that another GPU writes; where
  a kernel has neither, at its first instruction.
* It ends at an exit. Of all ways there through the control flow graph the longest counts, each instruction once:
  warps that part meet again at barriers, and the one with most to do is waited for.
* A loop counts once. One that multiplies on tensor cores counts nothing, nor does one that holds no other loop and
  loads from memory or waits for a copy: it is a product, a stream, or a poll.
* Products on tensor cores and no-operations count nothing; neither does what only a diverged warp runs, a call (the
  slow form of a division), or a trap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
_WAIT = "ACQBULK"
_PRODUCT = re.compile(r"(HMMA|HGMMA|QGMMA|UTC\w*MMA)\b")
_LOAD_OR_WAIT = re.compile(r"(LDG|LDGSTS|LD|UBLKCP|UTMALDG|SYNCS|LDGDEPBAR)\b")
_POLL = re.compile(r"LDG?\b.*\.STRONG\.SYS\b")
_ENDS = re.compile(r"(EXIT|BPT|KILL|RET)\b")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_CONDITION = re.compile(r"!?U?P\d")


@dataclass(frozen=True)
class Instruction:
    """Opcode with modifiers, whether a predicate guards it, and its operands; a branch's end with the address of its
    target, counted from the start of the function."""

    opcode: str
    is_guarded: bool
    operands: str


def serial_instructions(code: Sequence[Instruction]) -> int:
    """Serial instructions of one entry function by the rule of this module."""
    after = [_successors(code, number) for number in range(len(code))]
    loops = _loops(after)
    innermost: dict[int, int] = {}  # instruction -> index of the smallest loop around it
    for index in sorted(range(len(loops)), key=lambda one: -len(loops[one].body)):
        innermost.update(dict.fromkeys(loops[index].body, index))
    holders = {index for index, loop in enumerate(loops) if any(loop.body > other.body for other in loops)}
    uncounted, polls = set[int](), set[int]()
    for index, loop in enumerate(loops):
        own = [code[number].opcode for number in loop.body if innermost[number] == index]
        priced = any(_LOAD_OR_WAIT.match(one) for one in own) and index not in holders
        if priced or any(_PRODUCT.match(one) for one in own):
            uncounted.add(index)
        if priced and any(_POLL.match(one) for one in own):
            polls.add(loop.header)
    closing = {(number, loop.header) for loop in loops for number in loop.body}
    longest = [0] * len(code)
    for number in _finished_first(after, closing):
        onward = [longest[then] for then in after[number] if (number, then) not in closing]
        opcode = code[number].opcode
        counts = opcode != "NOP" and not _PRODUCT.match(opcode) and innermost.get(number) not in uncounted
        longest[number] = counts + max(onward, default=0)
    begins = {number for number, one in enumerate(code) if one.opcode.startswith(_WAIT)} | polls
    return max(longest[number] for number in begins or {0})


def _successors(code: Sequence[Instruction], number: int) -> tuple[int, ...]:
    one = code[number]
    following = (number + 1,) if number + 1 < len(code) else ()
    if one.opcode.startswith("BRA") and ".DIV" not in one.opcode:
        named = _TARGET.findall(one.operands)
        target, rest = divmod(int(named[-1], 16), INSTRUCTION_BYTES)
        assert not rest and 0 <= target < len(code), f"a branch to {one.operands}, outside of its function"
        always = not one.is_guarded and not _CONDITION.match(one.operands)
        return (target,) if always else (target, *following)
    return following if one.is_guarded or not _ENDS.match(one.opcode) else ()


@dataclass(frozen=True)
class _Loop:
    header: int
    body: frozenset[int]


def _loops(after: Sequence[Sequence[int]]) -> list[_Loop]:
    """Loops of a graph, nested ones too: strongly connected parts, then those of each without the edges to its header,
    the first of its instructions."""
    found: list[_Loop] = []
    todo: list[tuple[frozenset[int], frozenset[int]]] = [(frozenset(range(len(after))), frozenset())]
    while todo:
        inside, headers = todo.pop()
        for part in _connected_parts(after, inside, headers):
            header = min(part)
            if len(part) > 1 or header in after[header]:
                found.append(_Loop(header, part))
                if len(part) > 1:
                    todo.append((part, headers | {header}))
    return found


def _connected_parts(
    after: Sequence[Sequence[int]], inside: frozenset[int], headers: frozenset[int]
) -> list[frozenset[int]]:
    """Strongly connected parts (Kosaraju) of the graph on ``inside``, without the edges to ``headers``."""
    onward = {one: [then for then in after[one] if then in inside and then not in headers] for one in inside}
    before: dict[int, list[int]] = {one: [] for one in inside}
    for one, many in onward.items():
        for then in many:
            before[then].append(one)
    seen, parts = set[int](), []
    for one in reversed(_depth_first(sorted(inside), onward)):
        if one not in seen:
            reached = {one}
            stack = [one]
            while stack:
                for earlier in before[stack.pop()]:
                    if earlier not in seen and earlier not in reached:
                        reached.add(earlier)
                        stack.append(earlier)
            seen |= reached
            parts.append(frozenset(reached))
    return parts


def _finished_first(after: Sequence[Sequence[int]], closing: set[tuple[int, int]]) -> list[int]:
    """Instructions so that each comes behind those that may follow it, the edges that close a loop left out."""
    onward = {
        number: [then for then in many if (number, then) not in closing] for number, many in enumerate(after)
    }
    return _depth_first(range(len(after)), onward)


def _depth_first(starts: Iterable[int], onward: dict[int, list[int]]) -> list[int]:
    """All that is reached, each behind those that it leads to."""
    done, seen = [], set[int]()
    for start in starts:
        stack = [(start, iter(onward[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            one, rest = stack[-1]
            then = next((then for then in rest if then not in seen), None)
            if then is None:
                done.append(one)
                stack.pop()
            else:
                seen.add(then)
                stack.append((then, iter(onward[then])))
    return done
