"""Configs of odd sizes, one of each family that has only one shape among the tiny checkpoints of make_goldens.py."""

from __future__ import annotations

import json
from typing import Any, Final

from make_goldens import DATA

VOCAB_SIZE: Final = 333
_FIVES: Final = {"num_attention_heads": 5, "num_key_value_heads": 1}
_THREES: Final = {"num_attention_heads": 3, "num_key_value_heads": 1}
_SIXES: Final = {"num_attention_heads": 6, "num_key_value_heads": 2}
_LATENT: Final[dict[str, Any]] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 24,
    "v_head_dim": 72,
}
_INDEXED: Final[dict[str, Any]] = {"index_head_dim": 40, "index_n_heads": 15, "index_topk": 11}
_HAS_ODD: Final = frozenset(
    "bailing_hybrid bamba codegen falcon falcon_h1 gemma3n gemma4 gpt2 gpt_bigcode gpt_neox gptj kimi_linear lfm2 lfm3 llama4 mistral4 nemotron_h olmo_hybrid "
    "opt qwen3_5 qwen3_next".split()
)
"""Types of models with a second shape of odd sizes among the tiny checkpoints."""


def _config(name: str) -> dict[str, Any]:
    """Return the config of a tiny checkpoint, which says nothing of the type of weights."""
    found: dict[str, Any] = json.loads((DATA / name / "config.json").read_text())
    del found["dtype"]
    return found


def _longrope(table: dict[str, Any], rotary_dim: int) -> dict[str, Any]:
    """Return a table with a factor for each pair of rotated numbers."""
    short, long = ([1 + step * index for index in range(rotary_dim // 2)] for step in (0.05, 0.3))
    return {"rope_scaling": {**table, "short_factor": short, "long_factor": long}}


_WIDE: Final = frozenset(
    "arcee cohere ernie4_5_moe exaone4 gemma gemma2 glm glm4_moe granite_swa granitemoe granitemoeshared hunyuan_v1_moe hy_v3 "
    "jais2 llama minimax_m2 ministral mixtral olmo3 olmoe phi qwen2_moe qwen3_5_moe qwen3 smollm3 stablelm".split()
)
"""Types of models whose heads get 72 numbers."""
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "helium_tiny": {"hidden_size": 200},  # its heads are as wide together as the model
    "granitemoehybrid_dense_tiny": {"mamba_n_heads": 10, "mamba_n_groups": 5, "mamba_d_state": 24},
    "phi_tiny": {"partial_rotary_factor": 0.5},
    "step3p5_tiny": {
        "num_attention_groups": 1,
        "attention_other_setting": {"num_attention_heads": 3},
        "partial_rotary_factors": [1.0, 0.4, 0.4, 1.0],
        "query_pre_attn_scalar": 20,
    },
    "laguna_tiny": {
        "gating": "per-element",
        "moe_router_logit_softcapping": 2.0,
        "num_attention_heads_per_layer": [5, 3, 5],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.4},
        },
    },
    "minicpm3_tiny": {
        "hidden_size": 216,  # three heads of values of 72 numbers, which no key says
        "v_head_dim": None,
        "q_lora_rank": None,
        "rope_scaling": None,
        "scale_depth": None,
        "dim_model_base": None,
    },
    "cohere2_moe_tiny": {
        "rms_norm_eps": 1e-5,
        "expert_selection_fn": "sigmoid",
        "shared_expert_combination_strategy": "sum",
    },
    "mimo_v2_flash_tiny": {"num_attention_heads": 6, "v_head_dim": 24},  # twice the KV heads in layers with a window
    "persimmon_tiny": {"num_key_value_heads": None},
    "deepseek_v32_tiny": _INDEXED,
    "glm_moe_dsa_tiny": _INDEXED,
    "mistral_large4_tiny": _INDEXED,
    "axk2_tiny": {**_INDEXED, "gated_norm_rank": 5},
    "hy_v4_tiny": {**_INDEXED, "hc_mult": 5},
    "deepseek_v4_tiny": {
        "num_hidden_layers": 4,
        "moe_intermediate_size": 88,
        "o_groups": 5,
        "layer_types": None,
        "compress_ratios": [4, 128, 0, 4, 0],  # the last one is of a layer that drafts
        "compress_rates": None,
        "compress_rate_hca": 10,
        "hc_mult": 5,
        "rope_scaling": None,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
            "compress": {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 0.4},
        },
        "scoring_func": "sigmoid",
        **_INDEXED,
        "index_topk": 5,
    },
    "phi3_longrope_tiny": _longrope(_config("phi3_longrope_tiny")["rope_scaling"], 40),
    "phimoe_tiny": _longrope(_config("phimoe_tiny")["rope_scaling"], 40),
}
"""Further changes of one config."""


def odd_configs() -> dict[str, dict[str, Any]]:
    """Return the configs by the names of the tiny checkpoints that they change, the first of each architecture."""
    found: dict[str, dict[str, Any]] = {}
    seen = set[str]()
    for name in sorted(json.loads((DATA / "controls.json").read_text())):
        config = _config(name)
        kind = config["model_type"].removesuffix("_text")
        if kind in _HAS_ODD or config["architectures"][0] in seen:
            continue
        seen.add(config["architectures"][0])
        found[name] = config | _sizes(config, is_wide=kind in _WIDE) | CHANGES.get(name, {})
    return found


def _sizes(config: dict[str, Any], *, is_wide: bool) -> dict[str, Any]:
    """Return heads of 40 numbers, five to a KV head, or of 72, three to one."""
    if "kv_lora_rank" in config:
        return {"vocab_size": VOCAB_SIZE, "hidden_size": 60, "intermediate_size": 88, **_LATENT}
    heads, dim = (_THREES, 72) if is_wide else (_FIVES, 40)
    width = {"hidden_size": heads["num_attention_heads"] * dim}
    if "head_dim" in config:
        heads, width = (_SIXES if is_wide else _FIVES), {"head_dim": dim, "hidden_size": 60}
    return {"vocab_size": VOCAB_SIZE, "intermediate_size": 88, **heads, **width}
