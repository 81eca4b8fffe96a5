"""GLM-4-0414: the 9B and 32B models of 2025; GLM-4.1V, GLM-4.6V-Flash and GLM-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SANDWICH_NORMS, GGUFArchitecture, GGUFKeys, no_sections, no_window
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import glm
from jaxserve.models.families._common import with_sizes
from jaxserve.models.families._glm4v import glm4v
from jaxserve.models.families._keys import Keys

DEFAULTS = glm.DEFAULTS
_MULTIMODAL: Mapping[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "head_dim": None,
    "partial_rotary_factor": 1.0,
}
"""transformers' defaults of GLM-4.1V's text part."""
_OCR: Mapping[str, Any] = {
    **_MULTIMODAL,
    "vocab_size": 59_392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "attention_bias": False,
}
"""transformers' defaults of GLM-OCR's text part, and the absence of biases, for which its config has no key."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4 with sandwich norms; that of GLM-OCR without biases."""
    is_ocr = hf.get(MULTIMODAL, {}).get("model_type") == "glm_ocr"
    if is_ocr:
        Keys(hf).require("attention_bias", False, None)
        hf = {key: value for key, value in hf.items() if key != "attention_bias"}
    return replace(glm.decoder_config({**with_sizes(_OCR if is_ocr else _MULTIMODAL, hf)}), norm_placement="sandwich")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no keys of its own; raise CheckpointError for positions of images, whose files have rows in another order."""
    no_sections(keys)
    return no_window(keys, config)


FAMILY = Family(
    ("Glm4ForCausalLM",),
    decoder_config,
    text_part_of=(
        "Glm4vForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
    ),
    text_model_types=("glm4v_text", "glm4v", "glm_ocr_text", None),
    read_vision=glm4v,
    mtp="layer",
    renames={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    gguf=GGUFArchitecture(
        "glm4",
        has_bias_flags=True,
        has_partial_rotary=True,
        tensor_names={**SANDWICH_NORMS, "ffn_up": "mlp.gate_up_proj"},
        config=_gguf_config,
    ),
)
