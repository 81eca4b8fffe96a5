"""Llama 4's images: grids of tiles and margins, the text around them, and configs that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.tiles import canvas_grid
from jaxserve.model_config.preprocessing.images import CanvasTiles
from jaxserve.models.registry import open_model
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of
from tests.models.vision_model import count_tokens

MODEL = DATA / "vision" / "llama4_vision_tiny"


@pytest.mark.parametrize(
    ("size", "is_enlarged", "grid"),
    [
        ((336, 336), False, (1, 1)),
        ((337, 336), False, (2, 1)),
        ((100, 900), False, (1, 3)),
        ((1000, 1000), False, (3, 3)),
        ((3000, 2000), False, (5, 3)),
        ((10, 4000), False, (1, 12)),
        ((336, 336), True, (4, 4)),
        ((200, 300), True, (3, 5)),
    ],
)
def test_grids_are_those_of_transformers(size: tuple[int, int], is_enlarged: bool, grid: tuple[int, int]) -> None:
    """Sizes are heights and widths; a script compared 5,340 of them."""
    assert canvas_grid(*size, CanvasTiles(336, 16, is_enlarged)) == grid


def test_an_image_keeps_its_size_above_black_margins_and_is_stretched_in_the_last_tile() -> None:
    image = picture(40, 30, 0)
    *tiles, whole = process_image(image, processor_of(MODEL)).items
    assert [len(tiles), tiles[0].num_tokens, len(tiles[0].patches)] == [4, 4, 17]
    pixels = np.zeros((56, 56, 3), np.uint8)
    for index, tile in enumerate(tiles):
        for patch, (row, column) in zip(tile.patches[1:], tile.positions[1:], strict=True):
            top, left = 28 * (index // 2) + 7 * row, 28 * (index % 2) + 7 * column
            pixels[top : top + 7, left : left + 7] = patch.reshape(3, 7, 7).transpose(1, 2, 0)
    np.testing.assert_array_equal(pixels[:30, :40], np.asarray(image))
    assert not pixels[30:].any() and not pixels[:, 40:].any()
    assert whole.positions[0].tolist() == [0, -1] and whole.patches[1:].any()


def test_tiles_have_separators_and_a_small_image_is_one_tile() -> None:
    config = processor_of(MODEL)
    large, small = (process_image(picture(*size, 0), config).text for size in ((40, 30), (20, 22)))
    tokens = 4 * "<|patch|>"
    row = f"{tokens}<|tile_x_separator|>{tokens}<|tile_y_separator|>"
    assert large == f"<|image_start|>{row}{row}<|image|>{tokens}<|image_end|>"
    assert small == f"<|image_start|><|image|>{tokens}<|image_end|>"


def test_the_largest_grid_is_chosen_if_the_preprocessing_says_so(tmp_path: Path) -> None:
    assert count_tokens(20, 20, processor_of(changed(tmp_path, MODEL, {"resize_to_max_canvas": True}))) == [4] * 5


def test_the_position_of_the_class_token_is_stored_last() -> None:
    checkpoint = open_model(MODEL)
    name = "vision.position_embedding.weight"
    own = np.asarray(checkpoint.read(name))
    assert own.shape == checkpoint.tensors[name].shape == (17, 32)
    (file,) = MODEL.glob("*.safetensors")
    assert bytes(own[1:].view(np.uint8)) + bytes(own[:1].view(np.uint8)) in file.read_bytes()
