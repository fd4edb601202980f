"""The report of a predicted decode step as one HTML file that opens without a network.

Everything is inside the file and a content security policy forbids every request, so the page shows the same in ten
years. The report of a step draws itself: bars are boxes (``bars.py``), and a timeline needs names that move with the
zoom, which no charting library at hand does (``timeline.js``). Other pages have plotly inside, 4.8 MB of it
(``html_document``).

``report`` is plain data, all times in microseconds::

    model, machine, layout: str       concurrency: int        context: int, tokens
    num_gpus: int                     can_draw: bool, whether ``--intervals`` would add intervals
    main_path: str                    the path whose timeline is shown first (default: the first)
    compared_with: str                the path that gains are over (default: stock)
    paths: label -> step_us, tokens_per_s_per_user, tokens_per_s_per_gpu, speedup, floor_us, floor_fraction,
                    waits_us: part -> us, and optionally step_us_interval, speedup_interval: [low, high]
    waterfall: [{label, kind: "total" | "relative", step_us, delta_us, waits_delta_us: part -> us}]
    leave_one_out: [{without, step_us, cost_us}]
    example_layers: {"kda": layer, "mla": layer}
    critical_path: [{stage, part, us}]
    command: str                      versions: name -> version
    machine_values: [{field, value, unit, kind, source, us}], the most us of the critical path first
    not_modelled: [str]               limits: [str], what a measurement cannot show
    glossary: part -> meaning

``paths`` is required; a section whose data is missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from k3sim.sim.export import sections
from k3sim.sim.export.colours import COLOURS, MEANINGS, style_sheet
from k3sim.sim.export.timeline_data import layer_window, timeline_data
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.timeline.timeline import Timeline

CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
SCRIPTS = ("timeline.js", "timeline_draw.js", "timeline_input.js", "timeline_page.js")

# Counts errors on <body>, so that a test (or a reader) can see whether the page drew itself.
ERROR_HOOK = """
let errors = 0;
function count_error() { errors += 1; if (document.body) document.body.dataset.errors = errors; }
addEventListener("error", count_error);
addEventListener("unhandledrejection", count_error);
addEventListener("securitypolicyviolation", count_error);
"""


def write_html_report(report: Mapping[str, Any], timelines: Mapping[str, Timeline], path: Path) -> None:
    """Writes the report and the timelines of its paths (by the same labels) to ``path``, whole or not at all.

    Raises UserError when ``path`` cannot be written.
    """
    write_whole_file(path, _page(report, timelines).encode())


def _page(report: Mapping[str, Any], timelines: Mapping[str, Timeline]) -> str:
    drawn = {label: timeline_data(timeline) for label, timeline in timelines.items()}
    kinds = []
    for kind, layer in report.get("example_layers", {}).items():
        windows = {label: layer_window(timeline, layer) for label, timeline in timelines.items()}
        for label, window in windows.items():
            drawn[label].setdefault("windows", {})[kind] = window
        kinds += [kind] * any(windows.values())
    words = dict.fromkeys(word for one in drawn.values() for word in one["words"])
    meanings = {**MEANINGS, **report.get("glossary", {})}
    numbers = {word: number for number, word in enumerate(COLOURS)}
    data = {
        "timelines": drawn,
        "words": {word: {"number": numbers.get(word, "unknown"), "meaning": meanings.get(word, "")} for word in words},
    }
    body = "".join(
        (
            sections.headline(report),
            sections.waits(report),
            sections.waterfall(report),
            sections.leave_one_out(report),
            sections.timelines(report, timelines, words, kinds),
            sections.critical_path_table(report),
            sections.machine_values(report),
            sections.footer(report),
        )
    )
    title = f"{report.get('model', 'Decode step')} on {report.get('machine', '')}"
    return _document(title, body, scripts=[], data={"timelines": data}, draw="".join(map(asset, SCRIPTS)))


def html_document(title: str, body: str, figures: Mapping[str, Any], draw: str) -> str:
    """A whole page with charts of plotly: ``body`` (HTML), figures as JSON, ``draw`` (JavaScript).

    ``draw`` finds the figures in the element of that name, and sets ``data-drawn`` and ``data-errors`` of the body.
    """
    # Imported here: only pages with plotly's charts need it, and only its JavaScript.
    from plotly.offline import get_plotlyjs

    return _document(title, body, scripts=[get_plotlyjs()], data={"figures": figures}, draw=draw)


def _document(
    title: str, body: str, *, scripts: list[str], data: Mapping[str, Any], draw: str
) -> str:
    """A whole page that opens without a network. ``data`` are elements of JSON by their id."""
    # "<" as an escape: no text in the data can end the script element.
    elements = "".join(
        f'<script type="application/json" id="{name}">{_json(value)}</script>\n' for name, value in data.items()
    )
    head = "".join(f"<script>{script}</script>\n" for script in (ERROR_HOOK, *scripts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{asset("page.css")}{style_sheet()}</style>
{head}</head>
<body>
<main>
{body}
</main>
{elements}<script>{draw}</script>
</body>
</html>
"""


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """A script or style sheet of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
