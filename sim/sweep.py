"""A grid of questions, answered point by point into a file that an interrupted run goes on with.

A grid names options with their values: lists, ranges of whole numbers (``numbers.py``), or one value. Its points are
all combinations, the last option varying fastest. Each answered point is one line of ``points.jsonl``, behind a first
line that says of what the file is; a line is written whole, so that what a killed run leaves is complete lines and at
most one torn one, which is cut off. The tables are made from those lines once all are there, in the order of the
points: interrupted or not, they are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.sim.curve import point
from k3sim.sim.numbers import numbers_of
from k3sim.sim.options import OPTIONS, Options, typed_value
from k3sim.sim.question import ask

MOST_POINTS = 1_000_000
MOST_GRID_BYTES = 1 << 20
FORMAT = 1  # of points.jsonl
ACCEPTED = "options with their values, such as tp: [8, 16]"


@dataclass(frozen=True)
class Grid:
    """Words of options with their values as users write them, in order."""

    values: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def num_points(self) -> int:
        return prod(len(values) for _, values in self.values)

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(word for word, _ in self.values)

    def texts(self) -> Iterator[tuple[str, ...]]:
        """Values of each point, in the order of ``words``."""
        yield from product(*(values for _, values in self.values))

    def options(self, texts: Sequence[str]) -> Options:
        """The options of a point. Raises UserError for a value that is not of its option's kind."""
        given = {
            OPTIONS[word].name: typed_value(f"{word} of the grid", OPTIONS[word], text)
            for word, text in zip(self.words, texts, strict=True)
        }
        return Options(**given)

    def digest(self, version: str) -> str:
        """What tells this sweep from another: the grid, the version, and the machines and models that it names."""
        parts: list[Any] = [FORMAT, version, self.values]
        named = ("machine", "memory", "model", "weights", "state-dtype", "ignore-field")
        seen = set()
        for texts in self.texts():
            chosen = tuple(text for word, text in zip(self.words, texts, strict=True) if word in named)
            if chosen not in seen:
                seen.add(chosen)
                try:
                    question = ask(self.options(texts))
                except UserError as refusal:
                    parts.append(str(refusal))
                    continue
                parts += [repr(question.machine), repr(question.architecture)]
            if len(seen) == prod(len(values) for word, values in self.values if word in named):
                break
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def grid_of(given: Mapping[str, Any]) -> Grid:
    """A grid from a mapping of words to a value, a list, or a range.

    Raises UserError with every unknown word and odd value, and for more points than ``MOST_POINTS``.
    """
    faults, found = [], []
    for word, value in given.items():
        option = OPTIONS.get(str(word))
        if option is None:
            faults.append(f"unknown option {str(word)[:60]!r}; accepted: {', '.join(OPTIONS)}")
            continue
        texts: list[str] = []
        try:
            for one in value if isinstance(value, list) else [value]:
                texts += _texts(str(word), option.kind, one)
        except UserError as refusal:
            faults.append(str(refusal))
            continue
        if not texts:
            faults.append(f"{word} has no value; accepted: one or more")
        found.append((str(word), tuple(dict.fromkeys(texts))))
    if not given:
        faults.append("the grid names no option; accepted: one or more, such as concurrency")
    if faults:
        raise UserError("; ".join(faults))
    grid = Grid(tuple(found))
    if grid.num_points > MOST_POINTS:
        raise UserError(f"{grid.num_points:,} points; accepted: up to {MOST_POINTS:,}")
    return grid


def _texts(word: str, kind: type, value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, (int, float)):
        return [str(value)]
    if not isinstance(value, str):
        raise UserError(f"{word} is {str(value)[:60]!r}; accepted: a value, a list of values, or a range as in 1:64:x2")
    if kind is int:
        return [str(one) for one in numbers_of(word, value)]
    return [value]


def read_grid(path: str) -> Grid:
    """A grid from a YAML or JSON file. Raises UserError for what is no mapping of options to values."""
    import yaml  # type: ignore[import-untyped]

    file = Path(path)
    try:
        if file.stat().st_size > MOST_GRID_BYTES:
            raise UserError(f"{path}: is larger than the {MOST_GRID_BYTES >> 20} MB of a grid")
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; accepted: a YAML or JSON file, {ACCEPTED}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0][:120]
        raise UserError(f"{path}: is no YAML: {first}; accepted: {ACCEPTED}") from None
    if not isinstance(given, dict):
        raise UserError(f"{path}: is no mapping; accepted: {ACCEPTED}")
    try:
        return grid_of(given)
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None


def answer(grid: Grid, index: int, texts: tuple[str, ...]) -> dict[str, Any]:
    """One point: its options as they were written, its step and memory, or why it has none."""
    row: dict[str, Any] = {"point": index, **dict(zip(grid.words, texts, strict=True))}
    try:
        options = grid.options(texts)
    except UserError as refusal:
        return {**row, "refused": str(refusal)}
    found = point(options, options.path, options.concurrency, options.context).to_dict()
    return {**row, **{key: value for key, value in found.items() if key not in ("low_us", "high_us")}}


class Store:
    """Lines of ``points.jsonl`` in a folder: which points are answered, and where to write the next.

    Raises UserError for a folder that holds another sweep, that another process writes, or that cannot be written.
    """

    def __init__(self, folder: Path, grid: Grid, version: str = "") -> None:
        self.path = folder / "points.jsonl"
        self._grid, self._version = grid, version
        self.rows: dict[int, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115  (held open, and locked, for the whole of the sweep)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; give another --out") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows; two sweeps into one folder are not told there
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another sweep writes {self.path}; wait for it, or give another --out") from None

    def _read(self) -> None:
        """The points that are there; a torn last line is cut off, and a file of another sweep is refused."""
        head = {"k3sim_sweep": FORMAT, "digest": self._grid.digest(self._version), "num_points": self._grid.num_points}
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file):
            row = _row(line)
            if row is None:
                break
            if number == 0 and row != head:
                raise UserError(
                    f"{self.path} is of another grid, version, machine or model; give another --out, or remove it"
                )
            if number:
                self.rows[row["point"]] = row
            end += len(line)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
        if end == 0:
            self._write(head)

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; what is in it stays") from None

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep an answered point."""
        self._write(row)
        self.rows[row["point"]] = dict(row)

    def missing(self) -> list[tuple[int, tuple[str, ...]]]:
        """Points that are not answered yet."""
        return [(index, texts) for index, texts in enumerate(self._grid.texts()) if index not in self.rows]

    def close(self) -> None:
        """To the disk, for another run to go on with."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            pass  # lines that could not be written are answered again
        self._file.close()


def _row(line: bytes) -> dict[str, Any] | None:
    """A complete line of the file; None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and (isinstance(row.get("point"), int) or "k3sim_sweep" in row) else None


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key of the rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))
