"""Keys of the tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006)."""

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
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13_696,
}
_SECTIONS: Final = (8, 12, 12)
_CONNECTOR_EPS: Final = 1e-5
_MAX_IMAGE: Final = 1 << 14


def glm4v(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches have learned positions, stretched over each image, and rotate by row and column."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    hidden_size, num_heads = read_width(keys, "num_heads")
    patch = require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size)
    activation = read_activation(keys, "hidden_act")
    return VisionConfig(
        hidden_size=hidden_size,
        # Layers are as wide within as the decoder; `intermediate_size` is the connector's.
        intermediate_size=require_same(
            keys, "out_hidden_size", keys.integer("out_hidden_size", MAX_WIDTH), decoder.hidden_size
        ),
        num_layers=keys.integer("depth", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=patch,
        norm_eps=keys.number("rms_norm_eps"),
        activation=activation,
        positions="cubic",
        positions_per_side=keys.integer("image_size", _MAX_IMAGE, low=patch) // patch,
        connector="downsampled",
        connector_eps=_CONNECTOR_EPS,
        connector_activation=activation,
        connector_width=keys.integer("intermediate_size", MAX_WIDTH),
        merge=require_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "in_channels"),
        num_frames=keys.integer("temporal_patch_size", 16),
        layers="gated",
        has_biases=False,
        has_qkv_biases=keys.flag("attention_bias"),
        rope_theta=read_theta(keys),
        has_patch_norm=True,
        has_final_norm=True,
        mrope_sections=read_sections(hf, decoder, _SECTIONS, "chunks"),
        mrope_layout="chunks",
    )
