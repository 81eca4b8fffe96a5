"""Tiny checkpoints of GPT-2 and families of its time, with their names of keys and tensors; see tiny_checkpoints.py."""

from __future__ import annotations

from typing import Any

from mixture_checkpoints import BOS, EOS, PAD

_TOKENS: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def _gpt(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    """Return a config with GPT-2's keys."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "n_embd": 48,
        "n_inner": 56,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
        **_TOKENS,
        **keys,
    }


def _hf(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    """Return a config with common keys."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        **_TOKENS,
        **keys,
    }


def _gpt_neo(**keys: Any) -> dict[str, Any]:
    """Return a config of GPT-Neo."""
    return {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
        **_TOKENS,
        **keys,
    }


_EPS: dict[str, dict[str, Any]] = {"eps": {"layer_norm_epsilon": 0.1}}
_NEOX: dict[str, Any] = {"intermediate_size": 56, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.5}
_FALCON: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "bias": False, "alibi": False}
_THETA: dict[str, dict[str, Any]] = {"theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}}

GPT_CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "gpt2_tiny": (
        _gpt("GPT2LMHeadModel", "gpt2", n_layer=3, activation_function="gelu_new"),
        "float32",
        {**_EPS, "activation": {"activation_function": "relu"}},
    ),
    "gpt2_odd_tiny": (
        _gpt("GPT2LMHeadModel", "gpt2", n_embd=72, n_head=3, n_inner=None, vocab_size=333),
        "bfloat16",
        _EPS,
    ),
    "gpt_bigcode_tiny": (
        _gpt("GPTBigCodeForCausalLM", "gpt_bigcode", multi_query=True, activation_function="gelu_pytorch_tanh"),
        "bfloat16",
        {**_EPS, "activation": {"activation_function": "relu"}},
    ),
    "gpt_bigcode_heads_tiny": (
        _gpt("GPTBigCodeForCausalLM", "gpt_bigcode", n_embd=40, n_head=5, vocab_size=333, multi_query=False),
        "bfloat16",
        _EPS,
    ),
    "gptj_tiny": (
        _gpt("GPTJForCausalLM", "gptj", rotary_dim=8, tie_word_embeddings=False),
        "float16",
        {**_EPS, "part": {"rotary_dim": 12}},
    ),
    "gptj_odd_tiny": (
        _gpt("GPTJForCausalLM", "gptj", n_embd=120, n_head=3, rotary_dim=40, n_layer=1, vocab_size=333),
        "bfloat16",
        {"part": {"rotary_dim": 32}},
    ),
    "codegen_tiny": (
        _gpt("CodeGenForCausalLM", "codegen", n_embd=64, n_head=8, rotary_dim=4, tie_word_embeddings=False),
        "float16",
        {**_EPS, "part": {"rotary_dim": 8}},
    ),
    "codegen_odd_tiny": (
        _gpt("CodeGenForCausalLM", "codegen", n_embd=120, n_head=12, rotary_dim=10, n_layer=1, vocab_size=333),
        "bfloat16",
        {"part": {"rotary_dim": 6}},
    ),
    "opt_tiny": (
        _hf("OPTForCausalLM", "opt", ffn_dim=56, num_hidden_layers=3, activation_function="relu"),
        "float16",
        {"activation": {"activation_function": "gelu"}},
    ),
    "opt_odd_tiny": (
        _hf("OPTForCausalLM", "opt", ffn_dim=88, hidden_size=72, num_attention_heads=1, vocab_size=333),
        "bfloat16",
        {"activation": {"activation_function": "gelu"}},
    ),
    "gpt_neox_tiny": (
        _hf("GPTNeoXForCausalLM", "gpt_neox", rotary_emb_base=10000, use_parallel_residual=True, **_NEOX),
        "float16",
        {
            "part": {"rotary_pct": 1.0},
            "order": {"use_parallel_residual": False},
            "theta": {"rotary_emb_base": 20000},
        },
    ),
    "gpt_neox_sequential_tiny": (
        _hf(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            **{**_NEOX, "hidden_size": 120, "num_attention_heads": 3, "rotary_pct": 0.25, "num_hidden_layers": 1},
            use_parallel_residual=False,
            vocab_size=333,
        ),
        "bfloat16",
        {"order": {"use_parallel_residual": True}},
    ),
    "gpt_neo_tiny": (
        _gpt_neo(attention_types=[[["global", "local"], 1], [["local"], 1]], num_layers=3),
        "float16",
        {
            "activation": {"activation_function": "relu"},
            "window": {"window_size": 9},
            "kinds": {"attention_types": [[["global"], 3]]},
        },
    ),
    "gpt_neo_odd_tiny": (
        _gpt_neo(hidden_size=72, num_heads=3, intermediate_size=None, vocab_size=333),
        "bfloat16",
        {"window": {"window_size": 9}},
    ),
    "falcon_tiny": (
        _hf("FalconForCausalLM", "falcon", multi_query=True, parallel_attn=True, **_FALCON),
        "bfloat16",
        {**_THETA, **_EPS},
    ),
    "falcon_new_tiny": (
        _hf(
            "FalconForCausalLM",
            "falcon",
            **{**_FALCON, "hidden_size": 120, "num_attention_heads": 6, "vocab_size": 333, "ffn_hidden_size": 88},
            new_decoder_architecture=True,
            num_kv_heads=2,
        ),
        "bfloat16",
        {**_THETA, **_EPS},
    ),
    "falcon_sequential_tiny": (
        _hf(
            "FalconForCausalLM",
            "falcon",
            **{**_FALCON, "bias": True},
            num_attention_heads=3,
            multi_query=False,
            parallel_attn=False,
        ),
        "bfloat16",
        {**_THETA, **_EPS},
    ),
}
"""By name: the config, the dtype of the weights, and the changes to the config that must change its logits."""
