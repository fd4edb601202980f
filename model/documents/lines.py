"""The line on which a value stands in a JSON text, found again once a refusal needs it.

``json`` of the standard library is fast and forgets lines; a second look at the text costs a refusal some milliseconds
and a good file nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

#: Where a value stands in a document: names of fields and numbers of entries, from the top.
Keys = tuple[str | int, ...]

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


def places(text: str) -> Iterator[tuple[Keys, int]]:
    """Every value of a valid JSON text with its line, containers before what they hold."""
    line, counted = 1, 0
    at: list[str | int] = []  # keys of the value that comes next
    inside: list[bool] = []  # of each open container, whether it is a list
    key_next = False
    for found in _TOKEN.finditer(text):
        token, start = found.group(), found.start()
        line += text.count("\n", counted, start)
        counted = start
        if token in "}]":
            inside.pop()
            if inside or at:
                at.pop()
            key_next = False
        elif token == ",":
            if inside[-1]:
                at[-1] = int(at[-1]) + 1
            else:
                key_next = True
        elif token == ":":
            key_next = False
        elif key_next and token[0] == '"':
            at[-1] = json.loads(token, strict=False)
        else:
            yield tuple(at), line
            if token in "{[":
                is_list = token == "["
                inside.append(is_list)
                at.append(0 if is_list else "")
                key_next = not is_list


def lines_of(text: str, wanted: Iterable[Keys]) -> dict[Keys, int]:
    """Line of each of ``wanted``, or of the nearest value that contains it."""
    ends = set(wanted)
    prefixes = {keys[:length] for keys in ends for length in range(len(keys) + 1)}
    found: dict[Keys, int] = {}
    for keys, line in places(text):
        if keys in prefixes and keys not in found:
            found[keys] = line
            if len(found) == len(prefixes):
                break
    nearest = ((keys, next((keys[:n] for n in range(len(keys), -1, -1) if keys[:n] in found), None)) for keys in ends)
    return {keys: 1 if holder is None else found[holder] for keys, holder in nearest}


def repeated(text: str) -> list[tuple[Keys, int]]:
    """Fields that stand twice in one object, each with the line of its second value."""
    seen: set[Keys] = set()
    twice: list[tuple[Keys, int]] = []
    for keys, line in places(text):
        if keys in seen and not any(keys[: len(other)] == other for other, _ in twice):
            twice.append((keys, line))
        seen.add(keys)
    return twice
