"""Keys of the tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006), and of that of GLM-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys
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
_OCR: Final[Mapping[str, Any]] = {
    **_TOWER,
    "hidden_size": 1024,
    "attention_bias": True,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
"""transformers' defaults of GLM-OCR."""
_SECTIONS: Final = (8, 12, 12)
_CONNECTOR_EPS: Final = 1e-5
_MAX_IMAGE: Final = 1 << 14


def glm4v(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches have learned positions, stretched over each image, and rotate by row and column; those of GLM-OCR
    only rotate."""
    if hf[MULTIMODAL].get("model_type") == "glm_ocr":
        return _ocr(hf, processor, decoder)
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    patch = keys.integer("patch_size", MAX_PATCH)
    return VisionConfig(
        **_shared(keys, hf, processor, decoder),
        # Layers are as wide within as the decoder; `intermediate_size` is the connector's.
        intermediate_size=decoder.hidden_size,
        connector_width=keys.integer("intermediate_size", MAX_WIDTH),
        positions="cubic",
        positions_per_side=keys.integer("image_size", _MAX_IMAGE, low=patch) // patch,
        has_biases=False,
        has_qkv_biases=keys.flag("attention_bias"),
        has_patch_norm=True,
    )


def _ocr(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    keys = vision_table(_OCR, hf[MULTIMODAL])
    return VisionConfig(
        **_shared(keys, hf, processor, decoder),
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        connector_width=decoder.hidden_size * read_channels(keys, "in_channels"),
        positions="none",
        positions_per_side=0,
        has_biases=keys.flag("attention_bias"),
        has_head_norms=True,
    )


def _shared(
    keys: Keys, hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig
) -> dict[str, Any]:
    """Return the fields that both towers have."""
    hidden_size, num_heads = read_width(keys, "num_heads")
    activation = read_activation(keys, "hidden_act")
    require_same(keys, "out_hidden_size", keys.integer("out_hidden_size", MAX_WIDTH), decoder.hidden_size)
    return {
        "hidden_size": hidden_size,
        "num_layers": keys.integer("depth", MAX_LAYERS),
        "num_heads": num_heads,
        "patch_size": require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        "norm_eps": keys.number("rms_norm_eps"),
        "activation": activation,
        "connector": "downsampled",
        "connector_eps": _CONNECTOR_EPS,
        "connector_activation": activation,
        "merge": require_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        "output_size": decoder.hidden_size,
        "normalization": processor.normalization,
        "image_token_id": processor.image_token_id,
        "num_channels": read_channels(keys, "in_channels"),
        "num_frames": keys.integer("temporal_patch_size", 16),
        "layers": "gated",
        "rope_theta": read_theta(keys),
        "has_final_norm": True,
        "mrope_sections": read_sections(hf, decoder, _SECTIONS, "chunks"),
        "mrope_layout": "chunks",
    }
