"""Preprocessing that cuts large images into slices of any proportions: MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Geometry, Table, token_text
from jaxserve.model_config.preprocessing.images import ImageMarkup, SlicedAreas

_MAX_SLICES: Final = 64
_MERGE: Final = 2
"""Patches of the side of a window, and windows of the side of a block."""


def sliced(table: Table, config: Table, tokens: Mapping[str, Any]) -> Geometry:
    """Read sizes and marks. With `downsample_mode` 4x, no windows are merged before the connector."""
    mode = table.get("downsample_mode", "16x")
    if mode not in ("16x", "4x"):
        raise table.error("downsample_mode", "16x or 4x")
    slices = table.integer("max_slice_nums", 9, _MAX_SLICES) if table.flag("slice_mode", default=True) else 1
    sizes = SlicedAreas(table.integer("scale_resolution", 448, MAX_SIDE), slices)
    image, inner = token_text(tokens, "image_token", "<|image_pad|>"), _MERGE if mode == "16x" else 1
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        begin=token_text(tokens, "image_start_token", "<image>"),
        end=token_text(tokens, "image_end_token", "</image>"),
        tile=token_text(tokens, "slice_start_token", "<slice>"),
        tile_end=token_text(tokens, "slice_end_token", "</slice>"),
        row_end="\n",
        number=_number(tokens) if table.flag("use_image_id", default=True) else "",
    )
    return Geometry(sizes, table.integer("patch_size", 14, MAX_SIDE), _MERGE * inner, markup, inner_merge=inner)


def _number(tokens: Mapping[str, Any]) -> str:
    begin = token_text(tokens, "image_id_start_token", "<image_id>")
    return begin + "{number}" + token_text(tokens, "image_id_end_token", "</image_id>")
