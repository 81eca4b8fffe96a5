"""Keys of LFM2-VL's tower, SigLIP 2 NaFlex (arXiv 2502.14786), and its projector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import Connector, VisionConfig
from jaxserve.models.families._common import MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import read_root, read_tower, require_same, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "num_patches": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_WHOLE: Final[Mapping[str, Any]] = {
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_bias": True,
    "projector_use_layernorm": True,
    "downsample_factor": 2,
    "vision_feature_layer": -1,
}
_CONNECTOR_EPS: Final = 1e-5
_NORM: Final = "connector.norm."
_UNUSED: Final = ("head.",)


def lfm2_vl(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower that takes images of any size, and a projector over blocks of patches."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL]), Keys({**_WHOLE, **hf[MULTIMODAL]})
    keys.require("model_type", "siglip2_vision_model")
    whole.require("vision_feature_layer", -1, None)
    require_same(whole, "downsample_factor", processor.merge)
    eps, is_normed = keys.number("layer_norm_eps"), whole.flag("projector_use_layernorm")
    connector: Connector = "normed_projector" if is_normed else "projector"
    return replace(
        read_tower(keys, processor, decoder, norm_eps=eps, connector=connector, connector_eps=_CONNECTOR_EPS),
        patches="linear",
        positions="filtered",
        positions_per_side=read_root(keys, "num_patches"),
        connector_activation=read_activation(whole, "projector_hidden_act"),
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        has_connector_biases=whole.flag("projector_bias"),
        has_final_norm=True,
        unused_tensors=_UNUSED if is_normed else (*_UNUSED, _NORM),
    )
