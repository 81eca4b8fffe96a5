"""Keys of PaliGemma's tower (arXiv 2407.07726), SigLIP, and of its projector of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import siglip, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
"""transformers' defaults."""
TEXT_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16_384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257_152,
    "max_position_embeddings": 8192,
}
"""transformers' defaults of text parts of Gemma 1."""


def paligemma(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower and its projector. The whole prompt is seen like an image of Gemma 3."""
    vision_table({}, hf[MULTIMODAL]).require("model_type", "siglip_vision_model")
    Keys({"projection_dim": 2048, **hf[MULTIMODAL]}).require("projection_dim", decoder.hidden_size)
    tower = siglip(hf, processor, decoder, connector="biased_linear", defaults=_TOWER, bidirectional_layers="all")
    return replace(tower, unused_tensors=("head.",))
