"""Preprocessing that cuts images into tiles: Idefics3, InternVL, LFM2-VL, Llama 4, Cohere 2 Vision and Granite for Docling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Geometry, Table, token_text
from jaxserve.checkpoint.renamed import architecture
from jaxserve.model_config.preprocessing.images import (
    AreaSizes,
    CanvasTiles,
    DensePages,
    FixedSize,
    GridTiles,
    ImageMarkup,
    MarkedTiles,
    TiledAreas,
    TileSizes,
)

HAS_MARKS: Final = "use_image_special_tokens"
PLACEHOLDER: Final = "image_placeholder_token"
FIRST_LFM2_VL: Final = (
    "do_image_splitting",
    "downsample_factor",
    "encoder_patch_size",
    "max_image_tokens",
    "max_pixels_tolerance",
    "max_tiles",
    "min_image_tokens",
    "min_tiles",
    "tile_size",
    "use_thumbnail",
)
"""Keys that the first releases of LFM2-VL have beside the table of their preprocessing, whose name is that of SigLIP 2."""
_MAX_TILES: Final = 64
_MAX_MARKED: Final = 16
"""Most rows and columns of tiles that tokens mark."""
_MAX_TOKENS: Final = 1 << 16


def tiles(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Idefics3 and SmolVLM: square tiles in rows, then the whole image as one more tile."""
    tile = table.table("max_image_size", {"longest_edge": 364}).integer("longest_edge", None, MAX_SIDE)
    longest = table.table("size", {"longest_edge": 4 * 364}).integer("longest_edge", None, MAX_SIDE)
    sizes = TileSizes(longest, tile, table.flag("do_image_splitting", default=True))
    image = token_text(tokens, "image_token", "<image>")
    around = token_text(tokens, "fake_image_token", "<fake_token_around_image>")
    whole = token_text(tokens, "global_image_token", "<global-img>")
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        begin=around,
        end=around,
        single=whole,
        whole=whole,
        tile="<row_{row}_col_{column}>",
        row_end="\n",
        tiles_end="\n",
    )
    patch = config.table("vision_config", {}).integer("patch_size", 32, MAX_SIDE)
    return Geometry(sizes, patch, config.integer("scale_factor", 2, 64), markup)


def grid(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of InternVL and Qianfan-OCR: tiles, as its processor of images and texts cuts them whatever `crop_to_patches` says, and one mark around
    all of them."""
    most = table.integer("max_patches", 12, _MAX_TILES)
    sizes = GridTiles(table.square("size", 384), table.integer("min_patches", 1, most), most)
    if architecture(config.values) == "AyaVisionForConditionalGeneration":
        return _numbered(sizes, config)
    token = token_text(tokens, "context_image_token", "<IMG_CONTEXT>")
    begin, end = token_text(tokens, "start_image_token", "<img>"), token_text(tokens, "end_image_token", "</img>")
    patch = config.table("vision_config", {}).get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) and patch else patch
    side = Table(config.path, {"patch_size": patch}).integer("patch_size", None, MAX_SIDE)
    ratio = config.number("downsample_ratio", 0.5)
    if not 1 / 64 <= ratio <= 1:
        raise config.error("downsample_ratio", "a number from 1/64 to 1")
    is_qianfan = architecture(config.values) == "QianfanOCRForConditionalGeneration"
    placeholder = table.get(PLACEHOLDER, "<image>" if is_qianfan else token)
    if not isinstance(placeholder, str) or not placeholder:
        raise table.error(PLACEHOLDER, "a text")
    markup = ImageMarkup(placeholder, token, begin, end)
    return Geometry(sizes, side, int(1 / ratio), markup, has_class_token=True)


def _numbered(sizes: GridTiles, config: Table) -> Geometry:
    """Read sizes of Aya Vision: as InternVL, with a number before each tile."""
    markup = ImageMarkup(
        placeholder="<image>",
        token="<|IMG_PATCH|>",
        opening="<|START_OF_IMG|>",
        tile="TILE_{number}",
        single="TILE_GLOBAL",
        whole="TILE_GLOBAL",
        end="<|END_OF_IMG|>",
    )
    patch = config.table("vision_config", {}).integer("patch_size", 16, MAX_SIDE)
    return Geometry(sizes, patch, config.integer("downsample_factor", 2, 64), markup)


def pages(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Granite for Docling: tiles as InternVL's with marks as Idefics3's, more of them for pages that would be too small."""
    if table.flag("fine_route", default=False):
        raise table.error("fine_route", "false: the path of four times as many tokens is not computed")
    most = table.integer("max_patches", 32, _MAX_TILES) if table.flag("crop_to_patches", default=True) else 1
    least = table.integer("min_patches", 1, most) if most > 1 else 1
    grid = GridTiles(table.square("size", 512), least, most, _MAX_MARKED)
    image, around = token_text(tokens, "image_token", "<image>"), "<fake_token_around_image>"
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        begin=around,
        whole="<global-img>",
        whole_end=around,
        tile="<row_{row}_col_{column}>",
        row_end="\n",
        tiles_end="\n",
    )
    vision = config.table("vision_config", {})
    sizes = MarkedTiles(grid, _dense(table) if most > 1 else None)
    return Geometry(sizes, vision.integer("patch_size", 16, MAX_SIDE), vision.integer("scale_factor", 4, 64), markup)


