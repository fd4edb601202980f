"""Shipped models and files like theirs: bytes to the tensor, every field used, listed or refused, formats by module."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.checkpoint import active_parameters, tensors, total_bytes, total_parameters
from k3sim.model.config_fields import NO_BEARING, canonical
from k3sim.model.config_file import DATA, load_architecture, shipped_models
from k3sim.model.weight_formats import FORMATS

K3 = load_architecture()


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("kimi-k3", 1_560_860_324_864), ("deepseek-v3", 688_574_839_360), ("deepseek-r1", 688_574_839_360),
        ("kimi-k2", 1_029_173_256_720), ("kimi-linear-48b-a3b", 98_245_528_576),
    ],
)  # fmt: skip
def test_a_checkpoint_has_its_released_bytes(name: str, num_bytes: int) -> None:
    assert total_bytes(load_architecture(name)) == num_bytes


def test_parameters_are_those_of_the_cards() -> None:
    v3, k2, linear = (load_architecture(name) for name in ("deepseek-v3", "kimi-k2", "kimi-linear-48b-a3b"))
    main = sum(one.num_parameters * one.count for one in tensors(v3) if one.group != "mtp")
    assert (main, total_parameters(k2), total_parameters(linear)) == (
        671_026_419_200, 1_026_408_232_448, 49_122_681_728,
    )  # fmt: skip
    active = [round(active_parameters(one) / 1e9, 2) for one in (v3, k2, linear)]
    assert active == [36.63, 31.69, 3.11]


def test_successors_are_their_forerunners_and_more() -> None:
    assert replace(load_architecture("kimi-k2.6"), name="kimi-k2.5") == load_architecture("kimi-k2.5")
    indexed = load_architecture("kimi-k3.1")
    # 32 heads of 128 from the query latent, a key and a weight a head from the hidden row, a norm, in 24 layers.
    added = 24 * (32 * 128 * 1536 + 128 * 7168 + 32 * 7168 + 256)
    assert total_parameters(indexed) - total_parameters(K3) == added
    assert indexed.notes == ("names inside dsa_config are assumed to be those of DeepSeek-V3.2's indexer",)


def test_formats_of_k3_have_their_bytes() -> None:
    experts = sum(one.num_bytes * one.count for one in tensors(K3) if one.group == "experts")
    nvfp4 = load_architecture(weights=["experts=nvfp4"])
    in_nvfp4 = sum(one.num_bytes * one.count for one in tensors(nvfp4) if one.group == "experts")
    assert (round(experts / 1e9, 1), round(in_nvfp4 / 1e9, 1)) == (1446.5, 1531.5)
    fp8 = load_architecture(weights=["attention=fp8_block"])
    assert 36.0e9 < total_bytes(K3) - total_bytes(fp8) < 36.2e9
    assert nvfp4.notes == ("weights of experts are taken as nvfp4",)
    assert load_architecture(state_dtype="bf16").state_bytes_per_value == 2


@pytest.mark.parametrize("word", ["experts", "experts=fp3", "nothing=bf16", "=bf16", "experts="])
def test_an_override_that_names_nothing_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="accepted: TARGET=FORMAT with a target of experts, shared"):
        load_architecture(weights=[word])


def test_a_state_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="unknown type of KDA's state 'fp8'; accepted: fp32, bf16"):
        load_architecture(state_dtype="fp8")
    with pytest.raises(UserError, match="kimi-k2 has no KDA"):
        load_architecture("kimi-k2", state_dtype="bf16")


# -- every field is used, listed or refused ---------------------------------------------------------------------------


def numbers_in(config: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys of every number and switch of a config; of lists the first entry alone."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from numbers_in(value, (*keys, name))
    elif isinstance(config, list):
        yield from numbers_in(config[0] if config else None, (*keys, 0))
    elif isinstance(config, int | float):
        yield keys


def mutated(config: Any, keys: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(config)
    fields = changed
    for key in keys[:-1]:
        fields = fields[key]
    value = fields[keys[-1]]
    fields[keys[-1]] = (not value) if isinstance(value, bool) else value * 2 or 1
    return changed


def read(folder: Path, config: Any, **options: Any) -> Architecture:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return replace(load_architecture(path, **options), name="")


@pytest.mark.parametrize("name", shipped_models())
def test_a_changed_number_is_never_without_effect(tmp_path: Path, name: str) -> None:
    config = json.loads((DATA / f"{name}.json").read_text())
    before, without_effect = read(tmp_path, config), []
    for keys in numbers_in(config):
        try:
            after = read(tmp_path, mutated(config, keys))
        except UserError:
            continue
        if after == before:
            without_effect.append(keys)
    # What packs the same bits, what the vision tower computes, and groups where there is one.
    apart = {"symmetric", "dynamic", "actorder", "factor", "vision_config", "use_grouped_topk"}
    left = [keys for keys in without_effect if not {canonical(str(key)) for key in keys} & (NO_BEARING.keys() | apart)]
    assert left == []


def test_unknown_fields_are_one_answer_or_ignored(tmp_path: Path) -> None:
    config = json.loads((DATA / "kimi-k2.json").read_text()) | {"shiny": 1, "new_mixer": {"a": 2}}
    with pytest.raises(UserError, match="are not known: shiny, new_mixer; accepted: --ignore-field NAME for each"):
        read(tmp_path, config)
    with pytest.raises(UserError, match="are not known: new_mixer; accepted"):
        read(tmp_path, config, ignored=["shiny"])
    found = read(tmp_path, config, ignored=["shiny", "new_mixer"])
    assert len(found.notes) == 2 and "shiny" in found.notes[0]
    with pytest.raises(UserError, match="has no field absent, which --ignore-field names"):
        read(tmp_path, config, ignored=["shiny", "new_mixer", "absent"])


def test_zero_sized_parts_are_left_out(tmp_path: Path) -> None:
    config = json.loads((DATA / "kimi-k3.json").read_text())
    config["text_config"]["num_shared_experts"] = 0
    config["text_config"]["linear_attn_config"]["short_conv_kernel_size"] = 1
    config["text_config"]["first_k_dense_replace"] = 0
    found = read(tmp_path, config)
    assert (found.moe.shared_intermediate, found.kda.conv_width, found.num_dense_layers) == (0, 1, 0)
    assert total_bytes(found) > 0


# -- formats by module ------------------------------------------------------------------------------------------------


def formats_in(found: Architecture) -> dict[str, str]:
    return {part: stored.name for part, stored in found.formats}


def test_modelopt_beside_the_config_is_read(tmp_path: Path) -> None:
    config = json.loads((DATA / "deepseek-r1.json").read_text())
    del config["quantization_config"]
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*self_attn*"]}})
    )
    found = formats_in(read(tmp_path, config))
    assert found["moe.expert_w13"] == found["dense.down"] == found["moe.shared_down"] == "nvfp4"
    assert not any(part.startswith("mla.") for part in found)


def test_mixed_precision_is_read_by_module(tmp_path: Path) -> None:
    config = json.loads((DATA / "kimi-k2.json").read_text())
    layers = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(1, 61)}
    layers |= {f"model.layers.{layer}.self_attn.o_proj": {"quant_algo": "FP8_PB_WO"} for layer in range(61)}
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
    }  # fmt: skip
    assert formats_in(read(tmp_path, config)) == {
        "moe.expert_w13": "nvfp4", "moe.expert_w2": "nvfp4", "mla.o_proj": "fp8_block",
    }  # fmt: skip
    del layers["model.layers.30.self_attn.o_proj"]
    with pytest.raises(UserError, match=r"stores mla\.o_proj as bf16 and fp8_block; accepted: one format"):
        read(tmp_path, config)


def test_integers_are_read(tmp_path: Path) -> None:
    config = json.loads((DATA / "kimi-k2.json").read_text())
    for method in ("awq", "gptq"):
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
        assert formats_in(read(tmp_path, config))["mla.o_proj"] == "int4_g128"
    config["quantization_config"] = {"quant_method": "awq", "bits": 3, "group_size": 128}
    with pytest.raises(UserError, match="bits is 3 in groups of 128, accepted: 4 in groups of 32 or 128"):
        read(tmp_path, config)


def test_bytes_of_a_format_are_its_bits() -> None:
    for stored in FORMATS.values():
        assert stored.matrix_bytes(1024, 4096) == round(1024 * 4096 * stored.bits_per_weight / 8), stored.name


# -- files that nobody wrote ------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 7, 2**40, 1.5, "x", "fp8", [], {}, [1], {"a": 1}, [[]], "kimi_k2")


def scrambled(config: Any, random_source: random.Random) -> Any:
    """One to four places of a config with another value, without one, or with another's."""
    changed = copy.deepcopy(config)
    for _ in range(random_source.randint(1, 4)):
        fields = changed
        while True:
            name = random_source.choice(sorted(fields))
            inner = fields[name]
            if isinstance(inner, dict) and inner and random_source.random() < 0.8:
                fields = inner
                continue
            if random_source.random() < 0.2:
                del fields[name]
            else:
                fields[name] = random_source.choice(VALUES)
            break
        if not changed:
            break
    return changed


def test_any_config_is_read_or_refused(tmp_path: Path) -> None:
    """400 of them; 10,000 were tried once, with the same generator (docs/journal/2026-12-01-models.md)."""
    random_source = random.Random(2026)
    configs = [json.loads((DATA / f"{name}.json").read_text()) for name in shipped_models()]
    read_ones = 0
    for _ in range(400):
        try:
            assert total_bytes(read(tmp_path, scrambled(random_source.choice(configs), random_source))) > 0
            read_ones += 1
        except UserError as refusal:
            assert "\n" not in str(refusal) and len(str(refusal)) < 800
    assert 20 < read_ones < 380
