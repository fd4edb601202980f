"""A user's own measured steps and kernels: predicted as the stored ones are, and refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, run

from k3sim.calibrate.compare import shipped_kernels, shipped_links, shipped_steps
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.check import families
from k3sim.calibrate.compare.given_files import check_given, read_given
from k3sim.errors import UserError
from k3sim.sim.predict import predict
from k3sim.sim.profile import load_machine, profile_path

DATA = Path(shipped_steps.STEPS).parent
KERNELS = DATA / "h200-kernels-l1.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored_steps() -> list[dict[str, Any]]:
    """The stock step of one row, and the fused one with one switch alone."""
    steps = {shipped_steps.label_of(step): step for step in shipped_steps.measured_steps()}
    names = ("stock, 1 row, 8k", "fused with fused-allreduce alone, 1 row, 8k")
    return [dict(steps[name]) for name in names]


def table(path: Path, steps: list[dict[str, Any]]) -> Path:
    """A file as ``k3sim decode --table`` writes it."""
    path.write_text('{"steps": [\n' + ",\n".join(json.dumps(one) for one in steps) + "\n]}\n")
    return path


def small_steps(**changes: Any) -> list[dict[str, Any]]:
    """A step over the link, of fewer layers, with fields replaced."""
    return [{**shipped_links.measured_link_steps()[0], **changes}]


def bench(path: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> Path:
    """A file as ``k3sim kernels bench`` writes it, of the first timings of a stored one."""
    document = json.loads(KERNELS.read_text(encoding="utf-8"))
    document["timings"] = document["timings"][:3]
    change(document)
    path.write_text(json.dumps(document))
    return path


# -- what is predicted ------------------------------------------------------------------------------------------------


def test_steps_agree_with_validate_own(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = stored_steps()
    assert run(
        "calibrate", "--check", "--steps", str(table(folder / "mine.json", steps)), "--draws", "2", "--json"
    ) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    monkeypatch.setattr(shipped_steps, "measured_steps", lambda: steps)
    own = shipped_steps.shipped_step_cases(jobs=1)
    assert [one["label"] for one in cases] == [one.label for one in own]
    for mine, stored in zip(cases, own, strict=True):
        assert mine["predicted"] == pytest.approx(1e3 * stored.predicted, rel=1e-12)
        assert mine["measured"] == pytest.approx(1e3 * stored.measured, rel=1e-12)
        assert mine["error"] == pytest.approx(stored.error, rel=1e-9)


def test_kernels_agree_with_validate_own(folder: Path, capsys: Capture) -> None:
    assert run("calibrate", "--check", "--kernels", str(KERNELS), "--draws", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    source = f"calibrate/data/{KERNELS.name}"
    chains = [one for one in shipped_kernels.measured_chains() if one.source.startswith(source)]
    own = {one.label: one for one in shipped_kernels.compare_chains(chains, jobs=1)}
    assert len(document["cases"]) == len(own) > 20
    for mine in document["cases"]:
        assert mine["predicted"] == pytest.approx(own[mine["label"]].predicted, rel=1e-12)
        assert mine["measured"] == own[mine["label"]].measured
    stored = json.loads(KERNELS.read_text(encoding="utf-8"))["timings"]
    assert len(document["skipped"]) == len(stored) - len(own)
    assert "mla_decode merge of 8 ranks, 12 heads, 1 row" in document["skipped"]


def test_steps_over_a_link_agree_too(folder: Path) -> None:
    steps = shipped_links.measured_link_steps()[:1]
    given = read_given([table(folder / "links.json", steps)], [])
    (label,) = (one.label for one in given.rows)
    assert label.endswith(", 40 layers, TP8, 2 GPUs over NVLink")
    (case,) = check_given(given, num_draws=2, jobs=1)
    assert case.predicted == pytest.approx(shipped_steps.predict_measured(steps[0]).step_us, rel=1e-12)


def test_a_profiled_step_is_taken_as_well() -> None:
    (row,) = read_given([shipped_steps.TIMELINE], []).rows
    assert row.label == "fused, 1 row, 8k"


def test_rows_of_several_gpus_have_profiles_each(folder: Path, capsys: Capture) -> None:
    here, there = small_steps()[0], small_steps(machine="NVIDIA B300")[0]
    files = [table(folder / "h200.json", [here]), table(folder / "both.json", [there])]
    words = [word for file in files for word in ("--steps", str(file))]
    kernels = bench(folder / "kernels.json")
    assert run("calibrate", "--check", *words, "--kernels", str(kernels), "--draws", "2") == 0
    shown = capsys.readouterr().out
    assert "profile" in shown and "b300" in shown
    given = read_given(files, [kernels])
    assert [one.machine.name for one in given.rows] == ["h200", "b300", "h200", "h200", "h200"]
    assert [one.name for one in given.machines] == ["h200", "b300"]
    cases = check_given(given, num_draws=2, jobs=1)
    assert [one.hardware for one in cases] == ["h200", "b300", "h200", "h200", "h200"]
    assert [one.kind for one in cases] == ["step", "step", "kernel", "kernel", "kernel"]
    asked = shipped_steps.question_of_measured(there, load_machine("b300"))
    assert cases[1].predicted == predict(asked).step_us != cases[0].predicted


def test_a_profile_predicts_the_gpu_it_is_of(folder: Path) -> None:
    document = json.loads(profile_path("h200").read_text(encoding="utf-8"))
    document["name"] = "mine"
    (folder / "mine.json").write_text(json.dumps(document))
    mine = load_machine("mine.json")
    rows = [small_steps()[0], small_steps(machine="NVIDIA B300")[0], small_steps(machine="Another GPU")[0]]
    given = read_given([table(folder / "steps.json", rows)], [], mine)
    assert [one.machine.name for one in given.rows] == ["mine", "b300", "mine"]


def test_an_unlisted_gemv_is_predicted(folder: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["timings"][0] |= {"operator": "skinny_gemv", "case": "2048x7168, 3 rows", "moved_bytes": 29360128}
        document["timings"][1] |= {"operator": "skinny_gemv", "case": "2048x7168, 3 rows, add"}

    given = read_given([], [bench(folder / "kernels.json", rename)])
    labels = [one.label for one in check_given(given, num_draws=2, jobs=1)]
    assert labels[0] == "skinny_gemv 2048x7168, 3 rows"
    assert given.skipped == ["skinny_gemv 2048x7168, 3 rows, add"]


def test_families_count_and_name_the_worst() -> None:
    def one(label: str, predicted: float, kind: str = "kernel") -> ComparedCase:
        return ComparedCase(label=label, kind=kind, measured=10, predicted=predicted, low=9, high=11, unit="us")

    found = families([
        one("a 1x2", 11), one("b 3", 12), one("a 2x2", 8), one("fused, 1 row, 8k", 10, "step"), one("a", 30, "probe"),
    ])  # fmt: skip
    assert [(row["kind"], row["family"], row["cases"]) for row in found] == [
        ("kernel", "a", 2), ("kernel", "b", 1), ("step", "fused", 1),
    ]  # fmt: skip
    assert found[0]["worst"] == "a 2x2" and found[0]["worst_error"] == pytest.approx(-0.2)
    assert found[0]["median_error"] == pytest.approx(0.15)
    assert found[0]["mean_signed_error"] == pytest.approx(-0.05)
    assert found[0]["inside_interval"] == 1.0


# -- what is printed --------------------------------------------------------------------------------------------------


def test_the_page_and_the_totals_are_written(folder: Path, capsys: Capture) -> None:
    file = bench(folder / "kernels.json")
    assert run("calibrate", "--check", "--kernels", str(file), "--draws", "2") == 0
    shown = capsys.readouterr().out
    for words in ("proj_allreduce", "3 kernels, none in a fit: median error", "mean ", "worst case"):
        assert words in shown
    page = (folder / "k3sim-out" / "calibration-check.html").read_text(encoding="utf-8")
    assert "By family" in page and "proj_allreduce" in page


# -- what is refused --------------------------------------------------------------------------------------------------


def scaled(step: dict[str, Any], factor: float) -> dict[str, Any]:
    """A step in another unit throughout."""
    names = ("step_us", "p10_us", "p90_us")
    return {
        **step, **{name: step[name] * factor for name in names},
        "samples_us": [one * factor for one in step["samples_us"]],
    }  # fmt: skip


WRONG_STEPS = [
    (lambda step: {**step, "step_us": float("nan")}, "step_us is NaN"),
    (lambda step: {key: value for key, value in step.items() if key != "layers"}, "lacks layers"),
    (lambda step: {**step, "measured": False}, "measured is false"),
    (lambda step: scaled(step, 1e-3), "its bytes alone take"),
    (lambda step: scaled(step, 1e3), "its bytes alone take"),
    (lambda step: {**step, "read_bytes_per_s": 4558.0}, "read_bytes_per_s is 4558.0, accepted: 1e+10 to 1e+14 B/s"),
    (lambda step: {**step, "step_us": step["step_us"] * 1.1}, "the median of its samples is"),
    (lambda step: {**step, "machine": "NVIDIA H900"}, 'machine is "NVIDIA H900", of which no profile is shipped'),
    (lambda step: {**step, "path": "megakernel"}, 'path is "megakernel", accepted: stock, fused'),
    (lambda step: {**step, "switches": ["welded"]}, "which is called 'fused-allreduce' now"),
    (lambda step: {**step, "layout": "tp3ep1dcp1", "gpus": 1}, "is refused: "),
    (lambda step: {**step, "gpus": 3}, "gpus is 3, accepted: a divisor of the ranks"),
    (lambda step: {**step, "layers": 94}, "is refused: layers: got 94"),
    (lambda step: {**step, "concurrency": 99}, "is refused: the project's own kernels take 1 to"),
    (lambda step: {**step, "samples_us": [1.0]}, "samples_us is [1.0], accepted: a list of two or more times"),
    (lambda step: 7, "steps[0] is 7, accepted: an object"),
]


@pytest.mark.parametrize(("change", "says"), WRONG_STEPS)
def test_a_wrong_step_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    file = table(folder / "steps.json", [change(small_steps()[0])])
    with pytest.raises(UserError) as refusal:
        read_given([file], [])
    assert says in str(refusal.value)
    assert str(refusal.value).startswith(str(file)) and "\n" not in str(refusal.value)


def of_timing(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["timings"][0].update(changes)


def in_nanoseconds(document: dict[str, Any]) -> None:
    for row in document["timings"]:
        for name in ("median_us", "p10_us", "p90_us"):
            row[name] *= 1e3
        row["samples_us"] = [one * 1e3 for one in row["samples_us"]]


WRONG_KERNELS = [
    (of_timing(median_us=float("nan")), "median_us is NaN"),
    (of_timing(median_us=1.0), "median_us is 1.0, that of the samples is"),
    (of_timing(moved_bytes="a"), 'moved_bytes is "a"'),
    (lambda document: document["timings"][0].pop("case"), "lacks case"),
    (lambda document: document["environment"].pop("read_bytes_per_s"), "environment lacks read_bytes_per_s"),
    (lambda document: document["environment"].update(read_bytes_per_s=4458), "accepted: 1e+10 to 1e+14 B/s"),
    (lambda document: document["environment"].update(gpu="Another"), 'gpu is "Another", of which no profile'),
    (lambda document: document.update(timings=[]), "timings"),
    (in_nanoseconds, "its bytes alone take"),
]


@pytest.mark.parametrize(("change", "says"), WRONG_KERNELS)
def test_a_wrong_timing_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    file = bench(folder / "kernels.json", change)
    with pytest.raises(UserError) as refusal:
        read_given([], [file])
    assert says in str(refusal.value)
    assert str(refusal.value).startswith(str(file)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--steps mine.json", "give them with --check"),
        ("--check --steps none.json", "none.json: cannot be read"),
        ("--check --steps empty.json", "this is an empty file"),
        ("--check --steps short.json", "not valid JSON"),
        ("--check --steps kernels.json", "this is a sample file of 'k3sim kernels bench'"),
        ("--check --kernels mine.json", "'k3sim calibrate --check --steps FILE' puts them beside predictions"),
        ("--check --kernels trace.json", "this is a torch profiler (Chrome) trace"),
        ("--check --steps .", "this is a folder"),
        ("--check --steps nothing.json", "steps is [], accepted: a list that is not empty"),
        ("--check --steps mine.json --steps ./mine.json", "stands twice; accepted: each file once"),
        ("--check --steps mine.json --machine b300", "no row was measured on one; accepted: no --machine, or"),
        ("--check --steps mine.json --draws 1", "draws is 1; accepted: 2 to 1000"),
        ("--check --kernels unpriced.json", "its kernels have no cost in a chain"),
    ],
)
def test_a_wrong_file_is_one_line(folder: Path, capsys: Capture, arguments: str, says: str) -> None:
    table(folder / "mine.json", small_steps())
    bench(folder / "kernels.json")
    bench(folder / "unpriced.json", lambda document: [one.update(case="?") for one in document["timings"]])
    (folder / "empty.json").write_text("")
    (folder / "short.json").write_text((folder / "mine.json").read_text()[:-200])
    (folder / "nothing.json").write_text('{"steps": []}')
    (folder / "trace.json").write_text('{"traceEvents": []}')
    assert run("calibrate", *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3sim: ") and captured.err.count("\n") == 1
    assert says in captured.err
    assert not (folder / "k3sim-out").exists()
