"""Steps of the neighbours of Kimi K3: bytes by hand from their released shapes, launches, and what is refused.

One rank of TP8. Dense layers, routers and norms are counted as the configs have them; scales of FP8 are 4 bytes for
each 128 x 128.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from families import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    FAMILIES,
    KIMI_K2,
    KIMI_K25,
    KIMI_LINEAR,
    R1_NVFP4,
    V31_NVFP4,
    formats,
)

from k3sim.errors import UserError
from k3sim.kernels.costs import work_of
from k3sim.model.architecture import Architecture
from k3sim.model.collectives import BLACKWELL, HOPPER, Collectives
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.matrices import rank_matrices
from k3sim.model.paths import PATH_NAMES, find_path
from k3sim.model.program import Call, build_program
from k3sim.model.weight_formats import FORMATS, NVFP4

K3 = load_architecture()
H200, B200 = Collectives(thresholds=HOPPER), Collectives(thresholds=BLACKWELL)
TP8 = Layout(tp=8)


def layer(
    architecture: Architecture, number: int, gpu: Collectives = B200, *, path: str = "stock", rows: int = 1,
    layout: Layout = TP8, context: int = 8192, engine: str = "vllm",
) -> list[Call]:  # fmt: skip
    workload = Workload(concurrency=rows, context=context)
    found = find_path(path, engine=engine)
    program = build_program(architecture, layout, workload, found, collectives=gpu, only_layers=(number,))
    return [call for call in program.calls if call.layer == number]


def weight_bytes(calls: Iterable[Call], start: str = "") -> int:
    return sum(weight.num_bytes for call in calls if call.stage.startswith(start) for weight in call.weights)


def test_routed_bytes_of_a_token_by_hand() -> None:
    """8 x 3 x 256 x 7168 a layer: 44.0 MB in FP8, 24.8 MB in NVFP4; int4 with a scale for each 32 as NVFP4."""
    codes = 8 * 3 * 256 * 7168
    scales = 8 * (4 * 56 + 56 * 2) * 4
    assert weight_bytes(layer(DEEPSEEK_V3, 10), "moe.experts") == codes + scales == 44_050_944
    assert weight_bytes(layer(R1_NVFP4, 10), "moe.experts") == codes * 9 // 16 == 24_772_608
    assert weight_bytes(layer(KIMI_K25, 10), "moe.experts") == 24_772_608


def test_attention_bytes_of_a_rank_by_hand() -> None:
    """q_a and kv_a whole, 16 heads of q_b and o_proj, W_UK and W_UV in bf16 whatever the file has."""
    fp8 = 2112 * 7168 + 3072 * 1536 + 7168 * 2048 + 4 * (17 * 56 + 24 * 12 + 56 * 16)
    folded = 2 * 2 * 16 * 512 * 128
    assert weight_bytes(layer(DEEPSEEK_V3, 10), "mla.") == fp8 + folded
    assert weight_bytes(layer(R1_NVFP4, 10), "mla.") == 2 * (2112 * 7168 + 3072 * 1536 + 7168 * 2048) + folded
    assert weight_bytes(layer(V31_NVFP4, 10), "mla.o_proj") == 7168 * 2048 * 9 // 16
    assert weight_bytes(layer(KIMI_K2, 10), "mla.q_b") == 1536 * 1536 + 4 * 12 * 12


def test_dense_shared_and_router_bytes_by_hand() -> None:
    assert weight_bytes(layer(DEEPSEEK_V3, 0), "dense.") == 3 * 2304 * 7168 + 4 * (36 * 56 + 56 * 18)
    assert weight_bytes(layer(R1_NVFP4, 10), "moe.shared") == 3 * 256 * 7168 * 9 // 16
    assert weight_bytes(layer(KIMI_K2, 10), "moe.router") == 384 * 7168 * 2


def test_kimi_linear_layers_by_hand() -> None:
    kda, mla = layer(KIMI_LINEAR, 1), layer(KIMI_LINEAR, 3)
    in_proj = 3 * 512 + 128 + 4
    assert in_proj == 1668
    assert weight_bytes(kda, "kda.") == 2 * (in_proj * 2304 + 128 * 2304 + 2 * 512 * 128 + 2304 * 512)
    assert weight_bytes(mla, "mla.") == 2 * (768 * 2304 + 576 * 2304 + 2 * 4 * 512 * 128 + 2304 * 512)
    (recurrent,) = (call for call in kda if call.stage == "kda.recurrent")
    assert work_of(recurrent.operator, (), recurrent.shape).moved_bytes() == 524_288
    assert weight_bytes(kda, "moe.experts") == 8 * 3 * 128 * 2304 * 2


@pytest.mark.parametrize(
    ("architecture", "number", "gpu", "least", "most"),
    [
        (DEEPSEEK_V3, 10, H200, 27, 29),
        (DEEPSEEK_V3, 10, B200, 22, 25),
        (R1_NVFP4, 10, B200, 19, 21),
        (KIMI_LINEAR, 1, H200, 20, 23),
    ],
)
def test_launches_of_a_layer_on_the_main_stream(
    architecture: Architecture, number: int, gpu: Collectives, least: int, most: int
) -> None:
    calls = [call for call in layer(architecture, number, gpu) if call.stream == "main"]
    assert least <= len(calls) <= most, [call.stage for call in calls]
    assert sum(bool(call.sends) for call in calls) == 2


@pytest.mark.parametrize("path", PATH_NAMES)
@pytest.mark.parametrize("gpu", [H200, B200], ids=["h200", "b200"])
@pytest.mark.parametrize("stored", sorted(FORMATS))
@pytest.mark.parametrize("architecture", FAMILIES, ids=lambda one: one.name)
def test_every_precision_predicts_or_refuses_in_a_line(
    architecture: Architecture, stored: str, gpu: Collectives, path: str
) -> None:
    asked = replace(architecture, formats=formats(experts=FORMATS[stored]))
    try:
        calls = [one for number in (0, 1, 3) for one in layer(asked, number, gpu, path=path)]
    except UserError as refusal:
        assert "\n" not in str(refusal)
        said = str(refusal)
        assert path != "stock" or stored in said or "fp8" in said or "scale groups" in said
        return
    assert path in ("stock", "fused")
    read = {weight.region.split("/")[1] for call in calls for weight in call.weights}
    layers = {name for name in rank_matrices(asked, TP8) if name.split(".")[0] in asked.tables}
    assert read == {name for name in layers if not name.endswith("_shard")}


@pytest.mark.parametrize(
    ("asked", "gpu", "path", "message"),
    [
        (replace(K3, formats=formats(experts=FORMATS["int4_g32"])), B200, "fused",
         "no kernel for int4_g32 weights of moe.expert_w13 on path fused"),
        (replace(K3, formats=formats(experts=NVFP4)), H200, "stock",
         "nvfp4 weights of moe.expert_w13 on path stock without block-scaled tensor cores"),
        (replace(K3, formats=(("kda.in_proj", FORMATS["fp8_block"]),)), B200, "fused",
         "no kernel for fp8_block weights of kda.in_proj on path fused"),
        (DEEPSEEK_V3, B200, "megakernel", "path megakernel with public kernels has none for a plain residual, which"),
        (replace(DEEPSEEK_V3, moe=replace(DEEPSEEK_V3.moe, latent_size=3584)), B200, "stock",
         "no kernel on path stock reads moe.latent_down, moe.latent_up, which DeepSeek-V3 has"),
        (replace(K3, moe=replace(K3.moe, latent_size=0)), B200, "stock", "path stock reads moe.latent_down"),
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_by_name(
    asked: Architecture, gpu: Collectives, path: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        for number in (0, 1, 3):
            layer(asked, number, gpu, path=path)


def test_an_indexer_reads_all_keys_and_few_rows() -> None:
    dense, sparse = (layer(model, 10, context=131_072) for model in (DEEPSEEK_V3, DEEPSEEK_V32))
    found = {call.stage: work_of(call.operator, call.weights, call.shape).read_bytes() for call in sparse}
    assert found["mla.index_scores"] == 131_072 * 132
    assert found["mla.attention"] == 2048 * 576
    assert found["mla.index_q"] == 8192 * 1536 * 2
    assert len(sparse) - len(dense) == 5
    k31 = replace(K3, mla=replace(K3.mla, index_heads=32, index_dim=128, index_top_k=2048))
    stages = {call.stage: call.shape for call in layer(k31, 3, path="fused", context=262_144)}
    assert stages["mla.index_scores"]["cached"] == 262_144 and stages["mla.attention"]["context"] == 2048
    assert layer(k31, 1, path="fused") == layer(K3, 1, path="fused")


@pytest.mark.parametrize("path", PATH_NAMES)
def test_parts_of_size_zero_have_no_stages(path: str) -> None:
    shared = replace(K3, moe=replace(K3.moe, num_shared_experts=0, shared_intermediate=0))
    assert not any(call.stage.startswith("moe.shared") for call in layer(shared, 1, path=path))
    narrow = replace(K3, kda=replace(K3.kda, conv_width=1))
    tp16 = [call.stage for call in layer(narrow, 1, path=path, layout=Layout(tp=16))]
    assert "kda.conv" not in tp16 and "kda.in_proj" in tp16


def test_sglang_joins_the_gates_of_kimi_linear() -> None:
    vllm, sglang = (layer(KIMI_LINEAR, 1, engine=engine) for engine in ("vllm", "sglang"))
    assert weight_bytes(vllm) == weight_bytes(sglang)
    assert len(vllm) - len(sglang) == 2
