"""A config.json of a user: all faults in one line, foreign files by their names, and the name of the model."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.checkpoint import active_parameters, tensors, total_bytes, total_parameters
from k3sim.model.config_file import ACCEPTED, SHIPPED_CONFIG, load_architecture
from k3sim.model.config_rules import check_config
from k3sim.model.documents.document import parse_json
from k3sim.model.hub_cache import hub_folder

CONFIG: dict[str, Any] = json.loads(SHIPPED_CONFIG.read_text())
LAYERS: list[int] = CONFIG["text_config"]["linear_attn_config"]["kda_layers"]
Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
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


def refusal(path: Path | str) -> str:
    """The one line, without the file's name, of a path that is refused."""
    with pytest.raises(UserError) as caught:
        load_architecture(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message.removeprefix(f"{path}: ")


# -- what is read -----------------------------------------------------------------------------------------------------


def test_the_shipped_config_passes_the_check() -> None:
    document = parse_json(SHIPPED_CONFIG, SHIPPED_CONFIG.read_text(), ACCEPTED)
    check_config(document)
    assert document.faults == document.oddities == []


def test_file_folder_and_shipped_config_agree(write: Write) -> None:
    k3, path = load_architecture(), write(CONFIG)
    from_file = load_architecture(path)
    assert load_architecture(str(path.parent)) == from_file
    assert from_file.name == path.parent.name
    assert tensors(from_file) == tensors(k3)


def test_language_model_alone_has_no_vision_tensors(write: Write) -> None:
    k3, alone = load_architecture(), load_architecture(write(CONFIG["text_config"]))
    assert alone.vision is None
    assert total_bytes(alone) == total_bytes(k3) - 894_717_952
    assert active_parameters(alone) == active_parameters(k3)


def test_quantisation_at_the_top_level_is_read(write: Write) -> None:
    config = changed("text_config", "quantization_config", ...)
    config["quantization_config"] = CONFIG["text_config"]["quantization_config"]
    assert load_architecture(write(config)).moe == load_architecture().moe


def test_a_cached_model_is_called_by_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "hub" / "models--moonshotai--Kimi-K3"
    for folder in ("blobs", "snapshots/0123456789abcdef"):
        (model / folder).mkdir(parents=True)
    (model / "blobs" / "feedface").write_text(json.dumps(CONFIG))
    (model / "snapshots" / "0123456789abcdef" / "config.json").symlink_to(model / "blobs" / "feedface")
    for path in (model, model / "snapshots" / "0123456789abcdef"):
        assert load_architecture(path).name == "Kimi-K3"
    # A link elsewhere goes by the path as it was given, not by where it leads.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").symlink_to(model / "blobs" / "feedface")
    monkeypatch.chdir(mine)
    assert {load_architecture(one).name for one in ("config.json", ".", "../mine/config.json")} == {"mine"}
    (model / "snapshots" / "fedcba").mkdir()
    (model / "snapshots" / "fedcba" / "config.json").write_text(json.dumps(CONFIG))
    assert refusal(model).startswith("holds 2 snapshots (0123456789ab, fedcba); give the folder of one")


def test_owner_and_name_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--moonshotai--Kimi-K3"
    for revision in ("0123", "4567"):
        (model / "snapshots" / revision).mkdir(parents=True)
        config = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 93}}
        (model / "snapshots" / revision / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="holds 2 snapshots"):
        load_architecture("moonshotai/Kimi-K3")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("4567\n")
    assert load_architecture("moonshotai/Kimi-K3").name == "Kimi-K3"
    with pytest.raises(UserError, match=r"'moonshotai/Kimi-K9' is neither a path nor in the cache .*k3sim models"):
        load_architecture("moonshotai/Kimi-K9")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_its_library_has_it(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_folder() == Path(folder)


# -- what is refused --------------------------------------------------------------------------------------------------

T = "text_config"
L, Q = f"{T}.linear_attn_config", f"{T}.quantization_config"
SIZE = "a whole number from 1 to 2147483647"


@pytest.mark.parametrize(
    ("section", "name", "value", "shown"),
    [
        (T, "hidden_size", ..., "text_config lacks hidden_size"),
        (T, "hidden_size", "7168", f'text_config.hidden_size is "7168", accepted: {SIZE}'),
        (T, "hidden_size", 7168.0, f"text_config.hidden_size is 7168.0, accepted: {SIZE}"),
        (T, "hidden_size", True, f"text_config.hidden_size is true, accepted: {SIZE}"),
        (T, "hidden_size", -1, f"text_config.hidden_size is -1, accepted: {SIZE}"),
        (T, "hidden_size", 10**300, f"text_config.hidden_size is 1{'0' * 56}..., accepted: {SIZE}"),
        (T, "num_attention_heads", 0, f"text_config.num_attention_heads is 0, accepted: {SIZE}"),
        (T, "rms_norm_eps", float("nan"), "text_config.rms_norm_eps is NaN, accepted: a number above 0 and below 1"),
        (T, "rms_norm_eps", float("inf"), "rms_norm_eps is Infinity, accepted: a number above 0 and below 1"),
        (T, "num_experts_per_token", 897, "num_experts_per_token is 897, accepted: at most 896 (num_experts)"),
        (T, "first_k_dense_replace", 94, "first_k_dense_replace is 94, accepted: at most 93 (num_hidden_layers)"),
        (T, "num_key_value_heads", 8, "num_key_value_heads is 8, accepted: 96 (num_attention_heads)"),
        (T, "moe_intermediate_size", 3073, "is 3073, accepted: a multiple of 32 (moe.expert_w2 has a depth of 3073"),
        (T, "tie_word_embeddings", True, "text_config.tie_word_embeddings is true, accepted: false"),
        (T, "dtype", "float16", 'text_config.dtype is "float16", accepted: "bfloat16"'),
        (T, "model_type", "kimi_k2", 'text_config.model_type is "kimi_k2", accepted: "kimi_linear"'),
        (T, "num_experts", 10**9, "num_experts is 1000000000, accepted: a whole number from 1 to 65536"),
        (T, "num_shared_experts", -1, "num_shared_experts is -1, accepted: a whole number from 0 to 1024"),
        (T, "num_hidden_layers", 2**31, "num_hidden_layers is 2147483648, accepted: a whole number from 1 to 4096"),
        (T, "dsa_config", {"index_topk": 2048}, "dsa_config lacks index_n_heads (a whole number from 1 to 1024), "),
        (T, "sliding_window", 4096, "sliding_window is set: attention within a window is not modelled"),
        ("", "model_type", "deepseek_v3", 'line 1: model_type is "deepseek_v3", accepted: "kimi_k3"'),
        ("", "model_type", "kimi_k9", 'model_type is "kimi_k9", accepted: "kimi_k3" or "kimi_k31"'),
        ("", "model_type", ..., 'the file lacks model_type ("kimi_k3")'),
        ("", T, ..., "the file lacks text_config (an object)"),
        ("", T, [1], "text_config is [1], accepted: an object"),
        (L, "use_full_rank_gate", False, "use_full_rank_gate is false, accepted: true"),
        (L, "num_heads", -96, f"linear_attn_config.num_heads is -96, accepted: {SIZE}"),
        (L, "short_conv_kernel_size", 0, "short_conv_kernel_size is 0, accepted: a whole number from 1 to 1024"),
        (L, "kda_layers", None, "linear_attn_config.kda_layers is null, accepted: a list"),
        (L, "kda_layers", [1, "2"], 'linear_attn_config.kda_layers[1] is "2", accepted'),
        (L, "kda_layers", [1, 1, *LAYERS[2:]], "wrong from layer 2 on, accepted: each of 1 to 93"),
        (L, "kda_layers", LAYERS[:-1], "names 92 layers in kda_layers and full_attn_layers, wrong from layer 91 on"),
        (L, "kda_layers", [*LAYERS, 94], "names 94 layers in kda_layers and full_attn_layers, wrong from layer 95 on"),
        (L, "kda_layers", [*LAYERS, 4], "wrong from layer 5 on"),
        (Q, "format", "nvfp4-pack-quantized", 'format is "nvfp4-pack-quantized", accepted: "mxfp4-pack-quantized"'),
        (Q, "quant_method", "modelopt", "quantization_config.quant_algo is None, accepted: NVFP4"),
        (Q, "quant_method", "bitsandbytes", "quant_method is 'bitsandbytes', accepted: compressed-tensors"),
        (Q, "config_groups", {}, "config_groups names no group; accepted: an object with one or more"),
        (T, "new_field", 1, "work and are not known: new_field; accepted: --ignore-field NAME for each"),
        (L, "new_field", 1, "not known: new_field; accepted: --ignore-field NAME"),
        ("vision_config", "text_hidden_size", 4096, "text_hidden_size is 4096, accepted: 7168 (hidden_size)"),
        ("vision_config", "merge_kernel_size", [], "merge_kernel_size is [], accepted: a list that is not empty"),
    ],
)
def test_a_wrong_field_is_named_with_accepted_values(
    write: Write, section: str, name: str, value: object, shown: str
) -> None:
    assert shown in refusal(write(changed(section, name, value)))


def test_all_faults_of_a_config_are_one_line(write: Write) -> None:
    config = copy.deepcopy(CONFIG["text_config"])
    for name in ("mla_use_output_gate", "latent_moe_use_norm", "max_position_embeddings", "quantization_config"):
        del config[name]
    del config["linear_attn_config"]["use_full_rank_gate"]
    config |= {"hidden_act": "silu", "q_lora_rank": None}
    assert refusal(write(json.dumps(config, indent=1))) == (
        "line 1: the file lacks mla_use_output_gate (true), latent_moe_use_norm (true), max_position_embeddings; "
        'line 1: the file lacks quantization_config (MXFP4 experts); line 12: hidden_act is "silu", accepted: "situ"; '
        f"line 17: linear_attn_config lacks use_full_rank_gate (true); line 135: q_lora_rank is null, accepted: {SIZE}"
    )


def test_attention_is_in_the_format_of_its_group(write: Write) -> None:
    config = copy.deepcopy(CONFIG)
    quantisation = config["text_config"]["quantization_config"]
    quantisation["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    }
    quantisation["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    quantisation["ignore"] = quantisation["ignore"][1:]
    read = load_architecture(write(config))
    assert {name for name, one in read.formats if one.name == "fp8_block"} == {
        "kda.in_proj", "kda.g_b", "kda.f_b", "kda.o_proj", "mla.qkv_a", "mla.q", "mla.kv_a", "mla.gate", "mla.q_b",
        "mla.o_proj", "mla.index_q",
    }  # fmt: skip
    # 36.2 GB, less the scales and what stays: the down-projection of the decay and beta.
    assert 36.0e9 < total_bytes(load_architecture()) - total_bytes(read) < 36.2e9


def test_what_is_not_ignored_is_quantised(write: Write) -> None:
    for ignored in (["re:.*lm_head.*"], ["re:(((a*)*)*)*$"]):
        read = load_architecture(write(changed(Q, "ignore", ignored)))
        assert {"mxfp4"} == {one.name for name, one in read.formats if name.startswith(("kda.", "mla.", "dense."))}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "this is an empty file"),
        (json.dumps(CONFIG).encode()[:1000], "not valid JSON"),
        (b"[]", "holds [], which is no JSON object"),
        (b"null", "holds null, which is no JSON object"),
        (b"\xff\xfe\x00", "this is binary data"),
        (b"[" * 200_000, "nested more than 40 levels"),
        (b"1" * 10_000, "holds a number of thousands of digits"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "deeper than the 40 levels"),
        (b'"' + b"x" * (5 << 20), "5242881 bytes, at most 4194304 are read"),
        (b'{"model_type": "kimi_k3", "model_type": "kimi_k3"}', "model_type stands twice in one object"),
    ],
    ids=["empty", "truncated", "list", "null", "binary", "deep", "long number", "deep object", "large", "twice"],
)
def test_what_is_no_config_is_one_line(tmp_path: Path, content: bytes, shown: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    assert shown in refusal(path)


def test_paths_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / ("n" * 300), "a\0b", "/dev/zero", tmp_path / "fifo",
                 tmp_path / "link"):  # fmt: skip
        with pytest.raises(UserError, match=r"accepted: a config\.json of the Kimi K3 family"):
            load_architecture(path)


