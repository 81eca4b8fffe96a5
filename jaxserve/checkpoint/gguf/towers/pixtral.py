"""mmproj files of Pixtral's tower: Pixtral, Mistral 3, Ministral 3 and LightOnOCR."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import GATED, SIDE, Projector


def _pixtral(keys: TowerKeys) -> dict[str, Any]:
    vision = keys.vision
    return {
        "model_type": "pixtral",
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": keys.intermediate_size(),
        "num_hidden_layers": vision.integer("block_count"),
        "num_attention_heads": vision.integer("attention.head_count"),
        "patch_size": vision.integer("patch_size"),
        "hidden_act": keys.activation("gelu"),
    }


def _pixtral_projector(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of Mistral 3's projector, which joins blocks of patches, or of Pixtral's, published as LLaVA's."""
    projector = {"vision_feature_layer": -1, "multimodal_projector_bias": "mm.1.bias" in keys.file.tensors}
    if "mm.patch_merger.weight" not in keys.file.tensors:
        return projector | {"model_type": "llava", "vision_feature_select_strategy": "full"}
    return projector | {"spatial_merge_size": keys.vision.integer("spatial_merge_size", maximum=SIDE)}


def _longest(keys: TowerKeys) -> dict[str, Any]:
    return {"size": {"longest_edge": keys.vision.integer("image_size", maximum=SIDE)}}


def _lighton(keys: TowerKeys) -> dict[str, Any]:
    """Return the keys of LightOnOCR, whose prompts have nothing between rows of an image's tokens."""
    merge = keys.vision.integer("spatial_merge_size", maximum=SIDE)
    return {"architectures": ["LightOnOcrForConditionalGeneration"], "spatial_merge_size": merge}


_NAMES: Final = {
    **GATED,
    "mm.1.": "connector.linear_1.",
    "mm.2.": "connector.linear_2.",
    "mm.input_norm.": "connector.norm.",
    "mm.patch_merger.": "connector.merging_layer.",
}

PIXTRAL: Final = Projector(
    "pixtral",
    architectures=("mistral3", "llama"),
    model_type="mistral3",
    processor_type="PixtralImageProcessor",
    tokens={
        "image_token": ("[IMG]",),
        "image_break_token": ("[IMG_BREAK]",),
        "image_end_token": ("[IMG_END]",),
    },
    vision=_pixtral,
    preprocessing=_longest,
    whole=_pixtral_projector,
    names=_NAMES,
    unused=("v.token_embd.img_break",),  # a row of the text model's embeddings
    is_rope_permuted=True,
)
LIGHTON_OCR: Final = Projector(
    "lightonocr",
    architectures=("qwen3",),
    model_type="lighton_ocr",
    processor_type="PixtralImageProcessor",
    tokens={"image_token": ("<|image_pad|>",)},
    vision=_pixtral,
    preprocessing=_longest,
    whole=_lighton,
    names=_NAMES,
    is_rope_permuted=True,
)
