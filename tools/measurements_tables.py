"""Write docs/measured.md, every case of what was measured beside what is predicted, and the tables of docs/accuracy.md.

    python tools/measurements_tables.py

Whoever changes a cost, a path or a machine runs it (``make readme`` does); a test compares the page with a fresh run.
"""

from __future__ import annotations

import re
from pathlib import Path

import accuracy_tables
from own_cases import cublas_cases, link_kernel_cases, link_step_cases, shipped_kernel_cases, shipped_step_cases
from sample_tables import (
    all_reduces,
    decode_parts,
    decode_rank,
    decode_steps,
    decode_switches,
    hand_overs,
    link_probes,
    projections,
)

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.claims import judge_claims
from k3sim.calibrate.compare.ladders import counts
from k3sim.calibrate.compare.shipped_links import LinkDifference, link_differences
from k3sim.calibrate.compare.shipped_steps import StageCase, shipped_stage_cases
from k3sim.calibrate.compare.validate import Validation, coverage, groups, summary, validate
from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios

PAGE = Path(__file__).parents[1] / "docs" / "measured.md"


def table(rows: list[ComparedCase], unit: str) -> str:
    lines = [f"| Reading | Measured {unit} | Predicted {unit} | Error | Source |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [
        f"| {row.hardware}: {row.label} | {row.measured:.2f} | {row.predicted:.2f} | {100 * row.error:+.1f} % | "
        f"{row.source} |"
        for row in rows
    ]
    errors = sorted(abs(row.error) for row in rows)
    lines.append("")
    lines.append(f"Median error {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %.")
    return "\n".join(lines) + "\n"


