"""Keys of vision towers: SigLIP as in SmolVLM and Gemma 3, Qwen's, and Gemma 4's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import ReadVision
from jaxserve.checkpoint.renamed import MULTIMODAL, with_our_keys
from jaxserve.model_config.activation import Activation
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import (
    BudgetSizes,
    CentralSquare,
    FixedSize,
    GridTiles,
    ImageProcessorConfig,
    JoinedTiles,
    MarkedTiles,
    TileSizes,
)
from jaxserve.model_config.vision import BidirectionalLayers, Connector, Normalization, SectionLayout, VisionConfig
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_activation
from jaxserve.models.families._keys import Keys

MAX_PATCH: Final = 256
MAX_IMAGE: Final = 1 << 14
_SIGLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""transformers' defaults of Idefics3 and SmolVLM."""
_QWEN: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
"""transformers' defaults of Qwen3-VL and Qwen3.5."""
QWEN_NAMES: Final = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"}
"""Our names of keys of Qwen's towers."""
_GEMMA4: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
"""transformers' defaults of Gemma 4."""
_GEMMA4_THETA: Final = 100.0
MAX_POSITIONS: Final = 1 << 20
QWEN3_5_SECTIONS: Final = (11, 11, 10)
"""Qwen3.5's default of `mrope_section`."""
QWEN_EPS: Final = 1e-6


