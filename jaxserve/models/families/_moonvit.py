"""Keys of MoonViT (arXiv 2504.07491), the tower of Kimi K2.5 and K2.6, as published and as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 1152,
    "projector_ln_eps": 1e-5,
}
_PUBLISHED: Final[Mapping[str, str]] = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
"""transformers' names of a tower's keys, by those of published configs."""
_PROJECTOR: Final[Mapping[str, str]] = {
    "projection_hidden_size": "mm_hidden_size",
    "projection_layer_norm_eps": "projector_ln_eps",
}
"""Keys of a tower in published configs, by those of the whole config in transformers'."""
_NORM_EPS: Final = 1e-5
_MAX_SIDE: Final = 1 << 10


def moonvit(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches rotate by column and row, and whose positions are stretched over each image's grid."""
    keys = _with_names(hf[MULTIMODAL])
    keys.require("merge_type", "sd2_tpool", None)
    keys.require("mm_projector_type", "patchmerger", None)
    keys.require("pos_emb_type", "divided_fixed", None)
    keys.require("projector_hidden_act", "gelu", None)
    keys.require("text_hidden_size", decoder.hidden_size, None)
    keys.require("merge_kernel_size", [processor.merge] * 2)
    side = keys.integer("pos_emb_height", _MAX_SIDE)
    keys.require("pos_emb_width", side)
    eps = keys.number("projector_ln_eps")
    tower = read_tower(keys, processor, decoder, norm_eps=_NORM_EPS, connector="mlp", connector_eps=eps)
    keys.require("mm_hidden_size", tower.hidden_size)
    return replace(
        tower,
        positions="cubic",
        positions_per_side=side,
        rope_theta=read_theta(keys),
        rotary_layout="adjacent",
        has_final_norm=True,
    )


def _with_names(whole: Mapping[str, Any]) -> Keys:
    """Return the keys of a tower and its projector by our names, those of transformers for the tower."""
    projector = {ours: whole[name] for name, ours in _PROJECTOR.items() if name in whole}
    own = vision_table({}, whole).table
    return vision_table(
        {**_TOWER, **projector}, whole, {name: ours for name, ours in _PUBLISHED.items() if name in own}
    )
