"""Keys of MoonViT (arXiv 2504.07491), the tower of Kimi K2.5 and K2.6, as published and as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import MAX_PATCH, read_theta, read_width, require_same, vision_table

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
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    keys.require("mm_hidden_size", hidden_size)
    keys.require("text_hidden_size", decoder.hidden_size, None)
    keys.require("merge_kernel_size", [processor.merge] * 2)
    side = keys.integer("pos_emb_height", _MAX_SIDE)
    keys.require("pos_emb_width", side)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        norm_eps=_NORM_EPS,
        activation=read_activation(keys, "hidden_act"),
        positions="cubic",
        positions_per_side=side,
        connector="mlp",
        connector_eps=keys.number("projector_ln_eps"),
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        rope_theta=read_theta(keys),
        rotary_layout="adjacent",
        has_final_norm=True,
    )


def _with_names(whole: Mapping[str, Any]) -> Keys:
    """Return the keys of a tower and its projector by our names, those of transformers for the tower."""
    projector = {ours: whole[name] for name, ours in _PROJECTOR.items() if name in whole}
    own = vision_table({}, whole).table
    published = {ours: name for name, ours in _PUBLISHED.items() if name in own}
    renamed = {_PUBLISHED.get(key, key): value for key, value in own.items()}
    return Keys({**_TOWER, **projector, **renamed}, "vision_config.", published)
