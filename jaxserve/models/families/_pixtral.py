"""Keys of Pixtral's tower (arXiv 2410.07073), which Mistral 3 models and LightOnOCR have, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import Connector, VisionConfig
from jaxserve.models.families._common import read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
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
    connector: Connector = "projector" if kind == "llava" else "merged_projector"
    eps = decoder.norm_eps
    tower = read_tower(keys, processor, decoder, norm_eps=_EPS, connector=connector, connector_eps=eps)
    keys.require("head_dim", tower.head_dim, None)
    return replace(
        tower,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        has_connector_biases=whole.flag("multimodal_projector_bias"),
        has_patch_bias=False,
        layers="gated",
        has_biases=False,
        rope_theta=read_theta(keys, keys.number("rope_theta", low=1.0)),
        rotary_layout="alternating",
        has_first_norm=True,
    )
