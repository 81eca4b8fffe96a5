"""Keys of the tower of Muse Glimmer: windows in most layers, and positions stretched over each image's grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import read_theta, read_tower, vision_table

_EPS: Final = 1e-5
_TOWER: Final[Mapping[str, Any]] = {
    "patch_size": 14,
    "pos_emb_height": 32,
    "pos_emb_width": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 50,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "hidden_act": "gelu",
    "patch_temporal": 2,
    "spatial_merge_size": 2,
    "layer_norm_eps": _EPS,
}
_WHOLE: Final[Mapping[str, Any]] = {
    "out_hidden_size": 6144,
    "projector_hidden_size": 4096,
    "projector_hidden_act": "gelu",
}
_NAMES: Final = {"merge_size": "spatial_merge_size"}
_KINDS: Final = {"full_attention": True, "window_attention": False}


def muse_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read the tower and its connector."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL], _NAMES), Keys({**_WHOLE, **hf[MULTIMODAL]})
    keys.require("layer_norm_eps", _EPS)  # the epsilon of the norms in layers, whatever this key says
    eps = decoder.norm_eps
    tower = read_tower(keys, processor, decoder, norm_eps=_EPS, connector="activated_normed", connector_eps=eps)
    side = keys.integer("pos_emb_height", MAX_WIDTH)
    keys.require("pos_emb_width", side)
    whole.require("out_hidden_size", tower.hidden_size * tower.block)
    return replace(
        tower,
        patches="frames",
        num_frames=keys.integer("patch_temporal", 16),
        has_patch_bias=False,
        positions="padded",
        positions_per_side=side,
        rope_theta=read_theta(keys),
        rotary_layout="columns_first",
        window=processor.window,
        full_layers=_full_layers(keys, tower.num_layers),
        has_first_norm=True,
        has_final_norm=True,
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        connector_activation=read_activation(whole, "projector_hidden_act"),
    )


def _full_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """Read the layers without windows: by default every fourth one and the last one."""
    found = keys.get("layer_types")
    if found is None:
        return tuple(index for index in range(count) if (index + 1) % 4 == 0 or index == count - 1)
    if not isinstance(found, list) or len(found) != count or not {*found} <= {*_KINDS}:
        raise keys.error("layer_types", f"{' or '.join(_KINDS)} for each of the {count} layers")
    return tuple(index for index, kind in enumerate(found) if _KINDS[kind])
