"""Keys of the tower of Muse Glimmer: windows in most layers, and positions stretched over each image's grid."""

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
    "pos_emb_height": 32,
    "pos_emb_width": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 50,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "hidden_act": "gelu",
    "patch_temporal": 2,
    "merge_size": 2,
    "layer_norm_eps": 1e-5,
}
_WHOLE: Final[Mapping[str, Any]] = {
    "out_hidden_size": 6144,
    "projector_hidden_size": 4096,
    "projector_hidden_act": "gelu",
}
_KINDS: Final = {"full_attention": True, "window_attention": False}


def muse_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read the tower and its connector."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL]), Keys({**_WHOLE, **hf[MULTIMODAL]})
    hidden_size, num_heads = read_width(keys, "num_attention_heads")
    keys.require("layer_norm_eps", 1e-5)  # the epsilon of the norms in layers, whatever this key says
    side = keys.integer("pos_emb_height", MAX_WIDTH)
    keys.require("pos_emb_width", side)
    merge = require_same(keys, "merge_size", keys.integer("merge_size", 64), processor.merge)
    whole.require("out_hidden_size", hidden_size * merge**2)
    num_layers = keys.integer("num_hidden_layers", MAX_LAYERS)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        patches="frames",
        num_frames=keys.integer("patch_temporal", 16),
        has_patch_bias=False,
        norm_eps=1e-5,
        activation=read_activation(keys, "hidden_act"),
        positions="padded",
        positions_per_side=side,
        rope_theta=read_theta(keys),
        rotary_layout="columns_first",
        window=processor.window,
        full_layers=_full_layers(keys, num_layers),
        has_first_norm=True,
        has_final_norm=True,
        connector="activated_normed",
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        connector_activation=read_activation(whole, "projector_hidden_act"),
        connector_eps=decoder.norm_eps,
        merge=merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
    )


def _full_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """Read the layers without windows: by default every fourth one and the last one."""
    found = keys.get("layer_types")
    if found is None:
        return tuple(index for index in range(count) if (index + 1) % 4 == 0 or index == count - 1)
    if not isinstance(found, list) or len(found) != count or not {*found} <= {*_KINDS}:
        raise keys.error("layer_types", f"{' or '.join(_KINDS)} for each of the {count} layers")
    return tuple(index for index, kind in enumerate(found) if _KINDS[kind])
