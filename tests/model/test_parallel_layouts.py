"""Layouts as vLLM and SGLang write them: GPUs, what a rank holds, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload, check_layout, engine_sizes, stage_layers
from k3sim.model.matrices import rank_matrices, rank_shapes
from k3sim.model.memory import resident_bytes, room
from k3sim.model.program import dimensions, rank_load, stage_ends
from k3sim.model.routing import TEXT, UNIFORM, Routing

K3, R1 = load_architecture(), load_architecture("deepseek-r1")
SIZES = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 32, 64])
ANY_LAYOUT = st.builds(
    Layout,
    tp=SIZES,
    ep=SIZES,
    dp=st.integers(1, 3),
    dcp=SIZES,
    attn_dp=SIZES,
    pp=st.integers(1, 9),
    dispatch=st.booleans(),
    shard_all=st.booleans(),
)


def fitting(layout: Layout) -> bool:
    try:
        check_layout(K3, layout)
    except UserError as refused:
        assert "\n" not in str(refused)
        return False
    return True


# -- flags of engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "given_sizes", "gpus", "attention_tp"),
    [
        ("sglang", {"tp": 16, "dp": 2, "ep": 16, "dp_attention": True}, 16, 8),
        ("sglang", {"tp": 16, "attn_dp": 2, "ep": 16}, 16, 8),
        ("sglang", {"tp": 16, "dp": 2, "ep": 16}, 32, 16),
        ("vllm", {"tp": 8, "dp": 2, "ep": 16}, 16, 8),
        ("vllm", {"tp": 8, "dp": 2, "ep": 1}, 16, 8),
        ("vllm", {"tp": 1, "dp": 16, "ep": 16}, 16, 1),
        ("vllm", {"tp": 8}, 8, 8),
    ],
)
def test_engines_count_gpus_in_their_own_way(
    flags: str, given_sizes: dict[str, int], gpus: int, attention_tp: int
) -> None:
    sizes = {"tp": 16, "dp": 1, "ep": 1, "attn_dp": 1, "dp_attention": False, **given_sizes}
    layout = Layout(**engine_sizes(flags, **sizes))  # type: ignore[arg-type]
    check_layout(K3, layout)
    assert (layout.num_gpus, layout.attention_tp) == (gpus, attention_tp)


@pytest.mark.parametrize(
    ("flags", "given_sizes", "shown"),
    [
        ("vllm", {"dp": 2, "ep": 16}, "spans all tp x dp = 32 GPUs"),
        ("vllm", {"attn_dp": 2}, "are SGLang's"),
        ("vllm", {"dp_attention": True}, "are SGLang's"),
        ("sglang", {"dp": 2, "attn_dp": 2, "dp_attention": True}, "give one"),
    ],
)
def test_flags_that_exclude_one_another(flags: str, given_sizes: dict[str, int], shown: str) -> None:
    sizes = {"tp": 16, "dp": 1, "ep": 1, "attn_dp": 1, "dp_attention": False, **given_sizes}
    with pytest.raises(UserError, match=shown):
        engine_sizes(flags, **sizes)  # type: ignore[arg-type]


# -- what a rank holds ----------------------------------------------------------------------------------------------


@given(layout=ANY_LAYOUT)
@settings(max_examples=300)
def test_ranks_of_a_replica_hold_the_checkpoint(layout: Layout) -> None:
    """Experts once over all ranks; everything else once in every attention group, or whole where it is a copy."""
    if not fitting(layout):
        return
    matrices, shapes = rank_matrices(K3, layout), rank_shapes(K3, layout)
    whole = rank_matrices(K3, Layout(tp=1))
    experts = sum(matrices[f"moe.expert_{part}"].num_bytes for part in ("w13", "w2"))
    assert experts * shapes.experts_owned * layout.tp == 896 * sum(
        whole[f"moe.expert_{part}"].num_bytes for part in ("w13", "w2")
    )
    for name, one in matrices.items():
        if name.endswith("_shard"):
            copy = matrices[name.removesuffix("_shard")]
            assert one.num_bytes * layout.attention_tp == copy.num_bytes == whole[copy.name].num_bytes
        elif one.replicated:
            assert one.num_bytes == whole[name].num_bytes
        elif not name.startswith("moe.expert_") and name != "kda.in_proj":  # which holds a copy inside
            assert one.num_bytes * layout.attention_tp == whole[name].num_bytes
    assert layout.num_gpus == layout.tp * layout.pp * layout.dp


@given(layout=ANY_LAYOUT)
@settings(max_examples=200)
def test_more_division_never_needs_more_memory(layout: Layout) -> None:
    if not fitting(layout):
        return

    def needed(one: Layout) -> int:
        return resident_bytes(K3, one, concurrency=8, context=8192, kv_dtype="fp8").total

    assert needed(dataclasses.replace(layout, shard_all=True)) <= needed(dataclasses.replace(layout, shard_all=False))
    for change in ({"pp": layout.pp + 1}, {"dcp": 2 * layout.dcp}, {"dp": layout.dp + 1}):
        more = dataclasses.replace(layout, **change)
        if fitting(more):
            assert needed(more) <= needed(layout)


def test_everything_divided_is_a_sixteenth_of_the_checkpoint() -> None:
    weights = resident_bytes(
        K3, Layout(tp=16, dcp=8, shard_all=True), concurrency=1, context=8192, kv_dtype="fp8"
    ).weights
    # The text part of the checkpoint over 16, and what stays whole: MLA's down projections and small vectors.
    assert 97.0e9 < weights < 98.5e9


def test_room_is_what_fits_and_no_more() -> None:
    layout, capacity = Layout(tp=16, attn_dp=2), 288 * 10**9
    asked = {"context": 8192, "kv_dtype": "bf16", "capacity": capacity}
    found = room(K3, layout, concurrency=4, **asked)  # type: ignore[arg-type]
    assert found.users % layout.num_groups == 0

    def total(users: int, context: int = 8192) -> int:
        return room(K3, layout, concurrency=users, context=context, kv_dtype="bf16", capacity=capacity).resident.total

    assert total(found.users) <= capacity < total(found.users + 1)
    assert found.tokens is not None
    assert total(4, found.tokens // 4) <= capacity < total(4, found.tokens // 4 + 1)


# -- stages ---------------------------------------------------------------------------------------------------------


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_stages_hold_every_layer_once(layers: int, stages: int) -> None:
    if stages > layers:
        return
    parts = stage_layers(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert len(stage_ends(dataclasses.replace(K3), Layout(pp=3))) == 2


# -- load of the experts --------------------------------------------------------------------------------------------


def test_rows_and_experts_of_the_busiest_rank() -> None:
    def load(layout: Layout, rows: int = 64) -> tuple[float, int]:
        found = rank_load(K3, layout, rows, UNIFORM)
        return found.experts, found.rows

    assert load(Layout())[1] == 64
    even = load(Layout(ep=16, expert_imbalance=1.0))
    assert even[1] == 4  # 64 rows of 16 experts over 16 ranks
    assert even[0] == pytest.approx(UNIFORM.distinct_experts(896, 16, 64) / 16)
    routed, twice = load(Layout(ep=16)), load(Layout(ep=16, expert_imbalance=2.0))
    assert even[0] < routed[0] < twice[0] <= 56 and even[1] < routed[1] < twice[1] == 8


@pytest.mark.parametrize(("rows", "ep", "simulated"), [(8, 16, 13.2), (64, 16, 78.2), (64, 64, 26.0)])
def test_tokens_of_the_busiest_rank(rows: int, ep: int, simulated: float) -> None:
    """Against 400 draws, row by row, of which experts are chosen and where they lie."""
    assert UNIFORM.busiest_rank_tokens(896, 16, rows, ep) == pytest.approx(simulated, rel=0.04)


def test_popular_experts_make_a_rank_busier() -> None:
    assert TEXT.busiest_rank_tokens(896, 16, 64, 16) == pytest.approx(125, rel=0.03)
    assert UNIFORM.busiest_rank_tokens(896, 16, 1, 16) == UNIFORM.busiest_rank_experts(896, 16, 1, 16)
    same = Routing(name="counts", counts=(1.0,) * 896)
    assert same.busiest_rank_tokens(896, 16, 64, 16) == pytest.approx(UNIFORM.busiest_rank_tokens(896, 16, 64, 16))


def test_groups_share_rows_and_experts() -> None:
    workload = Workload(concurrency=64)
    gathered = dimensions(K3, Layout(tp=16, ep=16, attn_dp=4), workload, UNIFORM)
    assert (gathered["rows"], gathered["front_rows"], gathered["moe_rows"]) == (16, 16, 64)
    sent = dimensions(K3, Layout(tp=16, ep=16, attn_dp=4, dispatch=True), workload, UNIFORM)
    assert (sent["rows"], sent["front_rows"], sent["moe_rows"]) == (16, 4, 4)
    assert sent["expert_rows"] == gathered["expert_rows"] == 5
    assert (sent["ranks"], sent["expert_ranks"], sent["shared_width"]) == (4, 16, K3.moe.shared_intermediate)
    assert dimensions(R1, Layout(tp=8, ep=8), workload, UNIFORM)["rows"] == 64


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (Layout(tp=16, attn_dp=3), "attn-dp=3 at tp=16: attention groups lie inside tp"),
        (Layout(tp=8, attn_dp=16), "attn-dp=16 at tp=8"),
        (Layout(tp=64), "tp=64 on kimi-k3: not a power of two from 1 to 32"),
        (Layout(tp=64, attn_dp=64, ep=5), "ep=5 at tp=64"),
        (Layout(tp=9, attn_dp=3, ep=9), "groups of 3"),
        (Layout(tp=16, attn_dp=2, dcp=16), "dcp=16 at tp=16 in 2 attention groups"),
        (Layout(tp=16, ep=16, dispatch=True), "attn-dp above 1"),
        (Layout(tp=16, attn_dp=2, ep=8, dispatch=True), "ep equal to tp"),
        (Layout(tp=16, expert_imbalance=2.0), "needs ep above 1"),
        (Layout(tp=16, ep=16, expert_imbalance=0.5), "expert-imbalance is 0.5"),
        (Layout(tp=16, ep=16, expert_imbalance=float("nan")), "expert-imbalance is nan"),
        (Layout(pp=94), "pp=94 stages of 93 layers"),
        (Layout(pp=0), "pp=0 stages"),
    ],
)
def test_layouts_that_divide_nothing_are_refused(layout: Layout, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        check_layout(K3, layout)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)
