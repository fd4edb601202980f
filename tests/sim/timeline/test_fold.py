"""Folding: which layers are simulated, and that the folded step is the full one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.sim.components.skew import Skew
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import Question
from k3sim.sim.timeline.fold import Cell, Fold, cells, expand, fold_layers, folded_step_ps
from k3sim.sim.timeline.timeline import Counter, KernelRun, Phase, Span, Timeline

K3 = load_architecture()
PATHS = ("stock", "fused", "megakernel")


def neighbours(architecture: Architecture, layer: int) -> tuple[object, ...]:
    last = architecture.num_layers - 1
    return (
        architecture.mixer(layer),
        architecture.ffn(layer),
        architecture.attn_res_sources(layer, "mixer"),
        architecture.attn_res_sources(layer, "ffn"),
        architecture.ffn(layer - 1) if layer else None,
        architecture.mixer(layer + 1) if layer < last else None,
    )


def test_a_layer_stands_for_its_like() -> None:
    fold = fold_layers(K3)
    assert len(fold.representative) == K3.num_layers == 93
    for layer, chosen in enumerate(fold.representative):
        assert chosen in fold.layers
        assert neighbours(K3, layer) == neighbours(K3, chosen)


def test_the_folded_order_keeps_following_mixers() -> None:
    fold = fold_layers(K3)
    assert list(fold.layers) == sorted(set(fold.layers))
    assert (fold.layers[0], fold.layers[-1]) == (0, 92)
    for layer, following in zip(fold.layers, fold.layers[1:], strict=False):
        assert K3.mixer(following) == K3.mixer(layer + 1)
        # and the ffn before it
        assert K3.ffn(layer) == K3.ffn(following - 1)


def test_folding_leaves_fewer_than_half_of_the_layers() -> None:
    assert len(fold_layers(K3).layers) < 93 / 2


# -- a hand-made folded timeline -----------------------------------------------------------------------------------


def run(index: int, layer: int, start_ps: int, end_ps: int, cause: int, **fields: object) -> KernelRun:
    span = Span(Phase.WEIGHTS, start_ps, end_ps, cause, start_ps if cause >= 0 else -1)
    return KernelRun(
        index=index, rank=0, stream="main", layer=layer, kind="kda+moe", stage="stage", start_ps=start_ps,
        end_ps=end_ps, spans=[span], launched_by=cause, causes=(cause,) if cause >= 0 else (), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


# Layer 0 takes 10, layer 1 stands for 1 to 3 and takes 7, the head (layer 4) takes 3.
FOLDED = Timeline(
    machine="m",
    num_ranks=1,
    ranks=(0,),
    num_layers=2,
    kernels=[run(0, -1, 0, 2, -1), run(1, 0, 2, 10, 0), run(2, 1, 10, 17, 1), run(3, 4, 17, 20, 2)],
    counters=[Counter(0, "hbm", 9, ((0, 0), (4, 5), (10, 6), (16, 0)))],
    step_ps=20,
)
FOLD = Fold((0, 1), (0, 1, 1, 1))


def test_cells_tile_the_main_stream() -> None:
    parts = cells(FOLDED, FOLD)
    assert parts == [Cell(0, 2, -1, (-1,)), Cell(2, 10, 0, (0,)), Cell(10, 17, 1, (1, 2, 3)), Cell(17, 20, 4, (4,))]
    assert folded_step_ps(parts) == 2 + 8 + 3 * 7 + 3


def test_expanding_repeats_the_cells_in_order() -> None:
    full = expand(FOLDED, cells(FOLDED, FOLD))
    assert full.step_ps == 34
    assert full.num_layers == 4
    assert [(one.index, one.layer, one.start_ps, one.end_ps) for one in full.kernels] == [
        (0, -1, 0, 2),
        (1, 0, 2, 10),
        (2, 1, 10, 17),
        (3, 2, 17, 24),
        (4, 3, 24, 31),
        (5, 4, 31, 34),
    ]
    # A cause in the layer before is that layer's kernel, in its copy too; its time moves along.
    assert [one.launched_by for one in full.kernels] == [-1, 0, 1, 2, 3, 4]
    assert [one.spans[0].cause_ps for one in full.kernels] == [-1, 2, 10, 17, 24, 31]
    assert full.counters[0].steps == (
        (0, 0), (4, 5), (10, 6), (16, 0), (17, 6), (23, 0), (24, 6), (30, 0),
    )  # fmt: skip


# -- folded equals full --------------------------------------------------------------------------------------------


def both(path: str, skew: Skew, machine: str, **layout: int) -> tuple[Prediction, Prediction]:
    workload = Workload(concurrency=layout.pop("concurrency", 1), context=layout.pop("context", 8192))
    question = Question(
        architecture=K3,
        layout=Layout(**layout),  # type: ignore[arg-type]
        workload=workload,
        machine=load_machine(machine),
        path=find_path(path),
        skew=skew,
    )
    return predict(question), predict(replace(question, folded=False))


LAYOUTS = (
    {"machine": "gb300", "tp": 16},
    {"machine": "gb300", "tp": 8},
    {"machine": "gb300", "tp": 32, "ep": 4, "concurrency": 16},
    {"machine": "gb200", "tp": 16, "dcp": 4, "context": 131072},
    {"machine": "b300", "tp": 8, "concurrency": 4},
    {"machine": "gb300", "tp": 16, "concurrency": 64},
)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("layout", "skew"),
    [*((layout, Skew.OFF) for layout in LAYOUTS), *((layout, Skew.EXPECTED) for layout in LAYOUTS[::3])],
    ids=lambda one: one.value if isinstance(one, Skew) else "-".join(map(str, one.values())),
)
def test_the_folded_step_is_the_full_one(path: str, skew: Skew, layout: dict[str, object]) -> None:
    folded, full = both(path, skew, **layout)  # type: ignore[arg-type]
    assert folded.step_us == pytest.approx(full.step_us, rel=0.001)
    assert folded.hbm_busy_fraction == pytest.approx(full.hbm_busy_fraction, rel=0.002)
    for part in set(folded.waits_ps) | set(full.waits_ps):
        assert folded.waits_ps.get(part, 0) == pytest.approx(full.waits_ps.get(part, 0), abs=0.001 * full.step_ps), part
    # Expanded, it is the full timeline: the same kernels, at the same times.
    names = [(one.layer, one.stage, one.stream) for one in full.timeline.kernels]
    assert [(one.layer, one.stage, one.stream) for one in folded.full.kernels] == names
    assert folded.full.step_ps == folded.step_ps
    worst_ps = max(
        abs(one.end_ps - other.end_ps) for one, other in zip(folded.full.kernels, full.timeline.kernels, strict=True)
    )
    assert worst_ps <= 0.001 * full.step_ps


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", ["stock", "fused"])
def test_the_folded_step_of_own_kernels_agrees(path: str) -> None:
    """Their tables have a row for snapshot layers alone."""
    question = Question(
        architecture=K3,
        layout=Layout(tp=16),
        workload=Workload(),
        machine=load_machine("h200"),
        path=find_path(path, kernel_set="own"),
        skew=Skew.OFF,
    )
    folded, full = predict(question), predict(replace(question, folded=False))
    assert folded.step_us == pytest.approx(full.step_us, rel=0.001)
    assert folded.moved_bytes == full.moved_bytes
    stages = [(one.layer, one.stage) for one in full.timeline.kernels]
    assert [(one.layer, one.stage) for one in folded.full.kernels] == stages


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", PATHS)
def test_the_floor_of_a_folded_step_agrees(path: str) -> None:
    folded, full = both(path, Skew.OFF, "gb300", tp=16)
    assert folded.moved_bytes == full.moved_bytes
