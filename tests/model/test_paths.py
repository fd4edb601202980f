"""Paths by name and switch, and the tables behind them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from families import FAMILIES

from k3sim.errors import UserError
from k3sim.kernels.costs import all_costs
from k3sim.kernels.expert_gemv.launch import MAX_ROWS, WIDTHS
from k3sim.model.config_file import load_architecture
from k3sim.model.draft import Draft
from k3sim.model.layout import Layout, Workload
from k3sim.model.matrices import rank_matrices
from k3sim.model.paths import PARTS, PATH_NAMES, PUBLIC_TABLES, SWITCHES, find_path
from k3sim.model.paths.megakernel import MEGAKERNEL_TABLES
from k3sim.model.paths.own import MAX_OWN_ROWS, OWN_EXPERT_WIDTHS, OWN_TABLES, check_own
from k3sim.model.paths.public import FUSED_NEXT_WEIGHTS, LATENT, LOGITS
from k3sim.model.program import dimensions
from k3sim.model.routing import UNIFORM
from k3sim.model.step import FEATURES, Row

K3 = load_architecture()
ROWS = [row for tables in (PUBLIC_TABLES, MEGAKERNEL_TABLES, OWN_TABLES) for rows in tables.values() for row in rows]
ANY_FEATURES = frozenset(name for pair in FEATURES for name in pair)


def test_fused_has_all_switches_and_stock_none() -> None:
    assert find_path("fused").switches == frozenset(SWITCHES)
    assert find_path("stock").switches == frozenset()
    assert find_path("megakernel").switches == frozenset(SWITCHES)
    assert find_path("stock").tables is find_path("fused").tables


def test_with_starts_from_none_and_without_from_all() -> None:
    assert find_path("fused", with_switches=("fused-allreduce",)).switches == {"fused-allreduce"}
    without = find_path("fused", without=("fused-allreduce",))
    assert without.switches == {"low-batch-kernels", "sharded-router", "l2-prefetch"}
    both = find_path("fused", with_switches=("fused-allreduce", "l2-prefetch"), without=("low-batch-kernels",))
    assert both.switches == {"fused-allreduce", "l2-prefetch"}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("fuse", {}, r"unknown path 'fuse' \(did you mean fused\?\); accepted: stock, fused, megakernel"),
        (
            "fused",
            {"with_switches": ("fused-all",)},
            r"unknown switch 'fused-all' \(did you mean fused-allreduce\?\); accepted: low-",
        ),
        ("fused", {"without": ("Prefech",)}, "did you mean l2-prefetch"),
        (
            "fused",
            {"with_switches": ("fused-allreduce",), "without": ("fused-allreduce",)},
            "both --with and --without",
        ),
        ("stock", {"with_switches": ("fused-allreduce",)}, "path 'stock' has no switches"),
        ("megakernel", {"without": ("fused-allreduce",)}, "path 'megakernel' has no switches"),
        ("megakernel", {"kernel_set": "own"}, "path 'megakernel' has no kernels of the project's own"),
        ("fused", {"kernel_set": "owm"}, r"unknown kernels 'owm' \(did you mean own\?\); accepted: public, own"),
    ],
)
def test_refusals(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_path(name, **given)


@pytest.mark.parametrize(
    ("layout", "rows", "message"),
    [
        (Layout(tp=8, dcp=4), 1, "own kernels run plain tensor parallelism; ep=1 and dcp=4 need --kernels public"),
        (Layout(tp=8, ep=8), 1, "ep=8 and dcp=1 need --kernels public"),
        (Layout(tp=16), 17, "own kernels take 1 to 16 rows a rank; got 17"),
        (Layout(tp=4), 1, "tp=4: an expert's slice is 768 wide.*192 and 384; accepted: tp 8 or 16"),
    ],
)
def test_paths_without_own_kernels_are_refused(layout: Layout, rows: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_own(K3, layout, rows)


def test_own_kernels_are_built_for_what_is_accepted() -> None:
    assert OWN_EXPERT_WIDTHS == WIDTHS and MAX_OWN_ROWS == MAX_ROWS
    for tp in (8, 16):
        check_own(K3, Layout(tp=tp), MAX_OWN_ROWS)


def test_a_name_that_resembles_nothing_gets_no_hint() -> None:
    with pytest.raises(UserError) as refusal:
        find_path("xyzzy")
    assert "did you mean" not in str(refusal.value)


def test_every_operator_has_a_cost_and_row() -> None:
    # The fastest public product for each shape is what public tables time; the paths run what an engine picks.
    timed_alone = {"skinny_gemv.low_latency"}
    assert {row.operator for row in ROWS} - {"host"} == set(all_costs()) - timed_alone


def test_every_named_weight_and_dimension_exists() -> None:
    layout, models = Layout(tp=8), (K3, replace(K3, draft=Draft(num_drafts=7)), *FAMILIES)
    matrices = {name for model in models for name in rank_matrices(model, layout)}
    known = {name for model in models for name in dimensions(model, layout, Workload(), UNIFORM)}
    known |= {"sources", "ffn_sources"}
    for row in ROWS:
        assert set(row.weights) <= matrices | {"next layer"}, row.stage
        assert {value for value in row.shape.values() if isinstance(value, str)} <= known, row.stage
        assert row.group in known
        assert set(row.on) | set(row.off) <= {*SWITCHES, *PARTS}
        assert row.launch in ("graph", "pdl", "task", "host") and row.trigger in ("start", "wait", "stream", "end")
    for weights in FUSED_NEXT_WEIGHTS.values():
        assert set(weights) <= matrices


def test_every_row_runs_under_some_switches() -> None:
    parts = (LATENT, LOGITS)
    sets = [
        frozenset(name for name, on in zip((*SWITCHES, *parts), bits, strict=True) if on)
        for bits in product((0, 1), repeat=len(SWITCHES) + len(parts))
    ]
    groups = Layout(tp=16, ep=16, attn_dp=2)
    layouts = [
        (Layout(tp=8), 12), (Layout(tp=16), 6), (Layout(tp=16, dcp=2), 6), (Layout(tp=16, shard_all=True), 6),
        (groups, 12), (replace(groups, dispatch=True), 12), (Layout(tp=1), 96),
    ]  # fmt: skip
    for row in ROWS:
        assert any(
            row.applies(switches, layout, heads, rows, snapshot=True, features=ANY_FEATURES)
            for switches in sets
            for layout, heads in layouts
            for rows in (1, 4, 8, 64, 200, 512)
        ), row.stage


@pytest.mark.parametrize(
    ("parts", "rows", "front"),
    [
        ((), 1, {"moe.router": ["moe.router"], "moe.latent_down": ["moe.latent_down"]}),
        ((LATENT,), 1, {"moe.router": ["moe.router"], "moe.front": ["moe.latent_down_shard"]}),
        ((LOGITS,), 1, {"moe.front": ["moe.router_shard"], "moe.latent_down": ["moe.latent_down"]}),
        ((LATENT, LOGITS), 8, {"moe.front": ["moe.router_shard", "moe.latent_down_shard"]}),
        ((LATENT, LOGITS), 9, {"moe.router": ["moe.router"], "moe.latent_down": ["moe.latent_down"]}),
    ],
)
def test_the_front_is_divided_part_by_part(parts: tuple[str, ...], rows: int, front: dict[str, list[str]]) -> None:
    path = find_path("fused", with_switches=parts) if parts else find_path("stock")
    running = [row for row in path.tables["moe"] if path.applies(row, Layout(), 6, rows)]
    stages = ("moe.router", "moe.latent_down", "moe.front")
    assert {row.stage: list(row.weights) for row in running if row.stage in stages} == front


def kernel(**columns: object) -> Row:
    return Row(stage="s", operator="unfused.norm", shape={}, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "switches", "layout", "heads", "rows", "applies"),
    [
        ({}, (), Layout(), 6, 1, True),
        ({"on": ("fused-allreduce", "l2-prefetch")}, ("fused-allreduce",), Layout(), 6, 1, False),
        ({"on": ("fused-allreduce", "l2-prefetch")}, ("fused-allreduce", "l2-prefetch"), Layout(), 6, 1, True),
        ({"off": ("fused-allreduce", "l2-prefetch")}, ("l2-prefetch",), Layout(), 6, 1, False),
        ({"off": ("fused-allreduce", "l2-prefetch")}, ("low-batch-kernels",), Layout(), 6, 1, True),
        ({"needs": "dcp"}, (), Layout(), 6, 1, False),
        ({"needs": "dcp"}, (), Layout(dcp=2), 6, 1, True),
        ({"needs": "no dcp"}, (), Layout(dcp=2), 6, 1, False),
        ({"needs": "few kda heads"}, (), Layout(), 11, 1, True),
        ({"needs": "few kda heads"}, (), Layout(), 12, 1, False),
        ({"needs": "many kda heads"}, (), Layout(), 12, 1, True),
        ({"max_rows": 8}, (), Layout(), 6, 8, True),
        ({"max_rows": 8}, (), Layout(), 6, 9, False),
        ({"min_rows": 9}, (), Layout(), 6, 8, False),
    ],
)
def test_when_a_row_applies(
    columns: dict[str, object], switches: tuple[str, ...], layout: Layout, heads: int, rows: int, applies: bool
) -> None:
    assert kernel(**columns).applies(frozenset(switches), layout, heads, rows) is applies


def test_the_names_are_those_of_the_documentation() -> None:
    assert PATH_NAMES == ("stock", "fused", "megakernel")
    assert SWITCHES == ("low-batch-kernels", "fused-allreduce", "sharded-router", "l2-prefetch")
