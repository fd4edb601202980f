"""Per-rank shapes and bytes of K3, memory of a rank, and refusal of layouts and workloads.

Shapes at TP8 and TP16: the tuned dispatch table of ``vllm/models/kimi_k3/nvidia/low_latency_gemm.py``
(https://github.com/vllm-project/vllm); expert padding and resident memory: its issue 51124.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.checkpoint import total_bytes
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload, accepted_tp, check_layout, check_workload
from k3sim.model.matrices import expert_slice, kv_bytes_per_token, rank_matrices, rank_shapes
from k3sim.model.memory import RUNTIME_RESERVE_BYTES, check_fits, resident_bytes

K3 = load_architecture()
TP8 = Layout(tp=8)
TP16 = Layout(tp=16)
TP16_PADDED = Layout(tp=16, pad_experts=True)

H200_BYTES = 150_754_820_096

# name: (outputs, depth, bytes) at TP8, then at TP16
MATRICES = {
    "kda.in_proj": ((6288, 7168, 90_144_768), (3216, 7168, 46_104_576)),
    "kda.f_b": ((1536, 128, 393_216), (768, 128, 196_608)),
    "kda.o_proj": ((7168, 1536, 22_020_096), (7168, 768, 11_010_048)),
    "mla.qkv_a": ((2112, 7168, 30_277_632), (2112, 7168, 30_277_632)),
    "mla.gate": ((1536, 7168, 22_020_096), (768, 7168, 11_010_048)),
    "mla.q_b": ((2304, 1536, 7_077_888), (1152, 1536, 3_538_944)),
    "mla.w_uk": ((12 * 512, 128, 1_572_864), (6 * 512, 128, 786_432)),
    "mla.w_uv": ((12 * 128, 512, 1_572_864), (6 * 128, 512, 786_432)),
    "mla.o_proj": ((7168, 1536, 22_020_096), (7168, 768, 11_010_048)),
    "moe.router": ((896, 7168, 12_845_056), (896, 7168, 12_845_056)),
    "moe.router_shard": ((112, 7168, 1_605_632), (56, 7168, 802_816)),
    "moe.latent_down": ((3584, 7168, 51_380_224), (3584, 7168, 51_380_224)),
    "moe.latent_down_shard": ((448, 7168, 6_422_528), (224, 7168, 3_211_264)),
    "moe.expert_w13": ((768, 3584, 23_396_352 // 16), (384, 3584, 11_698_176 // 16)),
    "moe.expert_w2": ((3584, 384, 11_698_176 // 16), (3584, 192, 5_849_088 // 16)),
    "moe.shared_gate_up": ((1536, 7168, 22_020_096), (768, 7168, 11_010_048)),
    "moe.shared_down": ((7168, 768, 11_010_048), (7168, 384, 5_505_024)),
    "moe.latent_up": ((7168, 3584, 51_380_224), (7168, 3584, 51_380_224)),
    "moe.latent_up_shard": ((896, 3584, 6_422_528), (448, 3584, 3_211_264)),
    "dense.gate_up": ((8448, 7168, 121_110_528), (4224, 7168, 60_555_264)),
    "dense.down": ((7168, 4224, 60_555_264), (7168, 2112, 30_277_632)),
    "lm_head": ((20480, 7168, 293_601_280), (10240, 7168, 146_800_640)),
    "embedding": ((20480, 7168, 293_601_280), (10240, 7168, 146_800_640)),
}
REPLICATED = {"mla.qkv_a", "moe.router", "moe.latent_down", "moe.latent_up"}

LAYOUTS = st.sampled_from([1, 2, 4, 8, 16, 32]).flatmap(
    lambda tp: st.builds(
        Layout,
        tp=st.just(tp),
        ep=st.sampled_from([size for size in (1, 2, 4, 8, 16, 32) if size <= tp]),
        dp=st.integers(1, 8),
        dcp=st.sampled_from([size for size in (1, 2, 4, 8, 16, 32) if size <= tp]),
        pad_experts=st.booleans(),
    )
)


@pytest.mark.parametrize(("layout", "column"), [(TP8, 0), (TP16, 1)], ids=["tp8", "tp16"])
def test_matrices_of_a_rank(layout: Layout, column: int) -> None:
    matrices = rank_matrices(K3, layout)
    shapes = {name: (m.num_outputs, m.depth, m.num_bytes) for name, m in matrices.items()}
    assert shapes == {name: columns[column] for name, columns in MATRICES.items()}
    assert {name for name, matrix in matrices.items() if matrix.replicated} == REPLICATED
    assert {name for name, m in matrices.items() if m.dtype == "mxfp4"} == {"moe.expert_w13", "moe.expert_w2"}
    assert all(matrix.name == name for name, matrix in matrices.items())


def test_packed_input_projection_is_padded_to_sixteen_rows() -> None:
    assert rank_matrices(K3, TP8)["kda.in_proj"].num_outputs_unpadded == 6284
    assert rank_matrices(K3, TP16)["kda.in_proj"].num_outputs_unpadded == 3206


def test_absorbed_products_are_batched_by_head() -> None:
    matrices = rank_matrices(K3, TP8)
    assert matrices["mla.w_uk"].num_batches == matrices["mla.w_uv"].num_batches == 12
    assert matrices["mla.q_b"].num_batches == 1


def test_padding_changes_expert_slices_at_tp16_not_tp8() -> None:
    w13, w2 = (rank_matrices(K3, TP16_PADDED)[f"moe.expert_{part}"] for part in ("w13", "w2"))
    assert (w13.num_outputs, w13.num_outputs_unpadded, 16 * w13.num_bytes) == (512, 384, 15_597_568)
    assert (w2.num_outputs, w2.depth, 16 * w2.num_bytes) == (3584, 256, 7_798_784)
    assert expert_slice(K3, Layout(tp=8, pad_experts=True)) == expert_slice(K3, TP8) == 384
    assert expert_slice(K3, Layout(tp=32, pad_experts=True)) == 128


def test_expert_parallel_ranks_own_fewer_and_wider_experts() -> None:
    layout = Layout(tp=16, ep=4)
    assert expert_slice(K3, layout) == 3072 // 4
    assert rank_shapes(K3, layout).experts_owned == 896 // 4
    assert rank_shapes(K3, layout).expert_ranks == 4
    whole = rank_matrices(K3, Layout(tp=16, ep=16))
    assert whole["moe.expert_w13"].num_bytes + whole["moe.expert_w2"].num_bytes == 17_547_264


@given(layout=LAYOUTS)
def test_unpadded_shards_add_up_to_the_checkpoint(layout: Layout) -> None:
    """Whatever the layout, the ranks of a replica hold every weight once, or all of them the same."""
    matrices = rank_matrices(K3, Layout(tp=layout.tp, ep=layout.ep, dcp=layout.dcp))
    shapes = rank_shapes(K3, layout)
    experts = matrices["moe.expert_w13"].num_bytes + matrices["moe.expert_w2"].num_bytes
    assert experts * shapes.experts_owned * layout.tp == 17_547_264 * 896
    for whole, shard in (("router", "router_shard"), ("latent_down", "latent_down_shard")):
        assert matrices[f"moe.{shard}"].num_bytes * layout.tp == matrices[f"moe.{whole}"].num_bytes
    mla = sum(m.num_bytes for name, m in matrices.items() if name.startswith("mla.") and not m.replicated)
    norms = 1536 + 512
    assert mla * layout.tp + matrices["mla.qkv_a"].num_bytes == 2 * (232_196_096 - norms)


def test_state_and_cache_of_a_rank() -> None:
    tp8, tp16 = rank_shapes(K3, TP8), rank_shapes(K3, TP16)
    assert (tp8.kda_heads, tp8.mla_heads, tp16.kda_heads, tp16.mla_heads) == (12, 12, 6, 6)
    assert (tp8.kda_state_bytes, tp16.kda_state_bytes) == (786_432, 393_216)
    assert (tp8.kda_conv_state_bytes, tp16.kda_conv_state_bytes) == (27_648, 13_824)
    assert (tp8.kda_conv_weight_bytes, tp16.kda_conv_weight_bytes) == (73_728, 36_864)
    assert tp8.kda_conv_weight_bytes + tp8.kda_vector_bytes == 80_432
    assert (kv_bytes_per_token(K3, "fp8"), kv_bytes_per_token(K3, "bf16")) == (576, 1152)
    assert Workload(kv_dtype="bf16").kv_element_bytes == 2


def resident(layout: Layout, **changes: Any) -> Any:
    return resident_bytes(K3, layout, **{"concurrency": 1, "context": 8192, "kv_dtype": "fp8", **changes})


def test_resident_weights_agree_with_what_serving_reports() -> None:
    assert resident(TP8).weights == pytest.approx(205e9, rel=0.01)
    assert resident(TP16_PADDED).weights == pytest.approx(138e9, rel=0.01)
    padded_experts = resident(TP16_PADDED).weights - resident(TP16).weights
    assert padded_experts == 1_446_456_066_048 // 16 // 3  # 192 to 256: a third more
    assert 4 * padded_experts == pytest.approx(120.5e9, rel=0.01)


def test_one_ranks_weights_are_the_text_checkpoint() -> None:
    packed_rows = 4 * 12288 + 128 + 96
    in_proj_padding = 69 * (-packed_rows % 16) * 7168 * 2
    unused_decay_entries = 69 * (128 - 96) * 4
    text_bytes = total_bytes(K3) - 894_717_952
    assert resident(Layout(tp=1)).weights == text_bytes + in_proj_padding - unused_decay_entries


def test_sharding_all_saves_copies_of_the_front() -> None:
    saved = resident(TP16).weights - resident(Layout(tp=16, shard_all=True)).weights
    assert saved == 92 * (2 * 51_380_224 + 12_845_056) * 15 // 16


def test_cache_and_state_scale_with_requests() -> None:
    assert resident(TP8).kv_cache == 24 * 576 * 8192
    assert resident(TP8).kda_state == 69 * (786_432 + 27_648)
    assert resident(TP8, context=1_048_576).kv_cache == pytest.approx(14.5e9, rel=0.01)
    assert resident(TP8, kv_dtype="bf16").kv_cache == 2 * resident(TP8).kv_cache
    assert resident(Layout(tp=8, dcp=8)).kv_cache * 8 == resident(TP8).kv_cache
    assert resident(Layout(tp=8, dcp=8), context=8193).kv_cache == 24 * 576 * 1025
    # The fullest of two replicas has three of five requests.
    two_replicas = resident(Layout(tp=8, dp=2), concurrency=5)
    assert two_replicas.kv_cache == 3 * resident(TP8).kv_cache
    assert two_replicas.kda_state == 3 * resident(TP8).kda_state
    assert two_replicas.weights == resident(TP8).weights


def test_total_is_the_sum_of_the_parts() -> None:
    memory = resident(TP8)
    parts = (memory.weights, memory.kv_cache, memory.kda_state, memory.activations_and_workspace)
    assert memory.total == sum(parts)
    assert memory.activations_and_workspace > RUNTIME_RESERVE_BYTES


def fits(layout: Layout, **changes: Any) -> None:
    given_values = {"concurrency": 1, "context": 8192, "kv_dtype": "fp8", **changes}
    check_fits(K3, layout, hbm_capacity_bytes=H200_BYTES, machine_name="h200", **given_values)


def test_a_rank_too_large_names_what_fits() -> None:
    fits(TP16)
    with pytest.raises(UserError) as caught:
        fits(TP8)
    message = str(caught.value)
    assert "tp8ep1dcp1 needs 208.2 GB a GPU, 57.5 GB more than the 150.8 GB of h200" in message
    assert message.endswith("tp=16 or tp=32 would fit")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("tp", "capacity_gib", "served"),
    [(8, 268, True), (8, 180, False), (8, 141, False), (16, 180, True), (16, 141, True), (32, 80, True)],
    ids=["8 B300", "8 B200", "8 H200", "16 B200", "16 H200", "32 H100"],
)
def test_who_can_hold_the_model(tp: int, capacity_gib: int, served: bool) -> None:
    """GPU counts that a public recipe (https://github.com/vllm-project/recipes) serves on; two too few."""
    needed = resident(Layout(tp=tp, pad_experts=True)).total
    assert (needed <= capacity_gib * 2**30) == served


def test_what_no_tp_can_fit_says_so() -> None:
    with pytest.raises(UserError, match=r"no tp up to 32 fits: lower concurrency or context"):
        fits(TP8, concurrency=64, context=1_048_576)


@given(layout=LAYOUTS)
def test_every_dividing_layout_is_accepted(layout: Layout) -> None:
    check_layout(K3, layout)
    assert layout.num_gpus == layout.tp * layout.dp


def test_tags_are_short_and_ordered() -> None:
    assert TP16.tag == "tp16ep1dcp1"
    assert Layout(tp=8, dp=2, ep=8, dcp=4).tag == "tp8dp2ep8dcp4"


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (Layout(tp=0), "tp=0 on kimi-k3: not a power of two from 1 to 32; accepted: 1, 2, 4, 8, 16, 32"),
        (Layout(tp=-8), "tp=-8"),
        (Layout(tp=24), "not a power of two"),
        (Layout(tp=64), "not a power of two from 1 to 32"),
        (Layout(tp=8, ep=3), "ep=3 at tp=8"),
        (Layout(tp=8, ep=16), "experts lie on the ranks of one replica, so ep divides tp"),
        (Layout(tp=8, dcp=16), "accepted: 1, 2, 4, 8"),
        (Layout(tp=8, dcp=0), "dcp=0 at tp=8"),
        (Layout(dp=0), "dp=0 replicas; 1 to 1024 are accepted"),
        (Layout(tp=True), "tp=True is not an integer"),
        (Layout(dp=1.5), "dp=1.5 is not an integer"),  # type: ignore[arg-type]
    ],
)
def test_layouts_must_divide_the_model(layout: Layout, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        rank_matrices(K3, layout)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_impossible_power_of_two_names_the_width() -> None:
    uneven: Architecture = dataclasses.replace(K3, vocab_size=163_844)
    assert accepted_tp(uneven) == (1, 2, 4)
    with pytest.raises(UserError, match="it does not divide 163844 vocabulary; accepted: 1, 2, 4"):
        check_layout(uneven, TP8)


@pytest.mark.parametrize(
    ("workload", "shown"),
    [
        (Workload(concurrency=0), "concurrency=0; a whole number from 1 to 4096 is accepted"),
        (Workload(concurrency=4097), "concurrency=4097"),
        (Workload(context=0), "context=0; a whole number from 1 to 1048576 is accepted"),
        (Workload(context=1_048_577), "context=1048577"),
        (Workload(context=1e6), "context=1000000.0 is not an integer"),  # type: ignore[arg-type]
        (Workload(concurrency=float("nan")), "concurrency=nan is not an integer"),  # type: ignore[arg-type]
        (Workload(kv_dtype="fp4"), "kv_dtype='fp4'; fp8 or bf16 is accepted"),  # type: ignore[arg-type]
    ],
)
def test_workloads_outside_the_limits_are_refused(workload: Workload, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        check_workload(K3, workload)
    assert shown in str(caught.value)


@pytest.mark.parametrize("workload", [Workload(context=1), Workload(concurrency=4096, context=1_048_576)])
def test_the_limits_themselves_are_accepted(workload: Workload) -> None:
    check_workload(K3, workload)
