"""``k3sim paths``: every path and switch by name, and a path as the kernels that a prediction runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3sim.cli import main
from k3sim.model.paths import PARTS, PATH_NAMES, SWITCHES
from k3sim.model.program import build_program
from k3sim.model.switches import MEANINGS
from k3sim.sim.options import Options
from k3sim.sim.question import ask

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["paths", *arguments])
    assert exit_info.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def document_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(shown(capsys, *arguments, "--json"))
    return loaded


def test_the_overview_names_switches_and_their_parts(capsys: Capture) -> None:
    document = document_of(capsys)
    assert [one["path"] for one in document["paths"]] == list(PATH_NAMES)
    assert [one["switch"] for one in document["switches"]] == list(SWITCHES)
    parts = [part["part"] for one in document["switches"] for part in one["parts"]]
    assert parts == list(PARTS) and len(parts) == 11
    text = shown(capsys)
    assert all(name in text for name in (*PATH_NAMES, *MEANINGS))
    assert set(MEANINGS) == {*SWITCHES, *PARTS}


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(path="stock", concurrency=16),
        Options(path="megakernel", dcp=4, context=131072),
        Options(without=("low-batch-kernels.experts", "sharded-router"), concurrency=4),
        Options(kernels="own", machine="h200", concurrency=2),
        Options(kernels="own", path="stock", machine="h200"),
    ],
    ids=Options.side,
)
def test_a_path_is_shown_as_it_runs(capsys: Capture, options: Options) -> None:
    words = [word for word in options.command().split()[2:] if word not in ("--path", options.path)]
    document = document_of(capsys, options.path, *words)
    question = ask(options)
    layout = question.path.layout(question.layout, question.workload, question.pad_experts)
    program = build_program(question.architecture, layout, question.workload, question.path)
    runs = {(call.stage, call.operator, call.stream, call.launch) for call in program.calls}
    keys = ("stage", "operator", "stream", "launch")
    rows = [row for table in document["kinds"].values() for row in table]
    assert {tuple(row[key] for key in keys) for row in rows} == runs
    stages = {row["stage"] for row in rows}
    assert all(row["predecessor"] in stages | {None} and stages.issuperset(row["after"]) for row in rows)


def test_a_part_turns_its_own_rows_alone(capsys: Capture) -> None:
    whole = document_of(capsys, "fused")
    without = document_of(capsys, "fused", "--without", "fused-allreduce.o-proj")
    assert without["switches"] == ["low-batch-kernels", "fused-allreduce.tail", "sharded-router", "l2-prefetch"]
    for kind, table in whole["kinds"].items():
        kept = [row["operator"] for row in table if "fused-allreduce.o-proj" not in row["brought_by"]]
        left = [row["operator"] for row in without["kinds"][kind] if "fused-allreduce.o-proj" not in row["replaced_by"]]
        assert kept == left


def test_a_table_names_what_brings_a_kernel(capsys: Capture) -> None:
    lines = [" ".join(line.split()) for line in shown(capsys, "fused").splitlines()]
    assert lines[0].startswith("fused with public kernels, tp16ep1dcp1 on 16 GPUs, concurrency 1; switches: low-b")
    row = "kda.o_proj proj_allreduce.produce main pdl kda.decode kda.o_proj 1/16 fused-allreduce.o-proj"
    assert row in lines
    assert "moe.shared_gate_up skinny_gemv.ring aux graph attn_res.ffn moe.shared_gate_up 1/16" in " ".join(lines)
