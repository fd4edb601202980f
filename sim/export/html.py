"""The report of a predicted decode step as one HTML file that opens without a network.

The charting library is inside the file and a content security policy forbids every request, so the page shows
the same in ten years. What a user wrote (labels, sources, commands) is escaped.

``report`` is plain data, all times in microseconds::

    model, machine, layout: str       concurrency: int        context: int, tokens
    main_path: str                    the path whose timeline is shown first (default: the first)
    paths: label -> step_us, tokens_per_s_per_user, speedup (over stock), floor_us, floor_fraction,
                    hbm_busy_fraction, waits_us: part -> us, and optionally step_us_interval: [low, high]
    waterfall: [{label, kind: "total" | "relative", step_us, delta_us, waits_delta_us: part -> us}]
    leave_one_out: [{without, step_us, cost_us}]
    example_layers: {"kda": layer, "mla": layer}
    critical_path: [{stage, part, us}]
    command: str                      versions: name -> version
    machine_values: [{field, value, unit, kind, source}]
    not_modelled: [str]               limits: [str], what a measurement cannot show
    glossary: part -> meaning

``paths`` is required; a section whose data is missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from k3sim.sim.export.colours import part_colour, stage_group
from k3sim.sim.export.figures import leave_one_out_figure, waits_figure, waterfall_figure
from k3sim.sim.export.layout import Figure
from k3sim.sim.export.timeline_figures import layer_figure, step_figure
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.timeline.timeline import Phase, Timeline

MAX_CRITICAL_ROWS = 20
UNKNOWN = "–"

CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1c232b;
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 26px; font-weight: 650; margin: 0; }
h2 { font-size: 19px; font-weight: 650; margin: 0 0 4px; }
h3 { font-size: 15px; font-weight: 650; margin: 20px 0 4px; }
p { margin: 0 0 10px; max-width: 95ch; }
main > section, footer > h2 { border-top: 1px solid #dfe4ea; padding-top: 20px; margin-top: 28px; }
.facts { color: #5b6672; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 14px;
  margin-bottom: 8px; }
.card { border: 1px solid #dfe4ea; border-radius: 8px; padding: 14px 16px; }
.card h2 { font-size: 15px; color: #1f5fa8; }
.big { font-size: 30px; font-weight: 650; margin: 0 0 6px; font-variant-numeric: tabular-nums; }
.big span { font-size: 14px; font-weight: 400; color: #5b6672; }
dl { display: grid; grid-template-columns: auto auto; margin: 0; gap: 2px 12px; }
dt { color: #5b6672; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.chart { width: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 0 0 6px;
  font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 18px 4px 0; border-bottom: 1px solid #edf0f3; vertical-align: top; }
th { color: #5b6672; font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
summary { cursor: pointer; color: #1f5fa8; }
select { font: inherit; padding: 2px 6px; margin: 0 12px 0 4px; }
pre { background: #f4f6f8; padding: 10px 12px; border-radius: 6px; overflow-x: auto; margin: 0; }
footer ul { margin: 0; padding-left: 20px; }
footer .facts { margin-top: 8px; }
"""

# Counts errors on <body>, so that a test (or a reader) can see whether the page drew itself.
ERROR_HOOK = """
let errors = 0;
function count_error() { errors += 1; if (document.body) document.body.dataset.errors = errors; }
addEventListener("error", count_error);
addEventListener("unhandledrejection", count_error);
addEventListener("securitypolicyviolation", count_error);
"""

DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
function draw(element, figure) {
  element.hidden = !figure;
  return figure && Plotly.react(element, figure.data, figure.layout, {
    responsive: true,
    displayModeBar: "timeline" in element.dataset,
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  });
}
function draw_timelines(label) {
  return [...document.querySelectorAll("[data-timeline]")].map(
    element => draw(element, figures.timelines[label][element.dataset.timeline]));
}
const drawn = ["waits", "waterfall", "leave_one_out"].filter(name => figures[name]).map(
  name => draw(document.getElementById(name), figures[name]));
