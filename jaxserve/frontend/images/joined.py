"""Cuts an image into tiles that one encoder input has, and says what each of its embeddings is: see `JoinedTiles`."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from jaxserve.frontend.images.resize import resize
from jaxserve.model_config.preprocessing.images import JoinedTiles, Resampling

_LEAST_RATIO = 1.1
"""Ratio of the sides of a grid of embeddings to those of the largest one, up to which it is not stretched (transformers' constant)."""

Grid = tuple[int, int]
"""Rows and columns of tiles; (0, 0): an image is not cut."""


def joined_tiles(image: Image.Image, sizes: JoinedTiles, resampling: Resampling) -> tuple[Grid, list[Image.Image]]:
    """Return the grid of an image, and the whole image, followed by the tiles row by row."""
    side, grid = sizes.tile, best_grid(image.height, image.width, sizes)
    whole = resize(image, side, side, resampling)
    if grid == (0, 0):
        return grid, [whole]
    height, width = (side * count for count in grid)
    canvas, scaled = Image.new("RGB", (width, height)), _scaled(image, height, width, resampling)
    canvas.paste(scaled, ((width - scaled.width) // 2, (height - scaled.height) // 2))
    corners = [(left, top) for top in range(0, height, side) for left in range(0, width, side)]
    return grid, [whole, *(canvas.crop((x, y, x + side, y + side)) for x, y in corners)]


def best_grid(height: int, width: int, sizes: JoinedTiles) -> Grid:
    """Return the grid that shows most pixels of an image, and of several the one with the fewest others."""
    best, found = (0, -math.inf), sizes.grids[0] if sizes.grids else (0, 0)
    for rows, columns in sizes.grids:
        most_height, most_width = rows * sizes.tile, columns * sizes.tile
        scale = min(most_width / width, most_height / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        value = (shown, shown - most_height * most_width)
        if shown > best[0] or (shown == best[0] and value[1] > best[1] and shown):
            best, found = value, (rows, columns)
    return found


def _scaled(image: Image.Image, height: int, width: int, resampling: Resampling) -> Image.Image:
    """Return an image scaled in its proportions to fit a size."""
    of_width, of_height = width / image.width, height / image.height
    if of_width < of_height:
        height = min(math.ceil(image.height * of_width), height)
    else:
        width = min(math.ceil(image.width * of_height), width)
    return resize(image, height, width, resampling)


def joined_sources(height: int, width: int, grid: Grid, side: int, sizes: JoinedTiles) -> np.ndarray:
    """Return int32 (N, S), the sources of an image's embeddings (`VisionConfig.num_sources`): those of the whole image, then the rows of the
    grid without its margins, each with a learned vector at its end.

    height, width: of the image. side: embeddings of a tile's side.
    """
    rows, columns = grid
    whole, newline = np.arange(side**2)[:, None], (1 + rows * columns) * side**2
    if grid == (0, 0):
        return _numbers(np.concatenate([whole, [[newline]]]), sizes, np.ones(1))
    joined = side**2 + np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
    joined = _without_margins(joined.swapaxes(1, 2).reshape(rows * side, columns * side), height, width)
    ratio = 0.0 if sizes.most_tiles is None else math.sqrt(joined.size / (sizes.most_tiles * side**2))
    places, shares = joined[..., None], np.ones((*joined.shape, 1))
    if ratio > _LEAST_RATIO:
        places, shares = _between(joined, int(joined.shape[0] // ratio), int(joined.shape[1] // ratio))
    count, num_lines = places.shape[2], len(places)
    ends = np.zeros((num_lines, 1, count))
    ends[..., 0] = 1
    lines = np.concatenate([places, np.full((num_lines, 1, count), newline)], axis=1).reshape(-1, count)
    of_lines = np.concatenate([shares, ends], axis=1).reshape(-1, count)
    return np.concatenate([_numbers(whole, sizes, np.ones(1)), _numbers(lines, sizes, of_lines)])


def _without_margins(places: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the part of a grid that an image in the middle covers; sizes are rounded as by transformers."""
    rows, columns = places.shape
    if width / height > columns / rows:
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return places[margin : rows - margin]
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return places[:, margin : columns - margin]


def _between(places: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four places around each of a grid of height x width that is stretched over `places`, and their shares (bilinear)."""
    axes = []
    for stored, count in ((places.shape[0], height), (places.shape[1], width)):
        exact = np.maximum((np.arange(count) + 0.5) * stored / count - 0.5, 0)
        low = np.minimum(exact.astype(int), stored - 1)
        past = exact - low
        axes.append(((low, 1 - past), (np.minimum(low + 1, stored - 1), past)))
    pairs = [(row, column) for row in axes[0] for column in axes[1]]
    found = [places[row[:, None], column] for (row, _), (column, _) in pairs]
    return np.stack(found, axis=-1), np.stack(
        [of_row[:, None] * of_column for (_, of_row), (_, of_column) in pairs], axis=-1
    )


def _numbers(places: np.ndarray, sizes: JoinedTiles, shares: np.ndarray) -> np.ndarray:
    """Return places, (N, 1) or (N, 4), and their shares as numbers of a source."""
    if sizes.most_tiles is None:
        return places.astype(np.int32)
    found = np.zeros((2, len(places), 4), np.int32)
    found[0, :, : places.shape[1]] = places
    found[1, :, : places.shape[1]] = np.broadcast_to(shares, places.shape).astype(np.float32).view(np.int32)
    return np.concatenate(list(found), axis=1)
