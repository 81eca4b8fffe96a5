"""Keys of MiniCPM-V 4.6's tower: SigLIP for images of any size, in which windows of patches become one vector after a layer, and its connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import read_square, read_tower, vision_table

_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "window_kernel_size": [2, 2],
}
_WHOLE: Final[Mapping[str, Any]] = {
    "insert_layer_id": 6,
    "drop_vision_last_layer": False,
    "downsample_mode": "16x",
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
}
"""transformers' defaults."""
_MAX_SIDE: Final = 1 << 14
_CONNECTOR_EPS: Final = 1e-6
_MERGER: Final = "vit_merger."


def minicpm_v(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read the tower and its connector over blocks of 2 x 2 patches, or of as many windows of 2 x 2 patches."""
    keys, whole = vision_table(_TOWER, hf[MULTIMODAL]), Keys({**_WHOLE, **hf[MULTIMODAL]})
    whole.require("drop_vision_last_layer", False)
    whole.require("merger_times", 1)
    for table, key in ((keys, "window_kernel_size"), (whole, "merge_kernel_size")):
        if read_square(table, key, 64) != 2:
            raise table.error(key, "2 x 2")
    inner, eps = processor.inner_merge, keys.number("layer_norm_eps")
    whole.require("downsample_mode", "16x" if inner > 1 else "4x")
    tower = read_tower(
        keys, processor, decoder, norm_eps=eps, connector="normed_projector", connector_eps=_CONNECTOR_EPS
    )
    return replace(
        tower,
        positions="nearest",
        positions_per_side=read_square(keys, "image_size", _MAX_SIDE) // tower.patch_size,
        connector_width=4 * tower.hidden_size,
        merger_layer=whole.integer("insert_layer_id", tower.num_layers - 1, low=0) if inner > 1 else None,
        inner_merge=inner,
        has_final_norm=True,
        unused_tensors=() if inner > 1 else (_MERGER,),
    )
