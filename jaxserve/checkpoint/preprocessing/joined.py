"""Preprocessing that cuts an image into tiles whose embeddings are joined: LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Geometry, Table, token_text
from jaxserve.checkpoint.preprocessing.whole import CLIP_MEANS, has_class_token
from jaxserve.model_config.preprocessing.images import ImageMarkup, JoinedTiles

ASPECT: Final = "vision_aspect_ratio"
_PINPOINTS: Final = "image_grid_pinpoints"
_MAX_TILES: Final = 64
_NEXT: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONE_VISION: Final = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""transformers' defaults of sizes in pixels."""


def joined(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of LLaVA-NeXT: tiles of a grid that shows most of the image, of any number of embeddings."""
    size, crop = _side(table, "size", {"shortest_edge": 224}), _side(table, "crop_size", {"height": 224, "width": 224})
    if size != crop:  # tiles are of this size whether or not `do_center_crop` is set
        raise table.error("crop_size", f"{size} pixels, as in size")
    return _geometry(JoinedTiles(size, _grids(table, config, size, _NEXT)), config, tokens)


def bounded(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of LLaVA-OneVision: as LLaVA-NeXT, but with a bound on embeddings, and one tile for each of several images."""
    size = _side(table, "size", {"height": 384, "width": 384})
    for key in ("do_center_crop", "crop_size"):
        if table.get(key, None):
            raise table.error(key, "null")
    aspect = config.get(ASPECT, "anyres_max_9")
    found = re.fullmatch(r"anyres_max_(\d{1,2})", aspect) if isinstance(aspect, str) else None
    if found is None or not int(found[1]):
        raise config.error(ASPECT, "anyres_max_N")
    if table.get(ASPECT, aspect) != aspect:
        raise table.error(ASPECT, f"{aspect}, as config.json has it")
    red, green, blue = (int(mean * 255) for mean in table.numbers("image_mean", list(CLIP_MEANS), 3))
    sizes = JoinedTiles(size, _grids(table, config, size, _ONE_VISION), int(found[1]), (red, green, blue))
    return _geometry(sizes, config, tokens)


def _geometry(sizes: JoinedTiles, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    token = token_text(tokens, "image_token", "<image>")
    patch = config.table("vision_config", {}).integer("patch_size", 14, MAX_SIDE)
    return Geometry(sizes, patch, 1, ImageMarkup(token, token), has_class_token=has_class_token(config))


def _side(table: Table, key: str, default: dict[str, int]) -> int:
    """Read the side of a square, which a file may give in several ways."""
    value = table.get(key, default)
    value = {"shortest_edge": value} if isinstance(value, int) else value
    given = Table(table.path, {key: value})
    own = given.table(key, {})
    if "shortest_edge" in own.values:
        return own.integer("shortest_edge", None, MAX_SIDE)
    return given.square(key, 0)


def _grids(table: Table, config: Table, tile: int, default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Read the grids of tiles from sizes in pixels, of which both files may have the same list."""
    sizes = table.get(_PINPOINTS, default)
    if config.get(_PINPOINTS, None) not in (None, sizes):
        raise config.error(_PINPOINTS, "those of the preprocessing")
    if config.get(_PINPOINTS, None) is None and sizes != default:
        raise table.error(_PINPOINTS, "those of config.json")
    found = []
    for size in sizes if isinstance(sizes, list) else []:
        is_pair = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
        if not is_pair or any(side % tile for side in size) or size[0] * size[1] > _MAX_TILES * tile**2:
            raise table.error(_PINPOINTS, f"heights and widths of up to {_MAX_TILES} whole tiles of {tile} pixels")
        found.append((size[0] // tile, size[1] // tile))
    if not found:
        raise table.error(_PINPOINTS, "a list of sizes")
    return tuple(found)
