"""Shapes of K3 against the released checkpoint, and refusal of configs that are not of its family.

Totals: checkpoint index and safetensors headers of https://huggingface.co/moonshotai/Kimi-K3.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.checkpoint import active_parameters, tensors, total_bytes, total_parameters
from k3sim.model.config_file import SHIPPED_CONFIG, load_architecture

CONFIG: dict[str, Any] = json.loads(SHIPPED_CONFIG.read_text())


@pytest.fixture
def k3() -> Architecture:
    return load_architecture()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write_config(config: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write_config


def changed(section: str, name: str, value: object) -> dict[str, Any]:
    """K3's config with one field of a dotted section replaced, or removed where the value is ``...``."""
    config = copy.deepcopy(CONFIG)
    fields = config
    for part in section.split(".") if section else ():
        fields = fields[part]
    if value is ...:
        del fields[name]
    else:
        fields[name] = value
    return config


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


def test_every_group_has_the_size_of_its_tensors_in_the_checkpoint(k3: Architecture) -> None:
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


def test_active_parameters_count_the_lm_head_but_not_the_embedding(k3: Architecture) -> None:
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


def test_file_folder_and_shipped_config_agree(k3: Architecture, write: Callable[[Any], Path]) -> None:
    path = write(CONFIG)
    from_file = load_architecture(path)
    assert load_architecture(str(path.parent)) == from_file
    assert from_file.name == path.parent.name
    assert tensors(from_file) == tensors(k3)


def test_language_model_alone_has_no_vision_tensors(k3: Architecture, write: Callable[[Any], Path]) -> None:
    alone = load_architecture(write(CONFIG["text_config"]))
    assert alone.vision is None
    assert total_bytes(alone) == total_bytes(k3) - 894_717_952
    assert active_parameters(alone) == active_parameters(k3)


def test_another_model_is_told_which_are_accepted(write: Callable[[Any], Path]) -> None:
    with pytest.raises(UserError, match='is "deepseek_v3"; "kimi_k3" or "kimi_linear" is accepted'):
        load_architecture(write({"model_type": "deepseek_v3", "hidden_size": 7168}))


def test_quantisation_at_the_top_level_is_read(k3: Architecture, write: Callable[[Any], Path]) -> None:
    config = changed("text_config", "quantization_config", ...)
    config["quantization_config"] = CONFIG["text_config"]["quantization_config"]
    assert load_architecture(write(config)).moe == k3.moe


@pytest.mark.parametrize(
    ("section", "name", "value", "shown"),
    [
        ("text_config", "hidden_size", ..., "text_config.hidden_size is missing"),
        ("text_config", "hidden_size", "7168", 'text_config.hidden_size is "7168"'),
        ("text_config", "hidden_size", 7168.0, "text_config.hidden_size is 7168.0"),
        ("text_config", "hidden_size", True, "text_config.hidden_size is true"),
        ("text_config", "hidden_size", -1, "text_config.hidden_size is -1"),
        ("text_config", "hidden_size", 10**30, "text_config.hidden_size is 1000"),
        ("text_config", "num_attention_heads", 0, "text_config.num_attention_heads is 0"),
        ("text_config", "rms_norm_eps", float("nan"), "text_config.rms_norm_eps is NaN"),
        ("text_config", "rms_norm_eps", float("inf"), "text_config.rms_norm_eps is Infinity"),
        ("text_config", "num_experts_per_token", 897, "an integer from 1 to 896 is accepted"),
        ("text_config", "first_k_dense_replace", 94, "an integer from 0 to 93 is accepted"),
        ("text_config", "num_key_value_heads", 8, "text_config.num_key_value_heads is 8; 96 is accepted"),
        ("text_config", "moe_intermediate_size", 3073, "a multiple of 32"),
        ("text_config", "tie_word_embeddings", True, "text_config.tie_word_embeddings is true"),
        ("text_config", "dtype", "float16", 'text_config.dtype is "float16"; "bfloat16" is accepted'),
        ("text_config", "model_type", "kimi_k2", 'text_config.model_type is "kimi_k2"'),
        ("", "model_type", "deepseek_v3", 'model_type is "deepseek_v3"; "kimi_k3" is accepted'),
        ("", "text_config", ..., "text_config is missing; an object is accepted"),
        ("", "model_type", ..., "model_type is missing"),
        ("text_config", "num_experts", 10**9, "an integer from 1 to 65536 is accepted"),
        ("", "text_config", [1], "text_config is [1]; an object is accepted"),
        ("text_config.linear_attn_config", "use_full_rank_gate", False, "use_full_rank_gate is false"),
        ("text_config.linear_attn_config", "num_heads", -96, "linear_attn_config.num_heads is -96"),
        ("text_config.linear_attn_config", "kda_layers", None, "kda_layers is null"),
        ("text_config.linear_attn_config", "kda_layers", [1, "2"], 'kda_layers entry is "2"'),
        (
            "text_config.quantization_config",
            "format",
            "nvfp4-pack-quantized",
            '"mxfp4-pack-quantized" is acc',
        ),
        ("vision_config", "text_hidden_size", 4096, "vision_config.text_hidden_size is 4096"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_accepted(
    write: Callable[[Any], Path], section: str, name: str, value: object, shown: str
) -> None:
    path = write(changed(section, name, value))
    with pytest.raises(UserError) as caught:
        load_architecture(path)
    message = str(caught.value)
    assert shown in message
    assert message.startswith(f"{path}: ")
    assert message.endswith("is accepted")
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("kda_layers", "wrong"),
    [
        ([1, 1, *CONFIG["text_config"]["linear_attn_config"]["kda_layers"][2:]], "from layer 2 on"),
        (CONFIG["text_config"]["linear_attn_config"]["kda_layers"][:-1], "from layer 91 on"),
        ([*CONFIG["text_config"]["linear_attn_config"]["kda_layers"], 94], "from layer 94 on"),
        ([*CONFIG["text_config"]["linear_attn_config"]["kda_layers"], 4], "from layer 5 on"),
    ],
)
def test_layer_lists_must_cover_every_layer_once(
    write: Callable[[Any], Path], kda_layers: list[int], wrong: str
) -> None:
    path = write(changed("text_config.linear_attn_config", "kda_layers", kda_layers))
    with pytest.raises(UserError, match="each of 1 to 93") as caught:
        load_architecture(path)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "not valid JSON"),
        (json.dumps(CONFIG).encode()[:1000], "truncated?"),
        (b"[]", "holds a JSON list"),
        (b"null", "holds a JSON null"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 200_000, "not a usable JSON config"),
        (b"1" * 10_000, "not a usable JSON config"),
        (b" " * (5 << 20), "5242880 bytes"),
    ],
    ids=["empty", "truncated", "list", "null", "binary", "deep", "long number", "large"],
)
def test_what_is_not_a_config_is_refused_in_one_line(tmp_path: Path, content: bytes, shown: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_architecture(path)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / ("n" * 300), "a\0b", "/dev/zero"):
        with pytest.raises(UserError, match=r"config\.json"):
            load_architecture(path)


def test_an_unreadable_file_is_refused(write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = write(CONFIG)
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UserError, match="Permission denied"):
        load_architecture(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
TEXT_FIELDS = sorted(CONFIG["text_config"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(TEXT_FIELDS), value=JSON_VALUES)
def test_any_value_in_any_field_loads_or_is_refused(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed("text_config", name, value)))
    try:
        arch = load_architecture(path)
    except UserError:
        return
    assert total_bytes(arch) > 0