def by_model_type(readers: Mapping[str, ReadVision]) -> ReadVision:
    """Return the function that reads the tower of a multimodal config by its `model_type`."""

    def read(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
        kind = hf[MULTIMODAL].get("model_type")
        Keys({"model_type": kind}).require("model_type", *readers)
        return readers[kind](hf, processor, decoder)

    return read


def siglip(
    hf: Mapping[str, Any],
    processor: ImageProcessorConfig,
    decoder: DecoderConfig,
    *,
    connector: Connector,
    defaults: Mapping[str, Any] = {},
    bidirectional_layers: BidirectionalLayers = "none",
) -> VisionConfig:
    """Read a SigLIP tower, whose images or tiles all have the size of its table of positions."""
    whole = hf[MULTIMODAL]
    keys = vision_table({**_SIGLIP, **defaults}, whole)
    if not isinstance(processor.sizes, TileSizes | GridTiles | FixedSize | CentralSquare | MarkedTiles | JoinedTiles):
        raise keys.error("model_type", "a tower that takes images of any size, as the preprocessing makes them")
    eps = keys.number("layer_norm_eps")
    tower = read_tower(keys, processor, decoder, norm_eps=eps, connector=connector, connector_eps=eps)
    patch_size = tower.patch_size
    side = keys.integer("image_size", MAX_IMAGE) // patch_size
    if side % processor.merge:
        raise keys.error("image_size", f"pixels of whole blocks of {processor.merge} patches of {patch_size} pixels")
    if side != (expected := _side(processor.sizes) // patch_size):
        raise keys.error("image_size", f"{expected * patch_size}, as the preprocessing has it")
    return replace(
        tower,
        positions="table",
        positions_per_side=side,
        has_final_norm=True,
        image_patches=side**2,
        bidirectional_layers=bidirectional_layers,
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
    keys = vision_table(_QWEN, hf[MULTIMODAL], QWEN_NAMES)
    tower = read_tower(keys, processor, decoder, norm_eps=QWEN_EPS, connector="mlp", connector_eps=QWEN_EPS)
    require_same(keys, "out_hidden_size", decoder.hidden_size)
    return replace(
        tower,
        positions="interpolated",
        positions_per_side=read_root(keys, "num_position_embeddings"),
        num_frames=keys.integer("temporal_patch_size", 16),
        rope_theta=read_theta(keys),
        deepstack_layers=read_deepstack(keys, tower.num_layers, decoder.num_layers),
        mrope_sections=read_sections(hf, decoder, sections),
    )


def gemma4_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read the tower of Gemma 4, which encodes images of any proportions in as many patches as a budget allows."""
    keys = vision_table(_GEMMA4, hf[MULTIMODAL])
    keys.require("attention_bias", False, None)
    num_heads, eps = keys.integer("num_attention_heads", MAX_HEADS), keys.number("rms_norm_eps")
    keys.require("num_key_value_heads", num_heads)
    head_dim = keys.integer("head_dim", MAX_HEAD_DIM, low=4)
    if head_dim % 4:
        raise keys.error("head_dim", "a multiple of 4")
    assert isinstance(processor.sizes, BudgetSizes), "Gemma 4's preprocessing"
    require_same(keys, "pooling_kernel_size", processor.merge)
    require_same(keys, "patch_size", processor.patch_size)
    budget, merge = processor.sizes.max_patches, processor.merge
    positions = keys.integer("position_embedding_size", MAX_POSITIONS)
    if positions < budget // merge:  # a strip of one row of tokens
        raise keys.error("position_embedding_size", f"at least {budget // merge}, for images of {budget} patches")
    per_layer = None
    if decoder.per_layer_dim is not None:
        per_layer = Keys({"pad_token_id": 0, **hf}).integer("pad_token_id", decoder.vocab_size - 1, low=0)
    return VisionConfig(
        hidden_size=keys.integer("hidden_size", MAX_WIDTH),
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        attention_head_dim=head_dim,
        patch_size=processor.patch_size,
        patches="linear",
        has_patch_bias=False,
        layers="sandwich",
        has_biases=False,
        norm_eps=eps,
        activation=read_activation(keys, "hidden_activation"),
        positions="axes",
        positions_per_side=positions,
        rope_theta=read_theta(keys, _GEMMA4_THETA),
        rotary_layout="halves",
        connector="scaled_average",
        connector_eps=eps,
        is_standardized=keys.flag("standardize"),
        has_clipped_matmuls=keys.flag("use_clipped_linears"),
        merge=merge,
        output_size=decoder.hidden_size,
        normalization=_centred(processor.normalization),
        image_token_id=processor.image_token_id,
        patch_budget=budget,
        bidirectional_layers="sliding" if hf.get("use_bidirectional_attention") == "vision" else "none",
        per_layer_token_id=per_layer,
    )


def _centred(normalization: Normalization) -> Normalization:
    """Return a normalisation followed by 2 * (value - 1 / 2)."""
    pairs = list(zip(normalization.means, normalization.deviations, strict=True))
    means = tuple(mean + deviation / 2 for mean, deviation in pairs)
    return Normalization(normalization.scale, means, tuple(deviation / 2 for _, deviation in pairs))


def read_tower(
    keys: Keys,
    processor: ImageProcessorConfig,
    decoder: DecoderConfig,
    *,
    norm_eps: float,
    connector: Connector,
    connector_eps: float,
    activation: Activation | None = None,
    intermediate_size: int | None = None,
) -> VisionConfig:
    """Read the keys that most towers have: LayerNorms, biases and no learned positions, unless `replace` says otherwise.

    activation, intermediate_size: those of towers whose config does not say them.
    """
    hidden_size, num_heads = keys.integer("hidden_size", MAX_WIDTH), keys.integer("num_attention_heads", MAX_HEADS)
    if hidden_size % (4 * num_heads):
        raise keys.error("hidden_size", f"a multiple of 4 for each of {num_heads} heads")
    keys.require("num_channels", 3)
    if "spatial_merge_size" in keys.table:
        require_same(keys, "spatial_merge_size", processor.merge)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        patch_size=require_same(keys, "patch_size", processor.patch_size),
        norm_eps=norm_eps,
        activation=activation or read_activation(keys, "hidden_act"),
        positions="none",
        positions_per_side=0,
        connector=connector,
        connector_eps=connector_eps,
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
    )


def vision_table(defaults: Mapping[str, Any], whole: Mapping[str, Any], names: Mapping[str, str] = {}) -> Keys:
    """Return the keys of a tower, with defaults for those that its config does not have.

    names: our names of keys that the family names differently; defaults have ours.
    """
    own = whole.get("vision_config")
    if not isinstance(own, dict):
        raise Keys(whole).error("vision_config", "an object")
    theirs = {ours: name for name, ours in names.items()}
    return Keys({**defaults, **with_our_keys(own, names)}, "vision_config.", theirs)


def require_same(keys: Keys, key: str, expected: int) -> int:
    """Return a number, or the side of a square, that another part of the checkpoint has as well."""
    if keys.get(key) not in (expected, [expected, expected]):
        raise keys.error(key, f"{expected}, as the preprocessing and the decoder have it")
    return expected


def _side(sizes: TileSizes | GridTiles | FixedSize | CentralSquare | MarkedTiles | JoinedTiles) -> int:
    """Return the pixels of a side of every image or tile."""
    match sizes:
        case (
            TileSizes(tile=side)
            | GridTiles(tile=side)
            | JoinedTiles(tile=side)
            | FixedSize(height=side)
            | CentralSquare(side=side)
        ):
            return side
        case MarkedTiles(grid):
            return grid.tile


def read_square(keys: Keys, key: str, high: int) -> int:
    """Read the side of a square, of which a config may have height and width."""
    found = keys.get(key)
    if isinstance(found, list | tuple):
        if len(found) != 2 or found[0] != found[1]:
            raise keys.error(key, "a square")
        return Keys({key: found[0]}, keys.prefix).integer(key, high)
    return keys.integer(key, high)


def read_root(keys: Keys, key: str) -> int:
    """Read a number of places that fill a square, and return its side."""
    count = keys.integer(key, MAX_POSITIONS)
    if math.isqrt(count) ** 2 != count:
        raise keys.error(key, "a square number")
    return math.isqrt(count)


def read_theta(keys: Keys, default: float = 10_000.0) -> float:
    """Read the base of the rotation by row and column."""
    table = keys.get("rope_parameters")
    own = Keys({"rope_theta": default, **(table if isinstance(table, dict) else {})}, f"{keys.prefix}rope_parameters.")
    own.require("rope_type", "default", "axial")
    return own.number("rope_theta", low=1.0)


def read_deepstack(keys: Keys, num_layers: int, num_decoder_layers: int) -> tuple[int, ...]:
    """Read the layers of the tower whose outputs the decoder's first layers get."""
    found = keys.get("deepstack_visual_indexes") or []
    if not isinstance(found, list | tuple) or len(found) > num_decoder_layers or len(set(found)) != len(found):
        raise keys.error("deepstack_visual_indexes", f"at most {num_decoder_layers} different layers")
    return tuple(Keys({"layer": each}, keys.prefix).integer("layer", num_layers - 1, low=0) for each in found)


def read_sections(
    hf: Mapping[str, Any],
    decoder: DecoderConfig,
    default: tuple[int, int, int],
    layout: SectionLayout = "interleaved",
) -> tuple[int, int, int]:
    """Read `mrope_section`; the parts must fit the frequencies that rotate."""
    tables = (hf.get("rope_scaling"), hf.get("rope_parameters"))
    table = next((each for each in tables if isinstance(each, dict) and "mrope_section" in each), {})
    keys = Keys({"mrope_section": list(default), **table}, "rope_parameters.")
    time, rows, columns = map(int, keys.numbers("mrope_section", 3))
    count = (decoder.rotary_dim or decoder.head_dim) // 2
    if layout == "chunks" and time + rows + columns != count:
        raise keys.error("mrope_section", f"sections of the {count} rotating frequencies")
    if layout == "interleaved" and 3 * max(rows, columns) > count + 2:
        raise keys.error("mrope_section", "sections that a third of the rotating frequencies can hold")
    return time, rows, columns
