"""A calibration as one HTML page that opens without a network: values, residuals, measured against predicted.

``write_calibration_page`` takes the documents that ``k3sim calibrate`` prints as JSON: of a fit, of a check, or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare import page_parts
from k3sim.sim.export.whole_file import write_whole_file

TOLERANCE = 0.1  # the band of the errors
COLOURS = {"probe": "#7a8794", "kernel": "#3b82d6", "step": "#c2571a"}


def write_calibration_page(
    path: Path, *, fit: Mapping[str, Any] | None = None, check: Mapping[str, Any] | None = None
) -> None:
    """Write the page, whole or not at all. Raises UserError when ``path`` cannot be written."""
    write_whole_file(path, page(fit, check).encode())


def page(fit: Mapping[str, Any] | None, check: Mapping[str, Any] | None) -> str:
    figures: dict[str, Any] = {}
    sections: list[str] = []
    if fit is not None:
        figures["residuals"] = residual_figure(fit["values"])
        sections += _fit_sections(fit)
    if check is not None:
        figures["against"] = against_figure(check["cases"])
        figures["errors"] = error_figure(check["cases"])
        sections += _check_sections(check)
    title = f"Calibration of {(fit or check or {}).get('machine', '')}"
    return page_parts.page_of(title, sections, figures)


def residual_figure(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Deviation of each case from the value it speaks of, in percent, one row a field."""
    traces = []
    for central, name, colour in ((True, "gives the value", "#3b82d6"), (False, "around it", "#c2a15a")):
        points = [
            (100 * case["residual"], one["field"], case["case"])
            for one in values
            for case in one["cases"]
            if case["central"] is central
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "marker": {"color": colour, "size": 8, "opacity": 0.75},
                "x": [x for x, _, _ in points],
                "y": [y for _, y, _ in points],
                "text": [text for _, _, text in points],
                "hovertemplate": "%{text}<br>%{x:+.2f} %<extra></extra>",
            }
        )
    rows = len({one["field"] for one in values if one["cases"]})
    return {
        "data": traces,
        "layout": {
            **page_parts.LAYOUT,
            "height": 120 + 24 * rows,
            "xaxis": {**page_parts.GRID, "title": {"text": "case against the value, %"}},
            "yaxis": {**page_parts.GRID, "autorange": "reversed"},
        },
    }


