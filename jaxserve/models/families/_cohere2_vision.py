"""Keys of Cohere 2 Vision's tower, SigLIP 2, and of its projector with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import siglip, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_WIDTH: Final = "alignment_intermediate_size"


def cohere2_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower and its projector, whose activation no key names."""
    kind, whole = "siglip_vision_model", Keys({_WIDTH: 36_864, **hf[MULTIMODAL]})
    vision_table({"model_type": kind}, hf[MULTIMODAL]).require("model_type", kind)
    width = whole.integer(_WIDTH, 2 * MAX_WIDTH, low=2)
    if width % 2:
        raise whole.error(_WIDTH, "an even number")
    tower = siglip(hf, processor, decoder, connector="gated_projector", defaults=_TOWER)
    return replace(tower, connector_width=width, connector_activation="silu", unused_tensors=("head.",))
