"""GLM-4-0414: the 9B and 32B models of 2025; GLM-4.1V and GLM-4.6V-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SANDWICH_NORMS, GGUFArchitecture, GGUFKeys, no_sections, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import glm
from jaxserve.models.families._common import with_sizes
from jaxserve.models.families._glm4v import glm4v

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


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4 with sandwich norms."""
    return replace(glm.decoder_config(dict(with_sizes(_MULTIMODAL, hf))), norm_placement="sandwich")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no keys of its own; raise CheckpointError for positions of images, whose files have rows in another order."""
    no_sections(keys)
    return no_window(keys, config)


FAMILY = Family(
    ("Glm4ForCausalLM",),
    decoder_config,
    text_part_of=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    text_model_types=("glm4v_text", "glm4v", None),
    read_vision=glm4v,
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
