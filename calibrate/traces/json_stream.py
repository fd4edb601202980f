"""Events of a large JSON file, one by one, in bounded memory.

The scanner of the standard library parses one event at a time from a window that slides over the text: 1 GB takes some
15 CPU seconds, and memory is that of the window and of what the caller keeps. Numbers with a decimal point stay text,
because a double of microseconds since 1970 has lost its nanoseconds.

A file that a killed profiler left ends within an event: what was read before is given, and ``notes`` says so.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from k3sim.calibrate.traces.open_file import TextChunks
from k3sim.errors import UserError

MOST_VALUE_CHARACTERS = 32 << 20  # of one event, or of one value beside the events
_SPACE = re.compile(r"[ \t\r\n,]*")
_DECODER = json.JSONDecoder(strict=False, parse_float=str, parse_constant=lambda word: None)


class JsonStream:
    """Members of a top-level object, entries of its list ``events_key`` singly; or the entries of a bare list."""

    def __init__(self, path: str | Path, events_key: str) -> None:
        self.header: dict[str, Any] = {}
        self.notes: list[str] = []
        self.found_events = False
        self._name, self._key = str(path), events_key
        self._chunks = TextChunks(path)
        self._source = iter(self._chunks)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text, self._at, self._ended = "", 0, False

    def events(self) -> Iterator[dict[str, Any]]:
        """Entries of the list that are objects. Raises UserError for what is no JSON object or list of this form."""
        first = self._peek()
        if first == "[":
            self._at += 1
            self.found_events = True
            yield from self._entries()
            return
        if first != "{":
            raise UserError(f"{self._name}: no JSON object or list; a trace that a profiler wrote is accepted")
        self._at += 1
        while (sign := self._peek()) not in ("}", ""):
            key = self._value() if sign == '"' else None
            if not isinstance(key, str) or self._peek() != ":":
                self._refuse("a name and a colon are expected")
            self._at += 1
            if key == self._key and self._peek() == "[":
                self._at += 1
                self.found_events = True
                yield from self._entries()
            elif self._peek():
                value = self._value()
                if len(self.header) < 100:
                    self.header[key] = value
        if not sign:
            self._note_cut()

    def _entries(self) -> Iterator[dict[str, Any]]:
        while (sign := self._peek()) != "]":
            if not sign:
                self._note_cut()
                return
            value = self._value()
            if isinstance(value, dict):
                yield value
        self._at += 1

    def _peek(self) -> str:
        """The next sign that is neither space nor comma; empty at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # A number, or half a word, at the very end may go on in the next chunk.
                cut_off = error.pos > len(self._text) - 16 or error.msg.startswith("Unterminated string")
                if len(self._text) - self._at > MOST_VALUE_CHARACTERS:
                    self._refuse(f"one value is longer than {MOST_VALUE_CHARACTERS >> 20} M characters")
                if cut_off and self._more():
                    continue
                if cut_off and self._ended:
                    self._at = len(self._text)
                    return None
                self._refuse(error.msg)
            except (RecursionError, ValueError) as error:
                self._refuse("nested too deep" if isinstance(error, RecursionError) else str(error))
            length = end - self._at
            if end >= len(self._text) - 1 and self._text[self._at] not in '{["' and self._more():
                continue
            self._at += length
            return value

    def _more(self) -> bool:
        """Whether further text came; what has been parsed is let go. The window grows by its own length."""
        kept = self._text[self._at :]
        pieces, wanted = [kept], max(1, len(kept))
        while wanted > 0 and not self._ended:
            chunk = next(self._source, None)
            if chunk is None:
                self._ended = True
                pieces.append(self._decode.decode(b"", final=True))
            else:
                pieces.append(self._decode.decode(chunk))
                wanted -= len(chunk)
        self._text, self._at = "".join(pieces), 0
        return len(self._text) > len(kept)

    def _note_cut(self) -> None:
        why = self._chunks.damage or "it ends before its last bracket"
        self.notes.append(f"{self._name} was cut off: {why}; the events before that were read")

    def _refuse(self, why: str) -> NoReturn:
        near = self._text[self._at : self._at + 40]
        raise UserError(f"{self._name}: no valid JSON near {near!r}: {why}")
