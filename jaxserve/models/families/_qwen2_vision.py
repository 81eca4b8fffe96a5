"""Keys of the towers of Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923), beside Qwen2 decoders, of Qwen2.5-Omni, EXAONE 4.5 and
HyperCLOVA X SEED Think 32B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import Connector, VisionConfig
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import (
    QWEN_EPS,
    QWEN_NAMES,
    read_sections,
    read_theta,
    read_tower,
    require_same,
    vision_table,
)

_SHARED: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2: Final[Mapping[str, Any]] = {
    **_SHARED,
    "hidden_size": 1280,
    "out_hidden_size": 3584,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
}
_QWEN2_NAMES: Final = {**QWEN_NAMES, "embed_dim": "hidden_size", "hidden_size": "out_hidden_size"}
"""transformers' defaults of Qwen2-VL, whose `hidden_size` is the width of the decoder."""
_QWEN2_5: Final[Mapping[str, Any]] = {
    **_SHARED,
    "hidden_size": 3584,
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
    keys = vision_table(_QWEN2, hf[MULTIMODAL], _QWEN2_NAMES)
    require_same(keys, "out_hidden_size", decoder.hidden_size)
    width = keys.integer("hidden_size", MAX_WIDTH) * keys.integer("mlp_ratio", _MAX_RATIO)
    return _shared(keys, hf, processor, decoder, "mlp", width)


def _with_windows(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    keys, kind = vision_table(_QWEN2_5, hf[MULTIMODAL], QWEN_NAMES), hf[MULTIMODAL].get("model_type")
    has_matrix, made = kind in _HYPERCLOVAX, keys.integer("out_hidden_size", MAX_WIDTH)
    if not has_matrix:
        require_same(keys, "out_hidden_size", decoder.hidden_size)
    tower = _shared(keys, hf, processor, decoder, "rms_mlp_linear" if has_matrix else "rms_mlp")
    if kind == _EXAONE and tower.num_heads % keys.integer("num_key_value_heads", tower.num_heads):
        raise keys.error("num_key_value_heads", f"a divisor of num_heads ({tower.num_heads})")
    return replace(
        tower,
        layers="gated",
        connector_width=made if has_matrix else None,
        connector_scale=decoder.embedding_scale if has_matrix else 1.0,
        window=processor.window,
        full_layers=_full_layers(keys),
    )


def _shared(
    keys: Keys,
    hf: Mapping[str, Any],
    processor: ImageProcessorConfig,
    decoder: DecoderConfig,
    connector: Connector,
    intermediate_size: int | None = None,
) -> VisionConfig:
    """Read what both towers have. In EXAONE 4.5 and HyperCLOVA X a token has one position."""
    is_flat = hf[MULTIMODAL].get("model_type") in (_EXAONE, *_HYPERCLOVAX)
    tower = read_tower(
        keys,
        processor,
        decoder,
        norm_eps=QWEN_EPS,
        connector=connector,
        connector_eps=QWEN_EPS,
        intermediate_size=intermediate_size,
    )
    return replace(
        tower,
        has_patch_bias=False,
        num_frames=keys.integer("temporal_patch_size", 16),
        rope_theta=read_theta(keys),
        mrope_sections=None if is_flat else read_sections(hf, decoder, _SECTIONS, "chunks"),
        mrope_layout="chunks",
    )


def _full_layers(keys: Keys) -> tuple[int, ...]:
    """Read the layers without windows; transformers ignores numbers of layers that there are not."""
    found = keys.get("fullatt_block_indexes")
    if not isinstance(found, list | tuple) or not all(type(each) is int and each >= 0 for each in found):
        raise keys.error("fullatt_block_indexes", "a list of layers")
    return tuple(sorted(set(found)))
