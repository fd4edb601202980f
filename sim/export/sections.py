"""The sections of the report of a step, as HTML. ``html.py`` says what ``report`` holds.

What a user wrote (labels, sources, commands) is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from k3sim.sim.export.bars import leave_one_out_bars, waits_bars, waterfall_bars
from k3sim.sim.export.colours import MEANINGS, in_order, word_class
from k3sim.sim.quantities import quantity
from k3sim.sim.timeline.critical_path import WORK_PARTS, Part

MAX_CRITICAL_ROWS = 20
MAX_MACHINE_VALUES = 12
NUM_WAITS = 3  # that the top line names
UNKNOWN = "–"
WORK_WORDS = tuple(part.word for part in WORK_PARTS)


def headline(report: Mapping[str, Any]) -> str:
    """What was asked, the answer in words, and the paths side by side."""
    num_gpus = report.get("num_gpus")
    facts = [
        text(report.get("machine")),
        text(report.get("layout")),
        *([f"{number(num_gpus)} GPUs"] if num_gpus else []),
        f"concurrency {number(report.get('concurrency'))}",
        f"context {number(report.get('context'))} tokens",
    ]
    return f"""<header>
<h1>One decode step of {text(report.get("model", "the model"))}</h1>
<p class="facts">{" · ".join(facts)}</p>
<p class="answer">{_answer(report)}</p>
{_memory(report.get("memory"))}
{_paths_table(report["paths"])}
<p class="facts">Memory roofline: the bytes that the step must read, at the bandwidth that the machine achieves.</p>
</header>
"""


def _memory(memory: Mapping[str, Any] | None) -> str:
    """What one GPU holds, and what would fit, as a line."""
    if not memory:
        return ""
    held = {
        "weights": memory["weights_bytes"],
        "KV cache": memory["kv_cache_bytes"],
        "KDA state": memory["kda_state_bytes"],
        "workspace": memory["activations_and_workspace_bytes"],
    }
    named = ", ".join(f"{name} {number(size / 1e9, digits=1)}" for name, size in held.items() if size)
    tokens = memory["tokens_that_fit"]
    also = "" if tokens is None else f", or {number(tokens)} cached tokens in all"
    return (
        f'<p class="facts">Memory of a GPU: {number(memory["total_bytes"] / 1e9, digits=1)} of '
        f'{number(memory["capacity_bytes"] / 1e9, digits=1)} GB ({named}); room for '
        f'{number(memory["users_that_fit"])} users at this context{also}</p>'
    )


def _answer(report: Mapping[str, Any]) -> str:
    """Step, rates, gain and the largest waits of the main path, as two sentences."""
    label = report.get("main_path", next(iter(report["paths"])))
    row = report["paths"][label]
    rates = [
        f"<b>{number(value, digits=1)} {name}</b>"
        for name, value in (
            ("tok/s/user", row.get("tokens_per_s_per_user")),
            ("tok/s/GPU", row.get("tokens_per_s_per_gpu")),
        )
        if value is not None
    ]
    on = f" on {number(report['num_gpus'])} GPUs" if report.get("num_gpus") else ""
    first = f"A step of <b>{text(label)}</b> takes <b>{number(row['step_us'])} µs</b>"
    if rates:
        first += f": {' and '.join(rates)}{on}"
    first += _gain(report, label, row)
    waits = sorted(
        ((us, part) for part, us in row["waits_us"].items() if part not in WORK_WORDS and us > 0), reverse=True
    )
    named = [
        f"{text(part)} {number(us)} µs ({percent(us / row['step_us'])})" for us, part in waits[:NUM_WAITS]
    ]
    # Of a measured kernel, what is not its bytes may be work or waiting.
    called = "parts beside the counted bytes" if Part.UNKNOWN.word in row["waits_us"] else "waits"
    second = f" Its largest {called} are {', '.join(named)}." if named else ""
    return f"{first}.{second}"


def _gain(report: Mapping[str, Any], label: str, row: Mapping[str, Any]) -> str:
    """The gain over the path that it is compared with, and its interval."""
    against = report.get("compared_with", "stock")
    if row.get("speedup") is None or label == against:
        return ""
    gain = f", <b>{number(row['speedup'], digits=2)}×</b> {text(against)}"
    if row.get("speedup_interval"):
        low, high = row["speedup_interval"]
        return f"{gain} (90 % of draws: {low:,.2f} to {high:,.2f}×)"
    return f"{gain} (no interval; <code>--intervals</code> adds it)" if report.get("can_draw") else gain


def _paths_table(paths: Mapping[str, Mapping[str, Any]]) -> str:
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("step (µs)", lambda row: number(row["step_us"])),
        ("90 % of draws (µs)", lambda row: interval(row.get("step_us_interval"))),
        ("tok/s/user", lambda row: number(row.get("tokens_per_s_per_user"), digits=1)),
        ("tok/s/GPU", lambda row: number(row.get("tokens_per_s_per_gpu"), digits=1)),
        ("gain", lambda row: number(row.get("speedup"), digits=2, unit="×")),
        ("roofline (µs)", lambda row: number(row.get("floor_us"))),
        ("of roofline", lambda row: percent(row.get("floor_fraction"))),
    ]
    shown = [(name, cell) for name, cell in columns if any(cell(row) != UNKNOWN for row in paths.values())]
    return table(
        ["path", *(name for name, _ in shown)],
        [[label, *(cell(row) for _, cell in shown)] for label, row in paths.items()],
        numbers=range(1, 1 + len(shown)),
    )


def waits(report: Mapping[str, Any]) -> str:
    """Where the step goes on each path: bars, and the numbers."""
    waits_us = {label: row["waits_us"] for label, row in report["paths"].items()}
    parts = in_order(part for row in waits_us.values() for part in row)
    rows = [[part, *(number(row.get(part), digits=1) for row in waits_us.values())] for part in parts]
    numbers = table(
        ["part", *(f"{label} (µs)" for label in waits_us)], rows, numbers=range(1, 1 + len(waits_us)), coloured=True
    )
    unknown = ""
    if "kernel" in parts:
        unknown = " Of a measured step, kernel and exchange are all that start and end of a kernel do not tell apart."
    return f"""<section><h2>Where the time goes</h2>
