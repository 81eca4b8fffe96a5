"""Keys of the towers of Cohere 2 Vision and Aya Vision, SigLIP 2, and of their projectors with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._llava import feature_layer
from jaxserve.models.families._vision import siglip, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_AYA: Final[Mapping[str, Any]] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "adapter_layer_norm_eps": 1e-6,
}
_WIDTH: Final = "alignment_intermediate_size"
_KIND: Final = "siglip_vision_model"
_HEAD: Final = "head."


def cohere_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower and its projector, whose activation no key names."""
    own = hf[MULTIMODAL]
    Keys(own).require("model_type", "cohere2_vision", "aya_vision")
    vision_table({"model_type": _KIND}, own).require("model_type", _KIND)
    is_aya = own.get("model_type") == "aya_vision"
    whole = Keys({**_AYA, _WIDTH: decoder.hidden_size if is_aya else 36_864, **own})
    width = whole.integer(_WIDTH, 2 * MAX_WIDTH, low=2)
    if width % 2:
        raise whole.error(_WIDTH, "an even number")
    tower = siglip(hf, processor, decoder, connector="gated_projector", defaults=_TOWER)
    tower = replace(tower, connector_width=width, connector_activation="silu", unused_tensors=(_HEAD,))
    if not is_aya:
        return tower
    whole.require("vision_feature_select_strategy", "full")
    count = feature_layer(whole, tower.num_layers)
    later = (f"layers.{index}." for index in range(count, tower.num_layers))
    return replace(
        tower,
        num_layers=count,
        has_final_norm=False,
        connector="normed_gated_projector",
        connector_eps=whole.number("adapter_layer_norm_eps"),
        unused_tensors=(_HEAD, "post_layernorm.", *later),
    )
