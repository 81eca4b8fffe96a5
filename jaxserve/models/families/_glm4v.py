"""Keys of the tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006), and of that of GLM-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._vision import (
    MAX_IMAGE,
    QWEN_NAMES,
    read_sections,
    read_theta,
    read_tower,
    require_same,
    vision_table,
)

_TOWER: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_attention_heads": 12,
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
    "num_attention_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
"""transformers' defaults of GLM-OCR."""
_SECTIONS: Final = (8, 12, 12)
_CONNECTOR_EPS: Final = 1e-5


def glm4v(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches have learned positions, stretched over each image, and rotate by row and column; those of GLM-OCR
    only rotate."""
    is_ocr = hf[MULTIMODAL].get("model_type") == "glm_ocr"
    keys = vision_table(_OCR if is_ocr else _TOWER, hf[MULTIMODAL], QWEN_NAMES)
    require_same(keys, "out_hidden_size", decoder.hidden_size)
    width, has_biases = keys.integer("intermediate_size", MAX_WIDTH), keys.flag("attention_bias")
    tower = read_tower(
        keys,
        processor,
        decoder,
        norm_eps=keys.number("rms_norm_eps"),
        connector="downsampled",
        connector_eps=_CONNECTOR_EPS,
        # Layers are as wide within as the decoder in GLM-4.1V; `intermediate_size` is the connector's.
        intermediate_size=width if is_ocr else decoder.hidden_size,
    )
    tower = replace(
        tower,
        connector_activation=tower.activation,
        num_frames=keys.integer("temporal_patch_size", 16),
        layers="gated",
        rope_theta=read_theta(keys),
        has_final_norm=True,
        mrope_sections=read_sections(hf, decoder, _SECTIONS, "chunks"),
        mrope_layout="chunks",
    )
    if is_ocr:
        return replace(
            tower,
            connector_width=decoder.hidden_size * tower.num_channels,
            has_biases=has_biases,
            has_head_norms=True,
        )
    return replace(
        tower,
        connector_width=width,
        positions="cubic",
        positions_per_side=keys.integer("image_size", MAX_IMAGE, low=tower.patch_size) // tower.patch_size,
        has_biases=False,
        has_qkv_biases=has_biases,
        has_patch_norm=True,
    )
