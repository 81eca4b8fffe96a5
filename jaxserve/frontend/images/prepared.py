"""From a decoded image to what crosses to the engine: the model's image processor, limits and digests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.errors import CheckpointError, RequestError
from jaxserve.frontend.images.decode import ImageError
from jaxserve.frontend.images.processor import EncoderItem, process_image
from jaxserve.frontend.images.protocol import PreparedImage, PreparedItem
from jaxserve.model_config.preprocessing.images import (
    AreaSizes,
    BudgetSizes,
    ImageProcessorConfig,
    JoinedTiles,
    LimitedSides,
    NearestBlocks,
    PaddedSizes,
    SlicedAreas,
    TiledAreas,
)


def load_preparer(
    path: Path, max_patches: int, mmproj: Path | None = None
) -> Callable[[Image.Image, bool], PreparedImage]:
    """Return the function that prepares images for the checkpoint at `path`, of which some are the only ones of their prompts.

    max_patches: patches of one item that the engine can encode; images of a model that takes any size are reduced to it.
    mmproj: the GGUF file with the image encoder of a GGUF text model. Raises CheckpointError.
    """
    config = read_image_processor(path, mmproj)
    if config is None:
        raise CheckpointError(f"{path}: no preprocessor_config.json, which says how images are prepared")
    bounded = with_bounded_area(config, max_patches)

    def prepare(image: Image.Image, is_alone: bool) -> PreparedImage:
        try:
            processed = process_image(image, bounded, is_alone=is_alone)
        except RequestError as error:
            raise ImageError(error.message.rstrip(".")) from None
        for item in processed.items:
            if len(item.patches) > max_patches:
                raise ImageError(
                    f"it has {len(item.patches)} patches, at most {max_patches} can be encoded (--max-image-patches)"
                )
        return PreparedImage(list(map(prepared_item, processed.items)), processed.text)

    return prepare


def with_bounded_area(config: ImageProcessorConfig, max_patches: int) -> ImageProcessorConfig:
    """Return the preprocessing with no image larger than `max_patches`, for a model that takes images of any size."""
    match config.sizes:
        case AreaSizes() | SlicedAreas() as sizes:
            return replace(config, sizes=replace(sizes, bound=max_patches * config.patch_size**2))
        case TiledAreas(whole, grid) as sizes:
            whole = replace(whole, bound=max_patches * config.patch_size**2)
            is_cut = (grid.tile // config.patch_size) ** 2 <= max_patches
            return replace(config, sizes=replace(sizes, whole=whole) if is_cut else whole)
        case JoinedTiles(tile, grids) as joined:
            own = (tile // config.patch_size) ** 2 + config.has_class_token
            held = tuple((rows, columns) for rows, columns in grids if (rows * columns + 1) * own <= max_patches)
            return replace(config, sizes=replace(joined, grids=held))
        case BudgetSizes(budget):
            return replace(config, sizes=BudgetSizes(min(budget, max_patches)))
        case LimitedSides(longest):
            blocks, block = math.isqrt(max_patches // config.merge**2), config.patch_size * config.merge
            return replace(config, sizes=LimitedSides(min(longest, max(blocks, 1) * block)))
        case NearestBlocks(most):
            return replace(config, sizes=NearestBlocks(min(most, max(max_patches // config.merge**2, 1))))
        case PaddedSizes() as padded:
            return replace(config, sizes=replace(padded, bound=max_patches))
    return config


def prepared_item(item: EncoderItem) -> PreparedItem:
    """Return an item with its digest, as it crosses between processes."""
    patches = np.ascontiguousarray(item.patches, np.uint8)
    positions = np.ascontiguousarray(item.positions, "<i4")
    digest = sha256(f"{patches.shape} {item.grid} {item.num_tokens}:".encode())
    digest.update(positions.tobytes())
    digest.update(patches.tobytes())
    sources = b"" if item.sources is None else np.ascontiguousarray(item.sources, "<i4").tobytes()
    digest.update(sources)
    if item.time is not None:
        digest.update(f"time {item.time}".encode())
    return PreparedItem(
        item.num_tokens,
        item.grid,
        len(patches),
        patches.tobytes(),
        positions.tobytes(),
        digest.digest(),
        item.line,
        sources,
        item.time,
    )
