"""What goes wrong with files and options: values that no field expects, keys that moved, bytes that were lost."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    16,
    1.5,
    -0.0,
    1e-300,
    1e308,
    -1e308,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "x",
    "0",
    "NaN",
    "\ud800",
    "\x00",
    "\n",
    "\x1b[31m",
    "é",
    "💥",
    "../..",
    "x" * 5000,
    "a b " * 1000,
    [],
    {},
    [[]],
    [0],
    [None] * 3,
    {"": 0},
    {"value": 1},
    [1, 2, 3],
    [1e400, -1e400],
)
WORDS = (
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "16",
    "64",
    "4096",
    "1e3",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1_000",
    "٣",
    "9" * 400,
    "true",
    "yes",
    "null",
    "fused",
    "stock",
    "megakernel",
    "persistent",
    "welded",
    "h200",
    "gb300",
    "GB300",
    "gb30",
    "tp=8",
    "path=stock",
    "path=stock,path=fused",
    "=",
    ",",
    "a=b,,",
    "+",
    "--",
    "-",
    "--help",
    "é",
    "💥",
    "\udcff",
    "x" * 3000,
    "a " * 800,
    "../../..",
    "/",
    ".",
    "~",
    "~nobody/x.json",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
    "\n",
    "\x1b[0m",
    "%s",
    "{0}",
    "$HOME",
    "nothing.json",
    "[bold]x[/bold]",
    "[/]",
)


def nasty(random: Random) -> Any:
    """A value that few fields expect, in a copy of its own: later faults go into it."""
    return copy.deepcopy(random.choice(NASTY))


def mutated_file(random: Random, document: Any) -> bytes:
    """A document with one to four faults of values or fields; in one of five cases its bytes are at fault too."""
    document = json.loads(json.dumps(document))
    for _ in range(random.choices((0, 1, 2, 4), (1, 12, 4, 3))[0]):
        mutate_value(random, document)
    text = json.dumps(document, ensure_ascii=random.random() < 0.8, indent=random.choice((None, 1)))
    if random.random() < 0.05:
        text = twice(random, text)
    data = text.encode("utf-8", errors="surrogatepass")
    return random.choice(BYTES)(random, data) if random.random() < 0.2 else data


def mutate_value(random: Random, document: Any) -> None:
    """One fault, at a place that is drawn step by step from the top, so that every depth is met."""
    at, last = document, None
    holders: list[tuple[Any, Any]] = []
    while isinstance(at, dict | list) and at and (not holders or random.random() < 0.85):
        last = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
        holders.append((at, last))
        at = at[last]
    if not holders:
        return
    holder, key = random.choice(holders[-2:])
    random.choice(VALUES)(random, holder, key)


def _replace(random: Random, holder: Any, key: Any) -> None:
    holder[key] = nasty(random)


def _scale(random: Random, holder: Any, key: Any) -> None:
    given = holder[key]
    if isinstance(given, dict):  # value, low and high of a profile's entry together
        factor = 10.0 ** random.randint(-15, 15)
        for name, one in given.items():
            if isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < 1e280:
                given[name] = type(one)(one * factor)
    elif isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < 1e300:
        found = given * random.choice((0.5, 2.0, -1.0, 10.0 ** random.randint(-15, 15)))
        holder[key] = int(found) if isinstance(given, int) and abs(found) < 1e300 else found
    else:
        holder[key] = nasty(random)


def _remove(random: Random, holder: Any, key: Any) -> None:
    del holder[key]


def _add(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice(("extra", "", f"{key}s", str(key).upper(), "x" * 500, "\ud800", "welded"))] = nasty(random)
    else:
        holder.insert(key, nasty(random))


def _rename(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice((f"{key}_", str(key)[:-1], str(key).upper()))] = holder.pop(key)
    else:
        holder[key] = [holder[key]]


def _repeat(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        holder.extend([holder[key]] * random.choice((1, 100, 5000)))
    else:
        holder[key] = [holder[key]] * random.choice((1, 100, 5000))


def _nest(random: Random, holder: Any, key: Any) -> None:
    for _ in range(random.choice((1, 5, 60))):
        holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}


def _swap(random: Random, holder: Any, key: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    other = random.choice(keys)
    holder[key], holder[other] = holder[other], holder[key]


VALUES: tuple[Callable[[Random, Any, Any], None], ...] = (
    _replace,
    _replace,
    _replace,
    _scale,
    _scale,
    _remove,
    _add,
    _rename,
    _repeat,
    _nest,
    _swap,
)


def twice(random: Random, text: str) -> str:
    """A text with one of its pieces standing twice, a key among them."""
    start = random.randrange(len(text))
    end = min(len(text), start + random.choice((1, 20, 400)))
    return text[:end] + text[start:end] + text[end:]


def _cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flip(random: Random, data: bytes) -> bytes:
    found = bytearray(data or b"\0")
    for _ in range(random.choice((1, 3, 30))):
        found[random.randrange(len(found))] = random.randrange(256)
    return bytes(found)


BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (
    _cut,
    _cut,
    _flip,
    _flip,
    lambda random, data: b"",
    lambda random, data: data + random.choice((b"}", b"\0", b"\xff", b"x", data[:50])),
    lambda random, data: b"\xef\xbb\xbf" + data,
    lambda random, data: data.decode("utf-8", errors="replace").encode("utf-16"),
    lambda random, data: gzip.compress(data, 1),
    lambda random, data: b"[" * random.choice((10, 100_000)),
    lambda random, data: random.randbytes(random.choice((1, 100, 10_000))),
    lambda random, data: b"1" * 6000,
)


def mutated_words(random: Random, words: list[str]) -> list[str]:
    """A command line with up to three words replaced, left out, doubled, added or torn."""
    words = list(words)
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        at = random.randrange(len(words) + 1)
        kind = random.randrange(6)
        if kind == 0 or not words or at == len(words):
            words.insert(at, random.choice(WORDS))
        elif kind in (1, 2):
            words[at] = random.choice(WORDS)
        elif kind == 3:
            del words[at]
        elif kind == 4:
            words.insert(at, words[at])
        else:
            middle = random.randrange(len(words[at]) + 1)
            words[at] = words[at][:middle] + random.choice(("", "x", "=", "é", "-", "0")) + words[at][middle + 1 :]
    return [one.replace("\0", "") for one in words]