<p>Every instant of the step on its slowest rank is one part, work or a wait.{unknown}</p>
{legend(parts, report.get("glossary", {}))}
{waits_bars(waits_us)}
<details><summary>As a table</summary>{numbers}</details></section>
"""


def waterfall(report: Mapping[str, Any]) -> str:
    if not report.get("waterfall"):
        return ""
    return f"""<section><h2>Waiting removed, change by change</h2>
<p>Each bar is what one change takes off the step once those above it are in; below its name, the parts that change
most.</p>
{waterfall_bars(report["waterfall"])}</section>
"""


def leave_one_out(report: Mapping[str, Any]) -> str:
    if not report.get("leave_one_out"):
        return ""
    return f"""<section><h2>Each change taken away alone</h2>
<p>How much longer the step takes when one change is removed from the full set.</p>
{leave_one_out_bars(report["leave_one_out"])}</section>
"""


def critical_path_table(report: Mapping[str, Any]) -> str:
    rows = report.get("critical_path", [])[:MAX_CRITICAL_ROWS]
    if not rows:
        return ""
    body = table(
        ["part", "stage", "µs a step"],
        [[row["part"], row["stage"], number(row["us"], digits=1)] for row in rows],
        numbers=[2],
        coloured=True,
    )
    return f"<section><h2>Largest contributors on the critical path</h2>{body}</section>"


def timelines(report: Mapping[str, Any], labels: Iterable[str], words: Iterable[str], kinds: Iterable[str]) -> str:
    """Room for the charts, and what controls them. ``words`` are those that the charts show, ``kinds`` of layers."""
    labels = list(labels)
    if not labels:
        return ""
    main_path = report.get("main_path", labels[0])
    options = "".join(
        f'<option value="{escape(label)}"{" selected" if label == main_path else ""}>{escape(label)}</option>'
        for label in labels
    )
    layers = report.get("example_layers", {})
    charts = "".join(
        _chart(kind, f"One {kind.upper()} layer (layer {layers[kind]})", f"the start of layer {layers[kind]}")
        for kind in kinds
    )
    return f"""<section id="timeline"><h2>Timeline</h2>
