"""The direction of imports, read from the source, by room: model <- kernels/*/cost <- sim <- calibrate <- k3sim.

An import that is only for type checkers counts for the table too: it would tie the rooms just the same. For circles of
files it does not, since nothing is loaded by it.
"""

from __future__ import annotations

import pytest
from project_sources import ROOT, cycles, file_graph, imports, nearest, sources

GPU_PACKAGES = ("torch", "cutlass", "cuda", "triton")

#: What every command and every comparison may ask of the simulator.
SIM = (
    "sim.clock", "sim.machine", "sim.units", "sim.quantities", "sim.timeline", "sim", "sim.components", "sim.export",
    "sim.export.document",
)  # fmt: skip

#: Room -> the rooms that it may import, besides itself and k3sim/errors.py. A room is a folder, or one file that others
#: need without its folder; ``*`` stands for an operator. The longest name that fits a file is its room.
ROOMS: dict[str, tuple[str, ...]] = {
    "k3sim.errors": (),
    # What must be computed.
    "model.names": (),
    "model.documents": ("model.names",),
    "model": ("model.names", "model.documents"),
    "model.paths": ("model", "model.names"),
    # How, and what it costs. Costs are counts of shapes alone; the rest of an operator needs a GPU package.
    "kernels": (),
    "kernels.folders": (),
    "kernels.work": (),
    "kernels.*.configuration": (),
    "kernels.footprints": ("kernels.work",),
    "kernels.footprints.__main__": ("kernels.footprints", "kernels.toolchain"),
    "kernels.*.cost": ("model", "kernels.work", "kernels.footprints", "kernels.*.configuration"),
    "kernels.*.public": ("model", "kernels.work", "kernels.footprints", "kernels.*.cost"),
    "kernels.costs": ("model", "kernels.work", "kernels.folders"),
    "kernels.toolchain": ("kernels.work", "kernels.folders"),
    "kernels.device": ("kernels.toolchain", "kernels.folders"),
    "kernels.harness": ("model.documents", "kernels.work", "kernels.folders", "kernels.toolchain", "kernels.device"),
    "kernels.*": (
        "model", "kernels.work", "kernels.*.configuration", "kernels.*.cost", "kernels.*.public", "kernels.toolchain",
        "kernels.device", "kernels.harness",
    ),
    "kernels.multi_gpu.symmetric": (),
    "kernels.rank": (
        "model", "model.paths", "kernels.*", "kernels.*.configuration", "kernels.*.cost", "kernels.harness",
        "kernels.multi_gpu.symmetric",
    ),
    "kernels.multi_gpu": (
        "model", "model.paths", "kernels.*", "kernels.*.configuration", "kernels.toolchain", "kernels.device",
        "kernels.harness", "kernels.rank", "kernels.multi_gpu.symmetric",
    ),
    # When it happens. A file of the timeline carries the version that its writer gives it.
    "sim.clock": (),
    "sim.machine": (),
    "sim.units": (),
    "sim.quantities": (),
    "sim.export.document": (),
    "sim.timeline": (
        "model", "model.names", "model.documents", "model.paths", "kernels.work", "kernels.costs",
        "sim.export.document",
    ),
    "sim.components": (
        "model", "kernels.work", "kernels.costs", "sim.clock", "sim.machine", "sim.units", "sim.timeline",
    ),
    "sim": (
        "model", "model.names", "model.documents", "model.paths", "kernels.work", "kernels.costs", "sim.clock",
        "sim.machine", "sim.units", "sim.timeline", "sim.components",
    ),
    "sim.export": ("sim.quantities", "sim.timeline", "sim.export.document"),
    # Whether that is true. What measures runs kernels; a fit states what was read, and a comparison predicts.
    "calibrate": ("model.documents", "calibrate.probes"),
    "calibrate.probes": (
        "model.documents", "kernels.*", "kernels.*.configuration", "kernels.harness", "kernels.multi_gpu",
    ),
    "calibrate.evidence": ("model.documents", "model.paths", "kernels.costs", "sim"),
    "calibrate.decode": (
        "model", "model.documents", "model.paths", "kernels.costs", "kernels.device", "kernels.harness",
        "kernels.multi_gpu.symmetric", "kernels.rank", "sim.timeline", "sim.export.document",
    ),
    "calibrate.traces": ("model.documents", "sim.timeline"),
    "calibrate.fit": ("model.names", "model.documents", "calibrate", "calibrate.probes", "calibrate.compare", *SIM),
    "calibrate.compare": (
        "model", "model.paths", "model.documents", "kernels.harness", "calibrate", "calibrate.evidence",
        "calibrate.fit", *SIM,
    ),
    "calibrate.ablation": (
        "model", "model.paths", "kernels.work", "kernels.costs", "calibrate.compare", "calibrate.evidence", *SIM,
    ),
    # The front door.
    "k3sim": ("model", "model.paths", "model.documents", *SIM, "calibrate.decode", "calibrate.traces"),
    "k3sim.commands": (
        "model", "model.paths", "model.documents", *SIM, "kernels.toolchain", "kernels.harness", "kernels.multi_gpu",
        "calibrate", "calibrate.evidence", "calibrate.decode", "calibrate.fit", "calibrate.compare", "calibrate.traces",
        "k3sim",
    ),
}  # fmt: skip
#: Rooms whose files load no GPU package, not even inside a function: predicting needs a laptop.
PREDICTING = ("k3sim", "model", "sim", "kernels.work", "kernels.costs", "kernels.folders", "kernels.*.cost",
              "kernels.*.public")  # fmt: skip