def published(found: Validation, kind: str) -> str:
    """Rows of one kind by hardware and engine, with their intervals; then median and worst of the judged ones."""
    lines = [
        "| Hardware, engine | Result | Published | Predicted | Unit | Error | 90 % of draws | Inside |",
        "| --- | --- | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for (of_kind, hardware, engine), rows in groups(found.rows).items():
        lines += [_published_line(hardware, engine, row) for row in rows if of_kind == kind]
    totals = summary(found.rows).get(kind)
    lines.append("")
    if totals is None:
        errors = sorted(abs(row.error) for row in found.rows if row.kind == kind)
        lines.append(
            f"None is judged, as their step gave an input of the model (`read_inside`). Median error "
            f"{100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %."
        )
        return "\n".join(lines) + "\n"
    lines.append(
        f"{totals['rows']} judged: median error {100 * totals['median_error']:.1f} %, worst "
        f"{100 * totals['worst_error']:.1f} %, {coverage(found.rows)[kind].text()}."
    )
    return "\n".join(lines) + "\n"


def _published_line(hardware: str, engine: str, row: ComparedCase) -> str:
    title = row.label if row.judged else f"({row.label})"
    low, high = row.interval
    return (
        f"| {hardware}, {engine} | {title} | {row.measured:.4g} | {row.predicted:.4g} | {row.unit} | "
        f"{100 * row.error:+.1f} % | {low:.4g} to {high:.4g} | {'yes' if row.inside_interval else 'no'} |"
    )


def ladder_tables(found: Validation) -> str:
    """Steps of each ladder that have a switch, and how many have none."""
    parts = []
    for ladder, steps in found.ladders:
        parts.append(f"**{ladder.title}** ({ladder.source}, {ladder.date})\n")
        parts.append("| Step | Saved ms | Predicted ms | Ratio | Verdict |\n| --- | ---: | ---: | ---: | --- |")
        for step in steps:
            if step.predicted_saving_ms is not None and step.verdict != "start":
                saved = f"{step.published_saving_ms:+.3f} | {step.predicted_saving_ms:+.3f}"
                ratio = "" if step.ratio is None else f"{step.ratio:.2f}"
                parts.append(f"| {step.title} | {saved} | {ratio} | {step.verdict} |")
        numbers = ", ".join(f"{verdict}: {count}" for verdict, count in counts(steps).items())
        noise = f"{100 * ladder.noise:g} % ({ladder.noise_source})" if ladder.noise else "not said"
        parts.append(f"\nSteps by verdict: {numbers}. Noise of a step: {noise}.\n")
    return "\n".join(parts) + "\n"


def claims_table() -> str:
    """Every claim with its figures and verdicts."""
    judged = judge_claims([load_scenario(path) for path in shipped_scenarios()])
    lines = [
        "| Claim | Figure | Claimed | Predicted | 90 % of draws | Verdict |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for one in judged:
        for each in one.figures:
            answer = each.answer
            unit = "last over first" if each.figure.unit == "falls" else each.figure.unit
            claimed = "falls" if each.figure.unit == "falls" else f"{each.figure.value:g} {unit}"
            predicted = f"{answer.predicted:.4g} {unit}" if answer else ""
            between = f"{answer.low:.4g} to {answer.high:.4g}" if answer else ""
            lines.append(
                f"| {one.scenario.title} | {each.figure.label} | {claimed} | {predicted} | {between} | {each.verdict} |"
            )
    return "\n".join(lines) + "\n"


def stage_table(rows: list[StageCase]) -> str:
    """Stages of the main stream, the largest share of the gap first."""
    lines = [
        "| Stage | Kernels | Measured us | Predicted us | Measured step us | Predicted step us | Of the gap us |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def gap_us(row: StageCase) -> float:
        return row.count * (row.increment.measured - row.increment.predicted)

    for row in sorted(rows, key=gap_us, reverse=True):
        if row.stream == "main":
            lines.append(
                f"| {row.stage} | {row.count} | {row.duration.measured:.2f} | {row.duration.predicted:.2f} | "
                f"{row.increment.measured:.2f} | {row.increment.predicted:.2f} | {gap_us(row):+.0f} |"
            )
    return "\n".join(lines) + "\n"


def difference_table(rows: list[LinkDifference]) -> str:
    lines = [
        "| Path | Exchanges a step | Measured us | Predicted us | Measured us an exchange | Predicted us an exchange |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.case.label} | {row.num_exchanges} | {row.case.measured:+.1f} | {row.case.predicted:+.1f} | "
        f"{row.case.measured / row.num_exchanges:+.2f} | {row.case.predicted / row.num_exchanges:+.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


SECTIONS = """
# Measured beside predicted

Written whole by `tools/measurements_tables.py` (`make readme`) from the code and the stored samples; nothing here is
edited by hand. [accuracy.md](accuracy.md) sums it up and says where the model is wrong and why.
[journal](journal/README.md) holds the laboratory notes.

## Whole decode steps

`k3sim validate`. Rows in brackets are not judged: their record says what the model does not describe.

@steps@
## Stages of one KDA layer

`k3sim validate gb200-k3opt-kda-layer`

@kda layer@
## Optimisation ladders

`k3sim validate`, last tables. Steps for which the fused path has no switch or part are counted below each table. Ratio:
predicted over published saving. A step is right in size between half and twice; where what was saved is less than the
noise of the source, agreement is called noise, and no disagreement is.

@ladders@
## Claims

`k3sim claims`

@claims@
## Public kernels

`k3sim validate`. Kernels repeated in a CUDA graph with cold weights.

@kernels@
## Shipped kernels on one H200

`k3sim validate --own`. Kernels in a chain with programmatic dependent launch, cold weights.

@own kernels@
## cuBLAS on one H200

`k3sim validate --own`. Products of the stock path in a chain on plain graph edges.

@cublas@
## Whole rank on one H200

`k3sim validate --own`. One TP16 rank, all 93 layers, with the loopback fabric on both sides.

@own steps@
## Fused step of one row, stage by stage

`k3sim validate --own`. Duration is from start to end; the step of a stage is from the latest end on the main stream to
its own end.

@own stages@
## Measured steps by context and rows

`k3sim decode --path stock` and `k3sim decode --path fused`, stored in `calibrate/data/h200-decode-steps.json`.

@decode steps@
## Measured switches

One request, 8,192 tokens, from the same file.

@decode switches@
## One request at 8192 tokens

@decode rank@
## Parts of the measured fused step

`k3sim report calibrate/data/h200-decode-fused.json`

@decode parts@
## Exchanges checked between GPUs

`k3sim kernels check --gpus 2`, stored in `calibrate/data/h200-hand-overs.json`.

@hand-overs@
## Primitives of the link

`python -m k3sim.calibrate.probes.links`, stored in `calibrate/data/h200-links.json`.

@link probes@
## All-reduce by size

Chains of equal calls in one CUDA graph, from the same file.

@all-reduces@
## Projection with all-reduce

Projection, exchange, residual, mix and norm together, cold weights, from the same file.

@projections@
## Kernels over the link

@link kernels@
## Steps over the link

40 layers at TP8, context 8k, stored in `calibrate/data/h200-link-steps.json`.

@link steps@
## What the link adds

Steps over the link less the same steps with the loopback fabric.

@link differences@
""".lstrip()


def page(found: Validation) -> str:
    """The whole of measured.md."""
    tables = {
        "steps": published(found, "step"),
        "kda layer": published(found, "stage"),
        "kernels": published(found, "kernel"),
        "ladders": ladder_tables(found),
        "claims": claims_table(),
        "own kernels": table(shipped_kernel_cases(), "us"),
        "decode steps": decode_steps(),
        "decode switches": decode_switches(),
        "decode rank": decode_rank(),
        "decode parts": decode_parts(),
        "cublas": table(cublas_cases(), "us"),
        "own steps": table(shipped_step_cases(), "ms"),
        "own stages": stage_table(shipped_stage_cases()),
        "hand-overs": hand_overs(),
        "link probes": link_probes(),
        "all-reduces": all_reduces(),
        "projections": projections(),
        "link kernels": table(link_kernel_cases(), "us"),
        "link steps": table(link_step_cases(), "ms"),
        "link differences": difference_table(link_differences()),
    }
    return re.sub(r"^@(.+)@$", lambda name: tables[name[1]], SECTIONS, flags=re.MULTILINE).rstrip() + "\n"


if __name__ == "__main__":
    found = validate()
    PAGE.write_text(page(found), encoding="utf-8")
    accuracy = accuracy_tables.ACCURACY
    accuracy.write_text(accuracy_tables.rewritten(accuracy.read_text(encoding="utf-8"), found), encoding="utf-8")
