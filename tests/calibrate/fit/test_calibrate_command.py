"""``k3sim calibrate``: what it writes, prints and refuses; its page and its notebook."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Capture, run

pytest.importorskip("scipy")

from k3sim.calibrate import probes
from k3sim.calibrate.compare import shipped_links, shipped_steps
from k3sim.calibrate.compare.calibration_page import page
from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.check import check, summary
from k3sim.calibrate.fit import calibration
from k3sim.calibrate.probes.recorder import Recorder
from k3sim.errors import UserError
from k3sim.sim.profile import load_machine, profile_path

DATA = Path(calibration.__file__).parents[1] / "data"
NOTEBOOK = Path(__file__).parents[3] / "docs" / "calibration.ipynb"


def sees_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- fit ------------------------------------------------------------------------------------------------------------


def test_a_refit_writes_the_profile_and_a_page(folder: Path, capsys: Capture) -> None:
    assert run("calibrate", "--from", "h200", "--machine-out", "h200.json", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (folder / "h200.json").read_bytes() == profile_path("h200").read_bytes()
    assert (document["machine"], document["profile"], document["seed"]) == ("h200", "h200.json", 0)
    values = {one["field"]: one for one in document["values"]}
    assert values["grid_barrier_s"]["value"] == 9.27e-07
    assert [case["central"] for case in values["grid_barrier_s"]["cases"]] == [True, False, False]
    assert len(document["refused"]) == 72
    text = (folder / document["files"]["html"]).read_text(encoding="utf-8")
    assert "tensor_core_setup_s" in text and "http-equiv=\"Content-Security-Policy\"" in text


@pytest.mark.slow
def test_a_refit_prints_a_table(folder: Path, capsys: Capture) -> None:
    assert run("calibrate", "--from", str(DATA / "h200-primitives.json"), "--machine-out", "mine.json") == 0
    shown = capsys.readouterr().out
    for words in ("1527 samples, 72 refused", "l2_effective_bytes", "joint", "not determined, no probe", "mine.json"):
        assert words in shown
    assert load_machine("mine.json").name == "mine"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--from none.json", "none.json: cannot be read (No such file or directory)"),
        ("--from h201", "no stored samples of 'h201'; accepted: a sample file, or one of h200"),
        ("--from h200 --base h201", "unknown machine 'h201'"),
        ("--from h200 --base mine.json", "base is 'mine.json'; accepted: a shipped profile, b200, "),
        ("--from h200 --machine-out a.txt", "machine-out is 'a.txt'; accepted: a path that ends in .json"),
        ("--from h200 --machine-out no/where.json", "cannot write no/where.json"),
        ("--check --from h200", "--check fits nothing"),
        ("--check --machine gb300", "no stored measurements of NVIDIA GB300 NVL72"),
        ("--check --draws 1", "draws is 1; accepted: 2 to 1000"),
    ],
)
def test_a_bad_request_is_one_line(folder: Path, capsys: Capture, arguments: str, reason: str) -> None:
    assert run("calibrate", *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3sim: ") and captured.err.count("\n") == 1
    assert reason in captured.err
    assert not (folder / "a.txt").exists()


def test_without_a_gpu_it_says_what_works_anywhere(folder: Path, capsys: Capture) -> None:
    if sees_a_gpu():
        pytest.skip("would measure")
    assert run("calibrate") == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "--from" in line and ("needs torch" in line or "needs a CUDA GPU" in line)
    assert list(folder.iterdir()) == []


def test_samples_are_named_after_the_gpu() -> None:
    assert calibration.default_samples("NVIDIA H200") == Path("h200-primitives.json")
    assert calibration.default_samples("NVIDIA GB300") == Path("gb300-primitives.json")


@pytest.mark.slow
def test_on_a_gpu_it_measures_and_fits(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU and its probes replaced; what is stored of the H200 is what they read."""
    stored = {
        (case["probe"], json.dumps(case["parameters"])): case
        for case in json.loads((DATA / "h200-primitives.json").read_text(encoding="utf-8"))["cases"]
    }
    taken = []

    def replay(gpu: Any, recorder: Recorder, *, keep: Any) -> None:
        for (probe, _), case in stored.items():
            if not keep(probe):
                continue

            def sampler(case: dict[str, Any] = case) -> dict[str, tuple[str, Any]]:
                taken.append(case["probe"])
                return {
                    quantity: (reading["unit"], [reading["runs"][0][0]] * 5)
                    for quantity, reading in case["readings"].items()
                }

            recorder.record(probe, case["parameters"], sampler)

    def first(gpu: Any, recorder: Recorder) -> None:
        replay(gpu, recorder, keep=lambda probe: probe.startswith(("clocks", "tiny", "graph")))

    def second(gpu: Any, recorder: Recorder) -> None:
        if len(taken) < 200 and not again:
            raise KeyboardInterrupt  # killed half-way
        replay(gpu, recorder, keep=lambda probe: not probe.startswith(("clocks", "tiny", "graph")))

    again: list[bool] = []
    head = {"schema_version": 2, "gpu": "NVIDIA H200", "num_sms": 132, "l2_bytes": 62914560, "torch": "2.11"}
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr("k3sim.calibrate.probes.gpu.Gpu", lambda source: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr("k3sim.calibrate.probes.recorder.Clocks", lambda gpu: SimpleNamespace(hz=1.98e9))
    monkeypatch.setattr(
        "k3sim.calibrate.probes.recorder.metadata", lambda gpu, quick: {**head, "date": "2026-12", "quick": quick}
    )
    monkeypatch.setattr(probes, "PROBES", {"first": first, "second": second})
    assert run("calibrate", "--machine-out", "mine.json") == 130
    assert not (folder / "mine.json").exists()
    half = len(taken)
    again.append(True)
    assert run("calibrate", "--machine-out", "mine.json") == 0
    assert len(taken) == 2 * len(stored)  # each case twice, none again
    assert 0 < half < len(taken)
    mine, h200 = load_machine("mine.json"), load_machine("h200")
    assert mine.provenance["grid_barrier_s"].date == "2026-12"
    assert mine.grid_barrier_s == h200.grid_barrier_s
    assert mine.l2_effective_bytes == h200.l2_effective_bytes
    assert mine.nvlink_one_way_s == h200.nvlink_one_way_s
    assert "h200-primitives.json" in {one.name for one in folder.iterdir()}


# -- check ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_check_prints_every_kind(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = shipped_steps.measured_steps()[:1]
    monkeypatch.setattr(shipped_steps, "measured_steps", lambda: some)
    monkeypatch.setattr(shipped_links, "measured_link_steps", list)
    assert run("calibrate", "--check", "--draws", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    keys = ("label", "measured", "predicted", "unit", "error", "inside_interval", "used_in_fit")
    assert all(set(keys) <= set(one) for one in document["cases"])
    assert {one["kind"] for one in document["cases"]} == {"probe", "kernel", "step"}
    (step,) = (one for one in document["cases"] if one["kind"] == "step")
    assert step["label"] == "stock, 1 row, 8k"
    assert step["measured"] == pytest.approx(8798.0, abs=0.1)
    assert not step["used_in_fit"]
    assert "calibration-check.html" in document["files"]["html"]
    assert run("calibrate", "--check", "--draws", "2") == 0
    shown = capsys.readouterr().out
    assert "1 steps, none in a fit" in shown and "skinny_gemv 6288x7168, 1 row" in shown


@pytest.mark.slow
def test_no_step_and_no_kernel_gave_a_value() -> None:
    cases = check(load_machine("h200"), num_draws=2, kinds=("probe", "kernel"))
    used = [one.label for one in cases if one.kind == "kernel" and one.used_in_fit]
    assert used == []
    probes_used = [one.used_in_fit for one in cases if one.kind == "probe"]
    assert True in probes_used and False in probes_used
    assert all(one.inside_interval for one in cases if one.kind == "probe")
    assert all(one.interval[0] <= one.predicted <= one.interval[1] for one in cases)


def test_a_check_follows_its_seed() -> None:
    def cases(seed: int) -> list[ComparedCase]:
        return check(load_machine("h200"), kinds=("kernel",), num_draws=2, seed=seed, most=3)

    assert cases(1) == cases(1) != cases(2)
    assert len(cases(1)) == 3


def test_a_summary_counts_only_what_gave_no_value() -> None:
    def one(measured_us: float, *, used: bool = False) -> ComparedCase:
        return ComparedCase(
            label="a", kind="kernel", measured=measured_us, predicted=10, low=9, high=11, unit="us", used_in_fit=used
        )

    found = summary([one(10), one(8), one(12.5), one(100, used=True)])
    assert found.keys() == {"kernel"}
    assert found["kernel"]["cases"] == 3
    assert found["kernel"]["median_error"] == pytest.approx(0.2)
    assert found["kernel"]["worst_error"] == pytest.approx(0.25)
    assert found["kernel"]["mean_signed_error"] == pytest.approx((0 + 0.25 - 0.2) / 3)
    assert found["kernel"]["inside_interval"] == pytest.approx(1 / 3)


# -- page and notebook ----------------------------------------------------------------------------------------------


def test_the_page_escapes_what_it_shows() -> None:
    bad = ComparedCase(label="</script><b>", kind="kernel", measured=1, predicted=2, low=1, high=3, unit="us")
    text = page(None, calibration.check_document([load_machine("h200")], [bad], 2, 0))
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    match = re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    figures = json.loads(match.group(1))
    assert figures["errors"]["data"][0]["x"] == [100.0]
    assert figures["against"]["data"][1]["text"] == ["</script><b>"]


@pytest.mark.slow
def test_the_notebook_runs(folder: Path) -> None:
    document: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert names["machine"].name == "my-h200"
    assert len(names["cases"]) > 30
    assert names["high"] > names["low"]


def test_fitting_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"fitting needs scipy: pip install 'k3sim\[calibrate\]'"):
        calibration.calibrate(DATA / "h200-primitives.json")
