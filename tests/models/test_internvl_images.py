"""InternVL's images: tiles of any picture, the tensors of its tower, and configs that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.tiles import grid_size
from jaxserve.model_config.preprocessing.images import GridTiles
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import processor_of, vision_of

MODEL = DATA / "vision" / "internvl_tiny"
ODD = DATA / "vision" / "internvl_odd_tiny"
"""With the traits of InternViT-6B."""


def test_grids_of_pictures_of_any_size_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    random = np.random.default_rng(0)
    for side, least, most in ((448, 1, 12), (24, 1, 4), (30, 3, 6)):
        for height, width in random.integers(1, 1500, (100, 2)).tolist():
            expected = module.get_optimal_tiled_canvas((height, width), (side, side), least, most)
            assert grid_size(width, height, GridTiles(side, least, most)) == expected


def test_the_tokens_of_all_tiles_follow_each_other_and_the_whole_image_is_the_last_tile() -> None:
    config = processor_of(MODEL)
    processed = process_image(picture(80, 50, 0), config)
    assert processed.text == "<img>" + 12 * "<IMG_CONTEXT>" + "</img>"
    assert [item.num_tokens for item in processed.items] == [4, 4, 4]
    (small,) = process_image(picture(20, 22, 0), config).items
    assert (len(small.patches), small.positions[0].tolist(), small.num_tokens) == (17, [0, -1], 4)


def test_the_large_tower_has_other_norms_and_biases_than_the_small_one() -> None:
    small, large = vision_of(MODEL), vision_of(ODD)
    assert (small.has_qkv_biases, small.has_rms_norms, small.joint_norm_eps, small.has_final_norm) == (
        True,
        False,
        None,
        False,
    )
    assert (large.has_qkv_biases, large.has_rms_norms, large.joint_norm_eps, large.has_final_norm) == (
        False,
        True,
        1e-6,
        True,
    )