def test_an_unreadable_file_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(CONFIG)
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(UserError, match="Permission denied"):
        load_architecture(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(CONFIG["text_config"])), value=JSON_VALUES)
def test_any_value_anywhere_loads_or_is_refused(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed("text_config", name, value)))
    try:
        arch = load_architecture(path)
    except UserError as error:
        assert len(str(error)) < 700 and "\n" not in str(error)
        return
    assert total_bytes(arch) > 0


# -- other families: every reason in one answer -----------------------------------------------------------------------

DENSE_GQA = {
    "model_type": "mine", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_act": "silu", "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, ("grouped-query attention (num_key_value_heads)", "no experts")),
        ({"num_key_value_heads": 32}, ("attention with a key and value a head",)),
        ({"sliding_window": 128, "layer_types": ["a", "b"]}, ("attention within a window", "layers of several kinds")),
        ({"attention_bias": True, "mlp_bias": True}, ("a bias in attention", "a bias in the feed-forward part")),
        ({"ssm_state_size": 128, "mlp_hidden_act": "relu2"}, ("Mamba layers", "another activation (mlp_hidden_act)")),
        ({"linear_num_value_heads": 32, "attn_output_gate": True}, ("delta-net layers", "a gate of attention")),
        ({"tie_word_embeddings": True, "colour": 1}, ("one table for embedding and head", "not known: colour")),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("quant_method is 'bitsandbytes'",)),
        ({"hc_mult": 4, "compress_ratios": [4, 4], "o_lora_rank": 1024}, ("hyper-connections", "of low rank")),
    ],
)
def test_another_family_is_told_every_reason(more: dict[str, object], shown: tuple[str, ...], write: Write) -> None:
    said = refusal(write({**DENSE_GQA, **more}))
    assert 'model_type is "mine"' in said
    for one in shown:
        assert one in said
    assert "\n" not in said


