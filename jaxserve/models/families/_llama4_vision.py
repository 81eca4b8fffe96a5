"""Keys of Llama 4's tower, whose class token comes last, and of its pixel shuffle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import CanvasTiles, ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import MAX_IMAGE, read_square, read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "multi_modal_projector_bias": False,
    "rope_theta": 10_000.0,
}
_EPS: Final = 1e-5


def llama4_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower with learned and rotary positions, and a connector of two layers and a matrix over blocks of patches.

    transformers reads neither `hidden_act` nor `norm_eps` of it.
    """
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    keys.require("vision_feature_select_strategy", "default")
    keys.require("multi_modal_projector_bias", False)
    tower = read_tower(
        keys, processor, decoder, norm_eps=_EPS, connector="activated", connector_eps=_EPS, activation="gelu"
    )
    side = read_square(keys, "image_size", MAX_IMAGE) // tower.patch_size
    is_tile = isinstance(processor.sizes, CanvasTiles) and side * tower.patch_size == processor.sizes.tile
    if not is_tile or side % processor.merge:
        raise keys.error("image_size", f"the size of the preprocessing's tiles, in blocks of {processor.merge} patches")
    width, joint = keys.integer("projector_output_dim", MAX_WIDTH), tower.hidden_size * processor.merge**2
    for key in ("projector_input_dim", "vision_output_dim"):
        _require(keys, key, width, "projector_output_dim")
    _require(keys, "intermediate_size", joint, "the width of a block of patches")
    return replace(
        tower,
        patches="flat",
        has_patch_bias=False,
        positions="table",
        positions_per_side=side,
        rope_theta=read_theta(keys, keys.number("rope_theta", low=1.0)),
        rotary_layout="adjacent_halves",
        connector_width=width,
        has_class_token=True,
        has_first_norm=True,
        has_final_norm=True,
        image_patches=side**2 + 1,
    )


def _require(keys: Keys, key: str, expected: int, meaning: str) -> None:
    if keys.integer(key, MAX_WIDTH) != expected:
        raise keys.error(key, f"{expected}, {meaning}")
