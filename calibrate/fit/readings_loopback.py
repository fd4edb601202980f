"""Loopback: pushes into slots of the own memory, as one GPU stands for its peers."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.fit.statements import Reader, Reading, Statement, Undetermined, slope_of


def _slots(read: Reader, which: int, **parameters: Any) -> list[Statement]:
    """A looped-back push to 1, 8 and 16 slots: the straight line's value at one slot, or its slope."""
    points = [
        (one.parameters["slots"] - 1.0, value)
        for one, value in read.all("looped_back_push", "one_way", blocks=8, threads=128, **parameters)
    ]
    if len(points) < 3:
        raise Undetermined(f"{len(points)} stable samples of looped_back_push by slots; accepted are 3 or more")
    shown = " ".join(f"{name}={value}" for name, value in parameters.items())
    return [(f"looped_back_push 1 to 16 slots {shown}", slope_of(points)[which])]


def _slots_of_others(read: Reader, which: int) -> list[Statement]:
    """Of other grids: what is left of their time when the line's slope is taken off, or with its first value."""
    (_, first), (_, slope) = (_slots(read, number, same_block=False)[0] for number in (0, 1))
    found = []
    for one, value in read.all("looped_back_push", "one_way", same_block=False):
        more = one.parameters["slots"] - 1
        if (which == 0 and one.parameters["threads"] != 128) or (which == 1 and more):
            found.append((one.label, value - slope * more if which == 0 else (value - first) / more))
    return found


LOOPBACK_READINGS: tuple[Reading, ...] = (
    Reading(
        "loopback_visibility_s", 2,
        "A row pushed to slots of the own memory until a poller in another block has it, half a round: at one "
        "slot, by a straight line over 1, 8 and 16; around: other grids at 16 slots.",
        centre=lambda read: _slots(read, 0, same_block=False),
        around=lambda read: _slots_of_others(read, 0),
        joint=True,
    ),
    Reading(
        "loopback_slot_s", 2,
        "As loopback_visibility_s: what each further slot adds, a store and a load a thread; around: other grids, "
        "and the line of a block that polls what it pushed itself.",
        centre=lambda read: _slots(read, 1, same_block=False),
        around=lambda read: [*_slots_of_others(read, 1), *_slots(read, 1, same_block=True)],
        joint=True,
    ),
)
