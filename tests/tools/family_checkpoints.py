"""Tiny checkpoints of families with layers or names of their own; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any

from later_checkpoints import _config
from mixture_checkpoints import BOS, EOS, PAD

_THETA: dict[str, dict[str, Any]] = {"theta": {"rope_theta": 20000.0}}
_LEROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
_DBRX_ATTENTION: dict[str, Any] = {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0}
_DBRX_EXPERTS: dict[str, Any] = {
    "ffn_act_fn": {"name": "silu"},
    "ffn_hidden_size": 24,
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_normalize_expert_weights": 1.0,
}


def _dbrx(attention: dict[str, Any], experts: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a config with DBRX's keys."""
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "vocab_size": 320,
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {**_DBRX_ATTENTION, **attention},
        "ffn_config": {**_DBRX_EXPERTS, **experts},
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


def _modernbert(**keys: Any) -> dict[str, Any]:
    """Return a config with the keys of ModernBERT's decoders."""
    return {
        "architectures": ["ModernBertDecoderForCausalLM"],
        "model_type": "modernbert-decoder",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "global_attn_every_n_layers": 3,
        "local_attention": 16,
        "global_rope_theta": 10000.0,
        "local_rope_theta": 5000.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "cls_token_id": BOS,
        "sep_token_id": EOS,
        **keys,
    }


def _changed(key: str, table: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: {**table, **changes}}


FAMILY_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "flint_tiny": (
        _config(
            "FlintForCausalLM",
            "flint",
            head_dim=16,
            num_hidden_layers=4,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            mlp_only_layers=[0],
            sliding_window=8,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=2,
        ),
        "bfloat16",
        {
            **_THETA,
            "window": {"sliding_window": 9},
            "choices": {"num_experts_per_tok": 3},
            "weights": {"norm_topk_prob": False},
        },
    ),
    "bitnet_tiny": (
        _config("BitNetForCausalLM", "bitnet", hidden_act="relu2", tie_word_embeddings=True, hidden_size=64),
        "bfloat16",
        {**_THETA, "activation": {"hidden_act": "silu"}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "mistral_large4_tiny": (
        {
            **_config(
                "MistralLarge4TextModel",
                "mistral_large4_text",
                num_hidden_layers=4,
                num_key_value_heads=4,
                kv_lora_rank=20,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
                moe_intermediate_size=16,
                n_routed_experts=6,
                num_experts_per_tok=2,
                routed_scaling_factor=1.5,
                n_group=3,
                topk_group=2,
                index_topk=8,
                index_n_heads=12,
                index_head_dim=20,
                no_rope_layers=[1, 0, 1, 0],
                kv_source_layers=[0, 1, 0, 1],
                indexer_types=["full", "shared", "full", "full"],
                rope_parameters=_LEROPE,
                final_logit_softcapping=20.0,
            )
        },
        "bfloat16",
        {
            "theta": {"rope_parameters": {**_LEROPE, "rope_theta": 5000.0}},
            "cap": {"final_logit_softcapping": 5.0},
            "choices": {"num_experts_per_tok": 3},
            "groups": {"n_group": 1, "topk_group": 1},
            "chosen": {"index_topk": 12},
            "shared": {"indexer_types": ["full", "shared", "full", "shared"]},
        },
    ),
    "modernbert_decoder_tiny": (
        _modernbert(attention_bias=True, mlp_bias=True, classifier_bias=True, norm_bias=True),
        "float16",
        {
            "window": {"local_attention": 18},
            "theta": {"global_rope_theta": 20000.0},
            "local": {"local_rope_theta": 20000.0},
            "activation": {"classifier_activation": "silu"},
            "eps": {"norm_eps": 0.1},
        },
    ),
    "modernbert_decoder_odd_tiny": (
        _modernbert(
            hidden_size=72,
            num_attention_heads=3,
            num_hidden_layers=2,
            vocab_size=333,
            decoder_bias=False,
            tie_word_embeddings=False,
        ),
        "bfloat16",
        {"window": {"local_attention": 18}},
    ),
    "dbrx_tiny": (
        _dbrx({}, {}),
        "bfloat16",
        {
            "clip": _changed("attn_config", _DBRX_ATTENTION, clip_qkv=8.0),
            "choices": _changed("ffn_config", _DBRX_EXPERTS, moe_top_k=3),
            "weights": _changed("ffn_config", _DBRX_EXPERTS, moe_normalize_expert_weights=None),
        },
    ),
    "dbrx_odd_tiny": (
        _dbrx(
            {"kv_n_heads": 1, "clip_qkv": 8.0},
            {"moe_num_experts": 5, "moe_top_k": 1, "moe_normalize_expert_weights": None},
            d_model=120,
            n_heads=3,
            n_layers=1,
            vocab_size=333,
        ),
        "bfloat16",
        {"weights": _changed("ffn_config", _DBRX_EXPERTS, moe_num_experts=5, moe_top_k=1)},
    ),
}
"""By name: the config, the dtype of the weights, and the changes to the config that must change its logits."""