<p>The slowest rank, a stream a row: kernels above, what each does below, in the colours of <i>Where the time goes</i>.
The line through them is the critical path: what the step waits for, one kernel at a time.</p>
<p>Point at a chart and press <kbd>W</kbd> <kbd>S</kbd> to zoom and <kbd>A</kbd> <kbd>D</kbd> to pan, as in Perfetto;
<kbd>0</kbd> shows all of it. Or drag across it, or turn the wheel with <kbd>Ctrl</kbd>; dragging with <kbd>Shift</kbd>
pans. <kbd>/</kbd> goes to the search.</p>
<div class="controls"><label>Path <select id="path">{options}</select></label>
<label><input type="checkbox" id="dim"> dim what is off the critical path</label>
<label>Search stages <input type="search" id="search" placeholder="moe.experts" autocomplete="off"></label>
<span><button id="previous" title="the match before (Shift+Enter)">‹</button>
<button id="next" title="the next match (Enter)">›</button></span> <output id="found"></output></div>
{legend(words, report.get("glossary", {}))}
{charts}
{_chart("step", "The whole step", "the start of the step")}
<div id="tip" role="tooltip" hidden></div></section>
"""


def _chart(name: str, title: str, origin: str) -> str:
    buttons = "".join(
        f'<button data-do="{key}" title="{hint} ({key.upper()})" aria-label="{hint}">{shown}</button>'
        for key, shown, hint in (
            ("w", "+", "zoom in"),
            ("s", "−", "zoom out"),
            ("a", "←", "pan left"),
            ("d", "→", "pan right"),
            ("0", "all", "see all"),
        )
    )
    return (
        f"<figure><figcaption>{text(title)} <span>{buttons}</span></figcaption>"
        f'<div class="chart timeline" data-timeline="{escape(name)}" data-origin="{escape(origin)}" tabindex="0" '
        f'role="group" aria-label="{escape(title)}"></div></figure>'
    )


def machine_values(report: Mapping[str, Any]) -> str:
    """The values of the machine that the step hangs on, with what each is, and where it comes from."""
    given = report.get("machine_values", [])
    if not given:
        return ""
    label = report.get("main_path", next(iter(report["paths"])))
    step_us = report["paths"][label]["step_us"]
    rows = [
        [
            row["field"],
            in_field_units(row["value"], row["unit"]),
            number(row["us"]),
            percent(row["us"] / step_us),
            row["kind"],
            row["source"],
        ]
        for row in given[:MAX_MACHINE_VALUES]
    ]
    left_us = sum(row["us"] for row in given[MAX_MACHINE_VALUES:])
    left = f" {len(given) - len(rows)} further values price {number(left_us)} µs together." if left_us else ""
    body = table(["value", "", "prices (µs)", "of the step", "kind", "source"], rows, numbers=[1, 2, 3], wrapped=True)
    return f"""<section><h2>Machine values that the answer hangs on</h2>
<p>What each prices of the critical path of <b>{text(label)}</b>, with no further simulation. A stretch that several
values price is divided among them by count × value. To first order, that is what the step would lose if a latency were
zero or a rate infinite while the path stays where it is; queues that such a change would empty count for what waits in
them.{left} <code>k3sim machines</code> lists all.</p>
{body}</section>"""


def in_field_units(value: Any, unit: str) -> str:
    """``343 ns``, ``7 TB/s``; of a curve its highest point, and a word as it is."""
    if isinstance(value, (list, tuple)):
        return f"curve up to {quantity(max(rate for _, rate in value), unit.rpartition(', ')[2])}"
    return quantity(value, unit) if isinstance(value, (int, float)) else str(value)


def footer(report: Mapping[str, Any]) -> str:
    parts = []
    if report.get("command"):
        parts.append(f"<h2>To reproduce</h2><pre>{text(report['command'])}</pre>")
    versions = [f"{text(name)} {text(version)}" for name, version in report.get("versions", {}).items()]
    parts.append(f'<p class="facts">{" · ".join(versions)}</p>')
    for key, title in (("not_modelled", "Not modelled"), ("limits", "What was measured, and what was not")):
        if report.get(key):
            items = "".join(f"<li>{text(item)}</li>" for item in report[key])
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return f"<footer>{''.join(parts)}</footer>"


def legend(words: Iterable[str], glossary: Mapping[str, str]) -> str:
    """Colours and words in the order of the table, work before waits; a word's meaning shows when pointed at."""
    ordered = in_order(words)
    groups = [
        ("work", [word for word in ordered if word in WORK_WORDS]),
        ("waits", [word for word in ordered if word not in WORK_WORDS]),
    ]
    items = []
    for name, members in groups:
        items += [f"<li><b>{name}</b></li>"] * bool(members)
        items += [
            f'<li title="{escape(glossary.get(word, MEANINGS.get(word, "")))}"><i class="{word_class(word)}"></i>'
            f"{escape(word)}</li>"
            for word in members
        ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int],
    coloured: bool = False,
    wrapped: bool = False,
) -> str:
    """``numbers`` are the columns that hold numbers: they line up at the right.

    ``coloured``: words of the first column have a colour. ``wrapped``: names break behind a "_" and the last column
    anywhere, so that it fits any window.
    """
    align = ["class=number" if column in numbers else "" for column in range(len(names))]

    def cell(column: int, value: str) -> str:
        colour = f'<i class="{word_class(value)}"></i>' if coloured and column == 0 else ""
        shown = text(value).replace("_", "_<wbr>") if wrapped and column == 0 else text(value)
        return f"<td {align[column]}>{colour}{shown}</td>"

    head = "".join(f"<th {how}>{text(name)}</th>" for name, how in zip(names, align, strict=True))
    body = "".join("<tr>" + "".join(cell(i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    kind = ' class="wrapped"' if wrapped else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def text(value: Any) -> str:
    return UNKNOWN if value is None else escape(str(value))


def number(value: float | None, *, digits: int = 0, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}"


def interval(bounds: Sequence[float] | None) -> str:
    return UNKNOWN if not bounds else f"{bounds[0]:,.0f} to {bounds[1]:,.0f}"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"
