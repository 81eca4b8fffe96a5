"""Pixtral's images: sizes of any picture, line breaks, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import _limited_size, process_image
from jaxserve.model_config.preprocessing.images import LimitedSides
from tests.models.goldens import DATA
from tests.models.vision_files import changed, processor_of, vision_of

MODEL = DATA / "vision" / "mistral3_vision_tiny"
PIXTRAL = DATA / "vision" / "pixtral_tiny"
"""Pixtral 12B's classes: transformers publishes it as LLaVA."""


def without(folder: Path, key: str, table: str | None = None) -> Path:
    """Return a copy of Pixtral without a key of its config, or of a table in it, which then has transformers' default."""
    path = changed(folder, PIXTRAL)
    config = json.loads((path / "config.json").read_text())
    del (config if table is None else config[table])[key]
    (path / "config.json").write_text(json.dumps(config))
    return path


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
    config = processor_of(MODEL)
    processed = process_image(Image.new("RGB", (48, 20)), config)
    assert processed.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert (processed.items[0].num_tokens, processed.items[0].line) == (6, 3)


def test_images_have_no_more_patches_than_the_encoder_takes() -> None:
    config = processor_of(MODEL)
    assert with_bounded_area(config, 4096).sizes == LimitedSides(56)
    bounded = with_bounded_area(config, 20)  # two blocks of four patches a side
    assert bounded.sizes == LimitedSides(32)
    assert len(process_image(Image.new("RGB", (300, 290)), bounded).items[0].patches) == 16


def test_rows_of_a_tower_without_blocks_have_a_token_for_each_patch() -> None:
    config = processor_of(PIXTRAL)
    processed = process_image(Image.new("RGB", (36, 20)), config)
    assert processed.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert (processed.items[0].num_tokens, len(processed.items[0].patches)) == (6, 6)


@pytest.mark.parametrize(
    ("key", "table", "message"),
    [
        ("model_type", "vision_config", "vision_feature_select_strategy is 'full'"),
        ("vision_feature_layer", None, "vision_feature_layer is -2"),
        ("vision_feature_select_strategy", None, "vision_feature_select_strategy is 'default'"),
        ("model_type", None, "model_type"),
    ],
)
def test_keys_that_a_llava_config_omits_have_the_defaults_of_transformers(
    key: str, table: str | None, message: str, tmp_path: Path
) -> None:
    path = without(tmp_path, key, table)
    with pytest.raises(CheckpointError, match=message):
        vision_of(path)


def test_a_llava_model_with_preprocessing_that_is_not_computed_is_refused_with_its_class(tmp_path: Path) -> None:
    path = changed(tmp_path, PIXTRAL)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "LlavaNextVideoImageProcessor"}))
    with pytest.raises(CheckpointError, match=r"image_processor_type.*LlavaNextVideoImageProcessor"):
        vision_of(path)


def test_the_projector_of_a_llava_config_has_biases_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert "multimodal_projector_bias" not in json.loads((PIXTRAL / "config.json").read_text())
    assert vision_of(PIXTRAL).has_connector_biases
    assert not vision_of(changed(tmp_path, PIXTRAL, multimodal_projector_bias=False)).has_connector_biases


@pytest.mark.parametrize("keys", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_the_base_of_rotation_is_read_from_either_place(keys: dict[str, Any], tmp_path: Path) -> None:
    path = changed(tmp_path, MODEL, vision_config=keys)
    assert vision_of(path).rope_theta == 500.0
