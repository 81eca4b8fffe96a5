"""Granite 3 and 4, the dense models, and Granite for Docling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers, with_sizes
from jaxserve.models.families._docling import docling
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    attention_bias=False,
    mlp_bias=False,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    attention_multiplier=1.0,
    logits_scaling=1.0,
)
FACTOR_KEYS: Final = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Keys of GGUF files, by those that `with_factors` reads."""
FACTORS: Final = tuple(FACTOR_KEYS)
_DOCLING: Mapping[str, Any] = {
    "vocab_size": 133_800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
    "logits_scaling": 4.0,
}
"""transformers' defaults of the text part of Granite for Docling."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with factors on embeddings, block outputs and scores, and a divisor of logits."""
    keys = Keys({**DEFAULTS, **with_sizes(_DOCLING, hf)})
    return with_factors(keys, build(keys, layers=full_layers(keys), computed=("mlp_bias", *FACTORS)))


def with_factors(keys: Keys, config: DecoderConfig) -> DecoderConfig:
    """Add the factors on embeddings, block outputs and scores, and the divisor of logits."""
    return replace(
        config,
        embedding_scale=keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        attention_scale=keys.number("attention_multiplier"),
        logit_scale=1 / keys.number("logits_scaling"),
    )


def gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors and the divisor; raise CheckpointError if the file leaves positions out or has a sliding window."""
    if keys.get("rope.scaling.finetuned") is False:
        keys.fail("rope.scaling.finetuned", "true or none: positions are not left out", False)
    return no_window(keys, config) | gguf_factors(keys, config)


def gguf_factors(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` that `with_factors` reads."""
    defaults = {"attention_multiplier": config["head_dim"] ** -0.5}
    return {name: keys.number(key, defaults.get(name, 1.0)) for name, key in FACTOR_KEYS.items()}


FAMILY = Family(
    ("GraniteForCausalLM",),
    decoder_config,
    text_part_of=("GraniteDoclingForConditionalGeneration",),
    text_model_types=("granite_docling_text", None),
    read_vision=docling,
    gguf=GGUFArchitecture("granite", is_rope_permuted=True, has_bias_flags=True, config=gguf_config),
)
