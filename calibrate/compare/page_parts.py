"""What the pages of compared cases share: their drawing, axes, parity points and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from k3sim.sim.export.html import html_document

DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
Promise.all(Object.entries(figures).map(([name, figure]) => Plotly.newPlot(
  document.getElementById(name), figure.data, figure.layout, {responsive: true, displaylogo: false}))).then(() => {
  document.body.dataset.errors = errors;
  document.body.dataset.drawn = "yes";
});
"""
LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "margin": {"l": 190, "r": 20, "t": 20, "b": 50},
    "legend": {"orientation": "h", "y": 1.08},
    "plot_bgcolor": "#fff",
}
GRID = {"gridcolor": "#edf0f3", "zerolinecolor": "#9aa5b1"}
Point = tuple[str, float, float, float, float]  # text, measured, predicted, low and high, in microseconds


def page_of(title: str, sections: Iterable[str], figures: Mapping[str, Any]) -> str:
    """A whole page: its title, sections, and the figures that they leave room for."""
    return html_document(title, f"<h1>{escape(title)}</h1>\n{''.join(sections)}", figures, DRAW)


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
        "margin": {**LAYOUT["margin"], "l": 70},
        "height": height,
        "xaxis": {**GRID, "type": "log", "title": {"text": f"{against}, us"}},
        "yaxis": {**GRID, "type": "log", "title": {"text": "predicted, us"}},
    }


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def signed_percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


def html_table(columns: Sequence[str], rows: Iterable[Iterable[str]], numbers: Sequence[int] = ()) -> str:
    """A table of escaped cells; ``numbers`` are the columns that are set to the right."""

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numbers else ''}>{escape(str(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
