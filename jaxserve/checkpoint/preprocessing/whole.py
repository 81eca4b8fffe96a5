"""Preprocessing that reads images as a whole, and perhaps crops of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Geometry, Table, token_text
from jaxserve.checkpoint.renamed import architecture
from jaxserve.model_config.preprocessing.images import (
    AreaSizes,
    BudgetSizes,
    CentralSquare,
    FixedSize,
    ImageMarkup,
    LimitedSides,
    NearestBlocks,
    PaddedSizes,
    PanAndScan,
    Sizes,
)

_MAX_AREA: Final = 1 << 28
_MAX_CROPS: Final = 64
_CROPPED: Final = "Here is the original image {image} and here are some crops to help you see better {crops}"
"""Text of an image with crops (transformers' text of Gemma 3)."""
_CLIP: Final = "clip_vision_model"
_WITH_WINDOWS: Final = ("qwen2_5_vl", "exaone4_5", "qwen2_5_omni_thinker", "hyperclovax_vision_v2", "vlm")
"""Values of `model_type` of models whose towers have windows."""
_WITHOUT_BREAKS: Final = ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration")
"""Architectures that share an image processor with Pixtral: LightOnOCR's, now and as first published."""
CLIP_MEANS: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATIONS: Final = (0.26862954, 0.26130258, 0.27577711)


def areas(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Qwen2-VL and its successors: the area stays within bounds, and templates mark begin and end themselves."""
    sizes = AreaSizes(*_bounds(table, 56 * 56, 28 * 28 * 1280))
    image = token_text(tokens, "image_token", "<|image_pad|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    return Geometry(sizes, patch, merge, ImageMarkup(image, image), window_side(config, patch, merge))


def compass_areas(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Cohere's Compass: as Qwen2-VL, with an image token that the tokenizer's files do not name."""
    return areas(table, config, {"image_token": "<|IMAGE_PAD|>"})


def averaged(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of VideoLLaMA 3: as Qwen2-VL, and a token is a patch or the mean of four."""
    sizes = AreaSizes(*_bounds(table, 56 * 56, 28 * 28 * 1280))
    if table.integer("temporal_patch_size", 1, 16) != 1:
        raise table.error("temporal_patch_size", "1")
    image = token_text(tokens, "image_token", "<|image_pad|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 1, 2)
    return Geometry(sizes, patch, merge, ImageMarkup(image, image))


def enlarged(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of PaddleOCR-VL: as Qwen2-VL, but small images are enlarged."""
    sizes = AreaSizes(*_bounds(table, 384 * 384, 1536 * 1536), enlargement="in_turn")
    image = token_text(tokens, "image_token", "<|IMAGE_PLACEHOLDER|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    return Geometry(sizes, patch, merge, ImageMarkup(image, image))


def _bounds(table: Table, low: int, high: int) -> tuple[int, int]:
    """Read the bounds of an image's area. low, high: their defaults."""
    size = table.table("size", {"shortest_edge": low, "longest_edge": high})
    found = {
        "min_pixels": table.get("min_pixels", size.get("shortest_edge", None)),
        "max_pixels": table.get("max_pixels", size.get("longest_edge", None)),
    }
    bounds = Table(table.path, found)
    return bounds.integer("min_pixels", None, _MAX_AREA), bounds.integer("max_pixels", None, _MAX_AREA)


def frames(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of GLM-4.1V and its successors: as Qwen2-VL, but bounds are those of an image's equal frames together."""
    size = table.table("size", {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000})
    low, high = (size.integer(f"{edge}_edge", None, _MAX_AREA) for edge in ("shortest", "longest"))
    sizes = AreaSizes(low, high, table.integer("temporal_patch_size", 2, 16), enlargement="both")
    image = token_text(tokens, "image_token", "<|image|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    return Geometry(sizes, patch, merge, ImageMarkup(image, image))


def edge_frames(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Cosmos 3 Edge: as GLM-4.1V, with other defaults and one frame."""
    table.integer("temporal_patch_size", 1, 1)
    size = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    found = frames(
        Table(table.path, {"size": size, "temporal_patch_size": 1, "patch_size": 16, **table.values}), config, tokens
    )
    image = token_text(tokens, "image_token", "<|image_pad|>")
    return found._replace(markup=ImageMarkup(image, image))


def window_side(config: Table, patch: int, merge: int) -> int | None:
    """Return the patches of the side of a window, whole blocks, of towers as Qwen2.5-VL's; None for their relatives."""
    if config.get("model_type", None) not in _WITH_WINDOWS:
        return None
    own = config.table("vision_config", {})
    pixels = own.integer("window_size", 112, MAX_SIDE)
    if pixels < patch * merge:
        raise own.error("window_size", f"at least {patch * merge} pixels, the side of a block")
    return pixels // (patch * merge) * merge


def fixed(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Gemma 3: every image and crop has one size, and blank lines around it."""
    size = table.table("size", {"height": 224, "width": 224})
    height, width = (size.integer(side, None, MAX_SIDE) for side in ("height", "width"))
    sizes = FixedSize(height, width, _pan_and_scan(table))
    begin, end = token_text(tokens, "boi_token", "<start_of_image>"), token_text(tokens, "eoi_token", "<end_of_image>")
    token = token_text(tokens, "image_token", "<image_soft_token>")
    markup = ImageMarkup(placeholder=begin, token=token, begin=f"\n\n{begin}", end=f"{end}\n\n", cropped=_CROPPED)
    patch = config.table("vision_config", {}).integer("patch_size", 16, MAX_SIDE)
    per_side = sizes.height // patch
    blocks = round(config.integer("mm_tokens_per_image", 256, 1 << 16) ** 0.5)
    if sizes.height != sizes.width or per_side % blocks:
        raise table.error("size", f"a square whose patches of {patch} pixels divide into {blocks} blocks a side")
    return Geometry(sizes, patch, per_side // blocks, markup)


def _pan_and_scan(table: Table) -> PanAndScan | None:
    """Read how images are cropped. Defaults are those of transformers' `Gemma3Processor`."""
    if not table.flag("do_pan_and_scan", default=False):
        return None
    return PanAndScan(
        min_crop_size=table.integer("pan_and_scan_min_crop_size", 256, MAX_SIDE),
        max_crops=table.integer("pan_and_scan_max_num_crops", 4, _MAX_CROPS),
        min_ratio=table.number("pan_and_scan_min_ratio_to_activate", 1.2),
    )


def plain(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of LLaVA with SigLIP or CLIP: images of one size, and nothing around their tokens."""
    size = table.get("size", {"shortest_edge": 224})
    if isinstance(size, int):
        size = {"shortest_edge": size}
    bounds = Table(table.path, {"size": size}).table("size", {})
    sizes: Sizes
    if "height" in size:
        side = table.square("size", 224)
        sizes = FixedSize(side, side)
    else:
        sizes = _central_square(table, bounds.integer("shortest_edge", None, MAX_SIDE))
    token, kind = token_text(tokens, "image_token", "<image>"), config.get("model_type", None)
    default = 14 if kind in ("vipllava", "paligemma") else 32
    patch = config.table("vision_config", {}).integer("patch_size", default, MAX_SIDE)
    return Geometry(sizes, patch, 1, ImageMarkup(token, token), has_class_token=has_class_token(config))


def has_class_token(config: Table) -> bool:
    """Return True for a model with CLIP's tower, which all LLaVA models but LLaVA-OneVision have by default, unlike PaliGemma."""
    has_siglip = config.get("model_type", None) in ("llava_onevision", "paligemma")
    default = "siglip_vision_model" if has_siglip else _CLIP
    return bool(config.table("vision_config", {}).get("model_type", default) == _CLIP)


def _central_square(table: Table, shortest: int) -> CentralSquare:
    if not table.flag("do_center_crop", default=True):
        raise table.error("do_center_crop", "true")
    crop = table.get("crop_size", {"height": 224, "width": 224})
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    bounds = Table(table.path, {"crop_size": crop}).table("crop_size", {})
    height, width = (bounds.integer(side, None, MAX_SIDE) for side in ("height", "width"))
    if height != width or height > shortest:
        raise table.error("crop_size", f"a square with sides of at most {shortest} pixels")
    if not table.flag("do_pad", default=False):
        return CentralSquare(shortest, height)
    red, green, blue = (int(mean * 255) for mean in table.numbers("image_mean", list(CLIP_MEANS), 3))
    return CentralSquare(shortest, height, (red, green, blue))


def merged_budget(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Gemma 4 without encoders: as of Gemma 4, and the patches of a token are one."""
    found = budget(table, config, tokens)
    assert isinstance(found.sizes, BudgetSizes)
    sizes = BudgetSizes(found.sizes.max_patches // found.merge**2)
    return found._replace(sizes=sizes, patch_size=found.patch_size * found.merge, merge=1)


def budget(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Gemma 4: as many patches as fit a number of tokens, in the image's proportions."""
    merge = table.integer("pooling_kernel_size", 3, 64)
    sizes = BudgetSizes(table.integer("max_soft_tokens", 280, 1 << 14) * merge**2)
    image = token_text(tokens, "image_token", "<|image|>")
    begin, end = token_text(tokens, "boi_token", "<|image>"), token_text(tokens, "eoi_token", "<image|>")
    markup = ImageMarkup(placeholder=image, token=image, begin=begin, end=end)
    return Geometry(sizes, table.integer("patch_size", 16, MAX_SIDE), merge, markup)


def limited(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Pixtral and Mistral 3: sides up to a limit, and a break after each row of tokens. Those of patches are the tower's."""
    if architecture(config.values) in _WITHOUT_BREAKS:
        return _without_breaks(table, config, tokens)
    longest = table.table("size", {"longest_edge": 1024}).integer("longest_edge", None, MAX_SIDE)
    merge = config.integer("spatial_merge_size", 2 if config.get("model_type", None) == "mistral3" else 1, 64)
    patch = config.table("vision_config", {}).integer("patch_size", 16, MAX_SIDE)
    image = token_text(tokens, "image_token", "[IMG]")
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        end=token_text(tokens, "image_end_token", "[IMG_END]"),
        line_break=token_text(tokens, "image_break_token", "[IMG_BREAK]"),
    )
    return Geometry(LimitedSides(longest), patch, merge, markup)


def _without_breaks(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of LightOnOCR: as Mistral 3, with nothing between and after an image's tokens."""
    merge = config.integer("spatial_merge_size", 2, 64)
    patch = config.table("vision_config", {}).integer("patch_size", 14, MAX_SIDE)
    sides = table.get("patch_size", patch * merge)
    sides = {"height": sides, "width": sides} if isinstance(sides, int) else sides
    # The first release has the side of a patch here, and code that multiplies it.
    if sides not in ({"height": side, "width": side} for side in (patch, patch * merge)):
        raise table.error("patch_size", f"{patch * merge}, the side of {merge} patches")
    longest = table.table("size", {"longest_edge": 1024}).integer("longest_edge", None, MAX_SIDE)
    image = token_text(tokens, "image_token", "<|image_pad|>")
    return Geometry(LimitedSides(longest), patch, merge, ImageMarkup(image, image))


def nearest_blocks(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Muse Glimmer: whole blocks in proportions near the image's, and windows as large as the tower's table of positions."""
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    vision = config.table("vision_config", {})
    window = vision.integer("pos_emb_height", 32, MAX_SIDE)
    if window % merge:
        raise vision.error("pos_emb_height", f"whole blocks of {merge} patches")
    image = "<|patch|>"
    markup = ImageMarkup(image, image, begin="<|image_start|>", end="<|image_end|>")
    return Geometry(NearestBlocks(table.integer("max_image_tokens", 4096, _MAX_AREA)), patch, merge, markup, window)


def padded(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Kimi K2.5: a limit on patches, black margins, and templates mark begin and end themselves."""
    size = table.table("size", {"max_height": 512, "max_width": 512})
    side, width = (size.integer(f"max_{each}", None, MAX_SIDE) for each in ("height", "width"))
    if side != width:
        raise table.error("size", "the same max_height and max_width")
    sizes = PaddedSizes(table.integer("max_patches", 1 << 14, _MAX_AREA), side)
    image = token_text(tokens, "image_token", "<|media_pad|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    return Geometry(sizes, patch, merge, ImageMarkup(image, image))


_PUBLISHED: Final = "media_proc_cfg"
"""Key of the table in which Kimi K2.5's published preprocessing has other names, for code of its own."""


def with_our_names(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return Kimi K2.5's published preprocessing under transformers' names; any other one unchanged."""
    if _PUBLISHED not in table:
        return table
    own = Table(path, table).table(_PUBLISHED, {})
    if own.get("fixed_output_tokens", None) is not None:
        raise own.error("fixed_output_tokens", "null")
    side = own.get("patch_limit_on_one_side", 512)
    named = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "max_patches": own.get("in_patch_limit", None),
        "merge_size": own.get("merge_kernel_size", None),
        "patch_size": own.get("patch_size", None),
        "size": {"max_height": side, "max_width": side},
        "image_mean": own.get("image_mean", None),
        "image_std": own.get("image_std", None),
    }
    return {key: value for key, value in named.items() if value is not None}
