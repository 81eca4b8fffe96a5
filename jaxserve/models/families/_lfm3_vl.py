"""Keys of LFM3-VL's tower, of gated convolutions and attention, and of its projector."""

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
from jaxserve.models.families._vision import read_square, read_theta, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "conv_kernel_size": 3,
    "norm_eps": 1e-5,
}
_NAMES: Final = {"in_channels": "num_channels"}
_WHOLE: Final[Mapping[str, Any]] = {
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 4096,
    "projector_bias": True,
}
_THETA: Final = 1_000_000.0
_CONNECTOR_EPS: Final = 1e-6
_MAX_KERNEL: Final = 15


def lfm3_vl(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower without biases, and a projector over blocks of normalised patches."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL], _NAMES), Keys({**_WHOLE, **hf[MULTIMODAL]})
    tower = read_tower(
        keys,
        processor,
        decoder,
        norm_eps=keys.number("norm_eps"),
        connector="patch_normed_projector",
        connector_eps=_CONNECTOR_EPS,
        activation="silu",
    )
    num_kv_heads = keys.integer("num_key_value_heads", tower.num_heads)
    if tower.num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads ({tower.num_heads})")
    kernel = keys.integer("conv_kernel_size", _MAX_KERNEL)
    if not kernel % 2:
        raise keys.error("conv_kernel_size", "an odd number")
    return replace(
        tower,
        num_kv_heads=num_kv_heads,
        conv_layers=_conv_layers(keys, tower.num_layers),
        conv_size=kernel,
        patches="flat",
        has_patch_bias=False,
        num_frames=read_square(keys, "temporal_patch_size", 16),
        has_patch_norm=True,
        layers="gated",
        has_biases=False,
        has_head_norms=True,
        rope_theta=read_theta(keys, _THETA),
        connector="patch_normed_projector",
        connector_eps=_CONNECTOR_EPS,
        connector_activation=read_activation(whole, "projector_hidden_act"),
        connector_width=whole.integer("projector_hidden_size", MAX_WIDTH),
        has_connector_biases=whole.flag("projector_bias"),
    )


def _conv_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """Return the layers with a convolution: those that `layer_types` names, or the first two and every other one."""
    names = keys.get("layer_types")
    if names is None:
        return tuple(index for index in range(count) if index < 2 or index % 2)
    if not isinstance(names, list) or len(names) != count or set(names) - {"conv", "full_attention"}:
        raise keys.error("layer_types", f"conv or full_attention for each of the {count} layers")
    return tuple(index for index, name in enumerate(names) if name == "conv")
