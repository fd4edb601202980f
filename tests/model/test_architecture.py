"""Shapes of K3 against the released checkpoint, and refusal of configs that are not of its family.

Totals: checkpoint index and safetensors headers of https://huggingface.co/moonshotai/Kimi-K3.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from k3sim.model.architecture import Architecture
from k3sim.model.checkpoint import active_parameters, tensors, total_bytes, total_parameters
from k3sim.model.config_file import SHIPPED_CONFIG, load_architecture

CONFIG: dict[str, Any] = json.loads(SHIPPED_CONFIG.read_text())


@pytest.fixture
def k3() -> Architecture:
    return load_architecture()


def one_layer_parameters(arch: Architecture, group: str, layers: int) -> int:
    total = sum(tensor.num_parameters * tensor.count for tensor in tensors(arch) if tensor.group == group)
    assert total % layers == 0
    return total // layers


def test_total_bytes_equal_the_checkpoint_index(k3: Architecture) -> None:
    assert total_bytes(k3) == 1_560_860_324_864


def test_tensor_and_element_counts_equal_the_safetensors_headers(k3: Architecture) -> None:
    assert sum(tensor.count for tensor in tensors(k3)) == 497_220
    elements: Counter[str] = Counter()
    for tensor in tensors(k3):
        elements[tensor.dtype] += tensor.num_elements * tensor.count
    assert sum(elements.values()) == 1_503_647_073_024
    assert elements["float32"] == 11_122_432
    assert elements["bfloat16"] == 57_179_884_544


def test_every_group_has_its_checkpoint_tensors_size(k3: Architecture) -> None:
    group_bytes: Counter[str] = Counter()
    for tensor in tensors(k3):
        group_bytes[tensor.group] += tensor.num_bytes * tensor.count
    assert group_bytes["experts"] == 1_446_456_066_048
    assert group_bytes["embedding"] == group_bytes["lm_head"] == 2_348_810_240
    assert group_bytes["vision"] == 802_428_928 + 92_289_024
    in_layers = ("kda", "mla", "dense", "moe", "residual")
    after_the_layers = 3 * 7168 * 2
    assert sum(group_bytes[group] for group in in_layers) - after_the_layers == 108_811_877_376
    shared = sum(t.num_bytes * t.count for t in tensors(k3) if "shared_experts" in t.name)
    assert shared == 24_310_185_984


def test_parameters_of_one_layer_of_each_kind(k3: Architecture) -> None:
    assert one_layer_parameters(k3, "kda", 69) == 443_740_416
    assert one_layer_parameters(k3, "mla", 24) == 232_196_096
    assert one_layer_parameters(k3, "moe", 92) == 189_927_808
    assert one_layer_parameters(k3, "experts", 92 * 896) == 33_030_144
    assert one_layer_parameters(k3, "dense", 1) == 726_663_168


def test_active_parameters_count_lm_head_but_not_embedding(k3: Architecture) -> None:
    assert active_parameters(k3) == 104_189_614_848
    assert total_parameters(k3) == 2_779_931_837_184


def test_layers_follow_the_released_pattern(k3: Architecture) -> None:
    assert k3.mla_layers == (*range(3, 92, 4), 92)
    assert [k3.mixer(layer) for layer in (0, 2, 3, 90, 91, 92)] == ["kda", "kda", "mla", "kda", "mla", "mla"]
    assert [k3.ffn(layer) for layer in (0, 1, 92)] == ["dense", "moe", "moe"]
    assert (len(k3.kda_layers), len(k3.mla_layers)) == (69, 24)


def test_attention_residual_sources(k3: Architecture) -> None:
    before_mixer = [k3.attn_res_sources(layer, "mixer") for layer in range(93)]
    before_ffn = [k3.attn_res_sources(layer, "ffn") for layer in range(93)]
    final = k3.attn_res_sources(93, "mixer")
    # The snapshot of layer 12 is mixed from its own FFN on; its mixer sees the embedding and the prefix.
    assert before_mixer[:2] == [1, 2] and before_mixer[11:14] == [2, 2, 3]
    assert before_ffn[:2] == [2, 2] and before_ffn[11:13] == [2, 3]
    assert max(before_mixer + before_ffn) == final == 9
    assert sum(before_mixer) + sum(before_ffn) + final == k3.attn_res_total_sources() == 1003
    assert [layer for layer in range(93) if k3.is_snapshot(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]


def test_expert_bytes_are_codes_and_scales(k3: Architecture) -> None:
    assert k3.moe.bits_per_weight == 4.25
    whole_expert = 2 * k3.moe.matrix_bytes(3072, 3584) + k3.moe.matrix_bytes(3584, 3072)
    assert whole_expert == 17_547_264
