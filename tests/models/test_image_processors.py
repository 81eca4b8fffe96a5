"""Pixels of pictures of extreme sizes against transformers' own image processors, one of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.images.processor import process_image
from jaxserve.model_config.preprocessing.images import GridTiles, ImageProcessorConfig, LimitedSides
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import processor_of

NAMES = (
    "smolvlm_tiny", "idefics3_tiny", "qwen3_vl_tiny", "qwen2_5_vl_tiny", "glm4v_tiny", "gemma3_vision_tiny",
    "gemma4_vision_tiny", "gemma4_vision_odd_tiny", "mistral3_vision_tiny", "pixtral_odd_tiny", "llava_tiny",
    "llava_siglip_odd_tiny", "internvl_tiny", "paddleocr_vl_tiny", "paddleocr_vl_odd_tiny",
    "granite_docling_tiny", "granite_docling_odd_tiny",
)  # fmt: skip
SIZES = (
    (1, 1), (2, 1), (3, 7), (17, 3), (1, 200), (1, 300), (600, 3), (1, 2000), (3000, 17), (13, 999), (333, 332), (33, 32),
)  # fmt: skip
"""Widths and heights."""


def canvas(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the (3, height, width) pixels of patches (P, F), given the row and column of each."""
    side = round((patches.shape[-1] // 3) ** 0.5)
    rows, columns = places.max(axis=0) + 1
    pixels = np.zeros((rows, columns, 3, side, side), np.uint8)
    pixels[tuple(places.T)] = patches.reshape(-1, 3, side, side)
    return pixels.transpose(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


def found_in(image: Any, config: ImageProcessorConfig) -> list[np.ndarray]:
    """Return the pixels of each item."""
    items = process_image(image, config).items
    kept = [item.positions[:, 1] >= 0 for item in items]  # without a class token
    return [canvas(item.patches[own], item.positions[own]) for item, own in zip(items, kept, strict=True)]


def expected_of(processor: Any, image: Any, config: ImageProcessorConfig) -> list[np.ndarray]:
    """Return the pixels of each image or tile that transformers' processor makes."""
    options: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    if isinstance(config.sizes, GridTiles):
        options["crop_to_patches"] = True
    if isinstance(config.sizes, LimitedSides):  # as its processor of images and texts does
        options["patch_size"] = {"height": config.patch_size * config.merge, "width": config.patch_size * config.merge}
    made = processor(images=[[image]], **options)
    values = np.asarray(made["pixel_values"])
    if "image_grid_thw" in made:
        _, height, width = np.asarray(made["image_grid_thw"])[0]
        rows, columns = np.indices((height, width)).reshape(2, -1)
        if values.ndim == 4:  # one frame, row by row
            return [canvas(values.reshape(len(values), -1), np.stack([rows, columns], axis=1))]
        order = np.lexsort((columns % config.merge, rows % config.merge, columns // config.merge, rows // config.merge))
        frames = values.reshape(len(values), 3, 2, -1)
        return [canvas(frames[:, :, 0].reshape(len(values), -1), np.stack([rows, columns], axis=1)[order])]
    if "image_position_ids" in made:
        places = np.asarray(made["image_position_ids"])[0]
        is_patch = places[:, 0] >= 0
        patches = values[0][is_patch].reshape(is_patch.sum(), -1, 3).transpose(0, 2, 1)
        return [canvas(patches.reshape(len(patches), -1), places[is_patch][:, ::-1])]
    if "image_sizes" in made:
        height, width = np.asarray(made["image_sizes"])[0]
        return [values[0][:, :height, :width]]
    return list(values.reshape(-1, *values.shape[-3:]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pixels_of_pictures_of_extreme_sizes_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    path: Path = DATA / "vision" / name
    config = processor_of(path)
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        try:
            expected = expected_of(processor, image, config)
        except ValueError:  # sides of a ratio over 200, or a strip that is reduced to no pixel
            if isinstance(config.sizes, LimitedSides):
                (strip,) = found_in(image, config)
                assert min(strip.shape[1:]) == config.patch_size * config.merge
                continue
            assert max(size) > 200 * min(size)
            with pytest.raises(InvalidRequestError, match=f"{size[0]} x {size[1]} pixels"):
                process_image(image, config)
            continue
        found = found_in(image, config)
        assert len(found) == len(expected), size
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, other, err_msg=str(size))
