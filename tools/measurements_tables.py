"""Rewrite the tables of measurements.md that follow from the code or from stored samples.

    python tools/measurements_tables.py

Whoever changes a cost, a path or a machine runs it (``make readme`` does); a test compares the page with a fresh run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.claims import judge_claims
from k3sim.calibrate.compare.ladders import counts
from k3sim.calibrate.compare.own_kernels import cublas_rows, own_kernel_rows
from k3sim.calibrate.compare.own_links import (
    LinkDifference,
    link_differences,
    link_kernel_rows,
    link_samples,
    link_step_rows,
)
from k3sim.calibrate.compare.own_steps import StageRow, own_stage_rows, own_step_rows
from k3sim.calibrate.compare.validate import Row, Validated, Validation, groups, summary, validate
from k3sim.calibrate.decode.decode import DecodeOptions, case_of, table_cases
from k3sim.calibrate.evidence.scenarios import load_scenario, shipped_scenarios
from k3sim.calibrate.samples import Sample
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.program import build_program
from k3sim.sim.timeline.critical_path import Part

PAGE = Path(__file__).parent / "measurements.md"
DATA = Path(__file__).parents[1] / "calibrate" / "data"


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


def published(found: Validation, kind: str) -> str:
    """Rows of one kind by hardware and engine, with their intervals; then median and worst of the judged ones."""
    lines = [
        "| Hardware, engine | Result | Published | Predicted | Unit | Error | 90 % of draws | Inside |",
        "| --- | --- | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for (of_kind, hardware, engine), rows in groups(found.rows).items():
        lines += [_published_line(hardware, engine, row) for row in rows if of_kind == kind]
    totals = summary(found.rows)[kind]
    lines.append("")
    lines.append(
        f"{totals['rows']} judged: median error {100 * totals['median_error']:.1f} %, worst "
        f"{100 * totals['worst_error']:.1f} %, {100 * totals['inside_interval']:.0f} % inside the interval."
    )
    return "\n".join(lines) + "\n"


def _published_line(hardware: str, engine: str, row: Validated) -> str:
    one = row.evidence
    title = one.title if one.judged else f"({one.title})"
    return (
        f"| {hardware}, {engine} | {title} | {one.value:.4g} | {row.predicted:.4g} | {one.unit} | "
        f"{100 * row.error:+.1f} % | {row.low:.4g} to {row.high:.4g} | {'yes' if row.inside_interval else 'no'} |"
    )


def ladder_tables(found: Validation) -> str:
    """Steps of each ladder that have a switch, and how many have none."""
    parts = []
    for ladder, steps in found.ladders:
        parts.append(f"**{ladder.title}** ({ladder.source}, {ladder.date})\n")
        parts.append("| Step | Saved ms | Predicted ms | Verdict |\n| --- | ---: | ---: | --- |")
        for step in steps:
            if step.predicted_saving_ms is not None and step.verdict != "start":
                saved = f"{step.published_saving_ms:+.3f} | {step.predicted_saving_ms:+.3f}"
                parts.append(f"| {step.title} | {saved} | {step.verdict} |")
        numbers = ", ".join(f"{verdict}: {count}" for verdict, count in counts(steps).items())
        parts.append(f"\nSteps by verdict: {numbers}.\n")
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


def measured_steps() -> dict[str, dict[str, Any]]:
    """Steps of ``k3sim decode --table`` by the command that measures each."""
    return {row["command"]: row for row in json.loads((DATA / "h200-decode-steps.json").read_text())["steps"]}


def decode_steps() -> str:
    """Both paths by concurrency and context."""
    measured = measured_steps()
    cases = [one for one in table_cases(DecodeOptions()) if not one.with_switches and not one.without]
    lines = [
        "| Context | Requests | Stock us | Fused us | Speed-up | Stock of its floor | Fused of its floor |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for context, rows in sorted({(one.context, one.concurrency) for one in cases}):
        of_case = [DecodeOptions(path=path, concurrency=rows, context=context) for path in ("stock", "fused")]
        stock, fused = sides = [measured.get(one.command()) for one in of_case]
        cells = ["not yet measured" if one is None else f"{one['step_us']:,.0f}" for one in sides]
        cells.append("" if stock is None or fused is None else f"{stock['step_us'] / fused['step_us']:.2f}")
        cells += ["" if one is None else f"{100 * one['floor_fraction']:.0f} %" for one in sides]
        lines.append(f"| {context:,} | {rows} | {' | '.join(cells)} |")
    missing = [one.command() for one in cases if one.command() not in measured]
    lines += ["", f"{len(cases) - len(missing)} of {len(cases)} steps are measured"]
    lines[-1] += f"; not yet: {', '.join(f'`{one}`' for one in missing)}." if missing else "."
    return "\n".join(lines) + "\n"


def decode_switches() -> str:
    """Each switch alone, and each left out, at one request."""
    measured = measured_steps()
    stock = measured[DecodeOptions(path="stock").command()]["step_us"]
    fused = measured[DecodeOptions().command()]["step_us"]
    lines = [
        "| Switch | Alone us | Against stock us | All but it us | Against all four us |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for switch in SWITCHES:
        alone = measured[DecodeOptions(with_switches=(switch,)).command()]["step_us"]
        without = measured[DecodeOptions(without=(switch,)).command()]["step_us"]
        lines.append(
            f"| `{switch}` | {alone:,.0f} | {alone - stock:+,.0f} | {without:,.0f} | {without - fused:+,.0f} |"
        )
    return "\n".join([*lines, "", f"Stock is {stock:,.0f} us, all four are {fused:,.0f} us."]) + "\n"


def decode_rank() -> str:
    """One request at 8192 tokens: what was to be reached, and what was."""
    measured = measured_steps()
    stock, fused = (measured[DecodeOptions(path=path).command()] for path in ("stock", "fused"))
    whole = json.loads((DATA / "h200-decode-fused.json").read_text())
    allocated, needed = whole["allocated_bytes"], whole["needed_bytes"]
    cases = {path: case_of(DecodeOptions(path=path)) for path in ("stock", "fused")}
    own = {path: len(case.program.calls) for path, case in cases.items()}
    public = {}
    for path, case in cases.items():
        program = build_program(case.architecture, case.layout, case.workload, find_path(path))
        public[path] = sum(call.launch != "host" for call in program.calls)

    def verdict(reached: bool) -> str:
        return "reached" if reached else "missed"

    speedup, floor = stock["step_us"] / fused["step_us"], fused["floor_fraction"]
    error = allocated / needed - 1
    rows = [
        ("stock step", f"{stock['step_us']:,.1f} us (p10 {stock['p10_us']:,.1f}, p90 {stock['p90_us']:,.1f})", ""),
        ("fused step", f"{fused['step_us']:,.1f} us (p10 {fused['p10_us']:,.1f}, p90 {fused['p90_us']:,.1f})", ""),
        ("fused over stock", f"{speedup:.2f} times as fast", f"1.68: {verdict(speedup >= 1.68)}"),
        ("floor over fused step", f"{100 * floor:.0f} %", f"65 %: {verdict(floor >= 0.65)}"),
        ("start to first step", f"{whole['start_s']:.1f} s", f"60 s: {verdict(whole['start_s'] < 60)}"),
        (
            "memory, allocated over predicted",
            f"{allocated / 1e9:.2f} GB over {needed / 1e9:.2f} GB, {100 * error:+.1f} %",
            f"2 %: {verdict(abs(error) <= 0.02)}",
        ),
        ("launches of the fused step", f"{whole['num_launches']:,} by {own['fused']:,} calls", ""),
        ("calls of the stock step", f"{own['stock']:,}", ""),
        ("launches of the public paths, as simulated", f"stock {public['stock']:,}, fused {public['fused']:,}", ""),
    ]
    lines = ["| What | Measured | Wanted |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {what} | {is_now} | {wanted} |" for what, is_now, wanted in rows)]) + "\n"


def decode_parts() -> str:
    """Parts of the profiled fused step, and the stages that hold most of its critical path."""
    whole = json.loads((DATA / "h200-decode-fused.json").read_text())
    total = whole["profiled_us"]
    lines = ["| Part | us | Of the step | Most of it in |", "| --- | ---: | ---: | --- |"]
    for part in Part:
        us = whole["waits_us"].get(part.value)
        if us:
            most = [row for row in whole["critical_path"] if row["part"] == part.value][:4]
            stages = ", ".join(f"{row['stage']} {row['us']:,.0f}" for row in most)
            lines.append(f"| {part.word} | {us:,.1f} | {100 * us / total:.1f} % | {stages} |")
    lines.append(f"| step, profiled | {total:,.1f} | | |")
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


def hand_overs() -> str:
    """What was compared between GPUs, and what differed."""
    checks = json.loads((DATA / "h200-hand-overs.json").read_text())["checks"]
    lines = [
        "| Operator | What runs | GPUs for ranks | Replays: close, skewed, late | Unequal | First run |",
        "| --- | --- | --- | --- | ---: | --- |",
    ]
    for one in checks:
        replays = ", ".join(f"{one['replays'][how]:,}" for how in ("close", "skewed", "late") if how in one["replays"])
        first = f"{len(one['verdicts'])} comparisons with the reference" if one["verdicts"] else "between GPUs only"
        unequal = sum(one["unequal"].values()) + one["between_gpus"]
        verdict = "passed" if one["ok"] else "FAILED"
        lines.append(
            f"| `{one['operator']}` | {one['case']} | {one['gpus']} for {one['ranks']} | {replays} | {unequal} | "
            f"{first}; {verdict} |"
        )
    return "\n".join(lines) + "\n"


def _in_unit(sample: Sample, value: float) -> str:
    """Microseconds, or GB/s."""
    if sample.unit == "B/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value:.2f} us" if sample.unit == "us" else f"{1e6 * value / link_clock_hz():.3f} us"


def link_clock_hz() -> float:
    (clock,) = link_samples().matching("clocks", "sm_clock")
    return clock.value


def link_probes() -> str:
    """Every primitive of the link: median of both runs, deciles, repetitions."""
    lines = ["| Probe | Case | Median | p10 to p90 | Repetitions | |", "| --- | --- | ---: | --- | ---: | --- |"]
    for one in link_samples().samples:
        if one.case not in ("clocks", "all_reduce", "projection"):
            where = " ".join(f"{name}={value}" for name, value in one.parameters.items() if value is not False)
            low, high = (
                pick(value for run in one.runs if (value := getattr(run, name)) is not None)
                for pick, name in ((min, "p10"), (max, "p90"))
            )
            said = one.instability and f"not used: {one.instability}"
            if one.value == 0:
                said = "not used: nothing was waited for"
            lines.append(
                f"| `{one.case}` {one.quantity} | {where} | {_in_unit(one, one.value)} | "
                f"{_in_unit(one, low)} to {_in_unit(one, high)} | {sum(run.count for run in one.runs):,} | {said} |"
            )
    return "\n".join(lines) + "\n"


def all_reduces() -> str:
    """The one-shot kernel beside NCCL, by size."""
    found: dict[int, dict[tuple[str, int], Sample]] = {}
    for one in link_samples().samples:
        if one.case == "all_reduce":
            have = one.parameters
            found.setdefault(have["bytes"], {})[have["by"], have["ranks"]] = one
    lines = [
        "| Bytes | NCCL, 2 ranks us | One-shot, 2 ranks us | NCCL over it | One-shot, slots of 8 ranks us | Calls |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size, by in sorted(found.items()):
        nccl, own, eight = by["NCCL", 2], by["one-shot", 2], by["one-shot", 8]
        lines.append(
            f"| {size:,} | {nccl.value:.2f} | {own.value:.2f} | {nccl.value / own.value:.2f} | {eight.value:.2f} | "
            f"{own.parameters['calls']} |"
        )
    return "\n".join(lines) + "\n"


def projections() -> str:
    """Output projection, exchange, residual, mix and norm, by what does it."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for one in link_samples().samples:
        if one.case == "projection":
            have = one.parameters
            found.setdefault((-have["ranks"], -have["depth"], have["rows"]), {})[have["by"]] = one.value
    lines = [
        "| Ranks | K | Rows | Welded us | cuBLAS, NCCL, attn_res us | Over fused_allreduce | cuBLAS, one-shot, attn_res us |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (ranks, depth, rows), by in sorted(found.items()):
        nccl = by["cuBLAS, NCCL, attn_res"]
        lines.append(
            f"| {-ranks} | {-depth} | {rows} | {by['fused-allreduce']:.2f} | {nccl:.2f} | {nccl / by['fused-allreduce']:.2f} | "
            f"{by['stock']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def difference_table(rows: list[LinkDifference]) -> str:
    lines = [
        "| Path | Exchanges a step | Measured us | Predicted us | Measured us an exchange | Predicted us an exchange |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.path} | {row.num_exchanges} | {row.measured_us:+.1f} | {row.predicted_us:+.1f} | "
        f"{row.measured_us / row.num_exchanges:+.2f} | {row.predicted_us / row.num_exchanges:+.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """``page`` with what lies between each pair of markers replaced."""
    found = validate()
    tables = {
        "steps": published(found, "step"),
        "kda layer": published(found, "stage"),
        "kernels": published(found, "kernel"),
        "ladders": ladder_tables(found),
        "claims": claims_table(),
        "own kernels": table(own_kernel_rows(), "us"),
        "decode steps": decode_steps(),
        "decode switches": decode_switches(),
        "decode rank": decode_rank(),
        "decode parts": decode_parts(),
        "cublas": table(cublas_rows(), "us"),
        "own steps": table(own_step_rows(), "ms"),
        "own stages": stage_table(own_stage_rows()),
        "hand-overs": hand_overs(),
        "link probes": link_probes(),
        "all-reduces": all_reduces(),
        "projections": projections(),
        "link kernels": table(link_kernel_rows(), "us"),
        "link steps": table(link_step_rows(), "ms"),
        "link differences": difference_table(link_differences()),
    }
    for name, text in tables.items():
        begin, end = f"<!-- {name}: written by tools/measurements_tables.py -->\n", f"<!-- {name}: end -->\n"
        assert page.count(begin) == page.count(end) == 1, f"measurements.md has lost its markers of {name!r}"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
