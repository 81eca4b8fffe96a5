"""Gemma 4 without encoders (Gemma 4 12B): the text model of Gemma 4, and matrices from pixels to its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.images import BudgetSizes, ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.families import gemma4
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._vision import MAX_PATCH, MAX_POSITIONS, require_same, vision_table

_OF_GEMMA4: Final = (
    "vocab_size_per_layer_input",
    "hidden_size_per_layer_input",
    "enable_moe_block",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
)
"""Keys of other Gemma 4 models, which transformers does not read here."""
DEFAULTS: Final[Mapping[str, Any]] = {
    **{key: value for key, value in gemma4.DEFAULTS.items() if key not in _OF_GEMMA4},
    "sliding_window": 1024,
}
_TOWER: Final[Mapping[str, Any]] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
    "output_proj_dims": 3840,
}
_LAYER_NORM_EPS: Final = 1e-5


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 4 without experts and embeddings of each layer."""
    absent = {**dict.fromkeys(_OF_GEMMA4), "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return gemma4.decoder_config({"max_position_embeddings": 262_144, **DEFAULTS, **hf, **absent})


def read_vision(hf: Mapping[str, Any], processor: ImageProcessorConfig, decoder: DecoderConfig) -> VisionConfig:
    """Read a tower without layers: norms and a matrix over pixels, positions by axis, a norm, and a connector."""
    keys = vision_table(_TOWER, hf[MULTIMODAL])
    assert isinstance(processor.sizes, BudgetSizes), "Gemma 4's preprocessing"
    budget, positions = processor.sizes.max_patches, keys.integer("mm_posemb_size", MAX_POSITIONS)
    if positions < budget:  # a strip of one row of tokens
        raise keys.error("mm_posemb_size", f"at least {budget}, for images of {budget} tokens")
    hidden_size = keys.integer("mm_embed_dim", MAX_WIDTH)
    require_same(keys, "output_proj_dims", hidden_size)
    return VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=0,
        num_heads=1,
        patch_size=_side(keys, processor.patch_size),
        norm_eps=_LAYER_NORM_EPS,
        activation="gelu_tanh",
        patches="linear",
        pixel_norm_eps=_LAYER_NORM_EPS,
        has_patch_norm=True,
        positions="axes",
        positions_per_side=positions,
        has_first_norm=True,
        connector="normed",
        connector_eps=keys.number("rms_norm_eps"),
        merge=processor.merge,
        output_size=decoder.hidden_size,
        normalization=processor.normalization,
        image_token_id=processor.image_token_id,
        patch_budget=budget,
        bidirectional_layers="sliding" if hf.get("use_bidirectional_attention", "vision") == "vision" else "none",
    )


def _side(keys: Keys, expected: int) -> int:
    """Return the pixels of the side of a token's patch, which its preprocessing must have as well."""
    patch, merge = keys.integer("patch_size", MAX_PATCH), keys.integer("pooling_kernel_size", 64)
    if patch * merge != expected:
        raise keys.error("patch_size", f"{expected} / pooling_kernel_size ({merge}), as the preprocessing has it")
    return expected


FAMILY = Family(
    ("Gemma4UnifiedForCausalLM",),
    decoder_config,
    text_part_of=("Gemma4UnifiedForConditionalGeneration",),
    read_vision=read_vision,
)
