"""JSON that remembers the line on which each value stands, so that a refusal can name it.

``parse`` takes strict JSON: no comments, no NaN or Infinity, no key twice in one object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from k3sim.errors import UserError

_TOKEN = re.compile(r'[ \t\r\n]*(?:([\[\]{}:,])|("(?:[^"\\\x00-\x1f]|\\.)*")|([^\s\[\]{}:,"]+))')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?\Z")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 40

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Located:
    """A parsed document: ``value``, and the line of every value in it by its keys from the top."""

    file: str
    value: Any
    lines: dict[Key, int]

    def line(self, *keys: str | int) -> int:
        """Line of the value under ``keys``, or of the nearest one that contains it."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines[keys]

    def refuse(self, keys: Sequence[str | int], message: str) -> NoReturn:
        """Raise the UserError ``file:line: message`` for the value under ``keys``."""
        raise UserError(f"{self.file}:{self.line(*keys)}: {message}")


def read(path: Path) -> Located:
    """Parse a file. Raises UserError with file and line where it cannot be read or is not strict JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; accepted: a JSON file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; accepted: a JSON file") from None
    return parse(text, str(path))


def parse(text: str, file: str) -> Located:
    """Parse a text; ``file`` is the name that refusals give."""
    return _Parser(text, file).document()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0
        self.line, self.counted = 1, 0  # the line of position ``counted``
        self.lines: dict[Key, int] = {}

    def document(self) -> Located:
        value = self.value((), *self.token())
        rest = self.text[self.at :].strip()
        if rest:
            self.fail(f"{rest[:20]!r} follows the end of the document")
        return Located(self.file, value, self.lines)

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.file}:{self.line}: {what}; accepted: JSON")

    def token(self) -> tuple[str, str, str]:
        """The next (punctuation, string, word), one of which is not empty; ``line`` is then its line."""
        found = _TOKEN.match(self.text, self.at)
        start = found.start(found.lastindex) if found and found.lastindex else self._next()
        self.line += self.text.count("\n", self.counted, start)
        self.counted = start
        if found is None or not found.lastindex:
            rest = self.text[self.at :].strip()
            self.fail(f"{rest[:20]!r} is not JSON" if rest else "the document ends too early")
        self.at = found.end()
        punctuation, string, word = found.groups(default="")
        return punctuation, string, word

    def _next(self) -> int:
        """Where the next character that is not blank stands, or the end of the text."""
        rest = self.text[self.at :]
        return self.at + len(rest) - len(rest.lstrip()) if rest.strip() else len(self.text.rstrip())

    def value(self, keys: Key, punctuation: str, string: str, word: str) -> Any:
        self.lines[keys] = self.line
        if len(keys) > _MAX_DEPTH:
            self.fail(f"more than {_MAX_DEPTH} levels")
        if string:
            return self.string(string)
        if punctuation == "{":
            return self.object(keys)
        if punctuation == "[":
            return self.array(keys)
        if punctuation:
            self.fail(f"{punctuation!r} stands where a value is needed")
        if word in _WORDS:
            return _WORDS[word]
        if not _NUMBER.match(word) or len(word) > 300:
            self.fail(f"{word[:20]!r} is neither a number nor true, false or null")
        return json.loads(word)

    def string(self, token: str) -> str:
        try:
            text: str = json.loads(token)
        except ValueError:
            self.fail(f"{token[:20]} has an escape that does not exist")
        return text

    def object(self, keys: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        punctuation, string, word = self.token()
        while punctuation != "}" or found:
            if not string:
                self.fail(f"{(punctuation or word)[:20]!r} stands where a key in quotes is needed")
            key = self.string(string)
            if key in found:
                self.fail(f"key {key!r} stands twice in one object")
            if self.token()[0] != ":":
                self.fail(f"':' is missing after key {key!r}")
            found[key] = self.value((*keys, key), *self.token())
            punctuation, string, word = self.token()
            if punctuation == "}":
                break
            if punctuation != ",":
                self.fail(f"',' or '}}' is missing after the value of {key!r}")
            punctuation, string, word = self.token()
        return found

    def array(self, keys: Key) -> list[Any]:
        found: list[Any] = []
        punctuation, string, word = self.token()
        while punctuation != "]" or found:
            found.append(self.value((*keys, len(found)), punctuation, string, word))
            punctuation, string, word = self.token()
            if punctuation == "]":
                break
            if punctuation != ",":
                self.fail("',' or ']' is missing after a value of a list")
            punctuation, string, word = self.token()
        return found