const path = document.getElementById("path");
if (path) {
  drawn.push(...draw_timelines(path.value));
  path.addEventListener("change", () => draw_timelines(path.value));
}
Promise.all(drawn).then(() => {
  document.body.dataset.errors = errors;
  document.body.dataset.drawn = "yes";
});
"""


def write_html_report(report: Mapping[str, Any], timelines: Mapping[str, Timeline], path: Path) -> None:
    """Writes the report and the timelines of its paths (by the same labels) to ``path``, whole or not at all.

    Raises UserError when ``path`` cannot be written.
    """
    write_whole_file(path, _page(report, timelines).encode())


def _page(report: Mapping[str, Any], timelines: Mapping[str, Timeline]) -> str:
    figures = _figures(report, timelines)
    sections = (
        _headline(report),
        _waits(report),
        _waterfall(report),
        _leave_one_out(report),
        _timelines(report, timelines, figures["timelines"]),
        _critical_path(report),
        _footer(report),
    )
    title = f"{report.get('model', 'Decode step')} on {report.get('machine', '')}"
    return html_document(title, "".join(sections), figures, DRAW)


def html_document(title: str, body: str, figures: Mapping[str, Any], draw: str) -> str:
    """A whole page that opens without a network: plotly, ``body`` (HTML), figures as JSON, ``draw`` (JavaScript).

    ``draw`` finds the figures in the element of that name, and sets ``data-drawn`` and ``data-errors`` of the body.
    """
    # Imported here: only pages need plotly, and only its JavaScript.
    from plotly.offline import get_plotlyjs

    # "<" as an escape: no text in the data can end the script element.
    data = json.dumps(figures, separators=(",", ":"), ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<script>{ERROR_HOOK}</script>
<script>{get_plotlyjs()}</script>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="figures">{data}</script>
<script>{draw}</script>
</body>
</html>
"""


def _figures(report: Mapping[str, Any], timelines: Mapping[str, Timeline]) -> Figure:
    """Every chart by name; ``timelines`` by path, then ``kda``, ``mla`` and ``step``."""
    figures: Figure = {
        "waits": waits_figure({label: row["waits_us"] for label, row in report["paths"].items()})
    }
    if report.get("waterfall"):
        figures["waterfall"] = waterfall_figure(report["waterfall"])
    if report.get("leave_one_out"):
        figures["leave_one_out"] = leave_one_out_figure(report["leave_one_out"])
    figures["timelines"] = {}
    for label, timeline in timelines.items():
        charts = {
            kind: layer_figure(timeline, layer) for kind, layer in report.get("example_layers", {}).items()
        }
        charts["step"] = step_figure(timeline)
        figures["timelines"][label] = {name: chart for name, chart in charts.items() if chart}
    return figures


def _headline(report: Mapping[str, Any]) -> str:
    facts = [
        _text(report.get("machine")),
        _text(report.get("layout")),
        f"concurrency {_number(report.get('concurrency'))}",
        f"context {_number(report.get('context'))} tokens",
    ]
    return f"""<header>
<h1>One decode step of {_text(report.get("model", "the model"))}</h1>
<p class="facts">{" · ".join(facts)}</p>
<div class="cards">{"".join(_card(label, row) for label, row in report["paths"].items())}</div>
<p class="facts">Floor: the bytes the step must read, at the bandwidth the machine achieves.</p>
</header>
"""


def _card(label: str, row: Mapping[str, Any]) -> str:
    interval = row.get("step_us_interval")
    lines = [
        ("tok/s/user", _number(row.get("tokens_per_s_per_user"), digits=1)),
        ("speed-up over stock", _number(row.get("speedup"), digits=2, unit="×")),
        ("floor", _number(row.get("floor_us"), unit="µs")),
        ("floor / step", _percent(row.get("floor_fraction"))),
        ("HBM busy", _percent(row.get("hbm_busy_fraction"))),
    ]
    if interval:
        lines.insert(0, ("90 % interval", f"{_number(interval[0])} to {_number(interval[1], unit='µs')}"))
    known = [(name, value) for name, value in lines if value != UNKNOWN]
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in known)
    return f"""<section class="card"><h2>{_text(label)}</h2>
<p class="big">{_number(row["step_us"])}<span> µs a step</span></p><dl>{rows}</dl></section>"""


def _waits(report: Mapping[str, Any]) -> str:
    waits_us = {label: row["waits_us"] for label, row in report["paths"].items()}
    parts = list(dict.fromkeys(part for row in waits_us.values() for part in row))
    table = _table(
        ["part", *(f"{label} (µs)" for label in waits_us)],
        [[part, *(_number(row.get(part), digits=1) for row in waits_us.values())] for part in parts],
        numbers=range(1, 1 + len(waits_us)),
    )
    unknown = ""
    if "kernel" in parts:
        unknown = " Of a measured step, kernel and exchange are all that start and end of a kernel do not tell apart."
    return f"""<section><h2>Where the time goes</h2>
<p>Every instant of the step on its slowest rank is one part: blue is work, the other colours are waiting.{unknown}</p>
{_legend(parts, report.get("glossary", {}))}
<div class="chart" id="waits"></div>
<details><summary>As a table</summary>{table}</details></section>
"""


