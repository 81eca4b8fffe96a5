"""Keys of LLaVA's towers (arXiv 2310.03744) and of its successors': CLIP or SigLIP up to one of its last layers, or Pixtral's, and a projector
of two layers. LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326) join the tiles of an image, ViP-LLaVA (arXiv 2312.00784) reads several layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig, JoinedTiles
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._vision import siglip, vision_table

_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
_TOWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "clip_vision_model": {**_SIZES, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {**_SIZES, "patch_size": 16},
    "pixtral": {},
}
"""transformers' defaults of towers, by their `model_type`."""
_LARGE: Final[Mapping[str, Any]] = {
    "model_type": "clip_vision_model",
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_ONE_VISION: Final[Mapping[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
}
_TOWERS_OF: Final[Mapping[str, Mapping[str, Any]]] = {
    "llava": {"model_type": "clip_vision_model"},
    "llava_next": _LARGE,
    "llava_onevision": _ONE_VISION,
    "vipllava": _LARGE,
}
"""transformers' defaults of whole models, by their `model_type`, for a tower of the class that they have by default."""
_WHOLE: Final[Mapping[str, Any]] = {
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
}
_WHOLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llava": _WHOLE,
    "llava_next": _WHOLE,
    "llava_onevision": {**_WHOLE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "vipllava": {
        "vision_feature_layer": [-2, -5, -8, -11, 6],
        "projector_hidden_act": "gelu",
        "projector_layernorm_eps": 1e-5,
    },
}
"""transformers' defaults of further keys."""
_UNUSED: Final = ("post_layernorm.", "head.")
_LAYER: Final = "vision_feature_layer"
_LAYERS: Final = "vision_feature_layers"
"""Another name that ViP-LLaVA has for it."""


def llava(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower and its projector."""
    own = hf[MULTIMODAL]
    model = own.get("model_type")
    defaults = _TOWERS_OF[model]
    table = own.get("vision_config")
    given = table.get("model_type") if isinstance(table, dict) else None
    # A tower of another class has the defaults of its own.
    defaults = defaults if given in (None, defaults["model_type"]) else {}
    keys = vision_table(defaults, own)
    keys.require("model_type", *(each for each in _TOWERS if model == "llava" or each != "pixtral"))
    kind = keys.table["model_type"]
    if kind == "pixtral":
        return pixtral(hf, processor, decoder)
    if model == "vipllava" and _LAYER not in own and _LAYERS in own:
        own = {**own, _LAYER: own[_LAYERS]}
    whole, is_clip, is_vip = Keys({**_WHOLES[model], **own}), kind == "clip_vision_model", model == "vipllava"
    if is_vip:
        keys.require("model_type", "clip_vision_model")
    else:
        whole.require("vision_feature_select_strategy", "default" if is_clip else "full")
    tower = siglip(hf, processor, decoder, connector="projector", defaults={**_TOWERS[kind], **defaults})
    layers = feature_layers(whole, tower.num_layers)
    count = max(layers)
    joined = processor.sizes if isinstance(processor.sizes, JoinedTiles) else None
    if (joined is None) != (model in ("llava", "vipllava")):
        raise whole.error("model_type", "a model whose preprocessing is its own")
    return replace(
        tower,
        num_layers=count,
        feature_layers=layers if len(layers) > 1 else (),
        connector="normed_projector" if is_vip else "projector",
        connector_eps=whole.number("projector_layernorm_eps") if is_vip else tower.connector_eps,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        has_connector_biases=is_vip or whole.flag("multimodal_projector_bias"),
        has_patch_bias=not is_clip,
        has_class_token=is_clip,
        image_patches=tower.positions_per_side**2 + is_clip,
        num_sources=0 if joined is None else 1 if joined.most_tiles is None else 8,
        most_tiles=1 if joined is None else 1 + max(rows * columns for rows, columns in joined.grids),
        has_newline=joined is not None,
        has_first_norm=is_clip,
        has_final_norm=False,
        unused_tensors=(*_UNUSED, *(f"layers.{index}." for index in range(count, tower.num_layers))),
    )


def feature_layers(whole: Keys, stored: int) -> tuple[int, ...]:
    """Read the layers whose outputs the projector reads side by side: see `feature_layer`."""
    found = whole.get(_LAYER)
    if not isinstance(found, list):
        return (feature_layer(whole, stored),)
    if not found:
        raise whole.error(_LAYER, "numbers of layers whose outputs are read")
    return tuple(feature_layer(Keys({_LAYER: each}), stored) for each in found)


def feature_layer(whole: Keys, stored: int) -> int:
    """Read the layers before the features that the projector reads, which are counted from the last layer's if negative."""
    layer = whole.integer(_LAYER, stored, low=-stored)
    if not layer:
        raise whole.error(_LAYER, "the number of a layer whose output is read")
    return layer if layer > 0 else stored + 1 + layer
