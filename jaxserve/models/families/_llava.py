"""Keys of LLaVA's towers (arXiv 2310.03744): CLIP or SigLIP up to one of its last layers, or Pixtral's, and a projector of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._vision import siglip, vision_table

_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
_TOWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "clip_vision_model": {**_SIZES, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {**_SIZES, "patch_size": 16},
    "pixtral": {},
}
"""transformers' defaults of towers, by their `model_type`."""
_WHOLE: Final[Mapping[str, Any]] = {
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
}
_UNUSED: Final = ("post_layernorm.", "head.")


def llava(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower and its projector."""
    own = hf[MULTIMODAL]
    keys = vision_table({"model_type": "clip_vision_model"}, own)
    keys.require("model_type", *_TOWERS)
    kind = keys.table["model_type"]
    if kind == "pixtral":
        return pixtral(hf, processor, decoder)
    whole, is_clip = Keys({**_WHOLE, **own}), kind == "clip_vision_model"
    whole.require("vision_feature_select_strategy", "default" if is_clip else "full")
    tower = siglip(hf, processor, decoder, connector="projector", defaults=_TOWERS[kind])
    count = feature_layers(whole, tower.num_layers)
    return replace(
        tower,
        num_layers=count,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        has_connector_biases=whole.flag("multimodal_projector_bias"),
        has_patch_bias=not is_clip,
        has_class_token=is_clip,
        image_patches=tower.positions_per_side**2 + is_clip,
        has_first_norm=is_clip,
        has_final_norm=False,
        unused_tensors=(*_UNUSED, *(f"layers.{index}." for index in range(count, tower.num_layers))),
    )


def feature_layers(whole: Keys, stored: int) -> int:
    """Read the layers before the features that the projector reads, which are counted from the last layer's if negative."""
    layer = whole.integer("vision_feature_layer", stored, low=-stored)
    if not layer:
        raise whole.error("vision_feature_layer", "the number of a layer whose output is read")
    return layer if layer > 0 else stored + 1 + layer