def _dense(table: Table) -> DensePages | None:
    """Read the rule for pages that get more tiles; None: there is none."""
    scale, least, most = (table.number(f"dense_{key}", 0.0) for key in ("max_scale", "min_aspect", "max_aspect"))
    if not table.get("dense_max_patches", 0) or (scale <= 0 and least <= 0):
        return None
    tiles = table.integer("dense_max_patches", None, _MAX_TILES)
    return DensePages(tiles, max(scale, 0.0), max(least, 0.0), max(most, 0.0))


def tiled_areas(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of LFM2-VL: images within bounds of area; larger ones in tiles, with marks between them, then as a whole."""
    patch, merge = table.integer("encoder_patch_size", 16, MAX_SIDE), table.integer("downsample_factor", 2, 64)
    most = table.integer("max_image_tokens", 256, _MAX_TOKENS)
    least = table.integer("min_image_tokens", min(64, most), most)
    pixels = (patch * merge) ** 2
    whole = AreaSizes(least * pixels, most * pixels, has_whole_blocks=True)
    markup = _marks(tokens) if table.flag(HAS_MARKS, default=True) else ImageMarkup(*2 * [_image(tokens)])
    most_tiles = table.integer("max_tiles", 10, _MAX_TILES)
    if not table.flag("do_image_splitting", default=True) or most_tiles == 1:
        return Geometry(whole, patch, merge, markup)
    least_tiles, side = table.integer("min_tiles", 2, most_tiles), table.integer("tile_size", 512, MAX_SIDE)
    if least_tiles == 1:  # a grid of one tile has no prompt: the text is that of the whole image
        raise table.error("min_tiles", f"an integer from 2 to {most_tiles}")
    if side % (patch * merge):
        raise table.error("tile_size", f"pixels of whole blocks of {patch * merge} pixels")
    sizes = TiledAreas(
        whole,
        GridTiles(side, least_tiles, most_tiles),
        table.number("max_pixels_tolerance", 2.0) * most * pixels,
        table.flag("use_thumbnail", default=True),
    )
    return Geometry(sizes, patch, merge, markup)


def _image(tokens: Mapping[str, Any]) -> str:
    return token_text(tokens, "image_token", "<image>")


def _marks(tokens: Mapping[str, Any]) -> ImageMarkup:
    return ImageMarkup(
        _image(tokens),
        _image(tokens),
        opening=token_text(tokens, "image_start_token", "<|image_start|>"),
        end=token_text(tokens, "image_end_token", "<|image_end|>"),
        whole=token_text(tokens, "image_thumbnail_token", "<|img_thumbnail|>"),
        tile="<|img_row_{row}_col_{column}|>",
    )


def canvas(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Llama 4: tiles of a grid that holds the image in its proportions, with separators between them, then the whole image."""
    sizes = CanvasTiles(
        table.square("size", 336),
        table.integer("max_patches", 16, _MAX_TILES),
        table.flag("resize_to_max_canvas", default=False),
    )
    vision = config.table("vision_config", {})
    ratio = vision.number("pixel_shuffle_ratio", 0.5)
    if not 1 / 64 <= ratio <= 1:
        raise vision.error("pixel_shuffle_ratio", "a number from 1/64 to 1")
    markup = ImageMarkup(
        placeholder="<|image|>",
        token="<|patch|>",
        opening="<|image_start|>",
        tile_break="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>",
        single="<|image|>",
        whole="<|image|>",
        end="<|image_end|>",
    )
    patch = vision.integer("patch_size", 14, MAX_SIDE)
    return Geometry(sizes, patch, round(1 / ratio), markup, has_class_token=True)


def nearest_grid(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Cohere 2 Vision: tiles of the grid of the nearest size, a break after each of them, and marks around all."""
    side, most = table.square("size", 512), table.integer("max_patches", 12, _MAX_TILES)
    is_cut = table.flag("crop_to_patches", default=True)
    sizes = GridTiles(side, 1, most, is_nearest_size=True) if is_cut else FixedSize(side, side)
    token = token_text(tokens, "image_token", "<|IMG_PATCH|>")
    markup = ImageMarkup(
        token,
        token,
        begin=token_text(tokens, "boi_token", "<|START_OF_IMG|>"),
        end=token_text(tokens, "eoi_token", "<|END_OF_IMG|>"),
        tile_end=token_text(tokens, "img_line_break_token", "<|IMG_LINE_BREAK|>"),
    )
    patch = config.table("vision_config", {}).integer("patch_size", 16, MAX_SIDE)
    merge, per_side = config.integer("downsample_factor", 2, 64), table.integer("patch_size", 16, MAX_SIDE)
    if side != per_side * patch * merge:
        raise table.error("patch_size", f"{side / patch / merge:g}, the tokens of a tile's side")
    return Geometry(sizes, patch, merge, markup)
