"""Gemma (arXiv 2403.08295) and CodeGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers, with_sizes
from jaxserve.models.families._gemma import has_whole_prompts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._paligemma import TEXT_SIZES, paligemma

DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norm weights stored minus 1, embeddings times sqrt(D), and GELU, whose old name means the one with tanh."""
    keys = Keys({**DEFAULTS, **with_sizes(TEXT_SIZES, hf)})
    is_whole = has_whole_prompts(keys)
    if keys.get("hidden_act") == "gelu":
        keys = Keys({**keys.table, "hidden_act": "gelu_pytorch_tanh"})
    config = build(keys, layers=full_layers(keys), computed=("use_bidirectional_attention",))
    scale = config.hidden_size**0.5
    return replace(config, norm_weights="offset", embedding_scale=scale, has_whole_prompts=is_whole)


FAMILY = Family(
    ("GemmaForCausalLM",),
    decoder_config,
    text_part_of=("PaliGemmaForConditionalGeneration",),
    text_model_types=("gemma", None),
    read_vision=paligemma,
    gguf=GGUFArchitecture("gemma", norm_offset=1.0, config=lambda keys, config: {"hidden_act": "gelu_pytorch_tanh"}),
)
