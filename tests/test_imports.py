"""The direction of imports, read from the source: model <- kernels/*/cost <- sim <- calibrate <- k3sim.

An import that is only for type checkers counts too: it would tie the folders just the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from project_sources import ROOT, cycles, file_graph, imports, sources

ERRORS = "k3sim.errors"  # the one module of the front door that every folder may use
GPU_PACKAGES = ("torch", "cutlass", "cuda", "triton")

# What each folder may import of the project, besides k3sim.errors.
ALLOWED = {
    "model": ("k3sim.model",),
    # The configuration of a GEMV is plain data, and so are the tilings that its cost counts.
    "cost": (
        "k3sim.model",
        "k3sim.kernels.work",
        "k3sim.kernels.folders",
        "k3sim.kernels.skinny_gemv.configuration",
        "cost functions",
    ),
    "kernels": ("k3sim.model", "k3sim.kernels"),
    "sim": (
        "k3sim.model",
        "k3sim.kernels.work",
        "k3sim.kernels.costs",
        "k3sim.sim",
    ),
    "calibrate": ("k3sim.model", "k3sim.kernels", "k3sim.sim", "k3sim.calibrate"),
    "k3sim": ("k3sim",),
}


def part_of(path: Path) -> str:
    """The row of the table that a file falls under."""
    parts = path.relative_to(ROOT).parts
    plain = (("work.py",), ("costs.py",), ("folders.py",))
    if parts[0] == "kernels" and (path.name in ("cost.py", "public.py") or parts[1:] in plain):
        return "cost"
    return parts[0]


PREDICTING = [path for path in sources().values() if part_of(path) in ("model", "cost", "sim", "k3sim")]
KNOWN_CYCLES = [
    ["k3sim", "k3sim.report"],
    ["k3sim.kernels.multi_gpu.check", "k3sim.kernels.multi_gpu.decode_steps"],
    ["k3sim.sim.profile", "k3sim.sim.profile_rules"],
]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_cost_function(name: str) -> bool:
    return within(name, "k3sim.kernels") and name.split(".")[3:4] in (["cost"], ["public"])


def allows(part: str, name: str) -> bool:
    if within(name, ERRORS):
        return True
    return any(is_cost_function(name) if one == "cost functions" else within(name, one) for one in ALLOWED[part])


@pytest.mark.parametrize("path", sources().values(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_its_folder_and_those_before_it(path: Path) -> None:
    names = [one.name for one in imports(path) if within(one.name, "k3sim")]
    refused = [name for name in names if not allows(part_of(path), name)]
    assert refused == [], f"{part_of(path)} may import {', '.join(ALLOWED[part_of(path)])} and {ERRORS}"


@pytest.mark.parametrize("path", PREDICTING, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_predicts_needs_no_gpu_package(path: Path) -> None:
    assert [one.name for one in imports(path) if one.name.split(".")[0] in GPU_PACKAGES] == []


def test_no_files_import_each_other() -> None:
    """In a circle of any length, imports inside functions counted."""
    assert [circle for circle in cycles(file_graph()) if circle not in KNOWN_CYCLES] == []


def test_a_circle_of_three_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set[str]()}
    assert cycles(graph) == [["a", "b", "c"]]


def test_the_table_refuses_each_step_to_the_right() -> None:
    for part, name in (
        ("model", "k3sim.kernels.work.Work"),
        ("model", "k3sim.sim.timeline.timeline.Timeline"),
        ("model", "k3sim.Options"),
        ("cost", "k3sim.sim.machine.Machine"),
        ("cost", "k3sim.kernels.skinny_gemv.launch.skinny_gemv"),
        ("kernels", "k3sim.sim.machine.Machine"),
        ("sim", "k3sim.kernels.skinny_gemv.reference.skinny_gemv"),
        ("sim", "k3sim.calibrate.fit.fit"),
        ("calibrate", "k3sim.cli.app"),
    ):
        assert not allows(part, name), f"{part} may import {name}"
    for part, name in (
        ("model", "k3sim.errors.UserError"),
        ("cost", "k3sim.kernels.router_topk.cost.selection"),
        ("cost", "k3sim.kernels.skinny_gemv.cost"),
        ("sim", "k3sim.kernels.costs.work_of"),
        ("k3sim", "k3sim.sim.predict.predict"),
    ):
        assert allows(part, name), f"{part} may not import {name}"
