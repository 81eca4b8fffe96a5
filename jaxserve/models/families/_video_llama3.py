"""Keys of the tower of VideoLLaMA 3 (arXiv 2501.13106): SigLIP with rotation by row and column in place of learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._vision import read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def video_llama3(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches, or the means of blocks of four, become embeddings."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    eps = keys.number("layer_norm_eps")
    tower = read_tower(keys, processor, decoder, norm_eps=eps, connector="mean_projector", connector_eps=eps)
    return replace(tower, rope_theta=read_theta(keys), has_final_norm=True)
