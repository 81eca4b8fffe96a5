"""Pixtral's images: sizes of any picture, line breaks, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import _limited_size, process_image
from jaxserve.model_config.images import LimitedSides
from jaxserve.models.registry import open_model, read_decoder, with_vision
from tests.models.goldens import DATA

MODEL = DATA / "vision" / "mistral3_vision_tiny"


def changed(folder: Path, **keys: Any) -> Path:
    """Return a copy of the model with other values in its config; those of `vision_config` are added to it."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= keys.pop("vision_config", {})
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_sizes_of_any_picture_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    random = np.random.default_rng(0)
    for block, longest in ((28, 1540), (16, 1024), (15, 50)):
        for height, width in random.integers(1, 3000, (200, 2)).tolist():
            pixels = np.broadcast_to(np.uint8(0), (3, height, width))
            expected = module.get_resize_output_image_size(pixels, longest, block)
            found = _limited_size(height, width, block, longest)
            assert found == tuple(max(side, block) for side in expected)  # a strip keeps one row of patches


def test_rows_of_tokens_end_with_a_break_and_images_with_an_end() -> None:
    config = read_image_processor(MODEL)
    assert config is not None
    processed = process_image(Image.new("RGB", (48, 20)), config)
    assert processed.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert (processed.items[0].num_tokens, processed.items[0].line) == (6, 3)


def test_images_have_no_more_patches_than_the_encoder_takes() -> None:
    config = read_image_processor(MODEL)
    assert config is not None
    assert with_bounded_area(config, 4096).sizes == LimitedSides(56)
    bounded = with_bounded_area(config, 20)  # two blocks of four patches a side
    assert bounded.sizes == LimitedSides(32)
    assert len(process_image(Image.new("RGB", (300, 290)), bounded).items[0].patches) == 16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_config": {"patch_size": 0}}, "patch_size"),
        ({"vision_config": {"head_dim": 8}}, "head_dim"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
    ],
)
def test_a_tower_that_is_not_computed_is_refused_with_its_key(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, **keys)
    decoder, checkpoint = read_decoder(path)
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=message):
        with_vision(decoder, path, open_model(path).config)


@pytest.mark.parametrize("keys", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_the_base_of_rotation_is_read_from_either_place(keys: dict[str, Any], tmp_path: Path) -> None:
    path = changed(tmp_path, vision_config=keys)
    decoder, checkpoint = read_decoder(path)
    assert checkpoint is not None
    vision = with_vision(decoder, path, open_model(path).config).vision
    assert vision is not None and vision.rope_theta == 500.0
