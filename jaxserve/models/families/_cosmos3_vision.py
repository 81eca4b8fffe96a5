"""Keys of the tower of Cosmos 3 Edge: SigLIP 2, whose images have any size."""

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
from jaxserve.models.families._vision import read_root, read_sections, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
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
    eps = keys.number("layer_norm_eps")
    return replace(
        read_tower(keys, processor, decoder, norm_eps=eps, connector="mlp", connector_eps=_CONNECTOR_EPS),
        patches="linear",
        positions="filtered",
        positions_per_side=read_root(keys, "num_patches"),
        has_final_norm=True,
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        mrope_sections=read_sections(hf, decoder, _SECTIONS),
    )
