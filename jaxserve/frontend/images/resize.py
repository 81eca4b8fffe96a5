"""Resizes images with Pillow."""

from __future__ import annotations

import math
from typing import Final

from PIL import Image

from jaxserve.model_config.preprocessing.images import Resampling

_FILTERS: Final[dict[Resampling, Image.Resampling]] = {
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


def resize(image: Image.Image, height: int, width: int, resampling: Resampling) -> Image.Image:
    """Return the image with these sides, itself if it has them."""
    return image if image.size == (width, height) else image.resize((width, height), _FILTERS[resampling])


def rounded_down(height: float, width: float, block: int, ratio: float) -> tuple[int, int]:
    """Return multiples of `block`, at least one, below the sides of an image that is reduced by `ratio`."""
    return tuple(max(block, math.floor(side / ratio / block) * block) for side in (height, width))  # type: ignore[return-value]
