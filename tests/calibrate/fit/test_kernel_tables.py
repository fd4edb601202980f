"""Public kernel tables: rows that become chains, the third that is set aside, and a fit that finds what was planted."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from k3sim.calibrate.fit.kernel_tables import COLUMNS, TableRow, errors_of, fit_tables, profile_of, read_tables, row_of
from k3sim.cli import main
from k3sim.errors import UserError
from k3sim.sim.profile import load_machine, machine_of

pytest.importorskip("scipy")
GEMM = {
    "hardware": "NVIDIA GB300", "op": "GEMM torch.nn.functional.linear", "shape": "M=1 N=7168 K=768",
    "dtype": "bfloat16",
    "condition": "VLLM 0.24.0; 6 different weight copies back to back (cold-ish L2)", "time_us": "3.5", "notes": "",
    "source_url": "https://example.org",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    table.writerows(rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def planted(setup_s: float) -> list[dict[str, str]]:
    """A table whose times are those of a GB300 with another set-up."""
    machine = replace(load_machine("gb300"), tensor_core_setup_s=setup_s)
    rows = []
    for outputs in (4096, 5120, 6144, 7168, 8192, 10240):
        for depth in (3072, 3584, 7168):
            cells = {**GEMM, "shape": f"M=1 N={outputs} K={depth}"}
            row = row_of(cells)
            assert isinstance(row, TableRow)
            rows.append({**cells, "time_us": f"{row.predicted_us(machine):.6f}"})
    return rows


def test_a_planted_value_is_inside_its_interval(tmp_path: Path) -> None:
    rows, _ = read_tables([write(tmp_path / "a.csv.gz", planted(1.3e-6))], ["gb300"])
    found = fit_tables(load_machine("gb300"), rows)
    (value,) = found.fits[0].found
    assert value.determined and value.low is not None and value.high is not None
    assert value.value == pytest.approx(1.3e-6, rel=0.01)
    assert value.low < 1.3e-6 < value.high
    held = [errors for group, held_out, errors in found.errors if group == "all" and held_out]
    assert held[0].median < 0.01
    profile = profile_of(found, "mine", "a table")
    assert machine_of(profile, "x").tensor_core_setup_s == pytest.approx(1.3e-6, rel=0.01)


def test_held_out_rows_do_not_change_the_fit(tmp_path: Path) -> None:
    rows = planted(1.3e-6)
    plain, _ = read_tables([write(tmp_path / "a.csv", rows)], ["gb300"])
    spoilt = [{**cells, "time_us": "99"} if row.held_out else cells for cells, row in zip(rows, plain, strict=True)]
    assert 0 < sum(row.held_out for row in plain) < len(plain)
    other, _ = read_tables([write(tmp_path / "b.csv", spoilt)], ["gb300"])
    machine = load_machine("gb300")
    assert fit_tables(machine, plain).fits[0].found == fit_tables(machine, other).fits[0].found


def test_a_third_of_rows_is_set_aside() -> None:
    rows = []
    for outputs in range(64, 64 * 301, 64):
        row = row_of({**GEMM, "shape": f"M=1 N={outputs} K=512"})
        assert isinstance(row, TableRow)
        rows.append(row)
        assert row.held_out == replace(row, measured_us=1.0, group="other").held_out
    assert 0.25 < sum(row.held_out for row in rows) / len(rows) < 0.42


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "MI355X"}, "machine without a profile"),
        ({"hardware": "GB300 x8 (2 trays)"}, "machine without a profile"),
        ({"hardware": "B300/GB300 (SM103; TP to confirm)"}, "machine without a profile"),
        ({"condition": "eager launch"}, "eager: the host is measured"),
        ({"op": "NCCL all_reduce"}, "no cost for this operation"),
        ({"shape": "M=64 N=512 K=512"}, "more than 16 rows"),
        ({"dtype": "fp8"}, "not a bf16 product"),
        ({"time_us": ""}, "no time"),
    ],
)
def test_rows_without_a_chain_say_why(changes: dict[str, str], reason: str) -> None:
    assert row_of({**GEMM, **changes}) == reason


def test_traps_are_priced() -> None:
    """Few small copies stay in L2 and are not fitted; one kernel a replay has the graph's launch in its time."""
    machine = load_machine("gb300")
    small = row_of(GEMM)
    assert isinstance(small, TableRow) and small.copies == 6 and small.stays_in_l2(machine)
    assert not replace(small, copies=None).stays_in_l2(machine)
    large = row_of({**GEMM, "shape": "M=1 N=16384 K=7168"})
    assert isinstance(large, TableRow) and not large.stays_in_l2(machine)
    note = "one kernel per CUDA-graph replay, warm L2"
    kda = {**GEMM, "op": "KDA kda_fused_decode", "shape": "heads=12 dk=128 dv=128 conv=4 batch=1 seq=1", "notes": note}
    alone = row_of(kda)
    assert isinstance(alone, TableRow) and alone.one_a_replay
    chained = replace(alone, one_a_replay=False)
    launch_us = machine.host_graph_launch_s * 1e6
    assert alone.predicted_us(machine) - chained.predicted_us(machine) == pytest.approx(launch_us)


