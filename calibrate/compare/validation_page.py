"""Published results beside predictions as one HTML page that opens without a network.

A parity plot, every row with its interval, the optimisation ladders step by step, and the claims with their verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import page_parts
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.claims import JudgedClaim
from k3sim.calibrate.compare.validate import Validation, coverage, groups, summary
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.question import gpus_of

TITLE = "Published results beside predictions"
COLOURS = ("#3b82d6", "#c2571a", "#2e7d4f", "#7a4fa3", "#b03a5b", "#5d6b78", "#a0822a", "#1f8a8a")
TOLERANCE = 0.2  # the band of the parity plot


def write_validation_page(path: Path, found: Validation, claims: Sequence[JudgedClaim]) -> None:
    """Write the page, whole or not at all. Raises UserError when ``path`` cannot be written."""
    write_whole_file(path, page(found, claims).encode())


def page(found: Validation, claims: Sequence[JudgedClaim]) -> str:
    figures: dict[str, Any] = {}
    if found.rows:
        figures["parity"] = parity_figure(found.rows)
        judged = [row for row in found.rows if row.judged] or found.rows
        figures["errors"] = page_parts.errors_figure(
            (
                (f"{row.hardware}, {row.kind}s", f"{row.engine}: {row.label}", row.error, row.inside_interval)
                for row in judged
            ),
            TOLERANCE,
        )
    for number, (_, steps) in enumerate(found.ladders):
        figures[f"ladder{number}"] = ladder_figure(steps)
    return page_parts.page_of(TITLE, [*_rows(found), *_ladders(found), *_claims(claims)], figures)


def parity_figure(rows: Sequence[ComparedCase]) -> dict[str, Any]:
    """Published (x) against predicted (y) as time, logarithmic, one colour a machine and one symbol a kind."""

    def point(row: ComparedCase) -> page_parts.Point:
        low, high = sorted(row.us(bound) for bound in row.interval)
        return f"{row.engine}: {row.label}", row.us(row.measured), row.us(row.predicted), low, high

    points = [point(row) for row in rows]
    traces = [
        page_parts.equal_line(points, margin=1.2, factor=factor, name=name)
        for factor, name in ((1.0, "equal"), (1 + TOLERANCE, "+20 %"), (1 - TOLERANCE, "-20 %"))
    ]
    machines = sorted({row.hardware for row in rows})
    symbols = {"step": "circle", "stage": "diamond", "kernel": "square"}
    for colour, machine in zip(cycle(COLOURS), machines, strict=False):
        for kind, symbol in symbols.items():
            of = [row for row in rows if row.hardware == machine and row.kind == kind]
            if of:
                shown = [symbol if row.judged else f"{symbol}-open" for row in of]
                name = f"{machine}, {kind}s"
                placed = [point(row) for row in of]
                traces.append(page_parts.parity_points(placed, name, "published", colour, size=8, symbol=shown))
    return {"data": traces, "layout": page_parts.parity_layout("published", 620)}


def ladder_figure(steps: Sequence[Any]) -> dict[str, Any]:
    """Savings of each step that was judged, published beside predicted, in milliseconds."""
    shown = [one for one in steps if one.predicted_saving_ms is not None and one.verdict != "start"]
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "marker": {"color": colour},
                "x": [getattr(one, field) for one in shown],
                "y": [page_parts.wrapped(one.title) for one in shown],
                "hovertemplate": "%{y}<br>%{x:+.3f} ms<extra></extra>",
            }
            for name, field, colour in (
                ("published", "published_saving_ms", "#9aa5b1"),
                ("predicted", "predicted_saving_ms", "#3b82d6"),
            )
        ],
        "layout": {
            **page_parts.LAYOUT,
            "height": page_parts.height_of([page_parts.wrapped(one.title) for one in shown], least_px=46),
            "xaxis": {**page_parts.GRID, "title": {"text": "saved of the step, ms"}},
            "yaxis": {**page_parts.GRID, "autorange": "reversed"},
        },
    }


def _rows(found: Validation) -> list[str]:
    if not found.rows:
        return []
    covered = coverage(found.rows)
    totals = page_parts.html_table(
        (
            "judged", "rows", "median error", "worst", "inside the 90 % interval", "right intervals", "half width",
            "outside",
        ),
        (
            (
                f"{kind}s",
                str(one["rows"]),
                page_parts.percent(one["median_error"]),
                page_parts.percent(one["worst_error"]),
                f"{covered[kind].num_inside} of {covered[kind].num_cases}",
                "{} to {}".format(*covered[kind].likely),
                page_parts.percent(covered[kind].half_width, 0),
                ", ".join(covered[kind].misses),
            )
            for kind, one in summary(found.rows).items()
        ),
        numbers=(1, 2, 3, 4, 5, 6),
    )
    columns = ("what", "machine", "GPUs", "kind", "published", "predicted", "error", "interval", "inside", "source")
    table = page_parts.html_table(
        columns,
        (
            (
                page_parts.two_lines(row.label, engine if row.judged else f"{engine}; not judged: {row.why}"),
                hardware,
                str(gpus_of(row.command) or ""),
                kind,
                f"{row.measured:,.4g} {row.unit}",
                f"{row.predicted:,.4g} {row.unit}",
                page_parts.signed_percent(row.error),
                f"{row.interval[0]:,.4g} to {row.interval[1]:,.4g}",
                "yes" if row.inside_interval else "no",
                page_parts.unfolding(f"{row.source}, {row.date}", {"not known": row.unknown, "command": row.command}),
            )
            for (kind, hardware, engine), rows in groups(found.rows).items()
            for row in rows
        ),
        numbers=(2, 4, 5, 6, 7),
    )
    return [
        "<section><h2>Parity</h2><p>Nothing here was fitted. Open symbols are results that the model does not "
        "describe; they are listed with the reason and not counted. Dotted lines are 20 % off. Vertical bars: "
        f"the middle 90 % over {found.num_draws} machines drawn from the intervals of the profile's values, with "
        "errors of kernels of other families and other GPUs. <i>Right intervals</i>: how many results would be inside "
        "if each were with the chance of 90 %. <i>Half width</i>: median, of the prediction.</p>"
        f"<div class='wide'>{totals}</div><div class='pair'><div class='chart' id='parity'></div>"
        "<div class='chart' id='errors'></div></div></section>",
        f"<section><h2>Every result</h2><p>A click on a column sorts by it.</p>"
        f"{page_parts.filtered(table, 'results', 'results')}</section>",
    ]


def _ladders(found: Validation) -> list[str]:
    sections = []
    for number, (ladder, steps) in enumerate(found.ladders):
        table = page_parts.html_table(
            ("step", "after it ms", "predicted ms", "saved ms", "predicted", "ratio", "verdict", "why"),
            (
                (
                    one.title,
                    f"{one.published_ms:.3f}",
                    "" if one.predicted_ms is None else f"{one.predicted_ms:.3f}",
                    "" if one.verdict == "start" else f"{one.published_saving_ms:+.3f}",
                    ""
                    if one.predicted_saving_ms is None or one.verdict == "start"
                    else f"{one.predicted_saving_ms:+.3f}",
                    "" if one.ratio is None else f"{one.ratio:.2f}",
                    one.verdict,
                    one.why,
                )
                for one in steps
            ),
            numbers=(1, 2, 3, 4, 5),
        )
        noise = f"{100 * ladder.noise:g} % of the step ({ladder.noise_source})" if ladder.noise else "not said"
        sections.append(
            f"<section><h2>{escape(ladder.title)}</h2><p>{escape(ladder.source)}, {escape(ladder.date)}; not known: "
            f"{escape(ladder.unknown)}; noise of a saving: {escape(noise)}.</p>"
            f"<div class='chart' id='ladder{number}'></div><div class='wide'>{table}</div></section>"
        )
    return sections


def _claims(claims: Sequence[JudgedClaim]) -> list[str]:
    sections = []
    for one in claims:
        scenario = one.scenario
        figures = page_parts.html_table(
            ("figure", "claimed", "predicted", "90 % of draws", "unit", "verdict"),
            (
                (
                    figure.figure.label,
                    "falls" if figure.figure.unit == "falls" else f"{figure.figure.value:g}",
                    f"{figure.answer.predicted:.4g}" if figure.answer else "",
                    f"{figure.answer.low:.4g} to {figure.answer.high:.4g}" if figure.answer else "",
                    "last over first" if figure.figure.unit == "falls" else figure.figure.unit,
                    figure.verdict,
                )
                for figure in one.figures
            ),
            numbers=(1, 2, 3),
        )
        series = [(each.label, f"{each.predicted:.3f}", f"{each.low:.3f} to {each.high:.3f}", "")
                  for figure in one.figures for each in figure.series]  # fmt: skip
        others = [
            (each.label, f"{each.predicted:.4g}", f"{each.low:.4g} to {each.high:.4g}", "yes" if holds else "no")
            for each, holds in one.alternatives
        ]
        columns = ("otherwise", "predicted", "90 % of draws", "the claim holds")
        more = page_parts.html_table(columns, series + others, (1, 2))
        sections.append(
            f"<section><h2>{escape(scenario.title)}: {escape(one.verdict)}</h2><p>{escape(scenario.claim)}.</p>"
            f"<div class='wide'>{figures}</div><p><b>Boundary.</b> {escape(scenario.boundary)}</p>"
            f"<p><b>What would have to be true.</b> {escape(scenario.would_hold)}</p>"
            + (f"<div class='wide'>{more}</div>" if series or others else "")
            + f"<p>{escape(scenario.found)} ({escape(scenario.source)}, {escape(scenario.date)})</p></section>"
        )
    return sections
