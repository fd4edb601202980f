"""Tables in the terminal: plain text that survives being pasted into an issue, and never loses a figure.

A table that is too wide for its terminal is not cut. Its heads and long texts are wrapped first. Where that is not
enough, it goes on below with further columns beside the same first one. What is no terminal (a pipe, a file, the log of
a job) has no width: there a table is as wide as it needs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from k3sim.model.memory import Room

GAP = 2  # spaces between columns
LEAST_TEXT = 24  # columns of texts are not made narrower than this
UNBOUNDED = 100_000  # columns of what is no terminal


@dataclass(frozen=True)
class Table:
    """Heads and rows of texts. The first ``left`` columns are aligned left, the others, numbers, right.

    ``folded``: columns whose long texts go on in a further line where the terminal is narrow.
    """

    heads: tuple[str, ...]
    left: int = 1
    folded: frozenset[int] = frozenset()
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        assert len(cells) == len(self.heads), cells
        self.rows.append(cells)

    def widest(self, column: int) -> int:
        """Columns of the terminal that a column takes without wrapping."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.heads[column], *self._cells(column))))

    def narrowest(self, column: int) -> int:
        """The same with the head wrapped, and texts that may be."""
        from rich.cells import cell_len

        words = max((cell_len(word) for word in self.heads[column].split()), default=0)
        cells = max(map(cell_len, self._cells(column)), default=0)
        return max(words, min(cells, LEAST_TEXT) if column in self.folded else cells)

    def _cells(self, column: int) -> list[str]:
        return [row[column] for row in self.rows]


def table(*heads: str, left: int = 1, folded: Sequence[int] = ()) -> Table:
    """An empty table."""
    return Table(heads, left, frozenset(folded))


def console() -> Console:
    """Standard output, as wide as the terminal; without one, as wide as what is printed needs."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=terminal_columns() or UNBOUNDED)


def terminal_columns() -> int:
    """Columns of the terminal that standard output is, or 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def print_table(one: Table) -> None:
    """A table on standard output; columns for which its terminal has no room follow below."""
    from rich.align import Align
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    columns = terminal_columns() or UNBOUNDED
    for number, widths in enumerate(blocks(one, columns)):
        drawn = Drawn(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
        for column, width in widths.items():
            side: Literal["left", "right"] = "left" if column < one.left else "right"
            # Texts, not markup: labels hold brackets. Heads stand on their rows, and figures beside the first line.
            head = Align(Text(one.heads[column]), side, vertical="bottom")
            drawn.add_column(head, justify=side, width=width, overflow="fold")
        for row in one.rows:
            drawn.add_row(*(Text(row[column]) for column in widths))
        # A first column that alone is wider than the terminal is for the terminal to wrap.
        needed = sum(widths.values()) + GAP * len(widths)
        drawing = Console(highlight=False, width=max(columns, needed))
        with drawing.capture() as captured:
            drawing.print(drawn)
        if number:
            sys.stdout.write("\n")
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def blocks(one: Table, columns: int) -> list[dict[int, int]]:
    """Widths of the columns that stand beside each other, by position: one block where a table fits."""
    every = range(len(one.heads))
    widest = {column: one.widest(column) for column in every}
    if _total(widest) <= columns:
        return [widest]
    narrow = {column: one.narrowest(column) for column in every}
    found = [{0: narrow[0]}]
    for column in every[1:]:
        if len(found[-1]) > 1 and _total(found[-1]) + GAP + narrow[column] > columns:
            found.append({0: narrow[0]})
        found[-1][column] = narrow[column]
    return [_widened(block, widest, one.folded, columns) for block in found]


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _widened(block: dict[int, int], widest: dict[int, int], folded: frozenset[int], columns: int) -> dict[int, int]:
    """A block with the room that it leaves: for wrapped heads first, which need little, then for texts."""
    left = columns - _total(block)
    found = dict(block)
    for column in sorted(block, key=lambda one: (one in folded, widest[one] - block[one])):
        more = max(0, min(widest[column] - block[column], left))
        found[column] += more
        left -= more
    return found


def num_gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def memory_line(room: Room) -> str:
    """What one GPU holds of what it has, and what would fit."""
    held = room.resident
    tokens = "" if room.tokens is None else f", or {room.tokens:,} cached tokens"
    return (
        f"memory of a GPU: {held.total / 1e9:,.1f} of {room.capacity / 1e9:,.1f} GB, "
        f"weights {held.weights / 1e9:,.1f}; room for {room.users:,} users at this context{tokens}"
    )
