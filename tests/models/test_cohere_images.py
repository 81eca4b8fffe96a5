"""Images of Cohere 2 Vision and Aya Vision: grids of tiles, the text around them, and configs that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.tiles import grid_size
from jaxserve.model_config.preprocessing.images import GridTiles
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of
from tests.models.vision_model import count_tokens

MODEL = DATA / "vision" / "cohere2_vision_tiny"
AYA = DATA / "vision" / "aya_vision_tiny"
AYA_ODD = DATA / "vision" / "aya_vision_odd_tiny"


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((512, 512), (1, 1)),
        ((512, 513), (1, 2)),
        ((2000, 300), (4, 1)),
        ((1000, 1500), (2, 3)),
        ((3000, 3000), (3, 3)),
    ],
)
def test_grids_are_those_of_transformers(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Widths and heights, columns and rows; a script compared 1,960 sizes."""
    assert grid_size(*size, GridTiles(512, 1, 12, is_nearest_size=True)) == grid


def test_a_break_follows_each_tile_and_marks_stand_around_all() -> None:
    config = processor_of(MODEL)
    large, small = (process_image(picture(*size, 0), config).text for size in ((30, 45), (20, 22)))
    tile = 4 * "<|IMG_PATCH|>" + "<|IMG_LINE_BREAK|>"
    assert large == f"<|START_OF_IMG|>{3 * tile}<|END_OF_IMG|>"
    assert small == f"<|START_OF_IMG|>{tile}<|END_OF_IMG|>"


def test_an_image_is_one_tile_if_the_preprocessing_does_not_cut_it(tmp_path: Path) -> None:
    folder = changed(tmp_path, MODEL, {"crop_to_patches": False})
    assert count_tokens(80, 50, processor_of(folder)) == [4]
    assert vision_of(folder).image_patches == 16


def test_tiles_of_aya_vision_have_numbers() -> None:
    config, tokens = processor_of(AYA), 4 * "<|IMG_PATCH|>"
    large, small = (process_image(picture(*size, 0), config).text for size in ((80, 50), (20, 22)))
    tiles = f"TILE_1{tokens}TILE_2{tokens}"
    assert large == f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{tokens}<|END_OF_IMG|>"
    assert small == f"<|START_OF_IMG|>TILE_GLOBAL{tokens}<|END_OF_IMG|>"


def test_features_of_aya_vision_may_be_those_of_any_layer_and_later_layers_are_not_loaded() -> None:
    whole, earlier = vision_of(AYA), vision_of(AYA_ODD)
    assert (whole.num_layers, whole.connector_width, whole.has_final_norm) == (2, 48, False)
    assert (earlier.num_layers, earlier.connector_width, earlier.connector_eps) == (2, 44, 1e-3)
    assert "layers.2." in earlier.unused_tensors and "layers.2." not in whole.unused_tensors
