"""Keys of vision towers: SigLIP as in SmolVLM and Gemma 3, and Qwen's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.images import FixedSize, ImageProcessorConfig, TileSizes
from jaxserve.model_config.vision import Connector, VisionConfig
from jaxserve.models.families._common import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys

_MAX_PATCH: Final = 256
_MAX_IMAGE: Final = 1 << 14
_SIGLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""transformers' defaults of Idefics3 and SmolVLM."""
_QWEN: Final[Mapping[str, Any]] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
"""transformers' defaults of Qwen3-VL and Qwen3.5."""
QWEN3_5_SECTIONS: Final = (11, 11, 10)
"""Qwen3.5's default of `mrope_section`."""
_QWEN_EPS: Final = 1e-6


def siglip(
    hf: Mapping[str, Any],
    processor: ImageProcessorConfig,
    decoder: DecoderConfig,
    *,
    connector: Connector,
    defaults: Mapping[str, Any] = {},
    is_bidirectional: bool = False,
) -> VisionConfig:
    """Read a SigLIP tower, whose images or tiles all have the size of its table of positions."""
    whole = hf[MULTIMODAL]
    keys = _table({**_SIGLIP, **defaults}, whole)
    hidden_size, num_heads = _width(keys, "num_attention_heads")
    patch_size = keys.integer("patch_size", _MAX_PATCH)
    side = keys.integer("image_size", _MAX_IMAGE) // patch_size
    if side % processor.merge:
        raise keys.error("image_size", f"pixels of whole blocks of {processor.merge} patches of {patch_size} pixels")
    if side != (expected := _patches_per_side(processor)):
        raise keys.error("image_size", f"{expected * patch_size}, as the preprocessing has it")
    eps = keys.number("layer_norm_eps")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=_same(keys, "patch_size", patch_size, processor.patch_size),
        norm_eps=eps,
        activation=read_activation(keys, "hidden_act"),
        positions="table",
        positions_per_side=side,
        connector=connector,
        connector_eps=eps,
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=_channels(keys, "num_channels"),
        has_final_norm=True,
        image_patches=side**2,
        is_bidirectional=is_bidirectional,
    )


def qwen_vision(
    hf: Mapping[str, Any],
    processor: ImageProcessorConfig,
    decoder: DecoderConfig,
    *,
    sections: tuple[int, int, int] = (24, 20, 20),
) -> VisionConfig:
    """Read the tower of Qwen3-VL (arXiv 2511.21631) or Qwen3.5: 2-D rotation, positions stretched over each image's grid.

    sections: the default of `mrope_section`.
    """
    keys = _table(_QWEN, hf[MULTIMODAL])
    hidden_size, num_heads = _width(keys, "num_heads")
    layers = keys.integer("depth", MAX_LAYERS)
    count = keys.integer("num_position_embeddings", 1 << 20)
    side = math.isqrt(count)
    if side**2 != count:
        raise keys.error("num_position_embeddings", "a square number")
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=layers,
        num_heads=num_heads,
        patch_size=_same(keys, "patch_size", keys.integer("patch_size", _MAX_PATCH), processor.patch_size),
        norm_eps=_QWEN_EPS,
        activation=read_activation(keys, "hidden_act"),
        positions="interpolated",
        positions_per_side=side,
        connector="mlp",
        connector_eps=_QWEN_EPS,
        merge=_same(keys, "spatial_merge_size", keys.integer("spatial_merge_size", 64), processor.merge),
        output_size=_same(keys, "out_hidden_size", keys.integer("out_hidden_size", MAX_WIDTH), decoder.hidden_size),
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        num_channels=_channels(keys, "in_channels"),
        num_frames=keys.integer("temporal_patch_size", 16),
        rope_theta=_theta(keys),
        deepstack_layers=_deepstack(keys, layers, decoder.num_layers),
        mrope_sections=_sections(hf, decoder, sections),
    )


def _table(defaults: Mapping[str, Any], whole: Mapping[str, Any]) -> Keys:
    own = whole.get("vision_config")
    if not isinstance(own, dict):
        raise Keys(whole).error("vision_config", "an object")
    return Keys({**defaults, **own}, "vision_config.")


def _width(keys: Keys, heads_key: str) -> tuple[int, int]:
    """Return width and number of heads, whose width must be even."""
    hidden_size, num_heads = keys.integer("hidden_size", MAX_WIDTH), keys.integer(heads_key, MAX_HEADS)
    if hidden_size % (4 * num_heads):
        raise keys.error("hidden_size", f"a multiple of 4 for each of {num_heads} heads")
    return hidden_size, num_heads


def _same(keys: Keys, key: str, value: int, expected: int) -> int:
    """Return a value that another part of the checkpoint has as well."""
    if value != expected:
        raise keys.error(key, f"{expected}, as the preprocessing and the decoder have it")
    return value


def _patches_per_side(processor: ImageProcessorConfig) -> int:
    """Return the patches of a side of every image or tile, for towers whose images are all alike; 0 if they differ."""
    match processor.sizes:
        case TileSizes(tile=side) | FixedSize(height=side):
            return side // processor.patch_size
    return 0


def _channels(keys: Keys, key: str) -> int:
    keys.require(key, 3)
    return 3


def _theta(keys: Keys) -> float:
    table = keys.get("rope_parameters")
    return Keys(table, f"{keys.prefix}rope_parameters.").number("rope_theta", low=1.0) if table else 10_000.0


def _deepstack(keys: Keys, num_layers: int, num_decoder_layers: int) -> tuple[int, ...]:
    found = keys.get("deepstack_visual_indexes") or []
    if not isinstance(found, list | tuple) or len(found) > num_decoder_layers or len(set(found)) != len(found):
        raise keys.error("deepstack_visual_indexes", f"at most {num_decoder_layers} different layers")
    return tuple(Keys({"layer": each}, keys.prefix).integer("layer", num_layers - 1, low=0) for each in found)


def _sections(hf: Mapping[str, Any], decoder: DecoderConfig, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Read `mrope_section`; the parts of rows and columns must fit the frequencies that rotate."""
    tables = (hf.get("rope_scaling"), hf.get("rope_parameters"))
    table = next((each for each in tables if isinstance(each, dict) and "mrope_section" in each), {})
    keys = Keys({"mrope_section": list(default), **table}, "rope_parameters.")
    time, rows, columns = map(int, keys.numbers("mrope_section", 3))
    if 3 * max(rows, columns) > (decoder.rotary_dim or decoder.head_dim) // 2 + 2:
        raise keys.error("mrope_section", "sections that a third of the rotating frequencies can hold")
    return time, rows, columns
