"""What all charts of the HTML report share: fonts, axes, rows with names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from k3sim.sim.export.colours import INK, MUTED, RULE

Figure = dict[str, Any]

FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK}


def layout(*, height: int, **more: Any) -> Figure:
    """Layout of a chart without a legend: the page has its own, which wraps in a narrow window."""
    return {
        "height": height,
        "margin": {"l": 10, "r": 24, "t": 10, "b": 50},
        "font": FONT,
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "showlegend": False,
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#9aa4af", "font": FONT, "align": "left"},
        "xaxis": axis(),
        "yaxis": axis() | {"showgrid": False},
        **more,
    }


def axis() -> Figure:
    return {
        "automargin": True,
        "gridcolor": RULE,
        "zerolinecolor": "#9aa4af",
        "linecolor": RULE,
        "tickfont": {"color": INK},
        "title": {"font": {"size": 13, "color": MUTED}},
        "separatethousands": True,
        "exponentformat": "none",
    }


def named_rows(names: Sequence[str]) -> Figure:
    """A vertical axis with a name for each whole number, the first at the top."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": ["<br>".join(escape(line, quote=False) for line in wrap(name, 26)) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]
