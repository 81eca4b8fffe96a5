"""The tiny checkpoints of tests/models/data: a config.json each, in the spelling published models use.

Between them: every family, 1, 2, 3 and 4 query heads to a kv head, tied and untied heads, biases, qk-norm, a head dim
that is not D / N, windows of 8 tokens, layers without positions, every rope scaling that a short text can show, both
spellings of it, f32, f16 and bf16, one file and shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 320
BOS, EOS, PAD = 0, 2, 0


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """How one checkpoint is stored, and the changes to its config that must change its logits."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    num_shards: int = 1
    generation_eos: list[int] | None = None
    """End tokens of generation_config.json where they are not those of config.json."""
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)


def _config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **keys,
    }


def _llama(**keys: Any) -> dict[str, Any]:
    return _config("LlamaForCausalLM", "llama", **keys)


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_SCALING: dict[str, Any] = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

TINY_CHECKPOINTS: dict[str, TinyCheckpoint] = {
    "llama2_tiny": TinyCheckpoint(
        _llama(
            num_key_value_heads=4, num_hidden_layers=2, intermediate_size=64, attention_bias=False, pretraining_tp=1
        ),
        dtype="float32",
        controls={"theta": {"rope_theta": 20000.0}, "eps": {"rms_norm_eps": 0.1}},
    ),
    "llama3_tiny": TinyCheckpoint(
        {
            **{key: value for key, value in _llama(tie_word_embeddings=True).items() if key != "rope_theta"},
            "eos_token_id": [EOS, 1],
            "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 10000.0},
        },
        controls={"scaling": NO_SCALING},
    ),
    "llama_yarn_tiny": TinyCheckpoint(
        _llama(
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        controls={
            "scaling": NO_SCALING,
            "attention_factor": {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.0,
                }
            },
        },
    ),
    "llama_linear_tiny": TinyCheckpoint(
        _llama(head_dim=32, hidden_act="gelu_pytorch_tanh", rope_scaling={"type": "linear", "factor": 2.0}),
        dtype="float16",
        num_shards=2,
        controls={"scaling": NO_SCALING, "activation": {"hidden_act": "silu"}},
    ),
    "smollm2_tiny": TinyCheckpoint(
        _llama(
            hidden_size=96,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_theta=100000,
            rope_interleaved=False,
            rope_scaling=None,
        ),
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "smollm3_tiny": TinyCheckpoint(
        _config(
            "SmolLM3ForCausalLM",
            "smollm3",
            num_hidden_layers=4,
            num_key_value_heads=1,
            no_rope_layers=[1, 0, 1, 0],
            no_rope_layer_interval=2,
            layer_types=["full_attention"] * 4,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
            rope_theta=5000000.0,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
        ),
        controls={"nope": {"no_rope_layers": [1, 1, 1, 1]}},
    ),
    "smollm3_sliding_tiny": TinyCheckpoint(
        _config(
            "SmolLM3ForCausalLM",
            "smollm3",
            num_hidden_layers=4,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
        ),
        controls={
            "nope": {"no_rope_layers": [1, 1, 1, 1], "layer_types": ["full_attention", "sliding_attention"] * 2},
            "window": {"use_sliding_window": False},
            "one_more": {"sliding_window": 9},
        },
    ),
    "mistral_sliding_tiny": TinyCheckpoint(
        _config(
            "MistralForCausalLM",
            "mistral",
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            sliding_window=8,
        ),
        controls={"window": {"sliding_window": None}, "one_more": {"sliding_window": 9}},
    ),
    "qwen2_tiny": TinyCheckpoint(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=8,
            max_window_layers=1,
        ),
        generation_eos=[EOS, 0],
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "qwen2_sliding_tiny": TinyCheckpoint(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            num_key_value_heads=4,
            rms_norm_eps=1e-6,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
        controls={"window": {"use_sliding_window": False}, "first": {"max_window_layers": 0}},
    ),
    "qwen3_tiny": TinyCheckpoint(
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            head_dim=32,
            rms_norm_eps=1e-6,
            rope_theta=1000000,
            attention_bias=False,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
        ),
        controls={"theta": {"rope_theta": 10000.0}},
    ),
    "qwen3_sliding_tiny": TinyCheckpoint(
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        controls={"window": {"layer_types": ["full_attention"] * 3}, "one_more": {"sliding_window": 9}},
    ),
}
