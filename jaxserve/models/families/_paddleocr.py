"""Keys of the tower of PaddleOCR-VL (arXiv 2510.14528)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._vision import MAX_IMAGE, read_sections, read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "spatial_merge_size": 2,
}
_CONNECTOR_EPS: Final = 1e-5
_UNUSED: Final = ("packing_position_embedding.", "head.")
"""Positions of another layout of images, and a head that makes one vector of an image: published checkpoints have both."""
SECTIONS: Final = (16, 24, 24)


def paddleocr(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a SigLIP tower for images of any size: its positions are stretched over each image, and patches rotate by row and column."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    eps, patch = keys.number("layer_norm_eps"), processor.patch_size
    return replace(
        read_tower(keys, processor, decoder, norm_eps=eps, connector="mlp", connector_eps=_CONNECTOR_EPS),
        positions="linear",
        positions_per_side=keys.integer("image_size", MAX_IMAGE, low=patch) // patch,
        rope_theta=read_theta(keys),
        has_final_norm=True,
        mrope_sections=read_sections(hf, decoder, SECTIONS, "chunks"),
        mrope_layout="chunks",
        unused_tensors=_UNUSED,
    )
