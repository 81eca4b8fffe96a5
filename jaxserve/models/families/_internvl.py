"""Keys of InternVL's towers, InternViT-300M and InternViT-6B (arXiv 2504.10479), as transformers has them, and of Qianfan-OCR's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import GridTiles, ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import MAX_IMAGE, read_square, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "use_mean_pooling": True,
}
_WHOLE: Final[Mapping[str, Any]] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
}
_QIANFAN: Final[Mapping[str, Any]] = {**_TOWER, "attention_bias": True}
"""transformers' defaults of Qianfan-OCR."""
_ORIGINAL: Final[Mapping[str, Any]] = {"qkv_bias": True, "qk_normalization": False}
"""InternVL's first names of two keys, which transformers does not read in configs of Qianfan-OCR, and its values."""
_QK_NORM_EPS: Final = 1e-6
_CONNECTOR_EPS: Final = 1e-5


def internvl(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower with a class token and scaled layers, and a projector over normalised blocks of patches."""
    is_qianfan = hf[MULTIMODAL].get("model_type") == "qianfan_ocr"
    keys = vision_table(_QIANFAN if is_qianfan else _TOWER, hf[MULTIMODAL])
    whole = Keys({**_WHOLE, **hf[MULTIMODAL]})
    for key, value in _ORIGINAL.items() if is_qianfan else ():
        keys.require(key, value, None)
    whole.require("vision_feature_layer", -1)
    whole.require("vision_feature_select_strategy", "default")
    keys.require("use_absolute_position_embeddings", True)
    keys.require("norm_type", "layer_norm", "rms_norm")
    eps = keys.number("layer_norm_eps")
    tower = read_tower(
        keys, processor, decoder, norm_eps=eps, connector="normed_projector", connector_eps=_CONNECTOR_EPS
    )
    side = read_square(keys, "image_size", MAX_IMAGE) // tower.patch_size
    is_tile = isinstance(processor.sizes, GridTiles) and side * tower.patch_size == processor.sizes.tile
    if not is_tile or side % processor.merge:
        raise keys.error("image_size", f"the size of the preprocessing's tiles, in blocks of {processor.merge} patches")
    return replace(
        tower,
        positions="table",
        positions_per_side=side,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        has_qkv_biases=keys.flag("attention_bias"),
        has_rms_norms=keys.table["norm_type"] == "rms_norm",
        joint_norm_eps=_QK_NORM_EPS if keys.flag("use_qk_norm") else None,
        has_layer_scales=True,
        has_class_token=True,
        has_final_norm=not keys.flag("use_mean_pooling"),
        image_patches=side**2 + 1,
        unused_tensors=("mask_token",),
    )
