"""Tables of docs/measured.md that show stored samples and predict nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.shipped_links import link_samples
from k3sim.calibrate.decode.options import DecodeOptions, case_of
from k3sim.calibrate.decode.tables import table_cases
from k3sim.calibrate.samples import Sample
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.program import build_program
from k3sim.sim.timeline.critical_path import Part

DATA = Path(__file__).parents[1] / "calibrate" / "data"


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
        "| Ranks | K | Rows | Fused us | cuBLAS, NCCL, attn_res us | Ratio | cuBLAS, one-shot, attn_res us |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (ranks, depth, rows), by in sorted(found.items()):
        fused, nccl, stock = by["fused-allreduce"], by["cuBLAS, NCCL, attn_res"], by["stock"]
        lines.append(f"| {-ranks} | {-depth} | {rows} | {fused:.2f} | {nccl:.2f} | {nccl / fused:.2f} | {stock:.2f} |")
    return "\n".join(lines) + "\n"