def against_figure(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measured (x) against predicted (y), logarithmic, with intervals and the diagonal."""
    of_kind: dict[str, list[page_parts.Point]] = {}
    for one in cases:
        point = (one["label"], one["measured"], one["predicted"], one["low"], one["high"])
        of_kind.setdefault(one["kind"], []).append(point)
    traces = [page_parts.equal_line(point for points in of_kind.values() for point in points)]
    traces += [
        page_parts.parity_points(of_kind[kind], kind, "measured", colour, size=7)
        for kind, colour in COLOURS.items()
        if kind in of_kind
    ]
    return {"data": traces, "layout": page_parts.parity_layout("measured", 560)}


def error_figure(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Error of every kernel and step in percent, by the family that the first word of its name says."""
    return page_parts.errors_figure(
        (
            (f"{one['kind']}s: {one['label'].split()[0]}", one["label"], one["error"], one["inside_interval"])
            for one in cases
            if one["kind"] != "probe"
        ),
        TOLERANCE,
    )


def _fit_sections(fit: Mapping[str, Any]) -> list[str]:
    values = page_parts.html_table(
        ("field", "value", "low", "high", "unit", "how", "worst case left out"),
        (
            (
                one["field"],
                "curve" if isinstance(one["value"], list) else f"{one['value']:.5g}",
                f"{one['low']:.4g}",
                f"{one['high']:.4g}",
                one["unit"],
                one["how"],
                "" if one["left_out_error"] is None else f"{100 * one['left_out_error']:.1f} %",
            )
            for one in fit["values"]
        ),
        numbers=(1, 2, 3, 6),
    )
    kernels = [
        (
            one["field"],
            f"{one['value']:.4g}",
            "" if one["low"] is None else f"{one['low']:.4g}",
            "" if one["high"] is None else f"{one['high']:.4g}",
            f"{one['profile_value']:.4g}",
            "determined" if one["determined"] else one["reason"],
        )
        for group in fit["from_kernels"]
        for one in group["found"]
    ]
    sections = [
        f"<p class='facts'>Samples of {escape(str(fit['gpu']))}, {escape(str(fit['date']))}; "
        f"{len(fit['refused'])} of {fit['num_samples']} samples refused as unstable.</p>",
        f"<section><h2>Values</h2><p>Low and high cover the bootstrap of the cases that give the value, and what other "
        f"circumstances read. The last column predicts one case from the others.</p><div class='wide'>{values}</div>"
        "</section>",
        "<section><h2>Residuals</h2><div class='chart' id='residuals'></div></section>",
    ]
    if kernels:
        columns = ("field", "from kernels", "low", "high", "in the profile", "verdict")
        sections.append(
            "<section><h2>What kernels say of values without a probe</h2><p>Reported, not put into the profile: such a "
            "value also takes up what a cost function leaves out.</p><div class='wide'>"
            f"{page_parts.html_table(columns, kernels, numbers=(1, 2, 3, 4))}</div></section>"
        )
    refused = page_parts.html_table(("sample", "why"), ((one["case"], one["reason"]) for one in fit["refused"]))
    sections.append(
        "<section><h2>Not determined</h2><p>The profile keeps what it had.</p><div class='wide'>"
        f"{page_parts.html_table(('field', 'why'), fit['undetermined'].items())}</div>"
        f"<details><summary>Refused samples</summary><div class='wide'>{refused}</div></details></section>"
    )
    return sections


def _check_sections(check: Mapping[str, Any]) -> list[str]:
    rows = page_parts.html_table(
        ("kind", "case", "profile", "measured us", "predicted us", "error", "interval us", "inside", "in the fit"),
        (
            (
                one["kind"],
                one["label"],
                one["hardware"],
                f"{one['measured']:,.4g}",
                f"{one['predicted']:,.4g}",
                page_parts.signed_percent(one["error"]),
                f"{one['low']:,.4g} to {one['high']:,.4g}",
                "yes" if one["inside_interval"] else "no",
                "yes" if one["used_in_fit"] else "no",
            )
            for one in check["cases"]
        ),
        numbers=(3, 4, 5, 6),
    )
    totals = page_parts.html_table(
        ("not in the fit", "cases", "median error", "95th percentile", "worst", "inside the 90 % interval"),
        (
            (
                f"{kind}s",
                f"{one['cases']}",
                *(page_parts.percent(one[name]) for name in ("median_error", "p95_error", "worst_error")),
                page_parts.percent(one["inside_interval"], 0),
            )
            for kind, one in check["summary"].items()
        ),
        numbers=(1, 2, 3, 4, 5),
    )
    by_family = page_parts.html_table(
        ("kind", "family", "cases", "median error", "mean error", "worst error", "worst case"),
        (
            (
                one["kind"],
                one["family"],
                f"{one['cases']}",
                page_parts.percent(one["median_error"]),
                page_parts.signed_percent(one["mean_signed_error"]),
                page_parts.signed_percent(one["worst_error"]),
                one["worst"],
            )
            for one in check["families"]
        ),
        numbers=(2, 3, 4, 5),
    )
    skipped = "".join(f"<li>{escape(one)}</li>" for one in check["skipped"])
    not_predicted = f"<details><summary>Not predicted, for want of a cost</summary><ul>{skipped}</ul></details>"
    return [
        f"<section><h2>Measured against predicted</h2><div class='wide'>{totals}</div>"
        "<div class='pair'><div class='chart' id='against'></div><div class='chart' id='errors'></div></div></section>",
        f"<section><h2>By family</h2><div class='wide'>{by_family}</div>{not_predicted if skipped else ''}</section>",
        f"<section><h2>All cases</h2><p>{len(check['cases'])} cases; a click on a column sorts by it.</p>"
        f"{page_parts.filtered(rows, 'cases', 'cases')}</section>",
    ]
