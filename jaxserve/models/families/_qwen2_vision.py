"""Keys of the towers of Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923), beside Qwen2 decoders, of Qwen2.5-Omni, EXAONE 4.5 and
HyperCLOVA X SEED Think 32B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import (
    MAX_PATCH,
    QWEN_EPS,
    read_channels,
    read_sections,
    read_theta,
    read_width,
    require_same,
    vision_table,
)

_SHARED: Final[Mapping[str, Any]] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2: Final[Mapping[str, Any]] = {**_SHARED, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
"""transformers' defaults of Qwen2-VL, whose `hidden_size` is the width of the decoder."""
_QWEN2_5: Final[Mapping[str, Any]] = {
    **_SHARED,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""transformers' defaults of Qwen2.5-VL."""
_EXAONE: Final = "exaone4_5"
"""Type of a model whose tower is that of Qwen2.5-VL with fewer KV heads."""
_HYPERCLOVAX: Final = ("hyperclovax_vision_v2", "vlm")
"""Types of models whose tower is that of Qwen2.5-VL with a matrix after it: transformers' and as published."""
_SECTIONS: Final = (16, 24, 24)
_MAX_RATIO: Final = 64


def qwen2_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower whose patches rotate by row and column: with LayerNorms, or with RMSNorms, gates and windows."""
    if hf[MULTIMODAL].get("model_type") in ("qwen2_5_vl", "qwen2_5_omni_thinker", _EXAONE, *_HYPERCLOVAX):
        return _with_windows(hf, processor, decoder)
    keys = vision_table(_QWEN2, hf[MULTIMODAL])
    require_same(keys, "hidden_size", keys.integer("hidden_size", MAX_WIDTH), decoder.hidden_size)
    width, num_heads = read_width(keys, "num_heads", "embed_dim")
    return VisionConfig(
        **_shared(keys, hf, processor, decoder),
        hidden_size=width,
        intermediate_size=width * keys.integer("mlp_ratio", _MAX_RATIO),
        num_heads=num_heads,
        connector="mlp",
    )


def _with_windows(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    keys, kind = vision_table(_QWEN2_5, hf[MULTIMODAL]), hf[MULTIMODAL].get("model_type")
    made = keys.integer("out_hidden_size", MAX_WIDTH)
    if kind not in _HYPERCLOVAX:
        require_same(keys, "out_hidden_size", made, decoder.hidden_size)
    width, num_heads = read_width(keys, "num_heads")
    if kind == _EXAONE and num_heads % keys.integer("num_key_value_heads", num_heads):
        raise keys.error("num_key_value_heads", f"a divisor of num_heads ({num_heads})")
    return VisionConfig(
        **_shared(keys, hf, processor, decoder),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        layers="gated",
        connector="rms_mlp_linear" if kind in _HYPERCLOVAX else "rms_mlp",
        connector_width=made if kind in _HYPERCLOVAX else None,
        connector_scale=decoder.embedding_scale if kind in _HYPERCLOVAX else 1.0,
        window=processor.window,
        full_layers=_full_layers(keys),
    )


def _shared(
    keys: Keys, hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig
) -> dict[str, Any]:
    """Return the fields that both towers have. In EXAONE 4.5 and HyperCLOVA X a token has one position."""
    is_flat = hf[MULTIMODAL].get("model_type") in (_EXAONE, *_HYPERCLOVAX)
    return {
        "num_layers": keys.integer("depth", MAX_LAYERS),
        "patch_size": require_same(keys, "patch_size", keys.integer("patch_size", MAX_PATCH), processor.patch_size),
        "norm_eps": QWEN_EPS,
        "activation": read_activation(keys, "hidden_act"),
        "positions": "none",
        "positions_per_side": 0,
        "has_patch_bias": False,
        "connector_eps": QWEN_EPS,
        "merge": require_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        "output_size": decoder.hidden_size,
        "normalization": processor.normalization,
        "image_token_id": processor.image_token_id,
        "num_channels": read_channels(keys, "in_channels"),
        "num_frames": keys.integer("temporal_patch_size", 16),
        "rope_theta": read_theta(keys),
        "mrope_sections": None if is_flat else read_sections(hf, decoder, _SECTIONS, "chunks"),
        "mrope_layout": "chunks",
    }


def _full_layers(keys: Keys) -> tuple[int, ...]:
    """Read the layers without windows; transformers ignores numbers of layers that there are not."""
    found = keys.get("fullatt_block_indexes")
    if not isinstance(found, list | tuple) or not all(type(each) is int and each >= 0 for each in found):
        raise keys.error("fullatt_block_indexes", "a list of layers")
    return tuple(sorted(set(found)))
