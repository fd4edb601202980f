"""Plain-text tables of the command line: they survive being pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.claims import JudgedClaim
from k3sim.calibrate.compare.shipped_steps import StageCase
from k3sim.calibrate.compare.validate import Validation, groups, summary
from k3sim.calibrate.decode.lines import part_lines
from k3sim.comparison import Comparison
from k3sim.kernels.harness.check import Checked
from k3sim.measured_report import MeasuredReport
from k3sim.report import Report
from k3sim.sim.machine import Machine, describe
from k3sim.sim.predict import Prediction
from k3sim.sim.timeline.critical_path import WORK_PARTS, Part
from k3sim.stage_comparison import StageComparison


def _console(width: int = 110) -> Console:
    # Without a terminal the width is fixed, so that a table is the same in every log.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right", no_wrap=True)
    return table


def print_report(report: Report, files: Mapping[str, str]) -> None:
    """Headline, waits by part, and what each switch is worth."""
    console, question = _console(), report.question
    console.print(
        f"{question.architecture.name} on {question.machine.title}, {question.layout.tag}, "
        f"concurrency {question.workload.concurrency}, context {question.workload.context}"
    )
    console.print()
    between = ["90 % of draws us"] if report.intervals else []
    headline = _table("path", "step us", *between, "tok/s/user", "speed-up", "floor us", "of floor", "HBM busy")
    for label, prediction in report.labelled.items():
        headline.add_row(
            label,
            f"{prediction.step_us:,.1f}",
            *(["{:,.0f} to {:,.0f}".format(*report.intervals[label])] if between else []),
            f"{prediction.tokens_per_second_per_user:.1f}",
            f"{report.stock.step_us / prediction.step_us:.2f}x",
            f"{prediction.floor_us:,.1f}",
            f"{100 * prediction.floor_us / prediction.step_us:.0f} %",
            f"{100 * prediction.hbm_busy_fraction:.0f} %",
        )
    console.print(headline)
    console.print()
    console.print(_waits(report.labelled))
    console.print()
    switches = _table("switch", "added in turn us", "removed from all four us")
    before = report.ladder[0][1]
    for (label, prediction), (_, removed) in zip(report.ladder[1:], report.leave_one_out, strict=True):
        switches.add_row(
            label.removeprefix("+ "),
            f"{prediction.step_us - before.step_us:+,.1f}",
            f"{removed.step_us - report.reference.step_us:+,.1f}",
        )
        before = prediction
    console.print(switches)
    _print_files(console, files)


def print_comparison(comparison: Comparison, files: Mapping[str, str]) -> None:
    """Both sides, part by part, and the difference."""
    console = _console()
    before, after = comparison.before, comparison.after
    table = _table("part", before.label, after.label, "difference us")
    for part in Part:
        values = [side.prediction.waits_ps.get(part, 0) / 1e6 for side in (before, after)]
        if any(values):
            table.add_row(part.word, f"{values[0]:,.1f}", f"{values[1]:,.1f}", f"{values[1] - values[0]:+,.1f}")
    steps = (before.prediction.step_us, after.prediction.step_us)
    table.add_row("step", f"{steps[0]:,.1f}", f"{steps[1]:,.1f}", f"{steps[1] - steps[0]:+,.1f}")
    console.print(table)
    console.print(f"\n{after.label}: {comparison.speedup:.3f}x as fast as {before.label}")
    _print_files(console, files)


def print_measured(report: MeasuredReport, files: Mapping[str, str], most: int = 20) -> None:
    """Headline, parts of the profiled step, and the stages that hold most of it."""
    console, document = _console(), report.document
    facts = [document.get(key) for key in ("model", "machine", "layout", "path")]
    console.print(", ".join(str(one) for one in facts if one), markup=False)
    console.print(f"step {document['step_us']:,.1f} us; a profiled one, {document['profiled_us']:,.1f} us, goes\n")
    console.print("\n".join(part_lines(document)) + "\n")
    table = _table("stage", "part", "us", left=2)
    for row in document["critical_path"][:most]:
        table.add_row(row["stage"], Part(row["part"]).word, f"{row['us']:,.1f}")
    console.print(table)
    _print_files(console, files)


def print_stage_comparison(comparison: StageComparison, files: Mapping[str, str], most: int = 30) -> None:
    """Steps, and the stages that differ most."""
    console = _console()
    console.print(
        f"{comparison.before}: {comparison.before_step_us:.1f} us, "
        f"{comparison.after}: {comparison.after_step_us:.1f} us"
        f" ({comparison.before_step_us / comparison.after_step_us:.2f} times as fast)\n",
        soft_wrap=True,
    )
    if any(one is not None for one in comparison.waits_us):
        console.print(_parts_of_files(comparison))
        console.print()
    for note in comparison.notes:
        console.print(note, soft_wrap=True, markup=False)
    sides = ("kernels", "us before", "on path", "kernels", "us after", "on path")
    table = _table("stage", *sides, "difference us", "on path")
    for row in comparison.rows[:most]:
        table.add_row(
            row.stage,
            str(row.before_count),
            f"{row.before_us:.1f}",
            f"{row.before_path_us:.1f}",
            str(row.after_count),
            f"{row.after_us:.1f}",
            f"{row.after_path_us:.1f}",
            f"{row.delta_us:+.1f}",
            f"{row.path_delta_us:+.1f}",
        )
    console.print(table)
    if len(comparison.rows) > most:
        console.print(f"and {len(comparison.rows) - most} more in {files['json']}")
    _print_files(console, files)


def _parts_of_files(comparison: StageComparison) -> Table:
    """Parts as each file has them; of a prediction beside a measured step also those by the rule for measured ones."""
    names, columns = ["us before", "us after"], list(comparison.waits_us)
    for side, (name, parts) in enumerate(zip(tuple(names), comparison.start_end_us, strict=True)):
        if parts is not None:
            position = 1 if side == 0 else 2
            names.insert(position, f"{name} by starts and ends")
            columns.insert(position, parts)
    # The two that are by one rule: the added column in place of the prediction's own.
    sides = zip(comparison.waits_us, comparison.start_end_us, strict=True)
    pair = [own if ruled is None else ruled for own, ruled in sides]
    table = _table("part", *names, "difference us")

    def add(label: str, values: Sequence[float | None], compared: Sequence[float | None]) -> None:
        before, after = compared
        difference = "" if before is None or after is None else f"{after - before:+,.1f}"
        table.add_row(label, *("" if one is None else f"{one:,.1f}" for one in values), difference)

    for part in Part:
        values = [None if one is None else one.get(part.value) for one in columns]
        compared = [None if one is None else one.get(part.value) for one in pair]
        if any(values):
            add(part.word, values, compared)
    sums = [[None if one is None else sum(one.values()) for one in some] for some in (columns, pair)]
    add("sum of the parts", *sums)
    return table


def print_machines(machines: Sequence[Machine]) -> None:
    """One line a profile."""
    table = _table("name", "title", "SMs", "HBM GB", "HBM TB/s", "L2 MB", "NVLink GB/s", "domain", left=2)
    for machine in machines:
        table.add_row(
            machine.name,
            machine.title,
            str(machine.num_sms),
            f"{machine.hbm_capacity_bytes / 1e9:.0f}",
            f"{machine.hbm_read_bytes_per_s / 1e12:.2f}",
            f"{machine.l2_capacity_bytes / 1e6:.0f}",
            f"{machine.nvlink_egress_bytes_per_s / 1e9:.0f}",
            str(machine.nvlink_domain_gpus),
        )
    _console().print(table)


def print_machine(machine: Machine) -> None:
    """Every value of a profile with where it comes from."""
    console = _console()
    console.print(machine.title)
    for row in describe(machine):
        value = row["value"]
        shown = f"{len(value)} points" if isinstance(value, (list, tuple)) else f"{value:g}" if isinstance(
            value, float
        ) else str(value)
        console.print(f"\n{row['field']} = {shown} {row['unit']}  ({row['kind']}, {row['low']:g} to {row['high']:g})")
        console.print(f"    {row['source']}", soft_wrap=True)


def print_validation(found: Validation) -> None:
    """Published, predicted, error and interval of every row by hardware and engine; then the ladders, step by step."""
    console = _console(150)
    for (kind, hardware, engine), rows in groups(found.rows).items():
        columns = ("unit", "published", "predicted", "error", "interval", "inside")
        table = _table(f"{hardware}, {engine}: {kind}s", *columns)
        for row in rows:
            low, high = row.interval
            table.add_row(
                row.label if row.judged else f"({row.label})",
                row.unit,
                f"{row.measured:,.4g}",
                f"{row.predicted:,.4g}",
                f"{100 * row.error:+.1f} %",
                f"{low:,.4g} to {high:,.4g}",
                "yes" if row.inside_interval else "no",
            )
        console.print(table)
        console.print()
    for row in found.rows:
        if not row.judged:
            console.print(f"({row.label}): not judged, {row.why}", markup=False)
    for kind, totals in summary(found.rows).items():
        console.print(
            f"{totals['rows']} judged {kind}s: median {100 * totals['median_error']:.1f} %, "
            f"worst {100 * totals['worst_error']:.1f} %, {100 * totals['inside_interval']:.0f} % inside"
        )
    for ladder, steps in found.ladders:
        console.print()
        table = _table(ladder.title, "after ms", "predicted ms", "saved ms", "predicted", "verdict")
        for step in steps:
            start = step.verdict == "start"
            table.add_row(
                step.title,
                f"{step.published_ms:.3f}",
                "" if step.predicted_ms is None else f"{step.predicted_ms:.3f}",
                "" if start else f"{step.published_saving_ms:+.3f}",
                "" if start or step.predicted_saving_ms is None else f"{step.predicted_saving_ms:+.3f}",
                step.verdict,
            )
        console.print(table)


def print_rows(tables: Mapping[str, Sequence[ComparedCase]]) -> None:
    """Measured, predicted and error of each table, then the median and the worst."""
    console = _console()
    for name, rows in tables.items():
        quantity, unit = name.rsplit("_", 1)
        table = _table(quantity.replace("_", " "), f"measured {unit}", f"predicted {unit}", "error")
        for row in rows:
            table.add_row(row.label, f"{row.measured:.2f}", f"{row.predicted:.2f}", f"{100 * row.error:+.1f} %")
        console.print(table)
        errors = sorted(abs(row.error) for row in rows)
        console.print(f"median {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %\n")


def print_claims(claims: Sequence[JudgedClaim]) -> None:
    """Each claim with its figures, verdict, boundary and what would have to be true."""
    console = _console()
    for one in claims:
        console.print(f"{one.scenario.title}: {one.scenario.claim}", markup=False)
        table = _table("figure", "claimed", "predicted", "90 % of draws", "unit", "verdict")
        for each in one.figures:
            falls, answer = each.figure.unit == "falls", each.answer
            table.add_row(
                each.figure.label,
                "falls" if falls else f"{each.figure.value:g}",
                f"{answer.predicted:.4g}" if answer else "",
                f"{answer.low:.4g} to {answer.high:.4g}" if answer else "",
                "last / first" if falls else each.figure.unit,
                each.verdict,
            )
            for point in each.series:
                between = f"{point.low:.4g} to {point.high:.4g}"
                table.add_row(f"  {point.label}", "", f"{point.predicted:.4g}", between, "x", "")
        for answer, holds in one.alternatives:
            table.add_row(
                f"  {answer.label}", "", f"{answer.predicted:.4g}", f"{answer.low:.4g} to {answer.high:.4g}", "",
                "claim holds" if holds else "does not hold",
            )  # fmt: skip
        console.print(table)
        console.print(f"boundary: {one.scenario.boundary}", markup=False)
        console.print(f"what would have to be true: {one.scenario.would_hold}", markup=False)
        console.print(f"behind it: {one.scenario.found} ({one.scenario.source}, {one.scenario.date})\n", markup=False)
    console.print(
        "The intervals are those of the machine's values. What cost functions leave out is not in them: "
        "'k3sim validate' shows how far published steps are off.",
        markup=False,
    )


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, told (done, of); nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, of: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def print_stages(rows: Sequence[StageCase]) -> None:
    """A measured step by stage: mean duration and mean increment along the main stream, measured and predicted."""
    console = _console()
    table = _table("own stages us", "kernels", "measured", "predicted", "measured step", "predicted step")
    for row in rows:
        main = row.stream == "main"
        table.add_row(
            row.stage,
            str(row.count),
            f"{row.duration.measured:.2f}",
            f"{row.duration.predicted:.2f}",
            f"{row.increment.measured:.2f}" if main else "",
            f"{row.increment.predicted:.2f}" if main else "",
        )
    console.print(table)


def print_kernel_list(forms: Mapping[str, Sequence[str]]) -> None:
    """Operators with the number of forms that a build compiles, and an example of a name."""
    table = _table("operator", "forms", "first", left=1)
    for operator, names in forms.items():
        table.add_row(operator, str(len(names)), names[0])
    _console().print(table)


def print_kernel_build(manifest: Mapping[str, Any], path: str) -> None:
    """One line an operator and architecture: what its machine code holds at most."""
    console = _console()
    table = _table("operator", "architecture", "kernels", "registers", "stack B", "spills", "16-byte loads", left=2)
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in manifest["kernels"]:
        groups.setdefault((entry["operator"], entry["architecture"]), []).extend(entry["functions"])
    for (operator, architecture), codes in groups.items():
        table.add_row(
            operator,
            architecture,
            str(len(codes)),
            str(max(code["registers"] for code in codes)),
            str(max(code["stack_bytes"] for code in codes)),
            str(sum(code["spills"] for code in codes)),
            str(sum(code["loads_16_byte"] + code["bulk_copies"] for code in codes)),
        )
    console.print(table)
    console.print(f"\nmanifest  {path}", soft_wrap=True)


def print_checked(checked: Checked) -> None:
    """One case of a check: error, bound, verdict."""
    console = _console()
    console.print(checked.line, soft_wrap=True, markup=False)
    console.file.flush()  # a run takes minutes, and may be cut off


def print_bench(document: Mapping[str, Any]) -> None:
    """One line a case: times, rate, fraction of the floor, and the fastest peer that ran."""
    console = _console(width=160)
    rate = document["environment"]["read_bytes_per_s"]
    console.print(f"{document['environment']['gpu']}, read bandwidth {rate / 1e12:.2f} TB/s = 100 %\n", soft_wrap=True)
    table = _table(
        "operator", "case", "us", "p10", "p90", "again", "MB", "TB/s", "of floor", "best peer us", "x ours", left=2
    )
    table.columns[1].no_wrap = False  # long names, where the terminal is narrow
    for row in document["timings"]:
        ran = [peer for peer in row["peers"] if "error" not in peer]
        best = min(ran, key=lambda peer: peer["median_us"], default=None)
        moves = row["moved_bytes"] > 0
        table.add_row(
            row["operator"],
            row["case"],
            *(f"{row[key]:.2f}" for key in ("median_us", "p10_us", "p90_us", "second_median_us")),
            f"{row['moved_bytes'] / 1e6:.1f}" if moves else "",
            f"{row['tb_per_s']:.2f}" if moves else "",
            f"{100 * row['of_floor']:.0f} %" if moves else "",
            f"{best['median_us']:.2f}" if best else "",
            f"{best['ratio']:.2f}" if best else "",
        )
    console.print(table)
    rest = f"; {document['left']} cases left, for --resume" if document["left"] else ""
    console.print(f"\nsamples  {document['file']}{rest}", soft_wrap=True)


def progress_line(line: str) -> None:
    """A line on standard error; nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(line, markup=False)


