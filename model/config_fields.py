"""Fields of a ``config.json`` that have no bearing on the work of a decode step, and spellings of those that have.

A field that is neither used (``config_rules.py``) nor listed here may change work, so a config with one is refused; all
such fields are named in one answer. The list holds what the released files of the families have (Kimi K3 and
Kimi-Linear, Kimi-K2, DeepSeek-V3) and what transformers writes into any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TOKENS = "ids of tokens"
_TRAINING = "training only"
_LOADING = "how the library loads or stores the file"
_VALUES = "values of the result, not work"

#: Field -> why it has no bearing.
NO_BEARING: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id", "decoder_start_token_id",
                "sep_token_id", "unk_token_id", "image_token_id", "video_token_id", "image_placeholder",
            ),
            _TOKENS,
        ),
        **dict.fromkeys(
            (
                "initializer_range", "attention_dropout", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
                "router_aux_loss_coef", "output_router_logits", "ignore_index", "hidden_dropout", "attn_dropout",
            ),
            _TRAINING,
        ),
        **dict.fromkeys(
            (
                "architectures", "auto_map", "transformers_version", "use_cache", "_name_or_path", "name_or_path",
                "torchscript", "return_dict", "output_attentions", "output_hidden_states", "tokenizer_class",
                "use_unified_vision_chunk", "video_placeholder", "chunk_size_feed_forward", "is_encoder_decoder",
                "problem_type", "id2label", "label2id", "attn_implementation", "_attn_implementation", "model_name",
                "encoder_no_repeat_ngram_size", "remove_invalid_values", "cross_attention_hidden_size",
                "task_specific_params", "add_cross_attention", "finetuning_task", "is_decoder", "prefix",
                "pruned_heads", "tf_legacy_loss", "tie_encoder_decoder", "use_bfloat16", "_commit_hash",
            ),
            _LOADING,
        ),
        **dict.fromkeys(
            (
                "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
                "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
                "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
                "num_return_sequences", "output_scores", "repetition_penalty", "return_dict_in_generate",
                "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
            ),
            "how tokens are drawn by transformers",
        ),
        **dict.fromkeys(
            (
                "routed_scaling_factor", "norm_topk_prob", "moe_renormalize", "activation_situ_beta",
                "activation_situ_linear_beta", "gate_lower_bound", "rope_theta", "rope_scaling", "rope_parameters",
                "swiglu_limit",
            ),
            _VALUES,
        ),
        **dict.fromkeys(
            ("rope_interleave", "indexer_rope_interleave"), "order of the values that rope turns"
        ),
        "head_dim": "hidden size over heads, which no kernel of these families uses",
        "v_head_dim_padded": _LOADING,
        "max_window_layers": "layers with a window, which use_sliding_window switches on",
        "num_key_value_heads": "under latent attention the cache has one latent head",
        "rms_norm_eps": _VALUES,
    }
)  # fmt: skip

#: The name used here -> other names that released or re-saved files have for it.
SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok",),
        "num_shared_experts": ("n_shared_experts",),
        "num_expert_group": ("n_group",),
        "max_position_embeddings": ("model_max_length",),
        "moe_router_activation_func": ("scoring_func",),
        "dtype": ("torch_dtype",),
    }
)


def canonical(name: str) -> str:
    """The name used here for a field, whatever its spelling in the file."""
    return next((one for one, others in SPELLINGS.items() if name in others), name)
