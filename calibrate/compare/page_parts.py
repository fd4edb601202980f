"""What the pages of compared cases share: their drawing, axes, parity points and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from k3sim.sim.export.html import html_document

SCRIPT = Path(__file__).with_name("pages.js")
STYLE = Path(__file__).with_name("pages.css")
LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "margin": {"l": 10, "r": 20, "t": 30, "b": 50},
    "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"},
}
GRID: dict[str, Any] = {"automargin": True}  # labels are never cut
LABEL_CHARACTERS = 34  # of a line of an axis label: on a narrow window there must be room beside them
LINE_PX = 17
LINK = re.compile(r"https?://[^\s,;()<>\"']+[^\s,;()<>\"'.]")


class Markup(str):
    """A cell that is HTML already."""


Point = tuple[str, float, float, float, float]  # text, measured, predicted, low and high, in microseconds


def page_of(title: str, sections: Iterable[str], figures: Mapping[str, Any]) -> str:
    """A whole page: its title, sections, and the figures that they leave room for."""
    body = f"<style>{STYLE.read_text(encoding='utf-8')}</style>\n<h1>{escape(title)}</h1>\n{''.join(sections)}"
    return html_document(title, body, figures, SCRIPT.read_text(encoding="utf-8"))


def wrapped(label: str) -> str:
    """A label of an axis in lines that fit beside a chart in a narrow window."""
    return "<br>".join(escape(line, quote=False) for line in wrap(label, LABEL_CHARACTERS)) or label


def height_of(labels: Sequence[str], *, least_px: int = 26) -> int:
    """Height of a chart with a row for each of these wrapped labels."""
    return 130 + sum(max(least_px, LINE_PX * (label.count("<br>") + 1) + 6) for label in labels)


def errors_figure(cases: Iterable[tuple[str, str, float, bool]], within: float) -> dict[str, Any]:
    """Error of every case in per cent, a row a family: (family, case, error, whether its interval holds the reading).

    The families with the largest errors come first; the band is ``within`` of nothing.
    """
    families: dict[str, list[tuple[str, float, bool]]] = {}
    for family, case, error, inside in cases:
        families.setdefault(family, []).append((case, error, inside))
    order = sorted(families, key=lambda one: -max(abs(error) for _, error, _ in families[one]))
    labels = {family: wrapped(f"{family} ({len(families[family])})") for family in order}
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "marker": {"color": colour, "size": 9, "symbol": symbol, "opacity": 0.8},
            "x": [100 * error for family in order for _, error, inside in families[family] if inside is held],
            "y": [labels[family] for family in order for _, _, inside in families[family] if inside is held],
            "text": [case for family in order for case, _, inside in families[family] if inside is held],
            "hovertemplate": "%{text}<br>%{x:+.1f} %<extra></extra>",
        }
        for held, name, colour, symbol in (
            (True, "inside its interval", "#2f7fd0", "circle"),
            (False, "outside", "#d2691e", "diamond"),
        )
    ]
    band = {"type": "rect", "xref": "x", "yref": "paper", "x0": -100 * within, "x1": 100 * within, "y0": 0, "y1": 1,
            "fillcolor": "#7a8794", "opacity": 0.12, "line": {"width": 0}}  # fmt: skip
    return {
        "data": traces,
        "layout": {
            **LAYOUT,
            "height": max(360, height_of(list(labels.values()))),
            "shapes": [band],
            "xaxis": {**GRID, "title": {"text": "prediction against measurement, %"}, "zeroline": True},
            "yaxis": {**GRID, "categoryorder": "array", "categoryarray": [labels[one] for one in reversed(order)]},
        },
    }


def equal_line(
    points: Iterable[Point], *, margin: float = 1.0, factor: float = 1.0, name: str = "equal"
) -> dict[str, Any]:
    """The line on which a prediction is ``factor`` times what it is held against, over all points."""
    times = [time for _, measured, predicted, _, _ in points for time in (measured, predicted) if time > 0]
    ends = [min(times) / margin, max(times) * margin]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": ends,
        "y": [factor * end for end in ends],
        "name": name,
        "showlegend": factor == 1.0,
        "line": {"color": "#9aa5b1", "width": 1, "dash": "solid" if factor == 1.0 else "dot"},
        "hoverinfo": "skip",
    }


def parity_points(points: Sequence[Point], name: str, against: str, colour: str, **marker: Any) -> dict[str, Any]:
    """Points of one colour with their intervals."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": {"color": colour, **marker},
        "x": [measured for _, measured, _, _, _ in points],
        "y": [predicted for _, _, predicted, _, _ in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - predicted) for _, _, predicted, _, high in points],
            "arrayminus": [max(0.0, predicted - low) for _, _, predicted, low, _ in points],
            "color": colour,
            "thickness": 1,
            "width": 2,
        },
        "text": [text for text, _, _, _, _ in points],
        "hovertemplate": f"%{{text}}<br>{against} %{{x:,.4g}} us<br>predicted %{{y:,.4g}} us<extra></extra>",
    }


def parity_layout(against: str, height: int) -> dict[str, Any]:
    """Layout of predictions over what they are held against, both in microseconds on logarithmic axes."""
    return {
        **LAYOUT,
        "height": height,
        "xaxis": {**GRID, "type": "log", "title": {"text": f"{against}, us"}},
        "yaxis": {**GRID, "type": "log", "title": {"text": "predicted, us"}},
    }


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def signed_percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


def html_table(columns: Sequence[str], rows: Iterable[Iterable[str]], numbers: Sequence[int] = ()) -> str:
    """A table that sorts by a click on a column. Cells are escaped, addresses in them become links.

    ``numbers`` are the columns that are set to the right. A column of errors sorts by their size.
    """

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numbers else ''}>"
            f"{cell if isinstance(cell, Markup) else linked(str(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    heads = "".join(
        f"<th scope='col'{' class=number' if index in numbers else ''}{' data-sort=size' if name == 'error' else ''}>"
        f"<button type='button'>{escape(name)}</button></th>"
        for index, name in enumerate(columns)
    )
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table class='sortable'><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def two_lines(first: str, second: str) -> Markup:
    """A cell with a second line that explains the first."""
    return Markup(f"{linked(first)}<small>{linked(second)}</small>")


def unfolding(shown: str, more: Mapping[str, str]) -> Markup:
    """A cell that unfolds to further facts, each with its name."""
    lines = "".join(f"<p><b>{escape(name)}</b> {linked(text)}</p>" for name, text in more.items() if text)
    return Markup(f"{linked(shown)}<details><summary>more</summary>{lines}</details>")


def filtered(table: str, name: str, what: str) -> str:
    """A table with a field above it that leaves the rows which hold all words typed there. ``name``: of the element."""
    field = (
        f"<label class='filter'>Filter {escape(what)} <input type='search' data-filters='{name}' "
        "placeholder='words, such as gb200 step'><output></output></label>"
    )
    return f"{field}<div class='wide'>{table.replace('<table', f'<table id={name!r}', 1)}</div>"


def linked(text: str) -> str:
    """Escaped text whose addresses are links."""
    found, at = "", 0
    for match in LINK.finditer(text):
        address = escape(match[0])
        shown = address.partition("://")[2].removeprefix("www.")
        found += f"{escape(text[at : match.start()])}<a href='{address}' rel='noopener noreferrer'>{shown}</a>"
        at = match.end()
    return found + escape(text[at:])
