"""Keys of Pixtral's tower (arXiv 2410.07073), which Mistral 3 models and LightOnOCR have, too."""

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
    read_theta,
    read_width,
    require_same,
    vision_table,
)

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10_000.0,
}
_WHOLE: Final[Mapping[str, Mapping[str, Any]]] = {
    "mistral3": {"vision_feature_layer": -1, "projector_hidden_act": "gelu", "multimodal_projector_bias": False},
    "llava": {
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
    },
    "lighton_ocr": {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    },
}
"""transformers' defaults of Mistral 3, of Pixtral, which is published as LLaVA, and of LightOnOCR, by `model_type`."""
_TOWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mistral3": {"model_type": "pixtral"},
    "llava": {"model_type": "clip_vision_model"},
    "lighton_ocr": {"model_type": "pixtral", "patch_size": 14, "hidden_act": "silu"},
}
"""transformers' defaults of towers that are not Pixtral's. LLaVA models with CLIP's are read in `_llava`."""
_EPS: Final = 1e-5


def pixtral(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower without biases, whose patches rotate by row and column, and a projector; those of Mistral 3 and LightOnOCR join
    blocks of patches."""
    own = hf[MULTIMODAL]
    kind = own.get("model_type")
    Keys({"model_type": kind}).require("model_type", *_WHOLE)
    keys = vision_table({**_TOWER, **_TOWERS[kind]}, own)
    keys.require("model_type", "pixtral")
    whole = Keys({**_WHOLE[kind], **own})
    whole.require("vision_feature_layer", -1)
    if kind == "llava":
        whole.require("vision_feature_select_strategy", "full")
    if kind == "lighton_ocr":
        whole.require("projector_hidden_act", "gelu")
        whole.require("multimodal_projector_bias", False)
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    head_dim = keys.get("head_dim")
    if head_dim is not None:
        require_same(keys, "head_dim", keys.integer("head_dim", MAX_WIDTH), hidden_size // num_heads)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        norm_eps=_EPS,
        activation=read_activation(keys, "hidden_act"),
        positions="none",
        positions_per_side=0,
        connector="projector" if kind == "llava" else "merged_projector",
        connector_eps=decoder.norm_eps,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        has_connector_biases=whole.flag("multimodal_projector_bias"),
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=read_channels(keys, "num_channels"),
        has_patch_bias=False,
        layers="gated",
        has_biases=False,
        rope_theta=read_theta(keys, keys.number("rope_theta", low=1.0)),
        rotary_layout="alternating",
        has_first_norm=True,
    )
