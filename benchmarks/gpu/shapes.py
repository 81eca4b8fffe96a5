"""Models by shape, as `config.json` would give them: the published sizes of Llama 3, and tiny ones of every kind."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_config

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING,
    "tie_word_embeddings": False,
}
LLAMA_1B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**TINY, "rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 64}},
    "mistral, window 24": {**TINY, "architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2, biases": {**TINY, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3, head norms": {**TINY, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "smollm3, layers without positions": {
        **TINY,
        "architectures": ["SmolLM3ForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "head_dim": 64,
    },
    "gemma2, soft caps": {
        **TINY,
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 2,
        "head_dim": 64,
        "sliding_window": 24,
        "query_pre_attn_scalar": 64,
    },
    "qwen3, experts": {
        **TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


def decoder(config: dict[str, Any]) -> DecoderConfig:
    """Return the config that the server reads."""
    return decoder_config(config)
