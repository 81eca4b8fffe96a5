"""Keys of the tower of Cosmos 3 Edge: SigLIP 2, whose images have any size."""

from __future__ import annotations

import math
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
    MAX_POSITIONS,
    read_channels,
    read_sections,
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
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "num_patches": 256,
    "spatial_merge_size": 2,
}
_SECTIONS: Final = (24, 20, 20)
_CONNECTOR_EPS: Final = 1e-6


def edge_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read the tower and its connector."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL]), Keys({"projector_hidden_size": 11_520, **hf[MULTIMODAL]})
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    count = keys.integer("num_patches", MAX_POSITIONS)
    side = math.isqrt(count)
    if side**2 != count:
        raise keys.error("num_patches", "a square number")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        patches="linear",
        norm_eps=keys.number("layer_norm_eps"),
        activation=read_activation(keys, "hidden_act"),
        positions="filtered",
        positions_per_side=side,
        has_final_norm=True,
        connector="mlp",
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        connector_eps=_CONNECTOR_EPS,
        merge=require_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "num_channels"),
        mrope_sections=read_sections(hf, decoder, _SECTIONS),
    )
