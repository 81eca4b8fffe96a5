"""GLM-4.5 and GLM-4.6 (arXiv 2508.06471), GLM-4.5V and GLM-4.6V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_sections, no_window
from jaxserve.checkpoint.gguf.routing import GATING, SIGMOID, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers, with_sizes
from jaxserve.models.families._experts import COUNT_KEYS, dense_first, read_routed_experts
from jaxserve.models.families._glm4v import glm4v
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    attention_bias=False,
    use_qk_norm=False,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_MULTIMODAL: Mapping[str, Any] = {
    "vocab_size": 151_424,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "max_position_embeddings": 65_536,
    "attention_bias": True,
}
"""transformers' defaults of GLM-4.5V's text part."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with partial rotation, QKV biases, sigmoid-routed and shared experts after the first dense layers."""
    keys = without_sections(Keys({**DEFAULTS, "partial_rotary_factor": 0.5, **with_sizes(_MULTIMODAL, hf)}))
    experts = read_routed_experts(keys, "n_routed_experts", "n_shared_experts")
    config = build(
        keys,
        layers=dense_first(keys, full_layers(keys), experts),
        qkv_bias=keys.flag("attention_bias"),
        computed=(*COUNT_KEYS, "n_shared_experts", "partial_rotary_factor"),
    )
    return replace(config, qk_norm="heads" if keys.flag("use_qk_norm") else "none")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the router's keys, and what tensors and sizes tell of attention. Positions of images are not read."""
    if (keys.get(GATING) or SIGMOID) != SIGMOID:
        keys.fail(GATING, f"{SIGMOID} (sigmoid) or none", keys.get(GATING))
    no_sections(keys)
    return {
        **no_window(keys, config),
        **router_config(keys, config),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
    }


FAMILY = Family(
    ("Glm4MoeForCausalLM",),
    decoder_config,
    text_part_of=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
    text_model_types=("glm4v_moe_text", "glm4v_moe", None),
    read_vision=glm4v,
    mtp="layer",
    gguf=GGUFArchitecture(
        "glm4moe",
        has_bias_flags=True,
        has_partial_rotary=True,
        tensor_names={"post_attention_norm": "post_attention_layernorm"},
        experts="required",
        config=_gguf_config,
    ),
)
