"""Pictures for tests, the same on every machine: shades, stripes and noise."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return an RGB picture; another seed gives another picture."""
    noise = np.random.RandomState(seed).randint(0, 60, (height, width, 3))
    rows, columns = np.indices((height, width))
    shades = np.stack([rows * 180 // height, columns * 180 // width, (rows + columns + seed) % 16 * 12], axis=-1)
    return Image.fromarray((shades + noise).astype(np.uint8))