def print_calibration(document: Mapping[str, Any]) -> None:
    """Fitted values with intervals, what kernels say of others, what is not determined."""
    console = _console(width=120)
    console.print(
        f"{document['gpu']}, {document['date']}: {document['num_samples']} samples, {len(document['refused'])} refused "
        f"as unstable; base profile {document['base']}",
        soft_wrap=True,
    )
    console.print()
    table = _table("value", "fitted", "low", "high", "unit", "how", "worst case left out")
    for one in document["values"]:
        left_out = one["left_out_error"]
        table.add_row(
            one["field"],
            "curve" if isinstance(one["value"], list) else f"{one['value']:.5g}",
            f"{one['low']:.4g}",
            f"{one['high']:.4g}",
            "factor" if isinstance(one["value"], list) else one["unit"],
            one["how"],
            "" if left_out is None else f"{100 * left_out:.1f} %",
        )
    console.print(table)
    found = [one for group in document["from_kernels"] for one in group["found"]]
    if found:
        kernels = _table("from kernels, not put into the profile", "fitted", "low", "high", "in the profile", "verdict")
        for one in found:
            bounds = ("" if one[end] is None else f"{one[end]:.3g}" for end in ("low", "high"))
            verdict = "determined" if one["determined"] else one["reason"]
            kernels.add_row(one["field"], f"{one['value']:.3g}", *bounds, f"{one['profile_value']:.3g}", verdict)
        console.print()
        console.print(kernels)
    reasons: dict[str, list[str]] = {}
    for name, reason in document["undetermined"].items():
        reasons.setdefault(reason, []).append(name)
    console.print()
    for reason, names in reasons.items():
        console.print(f"not determined, {reason}: {', '.join(names)}", soft_wrap=True)
    files = {"profile": document["profile"]} if document["profile"] else {}
    _print_files(console, {**files, **document["files"]})


