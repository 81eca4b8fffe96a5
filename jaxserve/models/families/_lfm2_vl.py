"""Keys of LFM2-VL's tower, SigLIP 2 NaFlex (arXiv 2502.14786), and its projector."""

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
    read_channels,
    read_square,
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
    "num_patches": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_WHOLE: Final[Mapping[str, Any]] = {
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_bias": True,
    "projector_use_layernorm": True,
    "downsample_factor": 2,
    "vision_feature_layer": -1,
}
_MAX_POSITIONS: Final = 1 << 14
_CONNECTOR_EPS: Final = 1e-5
_NORM: Final = "connector.norm."
_UNUSED: Final = ("head.",)


def lfm2_vl(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower that takes images of any size, and a projector over blocks of patches."""
    keys, whole = (
        vision_table({"model_type": "siglip2_vision_model", **_TOWER}, hf[MULTIMODAL]),
        Keys({**_WHOLE, **hf[MULTIMODAL]}),
    )
    keys.require("model_type", "siglip2_vision_model")
    whole.require("vision_feature_layer", -1, None)
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    count = keys.integer("num_patches", _MAX_POSITIONS)
    if math.isqrt(count) ** 2 != count:
        raise keys.error("num_patches", "a square number")
    is_normed = whole.flag("projector_use_layernorm")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", read_square(keys, "patch_size", MAX_PATCH), processor.patch_size),
        norm_eps=keys.number("layer_norm_eps"),
        activation=read_activation(keys, "hidden_act"),
        patches="linear",
        positions="filtered",
        positions_per_side=math.isqrt(count),
        connector="normed_projector" if is_normed else "projector",
        connector_eps=_CONNECTOR_EPS,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        has_connector_biases=whole.flag("projector_bias"),
        merge=require_same(whole, "downsample_factor", whole.integer("downsample_factor", 64), processor.merge),
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "num_channels"),
        has_final_norm=True,
        unused_tensors=_UNUSED if is_normed else (*_UNUSED, _NORM),
    )