GROUPED = {**DENSE_GQA, "model_type": "llama"}
EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "parameters"),
    [
        # As the cards say: Llama-3.1-8B, 70B and 405B, Qwen3-8B, Qwen3-30B-A3B and Qwen3-235B-A22B.
        ({}, 8_030_261_248),
        ({"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
         70_553_706_496),
        ({"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
         405_853_388_800),
        ({"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
         8_190_735_360),
        (EXPERTS, 30_532_122_624),
        ({**EXPERTS, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
          "intermediate_size": 12288, "moe_intermediate_size": 1536}, 235_093_634_560),
    ],
)  # fmt: skip
def test_grouped_query_models_have_their_parameters(more: dict[str, object], parameters: int, write: Write) -> None:
    found = load_architecture(write({**GROUPED, **more}))
    assert total_parameters(found) == parameters
    assert len(found.gqa_layers) == found.num_layers and not found.mla_layers


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7, accepted: a divisor of 32"),
        ({"num_attention_heads": 24}, "num_attention_heads is 24, accepted: a divisor of 4096"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window is true"),
        ({"attention_bias": True}, "a bias in attention"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, accepted: a whole number"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "lacks moe_intermediate_size"),
        ({"num_experts_per_tok": 2}, "and there is no num_experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"colour": 1}, "colour"),
    ],
)
def test_grouped_query_models_say_what_is_wrong(more: dict[str, object], shown: str, write: Write) -> None:
    assert shown in refusal(write({**GROUPED, **more}))


def test_norms_of_heads_are_read(write: Write) -> None:
    for more, has_norms in (
        ({}, False), ({"model_type": "qwen3"}, True), ({"model_type": "qwen3", "use_qk_norm": False}, False),
        ({"use_qk_norm": True}, True),
    ):  # fmt: skip
        assert load_architecture(write({**GROUPED, **more})).gqa.has_norms is has_norms


def test_a_sparse_mla_model_is_read(write: Write) -> None:
    config = json.loads((SHIPPED_CONFIG.parent / "deepseek-v3.2.json").read_text())
    layers, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    config |= {
        "model_type": "of_another_name", "rope_interleave": True, "qk_head_dim": 192,
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first), "indexer_types": ["full"] * layers,
    }  # fmt: skip
    assert load_architecture(write(config)).mla.index_top_k == 2048
    said = refusal(write({**config, "qk_head_dim": 128, "indexer_types": ["full", "shared"]}))
    assert "qk_head_dim is 128, accepted: 192" in said and 'indexer_types is not "full" in each layer' in said
