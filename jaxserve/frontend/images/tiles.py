"""Cuts images into square tiles of one size, as each kind of preprocessing does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
from PIL import Image

from jaxserve.frontend.images.resize import resize
from jaxserve.model_config.preprocessing.images import CanvasTiles, GridTiles, MarkedTiles, Resampling, TileSizes

_MAX_TILED_SIDE: Final = 4096
"""Longest side of an image that is cut into tiles, whatever its checkpoint says (transformers' constant)."""


def square_tiles(
    image: Image.Image, sizes: TileSizes, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, (0, 0) if the image is not cut, and all tiles: see `TileSizes`."""
    side = sizes.tile
    scaled = resize(image, *_scaled_size(image.height, image.width, sizes.longest_edge), resampling)
    height, width = _tiled_size(image.height, image.width, sizes)
    whole = resize(scaled, height, width, resampling)
    rows, columns = height // side, width // side
    if rows * columns == 1:
        return (0, 0), [whole]
    return (rows, columns), [*boxes(whole, side), resize(whole, side, side, resampling)]


def _tiled_size(height: int, width: int, sizes: TileSizes) -> tuple[int, int]:
    """Return the size in whole tiles to which an image is stretched before it is cut."""
    side = sizes.tile
    if not sizes.is_split:
        return side, side
    height, width = _scaled_size(height, width, sizes.longest_edge)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side


def _scaled_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size whose longer side is `longest`, or the largest allowed one; the other side becomes even."""
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        height, width = max(height + height % 2, 1), longest
    else:
        width = int(longest * ratio)
        height, width = longest, max(width + width % 2, 1)
    ratio, most = width / height, _MAX_TILED_SIDE
    if width >= height and width > most:
        height, width = int(most / ratio), most
    elif height > width and height > most:
        height, width = most, int(most * ratio)
    return max(height, 1), max(width, 1)


def grid_tiles(
    image: Image.Image, sizes: GridTiles, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, (0, 0) if the image is not cut, its tiles and the whole image: see `GridTiles`."""
    grid, tiles = cut_grid(image, sizes, resampling)
    return ((0, 0), tiles) if len(tiles) == 1 else (grid, [*tiles, resize(image, sizes.tile, sizes.tile, resampling)])


def marked_tiles(
    image: Image.Image, sizes: MarkedTiles, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, and the tiles of an image and, if there are several, the whole image: see `MarkedTiles`."""
    grid, side = page_grid(image.width, image.height, sizes), sizes.grid.tile
    shape, tiles = cut_grid(image, grid, resampling)
    return shape, tiles if len(tiles) == 1 else [*tiles, resize(image, side, side, resampling)]


def page_grid(width: int, height: int, sizes: MarkedTiles) -> GridTiles:
    """Return the grids that a page may be cut into."""
    grid, rule, ratio = sizes.grid, sizes.dense, width / height
    if rule is None or (rule.min_ratio and ratio <= rule.min_ratio) or (rule.max_ratio and ratio > rule.max_ratio):
        return grid
    columns, _ = grid_size(width, height, grid)
    if rule.scale and columns * grid.tile / width >= rule.scale:
        return grid
    return replace(grid, min_tiles=min(grid.min_tiles, rule.max_tiles), max_tiles=rule.max_tiles)


def cut_grid(image: Image.Image, sizes: GridTiles, resampling: Resampling) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid of an image, and its tiles row by row."""
    side = sizes.tile
    columns, rows = grid_size(image.width, image.height, sizes)
    return (rows, columns), boxes(resize(image, rows * side, columns * side, resampling), side)


def boxes(image: Image.Image, side: int) -> list[Image.Image]:
    """Return the tiles of an image row by row."""
    corners = [(left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


def grid_size(width: int, height: int, sizes: GridTiles) -> tuple[int, int]:
    """Return columns and rows of the grid with the nearest proportions; of several, the largest one of which the image fills more than
    half."""
    best, least = (1, 1), math.inf
    sides = range(1, min(sizes.max_tiles, sizes.max_side or sizes.max_tiles) + 1)
    grids = [(x, y) for x in sides for y in sides if sizes.min_tiles <= x * y <= sizes.max_tiles]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    if sizes.is_nearest_size:
        factors = (np.array(grids) * sizes.tile / np.array([width, height])).min(axis=1)
        enlarging = np.where(factors < 1, np.inf, factors)
        return grids[int(enlarging.argmin() if (factors >= 1).any() else factors.argmax())]
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * sizes.tile**2 * columns * rows
        if distance < least or (distance == least and is_filled):
            best, least = (columns, rows), distance
    return best


def canvas_tiles(
    image: Image.Image, sizes: CanvasTiles, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, (0, 0) if the image is not cut, and all tiles: see `CanvasTiles`."""
    side, (rows, columns) = sizes.tile, canvas_grid(image.height, image.width, sizes)
    canvas = Image.new("RGB", (columns * side, rows * side))
    canvas.paste(resize(image, *_fitting_size(image.height, image.width, (rows, columns), sizes), resampling))
    if rows * columns == 1:
        return (0, 0), [canvas]
    return (rows, columns), [*boxes(canvas, side), resize(image, side, side, resampling)]


def canvas_grid(height: int, width: int, sizes: CanvasTiles) -> tuple[int, int]:
    """Return rows and columns of the best grid: that which enlarges the image least, or else reduces it least, and of several the smallest.

    Factors are float32, as transformers compares them.
    """
    grids = [(rows, count // rows) for count in range(1, sizes.max_tiles + 1) for rows in _divisors(count)]
    limits = np.array(grids, np.float32) * np.float32(sizes.tile) / np.array([height, width], np.float32)
    factors = limits.min(axis=1)
    enlarging = factors[factors >= 1]
    best = (enlarging.max() if sizes.is_enlarged else enlarging.min()) if len(enlarging) else factors.max()
    found = [grid for grid, factor in zip(grids, factors, strict=True) if factor == best]
    return min(found, key=lambda grid: grid[0] * grid[1])


def _divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]


def _fitting_size(height: int, width: int, grid: tuple[int, int], sizes: CanvasTiles) -> tuple[int, int]:
    """Return the size of an image on its canvas; factors of sides that the canvas bounds are float32, as in transformers."""
    sides, side = (height, width), sizes.tile
    whole = (grid[0] * side, grid[1] * side)
    wanted = whole if sizes.is_enlarged else tuple(max(each, side) for each in sides)
    bounds = tuple(map(min, wanted, whole))
    of_height, of_width = (
        np.float32(bound) / np.float32(own) if sizes.is_enlarged or each > most else bound / own
        for bound, own, each, most in zip(bounds, sides, wanted, whole, strict=True)
    )
    if of_width < of_height:
        return max(min(math.floor(height * of_width), bounds[0]), 1), bounds[1]
    return bounds[0], max(min(math.floor(width * of_height), bounds[1]), 1)
