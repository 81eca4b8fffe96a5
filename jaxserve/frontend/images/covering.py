"""Cuts an image into tiles after the whole image, with marks between them that have learned vectors: see `CoveringTiles`."""

from __future__ import annotations

from typing import Final

import numpy as np
from PIL import Image

from jaxserve.frontend.images.resize import resize
from jaxserve.frontend.images.tiles import boxes, grid_size
from jaxserve.model_config.preprocessing.images import CoveringTiles, ImageMarkup, Resampling

_LEAST_SHARE: Final = 0.9
"""Share of an image that the tiles of a grid show unreduced, above which the grid is large enough (transformers' constant)."""
_START, _WHOLE_END, _COLUMN, _ROW, _END = range(5)
"""Numbers of the marks: see `ImageProcessorConfig.mark_token_ids`."""


def covering_tiles(
    image: Image.Image, sizes: CoveringTiles, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, and the whole image, followed by the tiles if there are several."""
    side = sizes.grid.tile
    columns, rows = _covering_grid(image.width, image.height, sizes)
    tiles = boxes(resize(image, rows * side, columns * side, resampling), side)
    return (rows, columns), tiles if len(tiles) == 1 else [resize(image, side, side, resampling), *tiles]


def _covering_grid(width: int, height: int, sizes: CoveringTiles) -> tuple[int, int]:
    """Return columns and rows of the grid. transformers' search takes them for rows and columns."""
    if not sizes.is_covering:
        return grid_size(width, height, sizes.grid)
    sides = range(1, sizes.grid.max_tiles + 1)
    grids = sorted(
        ((x, y) for x in sides for y in sides if x * y <= sizes.grid.max_tiles), key=lambda grid: grid[0] * grid[1]
    )
    shares = {grid: _share(width, height, grid, sizes.grid.tile) for grid in grids}
    enough = [grid for grid in grids if shares[grid] > _LEAST_SHARE]
    if enough:
        return min(enough, key=lambda grid: (grid[0] * grid[1], -shares[grid]))
    return min(grids, key=lambda grid: (-shares[grid], grid[0] * grid[1]))


def _share(width: int, height: int, grid: tuple[int, int], side: int) -> float:
    """Return the area of the parts of an image that a tile shows without reducing them more than to its side, as a share of the image's."""
    rows, columns = grid
    heights = [height // rows] * (rows - 1) + [height - height // rows * (rows - 1)]
    widths = [width // columns] * (columns - 1) + [width - width // columns * (columns - 1)]
    found = 0.0
    for own_height in heights:
        for own_width in widths:
            longest, shortest = max(own_height, own_width), min(own_height, own_width)
            found += side * (shortest / longest * side) if longest > side else longest * shortest
    return found / (width * height)


def covering_marks(grid: tuple[int, int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the numbers of the marks before and after the embeddings of each tile."""
    rows, columns = grid
    if rows * columns == 1:
        return [((_START,), (_WHOLE_END, _END))]
    after = [
        _COLUMN if column < columns else _ROW if row < rows else _END
        for row in range(1, rows + 1)
        for column in range(1, columns + 1)
    ]
    return [((_START,), (_WHOLE_END,)), *(((), (mark,)) for mark in after)]


def mark_texts(markup: ImageMarkup) -> tuple[str, ...]:
    """Return the texts of the marks by their numbers."""
    return markup.begin, markup.whole_end, markup.tile_break, markup.row_end, markup.end


def covering_sources(before: tuple[int, ...], count: int, after: tuple[int, ...]) -> np.ndarray:
    """Return int32 (N, 1), the sources of a tile's embeddings with marks around its `count` outputs (`VisionConfig.num_sources`)."""
    marks = (np.array(numbers, np.int32) + count for numbers in (before, after))
    first, last = marks
    return np.concatenate([first, np.arange(count, dtype=np.int32), last])[:, None]
