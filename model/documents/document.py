"""One file of a user as a document: opened with care, its faults collected and said in one line.

A file is opened only where it is a regular one of at most the size that its kind can have, so a FIFO never hangs and
``/dev/zero`` never fills memory; a text that would fill it once it is parsed is counted first. JSON is taken strictly:
no key twice, no NaN, no number beyond 1e30, and no text that cannot be written again.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from k3sim.errors import UserError
from k3sim.model.documents.kinds import (
    Kind,
    foreign_kind,
    holds_too_much,
    kind_of_document,
    kind_of_lines,
    kind_of_text,
)
from k3sim.model.documents.lines import Keys, lines_of, repeated

MAX_DEPTH = 40
LARGEST_NUMBER = 1e30
_MAX_ANSWER = 600  # characters of a refusal, the file's name apart
_MAX_FAULT = 200
_MAX_FAULTS = 1000  # that are looked for: a list can have a million wrong entries
_MAX_NAME = 120
_MAX_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What a reader takes: in words, the kinds of file that are it, and the largest size."""

    what: str
    kinds: tuple[Kind, ...]
    most_bytes: int


@dataclass(frozen=True)
class Fault:
    """What is wrong with the value under ``keys``: ``says`` follows its name."""

    keys: Keys
    says: str


@dataclass(kw_only=True)
class Document:
    """A parsed file. ``text`` is empty where it comes from no file; then refusals give no lines."""

    name: str
    value: Any
    text: str = ""
    faults: list[Fault] = field(default_factory=list)
    oddities: list[Fault] = field(default_factory=list)  # what no document may hold, said where no model has said it
    longest: int = _MAX_ANSWER  # characters of a refusal, the file's name apart

    def fault(self, keys: Keys, says: str) -> None:
        """Note a fault; ``settle`` says all of them."""
        self.add([Fault(keys, says)])

    def add(self, faults: Iterable[Fault]) -> None:
        """Note several; beyond a thousand no more is looked for, and what was found is raised."""
        self.faults.extend(faults)
        if len(self.faults) > _MAX_FAULTS:
            self.settle()

    def settle(self) -> None:
        """Raise the UserError that says every fault that was noted, if any was."""
        if self.faults or self.oddities:
            raise UserError(self._answer())

    def _answer(self) -> str:
        said_already = {one.keys for one in self.faults}
        first = [*(one for one in self.oddities if one.keys not in said_already), *dict.fromkeys(self.faults)]
        lines = lines_of(self.text, [one.keys for one in first[:200]]) if self.text else {}
        if lines:
            first.sort(key=lambda one: lines.get(one.keys, 1 << 40))
        longest = max(_MAX_FAULT, self.longest // 3)
        said = [cut(f"{where(one.keys)} {one.says}", longest) for one in first[:200]]
        if lines:
            said = [f"line {lines[one.keys]}: {text}" for one, text in zip(first, said, strict=False)]
        more = len(first) > _MAX_FAULTS
        return join(shown_path(self.name), said, len(first), more=more, longest=self.longest)


def join(
    name: str, said: Sequence[str], total: int | None = None, *, more: bool = False, longest: int = _MAX_ANSWER
) -> str:
    """``name: fault; fault; and N more``, the faults at most some ``longest`` characters long, wherever the file lies.

    ``more``: there may be others beyond ``total``.
    """
    total = len(said) if total is None else total
    said = [cut(one, max(_MAX_FAULT, longest // 3)) for one in said]
    answer = f"{name}: {said[0]}"
    count = 1
    for one in said[1:]:
        if len(answer) - len(name) + len(one) > longest - 20:
            break
        answer, count = f"{answer}; {one}", count + 1
    least = "at least " if more else ""
    return f"{answer}; and {least}{total - count} more" if count < total else answer


def where(keys: Keys) -> str:
    """``records[0].value`` for ("records", 0, "value"); the file itself for no keys."""
    found = ""
    for key in keys:
        if isinstance(key, int):
            found += f"[{key}]"
        else:
            plain = key if re.fullmatch(r"[\w.\-]{1,60}", key, re.ASCII) else shown(key)
            found += f".{plain}" if found else plain
    return found or "the file"


def shown(value: Any) -> str:
    """A value as JSON, cut at 60 characters."""
    if isinstance(value, str):
        return cut(json.dumps(value[: _MAX_VALUE + 1]), _MAX_VALUE)
    found = ""
    try:
        for piece in json.JSONEncoder(default=str).iterencode(value):
            found += piece[: _MAX_VALUE + 1]
            if len(found) > _MAX_VALUE:
                break
    except (ValueError, RecursionError):
        found = found or type(value).__name__
    return cut(found, _MAX_VALUE)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown_path(path: str | Path) -> str:
    """A path as refusals give it: printable, and its end where it is long."""
    text = str(path)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MAX_NAME else f"...{text[3 - _MAX_NAME :]}"


def refuse(path: str | Path, what: str, accepted: Accepted) -> NoReturn:
    raise UserError(f"{shown_path(path)}: {what}; accepted: {accepted.what}")


def refuse_kind(path: str | Path, kind: Kind, accepted: Accepted) -> NoReturn:
    """Say what a file is that is not what is wanted, and which command takes it."""
    refuse(path, f"this is {kind.what}; {kind.advice}", accepted)


def read_bytes(path: str | Path, accepted: Accepted) -> bytes:
    """The bytes of a regular file of at most ``accepted.most_bytes``. Raises UserError for any other."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            refuse_kind(path, Kind.FOLDER, accepted)
        if not stat.S_ISREG(status.st_mode):
            refuse_kind(path, Kind.SPECIAL, accepted)
        # Not to be waited for, should a pipe have taken its place by now.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                refuse_kind(path, Kind.SPECIAL, accepted)
            data = file.read(accepted.most_bytes + 1)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror or error})", accepted)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        refuse(path, f"no path ({error})", accepted)
    if len(data) > accepted.most_bytes:
        kind = foreign_kind(data) or kind_of_text(data[: 1 << 16].decode("utf-8", errors="replace"))
        if kind is not None and kind not in accepted.kinds:
            refuse_kind(path, kind, accepted)
        size = max(status.st_size, len(data))
        refuse(path, f"{size} bytes, at most {accepted.most_bytes} are read", accepted)
    return data


def read_json(path: str | Path, accepted: Accepted) -> Document:
    """The JSON object in a file of one of the kinds that are accepted; what no model looks at is checked already.

    Raises UserError, naming what the file is, where it is none. Faults inside are noted, not raised.
    """
    data = read_bytes(path, accepted)
    foreign = foreign_kind(data)
    if foreign is not None:
        refuse_kind(path, foreign, accepted)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(path, f"not UTF-8 text (byte {error.start})", accepted)
    document = parse_json(path, text, accepted)
    kind = kind_of_document(document.value)
    if kind is not None and kind not in accepted.kinds:
        refuse_kind(path, kind, accepted)
    if not isinstance(document.value, dict):
        refuse(path, f"holds {shown(document.value)}, which is no JSON object", accepted)
    return document


def parse_json(path: str | Path, text: str, accepted: Accepted) -> Document:
    """The document in a JSON text, with the faults that any document can have noted."""
    if holds_too_much(text):
        kind = kind_of_text(text[: 1 << 16])
        if kind is not None and kind not in accepted.kinds:
            refuse_kind(path, kind, accepted)
        refuse(path, "holds more than 2,000,000 values, or 500,000 lists and objects", accepted)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice.append("")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        kind = kind_of_lines(text) if "\n" in text.strip() or "," in text else None
        if kind is None and text.lstrip()[:1] == "<":
            kind = kind_of_text(text)
        if kind is not None and kind not in accepted.kinds:
            refuse_kind(path, kind, accepted)
        short = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        ends = " (cut short?)" if short else ""
        refuse(path, f"line {error.lineno}: not valid JSON: {error.msg}, column {error.colno}{ends}", accepted)
    except RecursionError:
        refuse(path, f"nested more than {MAX_DEPTH} levels", accepted)
    except ValueError:
        refuse(path, "holds a number of thousands of digits", accepted)
    document = Document(name=str(path), value=value, text=text)
    if twice:
        for keys, _ in repeated(text):
            document.fault(keys, "stands twice in one object, accepted: once")
    if not is_plain(value):
        document.oddities.extend(islice(_oddities(value), _MAX_FAULTS + 1))
    return document


def is_plain(value: Any) -> bool:
    """Whether all numbers are finite and moderate, all texts can be encoded, and nothing is nested deeply."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return False
        inner: list[Any] = []
        for one in level:
            if type(one) is dict:
                if not all(map(is_text, one)):
                    return False
                inner.extend(one.values())
            elif type(one) is list:
                inner.extend(one)
            elif not _is_leaf(one):
                return False
        level = inner
    return True


def is_text(text: str) -> bool:
    """Whether a text can be encoded: no half of a surrogate pair stands in it."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _is_leaf(value: Any) -> bool:
    if type(value) is str:
        return is_text(value)
    if type(value) is float:
        return math.isfinite(value) and abs(value) <= LARGEST_NUMBER
    return type(value) is not int or abs(value) <= LARGEST_NUMBER


def _oddities(value: Any, keys: Keys = ()) -> Iterable[Fault]:
    """What ``is_plain`` says no to, each with its place."""
    if len(keys) > MAX_DEPTH:
        yield Fault(keys[:1], f"is nested deeper than the {MAX_DEPTH} levels that are accepted")
    elif isinstance(value, dict):
        for key, one in value.items():
            if not is_text(key):
                yield Fault((*keys, key), "has half a surrogate pair in its name, accepted: text of whole characters")
            yield from _oddities(one, (*keys, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _oddities(one, (*keys, index))
    elif isinstance(value, str):
        if not is_text(value):
            yield Fault(keys, f"is {shown(value)}, half a surrogate pair; accepted: text of whole characters")
    elif not _is_leaf(value):
        yield Fault(keys, f"is {shown(value)}, accepted: a finite number of at most {LARGEST_NUMBER:g}")