def print_table_fit(document: Mapping[str, Any]) -> None:
    """Values fitted from public tables, and the errors of fitted and held-out rows by group."""
    console = _console()
    values = _table("field", "value", "low", "high", "before", "verdict")
    for one in document["found"]:
        values.add_row(
            one["field"],
            *("" if one[key] is None else f"{one[key]:.3g}" for key in ("value", "low", "high", "profile_value")),
            one["reason"] or "determined",
        )
    console.print(values)
    console.print()
    errors = _table("rows of", "held out", "rows", "median error", "95th percentile", "mean")
    for one in document["errors"]:
        errors.add_row(
            one["group"],
            "yes" if one["held_out"] else "no",
            str(one["rows"]),
            f"{100 * one['median']:.1f} %",
            f"{100 * one['p95']:.1f} %",
            f"{100 * one['mean_signed']:+.1f} %",
        )
    console.print(errors)
    for reason, count in document["skipped"].items():
        console.print(f"{count} rows left out: {reason}", markup=False)
    if document["profile"]:
        console.print(f"wrote {document['profile']}", markup=False)


def print_check(document: Mapping[str, Any]) -> None:
    """Kernels and steps with interval and error, then the totals. Probes are in the JSON and on the page."""
    console = _console(width=150)
    table = _table("kind", "case", "measured us", "predicted us", "error", "interval us", "inside", left=2)
    for one in document["cases"]:
        if one["kind"] != "probe":
            table.add_row(
                one["kind"],
                one["label"],
                f"{one['measured']:,.2f}",
                f"{one['predicted']:,.2f}",
                f"{100 * one['error']:+.1f} %",
                f"{one['low']:,.2f} to {one['high']:,.2f}",
                "yes" if one["inside_interval"] else "no",
            )
    console.print(table)
    console.print()
    for kind, one in document["summary"].items():
        console.print(
            f"{one['cases']} {kind}s, none in a fit: median error {100 * one['median_error']:.1f} %, 95th percentile "
            f"{100 * one['p95_error']:.1f} %, worst {100 * one['worst_error']:.1f} %; "
            f"{100 * one['inside_interval']:.0f} % inside their 90 % interval",
            soft_wrap=True,
        )
    _print_files(console, document["files"])


@contextmanager
def progress(label: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A line on standard error that counts kernels; nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(label) as status:
        count = 0

        def advance(entry: Mapping[str, Any]) -> None:
            nonlocal count
            count += 1
            status.update(f"{label}: {count}, {entry['architecture']} {entry['operator']} {entry['kernel']}")

        yield advance


def _waits(paths: Mapping[str, Prediction]) -> Table:
    table = _table("where the step goes (us)", *paths)
    for part in Part:
        values = [prediction.waits_ps.get(part, 0) / 1e6 for prediction in paths.values()]
        if any(values):
            label = part.word if part in WORK_PARTS else f"wait: {part.word}"
            table.add_row(label, *(f"{value:,.1f}" for value in values))
    table.add_row("step", *(f"{prediction.step_us:,.1f}" for prediction in paths.values()))
    return table


def _print_files(console: Console, files: Mapping[str, str]) -> None:
    console.print()
    for kind, path in files.items():
        console.print(f"{kind:9} {path}", soft_wrap=True)
