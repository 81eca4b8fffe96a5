"""Keys of the tower of Granite for Docling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_LAYERS
from jaxserve.models.families._vision import read_deepstack, require_same, siglip, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
    "out_hidden_size": 1024,
    "deepstack_visual_indexes": [3, 7, 10],
}
_CONNECTOR_EPS: Final = 1e-5
_UNUSED: Final = ("fine.", "density_router.")
"""The path of more tokens, and what chooses it: transformers takes neither unless its processor is called for it."""


def docling(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a SigLIP tower of tiles, some of whose layers reach the decoder's first layers, with the path of fewer tokens."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    require_same(keys, "out_hidden_size", decoder.hidden_size)
    if decoder.hidden_size % 4:
        raise keys.error("out_hidden_size", "a multiple of 4")
    layers = read_deepstack(keys, keys.integer("num_hidden_layers", MAX_LAYERS), decoder.num_layers)
    return replace(
        siglip(hf, processor, decoder, connector="placed", defaults=_TOWER),
        connector_eps=_CONNECTOR_EPS,
        # The decoder multiplies embeddings of images, too.
        connector_scale=decoder.embedding_scale,
        deepstack_layers=tuple(sorted(layers)),
        deepstack_connector="normed_projector",
        unused_tensors=_UNUSED,
    )