def room_of(module: str) -> str:
    """The room of a module of the project: the longest name that fits it."""
    parts = module.split(".")
    if parts[1:2] and parts[1] in ("model", "kernels", "sim", "calibrate"):
        parts = parts[1:]
    for count in range(len(parts), 0, -1):
        exact, any_operator = ".".join(parts[:count]), ".".join([parts[0], "*", *parts[2:count]])
        if exact in ROOMS:
            return exact
        if count > 1 and any_operator in ROOMS:
            return any_operator
    raise AssertionError(f"{module} has no room")


def allows(room: str, other: str) -> bool:
    return other in (room, "k3sim.errors", *ROOMS[room])


def predicts(room: str) -> bool:
    return any(room == one or (one in ("model", "sim", "k3sim") and room.startswith(f"{one}.")) for one in PREDICTING)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    refused = [
        f"{path.relative_to(ROOT)} line {one.line}: {other} of {room_of(other)}"
        for module, path in sources().items()
        if room_of(module) == room
        for one in imports(path)
        if (other := nearest(one.name)) is not None and not allows(room, room_of(other))
    ]
    assert refused == [], f"{room} may import {', '.join(ROOMS[room])}"


def test_every_room_has_files() -> None:
    assert ROOMS.keys() == {room_of(module) for module in sources()}


def test_what_predicts_needs_no_gpu_package() -> None:
    loading = [
        f"{path.relative_to(ROOT)} line {one.line}"
        for module, path in sources().items()
        if predicts(room_of(module))
        for one in imports(path)
        if one.name.split(".")[0] in GPU_PACKAGES
    ]
    assert loading == []


def test_no_files_import_each_other() -> None:
    """In a circle of any length, imports inside functions counted."""
    assert cycles(file_graph()) == []


def test_a_circle_of_three_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set[str]()}
    assert cycles(graph) == [["a", "b", "c"]]


def test_the_table_refuses_each_step_right() -> None:
    for importer, imported in (
        ("k3sim.model.layout", "k3sim.kernels.work"),
        ("k3sim.model.layout", "k3sim.model.paths.public"),
        ("k3sim.model.layout", "k3sim"),
        ("k3sim.kernels.router_topk.cost", "k3sim.sim.machine"),
        ("k3sim.kernels.skinny_gemv.cost", "k3sim.kernels.skinny_gemv.launch"),
        ("k3sim.kernels.skinny_gemv.launch", "k3sim.sim.machine"),
        ("k3sim.sim.engine", "k3sim.kernels.skinny_gemv.reference"),
        ("k3sim.sim.components.fabric", "k3sim.sim.engine"),
        ("k3sim.sim.engine", "k3sim.calibrate.fit.fit"),
        ("k3sim.calibrate.probes.l2", "k3sim.sim.machine"),
        ("k3sim.calibrate.compare.validate", "k3sim.cli"),
    ):
        assert not allows(room_of(importer), room_of(imported)), f"{importer} may import {imported}"
    for importer, imported in (
        ("k3sim.model.layout", "k3sim.errors"),
        ("k3sim.kernels.router_topk.cost", "k3sim.kernels.work"),
        ("k3sim.sim.engine", "k3sim.kernels.costs"),
        ("k3sim.cli", "k3sim.sim.predict"),
    ):
        assert allows(room_of(importer), room_of(imported)), f"{importer} may not import {imported}"
