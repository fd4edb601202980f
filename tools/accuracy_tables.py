"""The three tables of docs/accuracy.md, errors summed up over groups of compared cases, and its line on intervals.

They stand beside the reasons that a reader needs with them, so they lie between markers in that page, as the block of
output does in README.md. Every single case is in docs/measured.md. ``measurements_tables.py`` writes both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marked_blocks import with_blocks
from own_cases import cublas_cases, link_kernel_cases, link_step_cases, shipped_kernel_cases, shipped_step_cases

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.validate import Validation, coverage
from k3sim.model.paths import SWITCHES

ACCURACY = Path(__file__).parents[1] / "docs" / "accuracy.md"
HEAD = (
    "| {} | Cases | Median error | Mean error | Worst | Inside 90 % | Command |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Compared cases of one line. ``inside`` counts those within the interval, None where none is drawn."""

    title: str
    errors: Sequence[float]  # predicted over measured, less one, of times
    inside: int | None
    command: str

    def line(self) -> str:
        sizes = sorted(abs(one) for one in self.errors)
        inside = "" if self.inside is None else f"{self.inside} of {len(sizes)}"
        worst = max(self.errors, key=abs)
        return (
            f"| {self.title} | {len(sizes)} | {100 * statistics.median(sizes):.1f} % | "
            f"{100 * statistics.mean(self.errors):+.1f} % | {100 * worst:+.1f} % | {inside} | `{self.command}` |"
        )


def time_error(row: ComparedCase) -> float:
    """Error of a published value as a time: positive when the prediction is slower, whatever the unit."""
    return 1 / (1 + row.error) - 1 if row.unit.startswith("tok/s") else row.error


def published_group(title: str, rows: Iterable[ComparedCase], command: str) -> Group:
    chosen = list(rows)
    return Group(
        title=title,
        errors=[time_error(row) for row in chosen],
        inside=sum(row.inside_interval for row in chosen),
        command=command,
    )


def measured_group(title: str, rows: Iterable[ComparedCase], command: str) -> Group:
    return Group(title=title, errors=[row.error for row in rows], inside=None, command=command)


def step_groups(found: Validation, own: Sequence[ComparedCase]) -> list[Group]:
    """Published steps by path and GPU, then those of the shipped kernels."""
    judged = [row for row in found.rows if row.kind == "step" and row.judged]
    groups = []
    for path in ("stock", "fused"):
        for gpu in ("gb200", "gb300", "b300"):
            rows = [
                row
                for row in judged
                if row.hardware == gpu and ("--path stock" in row.command) == (path == "stock")
            ]
            if rows:
                groups.append(published_group(f"published, {path}, {gpu}", rows, f"k3sim validate {gpu}"))
    layer = [row for row in found.rows if row.kind == "stage"]
    title = "stages of one KDA layer, fused, gb200" + ("" if layer[0].judged else " (gave an input: not judged)")
    groups.append(published_group(title, layer, "k3sim validate gb200-k3opt-kda-layer"))
    whole = {path: [row for row in own if row.label.startswith(f"{path}, ")] for path in ("stock", "fused")}
    some = [row for row in own if row not in whole["stock"] and row not in whole["fused"]]
    groups += [
        measured_group(f"shipped kernels, {path}, one H200", rows, "k3sim validate --own")
        for path, rows in whole.items()
    ]
    groups.append(measured_group("one switch on or off, one H200", some, "k3sim validate --own"))
    linked = [row for row in link_step_cases() if "NVLink" in row.label]
    groups.append(measured_group("shipped kernels, two H200 over NVLink", linked, "k3sim calibrate --check"))
    return groups


def kernel_groups(found: Validation) -> list[Group]:
    """Public kernels by GPU, then the shipped ones by operator, cuBLAS and those over the link."""
    judged = [row for row in found.rows if row.kind == "kernel" and row.judged]
    groups = [
        published_group(
            f"public, {gpu}", [row for row in judged if row.hardware == gpu], f"k3sim validate {gpu}"
        )
        for gpu in ("gb200", "gb300", "b200", "b300", "h200")
    ]
    groups.append(measured_group("cuBLAS in a chain, H200", cublas_cases(), "k3sim validate --own"))
    of_operator: dict[str, list[ComparedCase]] = {}
    for row in shipped_kernel_cases():
        of_operator.setdefault(row.label.split()[0], []).append(row)
    groups += [
        measured_group(f"`{operator}` in a chain, H200", rows, "k3sim validate --own")
        for operator, rows in sorted(of_operator.items())
    ]
    groups.append(measured_group("exchanges over NVLink, two H200", link_kernel_cases(), "k3sim calibrate --check"))
    return groups


def whatif_table(found: Validation, own: Sequence[ComparedCase]) -> str:
    """What a change saves: measured, predicted, and the ratio of the two."""
    lines = [
        "| Change | Where | Measured | Predicted | Predicted over measured |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    step = {row.id: row for row in found.rows if row.kind == "step"}
    for users in (1, 2, 4, 8, 16):
        stock, fused = (step[f"gb200-k3opt-{path}-c{users}"] for path in ("stock", "fused"))
        published = stock.measured / fused.measured
        predicted = stock.predicted / fused.predicted
        if stock.unit.startswith("tok/s"):
            published, predicted = 1 / published, 1 / predicted
        who = "1 user" if users == 1 else f"{users} users"
        lines.append(
            f"| all four | published, 16 gb200, {who} | {published:.2f} x | {predicted:.2f} x | "
            f"{predicted / published:.2f} |"
        )
    at = {row.label: row for row in own}
    stock, fused = at["stock, 1 row, 8k"], at["fused, 1 row, 8k"]
    measured, predicted = stock.measured / fused.measured, stock.predicted / fused.predicted
    lines.append(f"| all four | one H200, 1 row | {measured:.2f} x | {predicted:.2f} x | {predicted / measured:.2f} |")
    for switch in SWITCHES:
        alone, without = (at[f"fused {how}, 1 row, 8k"] for how in (f"with {switch} alone", f"without {switch}"))
        for how, before, after in (("added to stock", stock, alone), ("removed from all four", fused, without)):
            was, is_now = (1e3 * (getattr(after, side) - getattr(before, side)) for side in ("measured", "predicted"))
            ratio = f"{is_now / was:.2f}" if abs(was) >= 1e3 * SMALL * before.measured else "below the noise"
            lines.append(f"| `{switch}` {how} | one H200, 1 row | {was:+,.0f} us | {is_now:+,.0f} us | {ratio} |")
    return "\n".join(lines) + "\n"


def coverage_line(found: Validation) -> str:
    """How many published results lie inside their interval, by kind."""
    counts = "; ".join(f"{kind}s, {one.text()}" for kind, one in coverage(found.rows).items())
    return (
        "* **Intervals** hold what machine values and measured kernels of other families and GPUs leave open "
        "([how](calibration.md#intervals)); not what no kernel shows alone, such as an engine that launches others. Of "
        f"{counts}.\n"
    )


#: A measured difference below this share of the step says nothing about a ratio.
SMALL = 0.01


def rewritten(page: str, found: Validation) -> str:
    """``page`` with what lies between each pair of markers replaced."""
    own = shipped_step_cases()
    tables = {
        "steps": "\n".join([HEAD.format("Steps"), *(one.line() for one in step_groups(found, own))]) + "\n",
        "kernels": "\n".join([HEAD.format("Kernels"), *(one.line() for one in kernel_groups(found))]) + "\n",
        "switches": whatif_table(found, own),
        "coverage": coverage_line(found),
    }
    return with_blocks(page, "accuracy_tables.py", tables)