def _waterfall(report: Mapping[str, Any]) -> str:
    if not report.get("waterfall"):
        return ""
    return """<section><h2>Waiting removed, change by change</h2>
<p>Each bar is what one change takes off the step once those above are in. Point at a bar for its parts.</p>
<div class="chart" id="waterfall"></div></section>
"""


def _leave_one_out(report: Mapping[str, Any]) -> str:
    if not report.get("leave_one_out"):
        return ""
    return """<section><h2>Each change taken away alone</h2>
<p>How much longer the step takes when one change is removed from the full set.</p>
<div class="chart" id="leave_one_out"></div></section>
"""


def _timelines(
    report: Mapping[str, Any], timelines: Mapping[str, Timeline], charts: Mapping[str, Figure]
) -> str:
    if not timelines:
        return ""
    main_path = report.get("main_path", next(iter(timelines)))
    options = "".join(
        f'<option value="{escape(label)}"{" selected" if label == main_path else ""}>{escape(label)}</option>'
        for label in timelines
    )
    kernels = [kernel for timeline in timelines.values() for kernel in timeline.kernels]
    present = {span.phase for kernel in kernels for span in kernel.spans}
    groups = dict.fromkeys(stage_group(kernel.stage) for kernel in kernels)
    layers = "".join(
        f"<h3>One {escape(kind.upper())} layer (layer {layer})</h3>"
        f'<div class="chart" data-timeline="{escape(kind)}"></div>'
        for kind, layer in report.get("example_layers", {}).items()
        if any(kind in of_path for of_path in charts.values())
    )
    return f"""<section><h2>Timeline</h2>
<p><label>Path <select id="path">{options}</select></label> Slowest rank. Drag across a chart to zoom in,
double-click to zoom out.</p>
<p>{"In a layer, the upper bar of a kernel has its name and the lower its phases." if layers else ""}</p>
{_legend(groups, {})}
{_legend([phase.value for phase in Phase if phase in present], report.get("glossary", {})) if layers else ""}
{layers}
<h3>The whole step</h3>
<div class="chart" data-timeline="step"></div></section>
"""


def _critical_path(report: Mapping[str, Any]) -> str:
    rows = report.get("critical_path", [])[:MAX_CRITICAL_ROWS]
    if not rows:
        return ""
    table = _table(
        ["stage", "part", "µs a step"],
        [[row["stage"], row["part"], _number(row["us"], digits=1)] for row in rows],
        numbers=[2],
    )
    return f"<section><h2>Largest contributors on the critical path</h2>{table}</section>"


def _footer(report: Mapping[str, Any]) -> str:
    parts = []
    if report.get("command"):
        parts.append(f"<h2>To reproduce</h2><pre>{_text(report['command'])}</pre>")
    versions = [f"{_text(name)} {_text(version)}" for name, version in report.get("versions", {}).items()]
    parts.append(f'<p class="facts">{" · ".join(versions)}</p>')
    if report.get("machine_values"):
        names = ["field", "value", "unit", "kind", "source"]
        rows = [
            [_quantity(row[name]) if name == "value" else row[name] for name in names]
            for row in report["machine_values"]
        ]
        parts.append(f"<h2>Machine values this hangs on</h2>{_table(names, rows, numbers=[1])}")
    for key, title in (("not_modelled", "Not modelled"), ("limits", "What was measured, and what was not")):
        if report.get(key):
            items = "".join(f"<li>{_text(item)}</li>" for item in report[key])
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return f"<footer>{''.join(parts)}</footer>"


def _legend(parts: Iterable[str], glossary: Mapping[str, str]) -> str:
    entries = "".join(
        f'<li title="{escape(glossary.get(part, ""))}"><i style="background:{part_colour(part)}"></i>'
        f"{escape(part)}</li>"
        for part in parts
    )
    return f'<ul class="legend">{entries}</ul>'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """``numbers`` are the columns that hold numbers: they line up at the right."""
    align = ["class=number" if column in numbers else "" for column in range(len(names))]
    head = "".join(f"<th {how}>{_text(name)}</th>" for name, how in zip(names, align, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td {how}>{_text(cell)}</td>" for cell, how in zip(row, align, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: Any) -> str:
    return UNKNOWN if value is None else escape(str(value))


def _number(value: float | None, *, digits: int = 0, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}"


def _quantity(value: Any) -> str:
    """A machine value of unknown size: whole numbers in full, others to six digits."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"
    return str(value)


def _percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"