def test_errors_are_two_sided() -> None:
    row = row_of(GEMM)
    assert isinstance(row, TableRow)
    machine = load_machine("gb300")
    us = row.predicted_us(machine)
    found = errors_of([replace(row, measured_us=us / 1.1), replace(row, measured_us=us / 0.9)], machine)
    assert (found.rows, found.median, found.mean_signed) == (2, pytest.approx(0.1), pytest.approx(0.0))


def test_bad_tables_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.csv").write_text("op,shape\n")
    (tmp_path / "broken.csv.gz").write_bytes(b"\x1f\x8b nothing")
    write(tmp_path / "words.csv", [GEMM, {**GEMM, "time_us": "fast"}])
    write(tmp_path / "zero.csv", [{**GEMM, "time_us": "0"}])
    write(tmp_path / "many.csv", [{**GEMM, "time_us": "fast"}, {**GEMM, "time_us": "nan"}])
    (tmp_path / "ragged.csv").write_text("hardware,op,shape,dtype,condition,time_us,notes,source_url\nGB300,GEMM\n")
    (tmp_path / "step.csv").write_text('{"measured": true, "step_us": 1}')
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n")
    write(tmp_path / "none.csv", [{**GEMM, "hardware": "MI355X"}])
    for name, message in (
        ("short.csv", "short.csv: line 1: lacks hardware, dtype"),
        ("broken.csv.gz", "a gzip archive that cannot be unpacked"),
        ("missing.csv", "cannot be read (No such file"),
        ("words.csv", 'words.csv: line 3: time_us is "fast", accepted: 0.1 to 1e+06'),
        ("zero.csv", 'zero.csv: line 2: time_us is "0", accepted: 0.1 to 1e+06'),
        ("none.csv", "no cuBLAS rows of gb300"),
        ("many.csv", 'line 2: time_us is "fast", accepted: 0.1 to 1e+06; line 3: time_us is "nan", accepted'),
        ("ragged.csv", "ragged.csv: line 2: lacks shape, dtype, condition, time_us, notes, source_url"),
        ("step.csv", "this is a measured step of 'k3sim decode'"),
        ("azure.csv", "this is a trace of requests over time; arrivals and prefill are not modelled"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["calibrate", "--tables", str(tmp_path / name), "--machine", "gb300"])
        assert stopped.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err, captured.err
    with pytest.raises(UserError, match="this is a folder; give a file"):
        read_tables([tmp_path], ["gb300"])


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "a.csv", planted(1.3e-6))
    target = tmp_path / "mine.json"
    words = ["calibrate", "--tables", str(table), "--machine", "gb300", "--machine-out", str(target), "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["found"][0]["determined"] and document["profile"] == str(target)
    assert load_machine(str(target)).provenance["tensor_core_setup_s"].kind == "fitted"
