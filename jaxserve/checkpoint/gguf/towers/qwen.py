"""mmproj files of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import GATED, MAX_LAYERS, SIDE, Projector

_QWEN_MERGE: Final = 2
_QWEN_WINDOW: Final = 112
_FRAMES: Final = 2
"""Frames of Qwen's patch embeddings, which files have as two kernels."""
_LAST: Final = "mm.2.weight"
"""The last matrix of Qwen's projector."""
_QWEN_TOKENS: Final = {"image_token": ("<|image_pad|>",)}
_QWEN_NAMES: Final = {
    "v.post_ln.": "connector.norm.",
    "mm.0.": "connector.linear_fc1.",
    "mm.2.": "connector.linear_fc2.",
}


def _qwen(keys: TowerKeys, gelu: str) -> dict[str, Any]:
    """Return the keys that the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL have."""
    vision = keys.vision
    return {
        "depth": vision.integer("block_count", maximum=MAX_LAYERS),
        "num_heads": vision.integer("attention.head_count"),
        "patch_size": vision.integer("patch_size"),
        "spatial_merge_size": vision.integer("spatial_merge_size", _QWEN_MERGE, maximum=SIDE),
        "temporal_patch_size": _FRAMES,
        "hidden_act": keys.activation(gelu),
    }


def _qwen2(keys: TowerKeys) -> dict[str, Any]:
    width = keys.vision.integer("embedding_length")
    own = {"embed_dim": width, "mlp_ratio": keys.intermediate_size() // width, "hidden_size": keys.outputs(_LAST)}
    return _qwen(keys, "gelu") | own


def _qwen2_5(keys: TowerKeys) -> dict[str, Any]:
    shared, period = _qwen(keys, "gelu"), keys.vision.integer("n_wa_pattern")
    return shared | {
        "hidden_size": keys.vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "out_hidden_size": keys.outputs(_LAST),
        "window_size": keys.vision.integer("window_size", _QWEN_WINDOW, maximum=SIDE),
        "fullatt_block_indexes": list(range(period - 1, shared["depth"], period)),
    }


def _qwen3(keys: TowerKeys) -> dict[str, Any]:
    side = keys.vision.integer("image_size", maximum=SIDE) // keys.vision.integer("patch_size")
    return _qwen(keys, "gelu_pytorch_tanh") | {
        "hidden_size": keys.vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "out_hidden_size": keys.outputs(_LAST),
        "num_position_embeddings": side**2,
        "deepstack_visual_indexes": keys.deepstack_layers(),
    }


def _areas(keys: TowerKeys, *, low: int, high: int) -> dict[str, Any]:
    """Return the bounds of an image's area. low, high: those of the published checkpoints, for files without."""
    vision = keys.vision
    return {
        "patch_size": vision.integer("patch_size"),
        "merge_size": vision.integer("spatial_merge_size", _QWEN_MERGE, maximum=SIDE),
        "min_pixels": vision.integer("image_min_pixels", low),
        "max_pixels": vision.integer("image_max_pixels", high),
    }


QWEN2_5_VL: Final = Projector(
    "qwen2.5vl_merger",
    architectures=("qwen2vl",),
    model_type="qwen2_5_vl",
    processor_type="Qwen2VLImageProcessor",
    tokens=_QWEN_TOKENS,
    vision=_qwen2_5,
    preprocessing=partial(_areas, low=56 * 56, high=28 * 28 * 16_384),
    names={**_QWEN_NAMES, **GATED},
)
QWEN2_VL: Final = Projector(
    "qwen2vl_merger",
    architectures=("qwen2vl",),
    model_type="qwen2_vl",
    processor_type="Qwen2VLImageProcessor",
    tokens=_QWEN_TOKENS,
    vision=_qwen2,
    preprocessing=partial(_areas, low=56 * 56, high=28 * 28 * 16_384),
    names=_QWEN_NAMES,
)
QWEN3_VL: Final = Projector(
    "qwen3vl_merger",
    architectures=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
    model_type="qwen3_vl",
    processor_type="Qwen2VLImageProcessor",
    tokens=_QWEN_TOKENS,
    vision=_qwen3,
    preprocessing=partial(_areas, low=256 * 256, high=4096 * 4096),
    names=_QWEN_NAMES,
)
