"""Cuts a large image into slices of its proportions, after the whole image (MiniCPM-V 4.6)."""

from __future__ import annotations

import math

from PIL import Image

from jaxserve.frontend.images.resize import resize, rounded_down
from jaxserve.model_config.preprocessing.images import ImageMarkup, Resampling, SlicedAreas


def slices(
    image: Image.Image, sizes: SlicedAreas, block: int, resampling: Resampling
) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the grid, (0, 0) if the image is not cut, and the whole image, followed by its slices.

    block: pixels of the side of a block.
    """
    rows, columns = _grid(image.height, image.width, sizes)
    size = _scaled(image.height, image.width, sizes, block, is_enlarged=not rows)
    whole = resize(image, *size, resampling)
    if not rows:
        return (0, 0), [whole]
    height, width = _scaled(
        _divided(image.height, rows) / rows,
        _divided(image.width, columns) / columns,
        sizes,
        block,
        is_enlarged=True,
    )
    grid = resize(image, height * rows, width * columns, resampling)
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return (rows, columns), [whole, *(grid.crop((x, y, x + width, y + height)) for x, y in corners)]


def sliced_text(grid: tuple[int, int], tokens: list[str], markup: ImageMarkup) -> str:
    """Return the text of an image from the tokens of the whole image and of its slices row by row."""
    whole, *own = tokens
    marked = [markup.tile + each + markup.tile_end for each in own]
    rows = ("".join(marked[start : start + grid[1]]) for start in range(0, len(marked), grid[1] or 1))
    return markup.begin + whole + markup.end + markup.row_end.join(rows)


def _grid(height: int, width: int, sizes: SlicedAreas) -> tuple[int, int]:
    """Return rows and columns of the grid with the nearest proportions, of the last one with most rows; (0, 0): the image is not cut."""
    count = min(math.ceil(width * height / sizes.side**2), sizes.max_slices)
    if count <= 1:
        return 0, 0
    best, least, wanted = (1, 1), math.inf, math.log(width / height)
    for number in (count - 1, count, count + 1):
        if number == 1 or number > sizes.max_slices:
            continue
        for rows in range(1, number + 1):
            if number % rows:
                continue
            error = abs(wanted - math.log(number // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, number // rows), error
    return best


def _scaled(height: float, width: float, sizes: SlicedAreas, block: int, *, is_enlarged: bool) -> tuple[int, int]:
    """Return multiples of `block` near the sides of an image that is scaled to the area of a square, with no more pixels than
    the engine can encode.

    is_enlarged: a smaller one is scaled, too.
    """
    if height * width > sizes.side**2 or is_enlarged:
        ratio = width / height
        height = int(sizes.side / math.sqrt(ratio))
        width = int(height * ratio)
    size = _divided(height, block), _divided(width, block)
    if sizes.bound is None or size[0] * size[1] <= sizes.bound:
        return size
    return rounded_down(height, width, block, math.sqrt(height * width / sizes.bound))


def _divided(length: float, unit: int) -> int:
    """Return the multiple of `unit` nearest to a length, at least one."""
    return max(round(length / unit) * unit, unit)
