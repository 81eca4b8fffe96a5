"""Tiny checkpoints with experts, of later families; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any

BOS, EOS, PAD = 0, 2, 0


def _config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


_GRANITE: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 1e4,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.5,
}
_GRANITE_CONTROLS: dict[str, dict[str, Any]] = {
    "choices": {"num_experts_per_tok": 3},
    "residual": {"residual_multiplier": 1.0},
    "logits": {"logits_scaling": 1.0},
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 0.8,
}
# The prompt is longer than the original length, so that its last queries grow.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.3,
    "llama_4_scaling_beta": 0.2,
}

_LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "rope_theta": 1e4,
    "attn_scale": 0.3,
    "floor_scale": 8,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}

MIXTURE_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "granitemoe_tiny": (
        _config("GraniteMoeForCausalLM", "granitemoe", attention_bias=True, **_GRANITE),
        "bfloat16",
        _GRANITE_CONTROLS,
    ),
    "granitemoeshared_odd_tiny": (
        _config("GraniteMoeSharedForCausalLM", "granitemoeshared", **_GRANITE)
        | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "shared_intermediate_size": 24}
        | {"tie_word_embeddings": True},
        "bfloat16",
        {**_GRANITE_CONTROLS, "theta": {"rope_theta": 1e2}},
    ),
    "llama4_tiny": (
        _config("Llama4ForCausalLM", "llama4_text", **_LLAMA4)
        | {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "attention_chunk_size": 8},
        "bfloat16",
        {
            "chunk": {"attention_chunk_size": 16},
            "norm": {"use_qk_norm": False},
            "tuning": {"attn_temperature_tuning": False},
            "period": {"floor_scale": 9},
        },
    ),
    "llama4_odd_tiny": (
        _config("Llama4ForCausalLM", "llama4_text", **_LLAMA4)
        | {"hidden_size": 40, "head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2, "use_qk_norm": False}
        | {"attention_chunk_size": 13, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True}
        | {"rope_parameters": {**_LLAMA3, "rope_theta": 1e4}},
        "bfloat16",
        {"chunk": {"attention_chunk_size": 12}, "choices": {"num_experts_per_tok": 1}},
    ),
    "mistral4_tiny": (
        _config("Mistral4ForCausalLM", "mistral4", **{**LATENT, "n_group": 3, "topk_group": 2})
        | {"intermediate_size": 56, "first_k_dense_replace": 1, "rope_parameters": YARN},
        "bfloat16",
        {
            "groups": {"n_group": 1, "topk_group": 1},
            "normalised": {"norm_topk_prob": False},
            "scaling": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0001}},
        },
    ),
    "mistral4_odd_tiny": (
        _config("Mistral4ForCausalLM", "mistral4", **{**LATENT, "n_routed_experts": 5})
        | {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": None, "qk_nope_head_dim": 10, "first_k_dense_replace": 0, "rope_interleave": False}
        | {"rope_parameters": YARN},
        "bfloat16",
        {"interleaved": {"rope_interleave": True}, "choices": {"num_experts_per_tok": 3}},
    ),
}
"""By name: config, dtype, and controls as in `TinyCheckpoint`."""
