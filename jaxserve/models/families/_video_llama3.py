"""Keys of the tower of VideoLLaMA 3 (arXiv 2501.13106): SigLIP with rotation by row and column in place of learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._vision import (
    MAX_PATCH,
    read_channels,
    read_theta,
    read_width,
    require_same,
    vision_table,
)

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def video_llama3(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches, or the means of blocks of four, become embeddings."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    eps = keys.number("layer_norm_eps")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        norm_eps=eps,
        activation=read_activation(keys, "hidden_act"),
        positions="none",
        positions_per_side=0,
        connector="mean_projector",
        connector_eps=eps,
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "num_channels"),
        rope_theta=read_theta(keys),
        has_final_norm=True,
    )
