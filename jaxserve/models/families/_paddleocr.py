"""Keys of the tower of PaddleOCR-VL (arXiv 2510.14528)."""

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
    read_sections,
    read_theta,
    read_width,
    require_same,
    vision_table,
)

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "spatial_merge_size": 2,
}
_CONNECTOR_EPS: Final = 1e-5
_MAX_IMAGE: Final = 1 << 14
_UNUSED: Final = ("packing_position_embedding.", "head.")
"""Positions of another layout of images, and a head that makes one vector of an image: published checkpoints have both."""
SECTIONS: Final = (16, 24, 24)


def paddleocr(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a SigLIP tower for images of any size: its positions are stretched over each image, and patches rotate by row and column."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    patch = require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=patch,
        norm_eps=keys.number("layer_norm_eps"),
        activation=read_activation(keys, "hidden_act"),
        positions="linear",
        positions_per_side=keys.integer("image_size", _MAX_IMAGE, low=patch) // patch,
        connector="mlp",
        connector_eps=_CONNECTOR_EPS,
        merge=require_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "num_channels"),
        rope_theta=read_theta(keys),
        has_final_norm=True,
        mrope_sections=read_sections(hf, decoder, SECTIONS, "chunks"),
        mrope_layout="chunks",
        unused_tensors=_UNUSED,
    )
