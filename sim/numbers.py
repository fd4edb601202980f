"""Whole numbers as a user writes several of them: lists and ranges."""

from __future__ import annotations

import re

from k3sim.errors import UserError

MOST_NUMBERS = 4096


def numbers_of(word: str, text: str) -> tuple[int, ...]:
    """``8``, ``1,2,4``, ``1:16`` (every one), ``8:64:8`` (every eighth), ``1:1024:x2`` (doubled), or several of them.

    Raises UserError for what is none of these, a number below one, and more numbers than ``MOST_NUMBERS``.
    """
    if re.fullmatch(r"[+-]?\d{1,12}", text.strip(), re.ASCII):
        return (int(text),)  # whose limits are those of the question
    found: list[int] = []
    for item in text.split(","):
        whole = re.fullmatch(r"(\d{1,12})(?::(\d{1,12})(?::(x?)(\d{1,12}))?)?", item.strip(), re.ASCII)
        if whole is None:
            raise UserError(
                f"--{word} {text[:60]!r}: accepted: whole numbers, as in 8 or 1,2,4, and ranges, as in 1:16, 8:64:8 or "
                "1:1024:x2"
            )
        first, last, times, step = int(whole[1]), int(whole[2] or whole[1]), whole[3], int(whole[4] or 1)
        if first < 1 or last < first or step < 1 or (times and step < 2):
            raise UserError(f"--{word} {item.strip()!r}: accepted: from 1 up, by a step of 1 or more, or x2 or more")
        value = first
        while value <= last:
            found.append(value)
            if len(found) > MOST_NUMBERS:
                raise UserError(f"--{word} {text[:60]!r} is more than {MOST_NUMBERS} numbers; accepted: fewer")
            value = value * step if times else value + step
    return tuple(sorted(set(found)))
