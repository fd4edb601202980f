"""Rewrite the tables of measurements.md that follow from the code: predictions beside published readings.

    python docs/measurements_tables.py

Whoever changes a cost, a path or a machine runs it (``make readme`` does); a test compares the page with a fresh run.
"""

from __future__ import annotations

from pathlib import Path

from k3sim.calibrate.own_kernels import cublas_rows, own_kernel_rows
from k3sim.calibrate.own_steps import StageRow, own_stage_rows, own_step_rows
from k3sim.calibrate.validate import Row, kernel_rows, layer_rows, skewed_routing_rows, step_rows

PAGE = Path(__file__).parent / "measurements.md"


def table(rows: list[Row], unit: str) -> str:
    lines = [f"| Reading | Measured {unit} | Predicted {unit} | Error | Source |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [
        f"| {row.label} | {row.measured:.2f} | {row.predicted:.2f} | {100 * row.error:+.1f} % | {row.source} |"
        for row in rows
    ]
    errors = sorted(abs(row.error) for row in rows)
    lines.append("")
    lines.append(f"Median error {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %.")
    return "\n".join(lines) + "\n"


def stage_table(rows: list[StageRow]) -> str:
    """Stages of the main stream, the largest share of the gap first."""
    lines = [
        "| Stage | Kernels | Measured us | Predicted us | Measured step us | Predicted step us | Of the gap us |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def gap_us(row: StageRow) -> float:
        return row.count * (row.measured_increment_us - row.predicted_increment_us)

    for row in sorted(rows, key=gap_us, reverse=True):
        if row.stream == "main":
            lines.append(
                f"| {row.stage} | {row.count} | {row.measured_duration_us:.2f} | {row.predicted_duration_us:.2f} | "
                f"{row.measured_increment_us:.2f} | {row.predicted_increment_us:.2f} | {gap_us(row):+.0f} |"
            )
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """``page`` with what lies between each pair of markers replaced."""
    tables = {
        "steps": table(step_rows(), "ms"),
        "skewed routing": table(skewed_routing_rows(), "ms"),
        "kda layer": table(layer_rows(), "us"),
        "kernels": table(kernel_rows(), "us"),
        "own kernels": table(own_kernel_rows(), "us"),
        "cublas": table(cublas_rows(), "us"),
        "own steps": table(own_step_rows(), "ms"),
        "own stages": stage_table(own_stage_rows()),
    }
    for name, text in tables.items():
        begin, end = f"<!-- {name}: written by docs/measurements_tables.py -->\n", f"<!-- {name}: end -->\n"
        assert page.count(begin) == page.count(end) == 1, f"measurements.md has lost its markers of {name!r}"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
