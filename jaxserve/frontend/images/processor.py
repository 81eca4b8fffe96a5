"""Resizes and cuts a decoded image as its checkpoint says, and writes the text that stands for it in a prompt.

Sizes and pixels equal those of transformers' image processors with `backend="pil"`. Its default ones resize with torchvision,
which differs by 1 / 255 in a few pixels of a hundred. Patches stay 8-bit: the tower normalises them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from PIL import Image

from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.images.covering import covering_marks, covering_sources, covering_tiles, mark_texts
from jaxserve.frontend.images.joined import joined_sources, joined_tiles
from jaxserve.frontend.images.patches import as_read, cut_patches
from jaxserve.frontend.images.resize import resize, rounded_down
from jaxserve.frontend.images.sliced import sliced_text, slices
from jaxserve.frontend.images.tiles import canvas_tiles, cut_grid, grid_tiles, marked_tiles, square_tiles
from jaxserve.model_config.preprocessing.images import (
    AreaSizes,
    BudgetSizes,
    CanvasTiles,
    CentralSquare,
    CoveringTiles,
    Enlargement,
    FixedSize,
    GridTiles,
    ImageMarkup,
    ImageProcessorConfig,
    JoinedTiles,
    LimitedSides,
    MarkedTiles,
    NearestBlocks,
    PaddedSizes,
    PanAndScan,
    Resampling,
    SlicedAreas,
    TiledAreas,
    TileSizes,
)

_MAX_RATIO: Final = 200
"""Largest ratio of the sides of an image whose area is bounded (transformers' constant)."""
_MAX_PADDED_SIDE: Final = 10_000
"""Pixels of a side of a square that an image is padded to: 300 MB."""


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """One grid of patches that a tower encodes by itself: an image, or a tile of one."""

    patches: np.ndarray
    """uint8 (P, F): block by block, those of a block row by row; of a patch channels, then rows, then columns. Blocks of a tower with
    windows follow each other window by window, others row by row."""
    positions: np.ndarray
    """int32 (P, 2): row and column of each patch. A class token, before all patches, has row 0 and column -1."""
    grid: tuple[int, int]
    """Patches in a column and in a row."""
    num_tokens: int
    """Embeddings that the tower makes of it."""
    line: int = 0
    """Embeddings of a row, if prompts have a line break between rows; 0: they have none."""
    sources: np.ndarray | None = None
    """int32 (N, S): see `VisionConfig.num_sources`; None: S is 0."""
    time: int | None = None
    """Rotary positions between the first group of frames of a video and this one, which shares its place (M-RoPE); None: the item has a
    place of its own."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as a prompt and a tower get it."""

    items: tuple[EncoderItem, ...]
    """In the order of their tokens in the prompt."""
    text: str
    """Text that replaces `ImageMarkup.placeholder` in the rendered prompt. Encoded with its control tokens, it has
    `num_tokens` image tokens."""

    @property
    def num_tokens(self) -> int:
        """Embeddings of all items."""
        return sum(item.num_tokens for item in self.items)


def process_image(image: Image.Image, config: ImageProcessorConfig, *, is_alone: bool = True) -> ProcessedImage:
    """Cut an RGB image into the items that the tower encodes.

    is_alone: the prompt has no other image. Raises InvalidRequestError for an image of an impossible shape.
    """
    if isinstance(config.sizes, JoinedTiles):
        item = _joined_item(image, config.sizes, config, is_alone=is_alone)
        return ProcessedImage((item,), _text((0, 0), [_tokens(item, config.markup)], config.markup))
    if isinstance(config.sizes, CoveringTiles):
        return _marked_image(image, config.sizes, config)
    grid, tiles = _resized(image, config)
    items = tuple(_item(np.asarray(tile), config) for tile in tiles)
    if isinstance(config.sizes, SlicedAreas):
        return ProcessedImage(items, sliced_text(grid, [_tokens(item, config.markup) for item in items], config.markup))
    tokens = [_tokens(item, config.markup) + config.markup.tile_end for item in items]
    if isinstance(config.sizes, GridTiles) and not config.markup.tile:  # nothing stands between them
        grid, tokens = (0, 0), ["".join(tokens)]
    is_cropped = isinstance(config.sizes, FixedSize) and len(items) > 1
    text = _cropped_text(tokens, config.markup) if is_cropped else _text(grid, tokens, config.markup)
    return ProcessedImage(items, text)


def _joined_item(
    image: Image.Image, sizes: JoinedTiles, config: ImageProcessorConfig, *, is_alone: bool
) -> EncoderItem:
    """Return the only item of an image, with all of its tiles."""
    if sizes.padding is not None and not is_alone:
        square = CentralSquare(sizes.tile, sizes.tile, sizes.padding)
        grid, tiles = (0, 0), [_central_square(image, square, config.resampling)]
    else:
        grid, tiles = joined_tiles(image, sizes, config.resampling)
    items = [_item(np.asarray(tile), config) for tile in tiles]
    side = sizes.tile // config.patch_size // config.merge
    sources = joined_sources(image.height, image.width, grid, side, sizes)
    patches, positions = (
        np.concatenate(parts) for parts in zip(*((each.patches, each.positions) for each in items), strict=True)
    )
    return EncoderItem(patches, positions, items[0].grid, len(sources), sources=sources)


def _marked_image(image: Image.Image, sizes: CoveringTiles, config: ImageProcessorConfig) -> ProcessedImage:
    """Return an image whose tiles have marks before and after their embeddings."""
    grid, tiles = covering_tiles(image, sizes, config.resampling)
    marks, items, text = mark_texts(config.markup), [], ""
    for tile, (before, after) in zip(tiles, covering_marks(grid), strict=True):
        item = _item(np.asarray(tile), config)
        sources = covering_sources(before, item.num_tokens, after)
        text += "".join(
            [*(marks[each] for each in before), _tokens(item, config.markup), *(marks[each] for each in after)]
        )
        items.append(replace(item, num_tokens=len(sources), sources=sources))
    return ProcessedImage(tuple(items), text)


def _resized(image: Image.Image, config: ImageProcessorConfig) -> tuple[tuple[int, int], list[Image.Image]]:
    """Return rows and columns of the tiles that the whole image is cut into, (0, 0) if it is not, and all tiles or crops."""
    match config.sizes:
        case TileSizes() as sizes:
            return square_tiles(image, sizes, config.resampling)
        case GridTiles() as sizes:
            return grid_tiles(image, sizes, config.resampling)
        case CanvasTiles() as sizes:
            return canvas_tiles(image, sizes, config.resampling)
        case MarkedTiles() as sizes:
            return marked_tiles(image, sizes, config.resampling)
        case SlicedAreas() as sizes:
            return slices(image, sizes, config.patch_size * config.merge, config.resampling)
        case TiledAreas() as sizes:
            return _tiled_area(image, sizes, config)
        case AreaSizes() as sizes:
            factor = config.patch_size * config.merge
            size = bounded_size(image.height, image.width, factor, sizes)
        case FixedSize() as sizes:
            parts = [image, *map(image.crop, _crops(image.width, image.height, sizes.crops))]
            return (0, 0), [resize(part, sizes.height, sizes.width, config.resampling) for part in parts]
        case CentralSquare() as sizes:
            return (0, 0), [_central_square(image, sizes, config.resampling)]
        case BudgetSizes() as sizes:
            size = budget_size(image.height, image.width, config.patch_size, config.merge, sizes.max_patches)
        case LimitedSides(longest):
            size = _limited_size(image.height, image.width, config.patch_size * config.merge, longest)
        case NearestBlocks(most):
            size = _nearest_blocks(image.height, image.width, config.patch_size * config.merge, most)
        case JoinedTiles() | CoveringTiles():
            raise AssertionError("an image with learned vectors among its embeddings")
        case PaddedSizes() as sizes:
            return (0, 0), [_padded(image, config, sizes)]
    return (0, 0), [resize(image, *size, config.resampling)]


def bounded_size(height: int, width: int, factor: int, sizes: AreaSizes) -> tuple[int, int]:
    """Return multiples of `factor` near the image's sides, with an area within the bounds, and no more than the engine can encode."""
    shown = f"{width} x {height}"
    height, width = _enlarged(height, width, factor, sizes.enlargement)
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise InvalidRequestError(
            f"The image has {shown} pixels; this model takes sides of a ratio up to {_MAX_RATIO}."
        )
    size = _area_size(height, width, factor, sizes)
    if sizes.bound is None or size[0] * size[1] <= sizes.bound:
        return size
    return rounded_down(height, width, factor, math.sqrt(height * width / sizes.bound))


def _area_size(height: int, width: int, factor: int, sizes: AreaSizes) -> tuple[int, int]:
    least, frames = factor if sizes.has_whole_blocks else 0, sizes.frames
    compared = frames if sizes.compared_frames is None else sizes.compared_frames
    new_height, new_width = (max(round(side / factor) * factor, least) for side in (height, width))
    if compared * new_height * new_width > sizes.max_pixels:
        return rounded_down(height, width, factor, math.sqrt(frames * height * width / sizes.max_pixels))
    if compared * new_height * new_width < sizes.min_pixels:
        ratio = math.sqrt(sizes.min_pixels / (frames * height * width))
        return tuple(math.ceil(side * ratio / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


def _enlarged(height: int, width: int, factor: int, rule: Enlargement) -> tuple[int, int]:
    """Return the sides of an image, of which none is shorter than `factor` pixels if the rule says so."""
    if rule == "both" and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        return int(height * scale), int(width * scale)
    if rule == "in_turn" and height < factor:
        height, width = factor, round(width * factor / height)
    if rule == "in_turn" and width < factor:
        height, width = round(height * factor / width), factor
    return height, width


def budget_size(height: int, width: int, patch: int, merge: int, max_patches: int) -> tuple[int, int]:
    """Return multiples of a block's side in the image's proportions, as large as `max_patches` patches allow."""
    block = patch * merge
    factor = math.sqrt(max_patches * patch**2 / (height * width))
    new_height, new_width = (math.floor(factor * side / block) * block for side in (height, width))
    if not new_height and not new_width:
        raise InvalidRequestError(f"The image has {width} x {height} pixels; {max_patches} patches cannot show it.")
    longest = max_patches // merge**2 * block
    if not new_height:
        return block, min(width // height * block, longest)
    if not new_width:
        return min(height // width * block, longest), block
    return new_height, new_width


def _limited_size(height: int, width: int, block: int, longest: int) -> tuple[int, int]:
    """Return multiples of `block`, rounded up, of the image's sides, which are reduced to `longest` pixels."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = (max(math.floor(side / ratio), 1) for side in (height, width))
    return -(-height // block) * block, -(-width // block) * block


def _nearest_blocks(height: int, width: int, block: int, most: int) -> tuple[int, int]:
    """Return multiples of `block` near the image's sides. Raises InvalidRequestError for a strip of more than `most` blocks."""
    rows, columns = height / block, width / block
    ratio = columns / rows
    if rows * columns > most:
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    # Of equally good pairs transformers takes the first one of a set, whose order follows from the numbers.
    ends = [(math.floor(side), math.ceil(side)) for side in (rows, columns)]
    found = {(row, column) for row in ends[0] for column in ends[1]}
    pairs = [pair for pair in found if min(pair) >= 1 and pair[0] * pair[1] <= most]
    if not pairs:
        raise InvalidRequestError(
            f"The image has {width} x {height} pixels, a strip that {most} blocks of {block} pixels cannot show in its proportions."
        )
    best = min(pairs, key=lambda pair: abs(pair[0] / pair[1] - height / width))
    return best[0] * block, best[1] * block


def _padded(image: Image.Image, config: ImageProcessorConfig, sizes: PaddedSizes) -> Image.Image:
    block, budget = config.patch_size * config.merge, float(sizes.max_patches)
    while True:
        size = _reduced_size(image.height, image.width, config.patch_size, sizes.max_side, budget)
        height, width = (-(-side // block) * block for side in size)
        count = height * width // config.patch_size**2
        if sizes.bound is None or count <= sizes.bound or count == config.merge**2:
            break
        budget *= sizes.bound / count
    padded = Image.new("RGB", (width, height))
    padded.paste(resize(image, *size, config.resampling))
    return padded


def _reduced_size(height: int, width: int, patch: int, max_side: int, budget: float) -> tuple[int, int]:
    """Return the sides of an image with at most `budget` whole patches, `max_side` of them in a row and in a column."""
    longest = max_side * patch
    count = max(height // patch, 1) * max(width // patch, 1)
    scale = min(1.0, math.sqrt(budget / count), longest / height, longest / width)
    return tuple(min(max(int(side * scale), 1), longest) for side in (height, width))  # type: ignore[return-value]


def _central_square(image: Image.Image, sizes: CentralSquare, resampling: Resampling) -> Image.Image:
    if sizes.padding is not None and image.width != image.height:
        longest = max(image.size)
        if longest > _MAX_PADDED_SIDE:
            raise InvalidRequestError(
                f"The image has {image.width} x {image.height} pixels; this model pads images to squares and takes sides of "
                f"at most {_MAX_PADDED_SIDE} pixels."
            )
        square = Image.new("RGB", (longest, longest), sizes.padding)
        square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
        image = square
    shortest = min(image.size)
    width, height = (int(sizes.shortest * each / shortest) for each in image.size)
    scaled = resize(image, height, width, resampling)
    left, top = (width - sizes.side) // 2, (height - sizes.side) // 2
    return scaled.crop((left, top, left + sizes.side, top + sizes.side))


def _tiled_area(
    image: Image.Image, sizes: TiledAreas, config: ImageProcessorConfig
) -> tuple[tuple[int, int], list[Image.Image]]:
    factor = config.patch_size * config.merge
    whole = resize(image, *bounded_size(image.height, image.width, factor, sizes.whole), config.resampling)
    height, width = (max(round(side / factor) * factor, config.patch_size) for side in (image.height, image.width))
    if height * width <= sizes.most_pixels:
        return (0, 0), [whole]
    grid, tiles = cut_grid(image, sizes.grid, config.resampling)
    return grid, [*tiles, whole] if sizes.has_whole else tiles


def _crops(width: int, height: int, rule: PanAndScan | None) -> list[tuple[int, int, int, int]]:
    """Return left, top, right and bottom of each crop of an image of `width` x `height` pixels; the last one may be shorter."""
    if rule is None:
        return []
    longest, shortest = max(width, height), min(width, height)
    if longest / shortest < rule.min_ratio:
        return []
    count = min(longest // rule.min_crop_size, math.floor(longest / shortest + 0.5))
    length = math.ceil(longest / min(max(count, 2), rule.max_crops))
    if min(length, shortest) < rule.min_crop_size:
        return []
    spans = [(start, min(start + length, longest)) for start in range(0, longest, length)]
    if width >= height:
        return [(start, 0, end, height) for start, end in spans]
    return [(0, start, width, end) for start, end in spans]


def _item(pixels: np.ndarray, config: ImageProcessorConfig) -> EncoderItem:
    patch, merge = config.patch_size, config.merge
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches, positions = as_read(
        *cut_patches(pixels, patch, merge),
        merge**2,
        window=config.window,
        inner_merge=config.inner_merge,
        has_class_token=config.has_class_token,
    )
    line = width // merge if config.markup.line_break else 0
    return EncoderItem(np.ascontiguousarray(patches), positions, (height, width), height * width // merge**2, line)


def _tokens(item: EncoderItem, markup: ImageMarkup) -> str:
    """Return the tokens of an item."""
    line = item.line or item.num_tokens
    return markup.line_break.join([markup.token * line] * (item.num_tokens // line))


def _text(grid: tuple[int, int], tokens: list[str], markup: ImageMarkup) -> str:
    """Return the text of an image from the tokens of its items: tiles row by row, then the whole image."""
    return "".join(_parts(grid, iter(tokens), markup))


def _cropped_text(tokens: list[str], markup: ImageMarkup) -> str:
    """Return the text of an image and its crops from the tokens of each."""
    image, *crops = (_text((0, 0), [own], markup) for own in tokens)
    return markup.cropped.format(image=image, crops=" ".join(crops))


def _parts(grid: tuple[int, int], tokens: Iterator[str], markup: ImageMarkup) -> Iterator[str]:
    rows, columns = grid
    yield markup.opening
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield markup.tile_break if column > 1 else ""
            number = (row - 1) * columns + column
            yield markup.begin + markup.tile.format(row=row, column=column, number=number) + next(tokens)
        yield markup.row_end
    for whole in tokens:
        if rows:
            yield markup.tiles_end + markup.begin + markup.whole + whole + markup.whole_end
        else:
            yield markup.begin + markup.single + whole
    yield markup.end
