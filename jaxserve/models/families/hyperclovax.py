"""HyperCLOVA X SEED, for texts, and SEED Think 32B, which reads images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers, with_sizes
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._qwen2_vision import qwen2_vision
from jaxserve.models.families._vision import by_model_type
from jaxserve.models.families.granite import FACTORS

DEFAULTS = dict(
    COMMON_DEFAULTS,
    attention_bias=False,
    mlp_bias=False,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    attention_multiplier=None,
    logits_scaling=1.0,
    use_post_norm=True,
)
_SIZES: Mapping[str, Any] = {**llama.SIZES, "tie_word_embeddings": True}
"""transformers' defaults of further keys, which multimodal configs may leave out."""
_SANDWICH: Mapping[str, str] = {
    "post_norm1": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms before and after blocks, and factors on embeddings, block outputs, scores and logits."""
    keys = Keys({**DEFAULTS, **with_sizes(_SIZES, hf)})
    config = build(keys, layers=full_layers(keys), computed=("mlp_bias", *FACTORS))
    scale = "attention_multiplier"
    return replace(
        config,
        norm_placement="sandwich" if keys.flag("use_post_norm") else "pre",
        embedding_scale=keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        attention_scale=None if keys.get(scale) is None else keys.number(scale),
        logit_scale=keys.number("logits_scaling"),
    )


def _norm_names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    return _SANDWICH if hf.get("use_post_norm", True) else {}


FAMILY = Family(
    ("HyperCLOVAXForCausalLM",),
    decoder_config,
    text_part_of=("HyperCLOVAXVisionV2ForConditionalGeneration", "HCXVisionV2ForCausalLM"),
    text_model_types=("hyperclovax",),
    read_vision=by_model_type({"hyperclovax_vision_v2": qwen2_vision, "vlm": qwen2_vision}),
    config_renames=_norm_names,
)
