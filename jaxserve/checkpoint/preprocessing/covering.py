"""Preprocessing of Ovis2: the whole image, then tiles, with marks between them that have learned vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Geometry, Table
from jaxserve.model_config.preprocessing.images import CoveringTiles, GridTiles, ImageMarkup

_MAX_TILES: Final = 64
_MARKS: Final = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Marks in the order of their ids and vectors: those around the whole image, between tiles of a row, between rows, and at the end."""
_IDS: Final = "visual_indicator_token_ids"


def covering(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes of Ovis2."""
    side = table.square("size", 384)
    if table.get("do_center_crop", None):
        raise table.error("do_center_crop", "null")
    most = table.integer("max_patches", 12, _MAX_TILES) if table.flag("crop_to_patches", default=False) else 1
    grid = GridTiles(side, table.integer("min_patches", 1, most) if most > 1 else 1, most)
    start, whole_end, column, row, end = _MARKS
    markup = ImageMarkup(
        placeholder="<image>",
        token="<IMG_ATOM>",
        begin=start,
        whole_end=whole_end,
        tile_break=column,
        row_end=row,
        end=end,
    )
    sizes = CoveringTiles(grid, table.flag("use_covering_area_grid", default=True))
    vision = config.table("vision_config", {})
    patch, stride = vision.integer("patch_size", 14, MAX_SIDE), vision.integer("hidden_stride", 1, 64)
    return Geometry(sizes, patch, stride, markup, mark_token_ids=_mark_ids(config, tokens))


def _mark_ids(config: Table, tokens: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the tokens of the marks, which the tokenizer may describe, too."""
    found = config.get(_IDS, [151666, 151667, 151668, 151669, 151670])
    if not isinstance(found, list) or len(found) != len(_MARKS) or not all(type(each) is int for each in found):
        raise config.error(_IDS, f"the ids of {', '.join(_MARKS)}")
    added = tokens.get("added_tokens_decoder")
    for token_id, text in zip(found, _MARKS, strict=True):
        own = added.get(str(token_id), text) if isinstance(added, dict) else text
        if (own.get("content") if isinstance(own, dict) else own) != text:
            raise config.error(_IDS, f"the ids of {', '.join(_MARKS)}")
    return tuple(found)
