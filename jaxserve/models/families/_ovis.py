"""Keys of Ovis2's tower, AIMv2 (arXiv 2411.14402), and of its table of embeddings of images (arXiv 2405.20797)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import CoveringTiles, ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_VOCAB_SIZE
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import MAX_IMAGE, read_square, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "image_size": 224,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "vocab_size": 16_384,
    "hidden_stride": 1,
    "num_visual_indicator_tokens": 5,
    "tokenize_function": "softmax",
}
"""transformers' defaults."""
_CONNECTOR_EPS: Final = 1e-5


def ovis2(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower with RMSNorms and gated blocks, and a table whose rows are mixed."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL]), Keys(hf[MULTIMODAL])
    whole.require("hidden_size", decoder.hidden_size)
    keys.require("tokenize_function", "softmax", "st_argmax")
    has_biases, marks = keys.flag("mlp_bias"), len(processor.mark_token_ids)
    keys.require("qkv_bias", has_biases)
    keys.require("num_visual_indicator_tokens", marks)
    eps = keys.number("rms_norm_eps")
    tower = read_tower(keys, processor, decoder, norm_eps=eps, connector="tabled", connector_eps=_CONNECTOR_EPS)
    side = read_square(keys, "image_size", MAX_IMAGE) // tower.patch_size
    if not isinstance(processor.sizes, CoveringTiles):
        raise whole.error("model_type", "a model whose preprocessing is its own")
    if side != processor.sizes.grid.tile // tower.patch_size or side % processor.merge:
        raise keys.error("image_size", f"the size of the preprocessing's tiles, in blocks of {processor.merge} patches")
    return replace(
        tower,
        positions="table",
        positions_per_side=side,
        has_patch_norm=True,
        layers="gated",
        has_biases=has_biases,
        has_final_norm=True,
        connector_width=keys.integer("vocab_size", MAX_VOCAB_SIZE, low=marks + 1),
        num_marks=marks,
        has_one_share=keys.table["tokenize_function"] == "st_argmax",
        image_patches=side**2,
        num_sources=1,
    )
